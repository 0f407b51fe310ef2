"""The kubelet's checkpoint as the stand-in keeps it, against two files that a kubelet v1.36.3 wrote."""

import subprocess
import sys

import pytest

from topoalign.core.model.errors import StateFault
from topoalign.kubelet.files import device_checkpoint
from topoalign.kubelet.files.device_checkpoint import CheckpointData, PodDevicesEntry

EMPTY = b'{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":3467439661}'
ONE_GPU = (
    b'{"Data":{"PodDeviceEntries":[{"PodUID":"uid-1","ContainerName":"c","ResourceName":"nvidia.com/gpu",'
    b'"DeviceIDs":{"0":["GPU-1"]},"AllocResp":"Ch8KFk5WSURJQV9WSVNJQkxFX0RFVklDRVMSBUdQVS0x"}],'
    b'"RegisteredDevices":{"nvidia.com/gpu":["GPU-1","GPU-2"]}},"Checksum":2814276120}'
)


@pytest.mark.parametrize("content", [EMPTY, ONE_GPU], ids=["empty", "one-gpu"])
def test_what_a_kubelet_wrote_is_read_and_written_again_byte_for_byte(content: bytes) -> None:
    assert content == device_checkpoint.encode_device_checkpoint(device_checkpoint.decode_device_checkpoint(content))


def test_a_checkpoint_with_one_digit_changed_is_not_trusted() -> None:
    with pytest.raises(StateFault, match="checksum"):
        device_checkpoint.decode_device_checkpoint(ONE_GPU.replace(b'["GPU-1"]', b'["GPU-3"]'))


@pytest.mark.parametrize("content", [b"", b"{}", ONE_GPU[:-9], EMPTY + b"x", b"\xff\xfe"])
def test_a_file_that_is_no_checkpoint_is_refused_by_name(content: bytes) -> None:
    """To delete it alone makes a kubelet give the devices of running pods to others."""
    with pytest.raises(StateFault, match="kubelet_internal_checkpoint") as error:
        device_checkpoint.decode_device_checkpoint(content)

    assert "drain the node" in error.value.remedy


def test_devices_are_printed_by_node_in_the_order_of_numbers_not_of_text() -> None:
    """Node 10 comes after node 2, and devices without topology stand first, under -1."""
    entry = PodDevicesEntry("u", "c", "r", {10: ["d"], -1: ["a", "b"], 2: ["c"]}, b"")

    text = device_checkpoint.spew_device_data(CheckpointData([entry, entry]))

    assert "map[-1:[a b] 2:[c] 10:[d]] AllocResp:([]uint8)[]} {PodUID:(string)u " in text


READ_TWICE = """
import os, sys, threading
from topoalign.core.model.errors import StateFault
from topoalign.kubelet.files import cpu_checkpoint, device_checkpoint, memory_checkpoint

DEVICES = b'{"Data":{"RegisteredDevices":{}},"Checksum":1}'
CPUS = b'{"policyName":"static","defaultCpuSet":"0","checksum":1}'
MEMORY = b'{"policyName":"Static","machineState":{},"checksum":1}'

def read(decode, content, gate):
    gate.wait()
    try:
        decode(content)
    except StateFault:
        pass

ended = set()
decoders = (
    (device_checkpoint.decode_device_checkpoint, DEVICES),
    (cpu_checkpoint.decode_cpu_checkpoint, CPUS),
    (memory_checkpoint.decode_memory_checkpoint, MEMORY),
)
for decode, content in decoders:
    for _ in range(40):
        child = os.fork()
        if child == 0:
            sys.setswitchinterval(1e-6)
            gate = threading.Barrier(2)
            threads = [threading.Thread(target=read, args=(decode, content, gate)) for _ in range(2)]
            [each.start() for each in threads]
            [each.join() for each in threads]
            os._exit(0)
        ended.add(os.waitpid(child, 0)[1])
print(ended)
"""


def test_two_threads_that_read_a_checkpoint_first_do_not_end_the_process() -> None:
    """An agent that begins reads the kubelet's files for the record and for predictions at the same time."""
    read = subprocess.run([sys.executable, "-c", READ_TWICE], capture_output=True, text=True, check=True, timeout=50)

    assert "{0}" == read.stdout.strip()
