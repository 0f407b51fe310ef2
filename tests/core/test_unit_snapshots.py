"""A snapshot of sixteen of the largest GPUs fits one message, with all of their units held."""

import re

import msgspec
from unit_support import CORES, MEMORY, in_units

from topoalign.core import wire
from topoalign.core.model.allocations import Allocation, Owner
from topoalign.core.model.events import AllocationsSnapshot
from topoalign.core.model.ids import AllocationID, ContainerName, DeviceID, Namespace, NodeName, PodName
from topoalign.core.model.topology.device_offers import MEMORY_BLOCK
from topoalign.core.model.topology.model import Topology
from topoalign.machines import load_machine

GPU_BYTES = 288 * 10**9
PER_GPU = 15
"""Containers on a GPU: 240 in all, more than twice the 110 pods that a kubelet takes by default."""


def sixteen_large_gpus() -> Topology:
    """In units, with ids as long as a driver's."""
    plain = load_machine("dgx2").topology
    gpus = tuple(msgspec.structs.replace(gpu, memory=GPU_BYTES) for gpu in plain.gpus)
    text = msgspec.json.encode(msgspec.structs.replace(plain, gpus=gpus)).decode()
    named = re.sub(r'"GPU-(\d+)"', lambda number: f'"GPU-5ba6cb5d-05ef-47a2-97f8-{int(number[1]):012}"', text)
    return in_units(msgspec.json.decode(named, type=Topology), 16)


def part(gpu: DeviceID, letter: str, units: int, number: int) -> tuple[DeviceID, ...]:
    """What container `number` of a GPU holds of so many units, all of which are held by the containers together."""
    bounds = units * number // PER_GPU, units * (number + 1) // PER_GPU
    return tuple(DeviceID(f"{gpu}::{letter}{unit}") for unit in range(*bounds))


def test_a_snapshot_with_all_units_of_a_large_node_fits_a_message() -> None:
    machine, blocks = sixteen_large_gpus(), GPU_BYTES // MEMORY_BLOCK
    held = tuple(
        Allocation(
            id=AllocationID(f"0f9ae4b1-5c5e-4a53-b0a5-{gpu.index:06}{number:06}"),
            owner=Owner(
                namespace=Namespace("training"),
                pod=PodName(f"resnet-{gpu.index}-{number}-6c9f7d5b8-x2k4q"),
                container=ContainerName("main"),
            ),
            devices={CORES: part(gpu.id, "c", 100, number), MEMORY: part(gpu.id, "m", blocks, number)},
            boot="6e0f2f5c-2d0b-4c43-9d0c-0c2f5a1b7e11",
            pod_uid="3f1c9a52-86d4-4f0e-8e0b-5f2b7c1d9e64",
        )
        for gpu in machine.gpus
        for number in range(PER_GPU)
    )
    snapshot = AllocationsSnapshot(
        node=NodeName("gpu-00000.example.com"), epoch=1, seq=1, allocations=held, digest="f" * 64
    )

    body = wire.encode_event(snapshot, 0.0).body

    assert 16 * (100 + blocks) == sum(len(ids) for each in held for ids in each.devices.values())
    assert len(body) < wire.LARGEST_BODY
