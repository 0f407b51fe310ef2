"""
Journals, messages and HTTP answers of earlier versions, from 0.1.0 on, are read, and written again byte for byte.

So agents of one version and the next one can share a cluster: fields may be added to facts, and none that stands there may
change. To record those of a new version, or after a field was added to an unreleased one:
`PYTHONPATH=tests/support:tests/allocator python -m test_recorded_facts tests/recorded/<version>`.
"""

import json
import shutil
import sys
from pathlib import Path

import anyio
import httpx
import msgspec
import pytest
from device_allocations_support import GPUS, MACHINE, NODE, Node
from fact_support import mig_device, owner
from starlette.applications import Starlette
from view_support import heard_of, state_of

from topoalign.allocator.ledger import journal_format
from topoalign.allocator.ports import ReportedDevices, ResourceEntry
from topoalign.core import wire
from topoalign.core.admission.admit import admit
from topoalign.core.deviceshare.koordinator_names import HINT_ANNOTATION, JOINT_ANNOTATION
from topoalign.core.model.decisions import Admission, Refusal
from topoalign.core.model.events import (
    AllocationRefused,
    AllocationsSnapshot,
    ContainerUsage,
    DeviceHealth,
    Event,
    HealthState,
)
from topoalign.core.model.ids import GPU, NIC, ContainerName, DeviceID, PodName, ResourceName
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, PodRequest, Policy
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.model.topology.model import Nic, Topology, VirtualFunction
from topoalign.core.ports import Message
from topoalign.core.state.fold import NodeState, replay
from topoalign.discovery.device_record import RecordFile
from topoalign.kubelet.files.pod_directories import PodDirectories
from topoalign.registry.api import Api
from topoalign.registry.cluster_nodes import Cluster
from topoalign.registry.foreign_nodes import ForeignNodes
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.testing.manual_clock import ManualClock

SHARED = ResourceName("nvidia.com/gpu.shared")
SLICE = ResourceName("nvidia.com/mig-1g.10gb")
FUNCTION = ResourceName("nvidia.com/nic-vf")
PATHS = ("/v1/nodes", f"/v1/nodes/{NODE}", "/v1/allocations")


def divided() -> Topology:
    """GPU 1 is shared in time, GPU 2 cut into instances, one of the NICs offered by its functions."""
    instances = tuple(mig_device(f"MIG-{i}", 7 + i) for i in range(2))
    gpus = tuple(msgspec.structs.replace(gpu, mig=instances) if gpu.index == 2 else gpu for gpu in MACHINE.gpus)
    nics = tuple(
        Nic(
            id=DeviceID(f"mlx5_{i}"),
            index=i,
            numa_affinity=(i,),
            virtual_functions=tuple(VirtualFunction(pci=f"0000:9{i}:00.{f}") for f in range(1, 3)),
        )
        for i in range(2)
    )
    offers = (
        Offer(resource=GPU, devices=(GPUS[0], *GPUS[3:])),
        Offer(resource=SHARED, devices=(GPUS[1],), replicas=3),
        Offer(resource=SLICE, devices=(instances[0].uuid, instances[1].uuid), replicas=2),
        Offer(resource=NIC, devices=(nics[0].id,)),
        Offer(resource=FUNCTION, devices=tuple(DeviceID(each.pci) for each in nics[1].virtual_functions)),
    )
    return msgspec.structs.replace(MACHINE, gpus=gpus, nics=nics, offers=offers)


async def node_with_all() -> Node:
    """Shares, instances and functions given by the kubelet, functions decided jointly, a displaced container."""
    node = Node(settle_seconds=0)
    node.topology = divided()
    node.restart()
    healthy = DeviceHealth(state=HealthState.HEALTHY)
    cards = {gpu.id: healthy for gpu in node.topology.gpus} | {nic.id: healthy for nic in node.topology.nics}
    node.hear_health(node.ledger, 2, cards)
    await by_kubelet(node)
    by_bus(node)
    await displaced(node)
    node.ledger.observe(containers=(ContainerUsage(owner=owner("other"), devices={SHARED: (DeviceID("GPU-1::0"),)}),))
    released = next(each.id for each in node.ledger.state.allocations.values() if GPUS[7] in each.device_ids)
    node.ledger.release([released], "released")
    node.ledger.announce()
    return node


async def by_kubelet(node: Node) -> None:
    """The kubelet gives out parts of devices, and its list binds them."""
    for pod, resource, *names in (
        ("shares", SHARED, "GPU-1::0", "GPU-1::2"),
        ("instance", SLICE, "MIG-0::1", "MIG-1::0"),
        ("function", FUNCTION, "0000:91:00.2"),
        ("whole", GPU, "GPU-3", "GPU-0"),
        ("short", GPU, "GPU-7"),
    ):
        devices = tuple(map(DeviceID, names))
        await node.device_allocations.prefer(resource, list(node.topology.devices[resource]), (), len(devices))
        await node.device_allocations.allocate(resource, [devices])
        node.kubelet.show(pod, *devices, resource=resource)
        await node.device_allocations.reconcile()


def by_bus(node: Node) -> None:
    """A pod whose GPU and functions of a NIC are decided together, and one that is refused."""
    said = {
        JOINT_ANNOTATION: json.dumps({"deviceTypes": ["gpu", "rdma"]}),
        HINT_ANNOTATION: json.dumps({"rdma": {"vfSelector": {}}}),
    }
    asked = {GPU: 1, NIC: 1}
    container = ContainerRequest(name=ContainerName("main"), requests=asked, limits=asked)
    pod = PodRequest(name=PodName("joint"), annotations=said, containers=(container,))
    decision = admit(node.ledger.state, pod, AdmissionRules(policy=Policy.NONE))
    assert isinstance(decision, Admission), decision
    node.ledger.grant([node.ledger.named(each) for each in decision.allocations])
    large = msgspec.structs.replace(container, requests={GPU: 9}, limits={GPU: 9})
    pod = PodRequest(name=PodName("large"), containers=(large,))
    refusal = admit(node.ledger.state, pod, AdmissionRules())
    assert isinstance(refusal, Refusal)
    node.ledger.refuse(pod, refusal)


async def displaced(node: Node) -> None:
    """A container that runs on when the kubelet, whose checkpoint was lost, gives its GPU to another one."""
    gpu = GPUS[5]
    await node.device_allocations.allocate(GPU, [[gpu]])
    node.kubelet.version, node.kubelet.parts = 1, (ResourceEntry(GPU, frozenset({gpu}), "uid-1", "main"),)
    node.kubelet.checkpoint = frozenset({(GPU, gpu)})
    shown = ReportedDevices(owner=owner("x1"), resource=GPU, devices=frozenset({gpu}), pod_uid="uid-1")
    node.kubelet.shown.append(shown)
    node.kubelet.usage = (ContainerUsage(owner=owner("x1"), devices={GPU: (gpu,)}),)
    node.kubelet.directories = PodDirectories(torn_down={"uid-1": False})
    await node.device_allocations.reconcile()
    node.kubelet.shown.remove(shown)
    node.kubelet.usage = (ContainerUsage(owner=owner("x1")),)
    node.kubelet.version, node.kubelet.parts, node.kubelet.checkpoint = 2, (), frozenset()
    node.kubelet.kubelet = 2
    await node.device_allocations.allocate(GPU, [[gpu]])
    node.kubelet.show("x2", gpu)
    await node.device_allocations.reconcile()


def journal_of(node: Node) -> bytes:
    """The journal as it would be on disk."""
    header = journal_format.encode_line(journal_format.JournalHeader(version=journal_format.VERSION, node=NODE))
    return header + b"".join(map(journal_format.encode_line, node.journal.load()))


def facts_of(node: Node) -> list[tuple[Event, float]]:
    """All that the node has said, the newest hardware, health and usage first; with the wall seconds."""
    state = node.ledger.state
    readings = [each for each in (state.topology, state.health, state.usage) if each is not None]
    ledger = [(event, entry.time) for entry in node.journal.load() for event in entry.events]
    return [*((each, 0.0) for each in readings), *ledger]


def messages_of(node: Node) -> bytes:
    """A message a line: its time, subject, headers and body, this one as text."""
    lines = []
    for event, time in facts_of(node):
        message = wire.encode_event(event, time)
        lines.append((time, message.subject, message.headers, message.body.decode()))
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


def message_of(line: bytes) -> tuple[Message, float]:
    """The message that `messages_of` wrote in a line, and its time."""
    time, subject, headers, body = msgspec.json.decode(line, type=tuple[float, str, dict[str, str], str])
    return Message(subject=subject, headers=headers, body=body.encode()), time


async def answers_of(messages: bytes) -> bytes:
    """What the registry answers over HTTP once it has received these messages: an answer a line."""
    cluster = Cluster()
    for message, time in map(message_of, messages.splitlines()):
        event = wire.decode_event(message)
        cluster.apply(heard_of(event, state_of(cluster, event.node), time))
    transport = httpx.ASGITransport(
        Starlette(routes=[Api(cluster, ManualClock(), MemoryBus(), ForeignNodes(ManualClock())).mount()])
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://registry") as client:
        return b"".join([(await client.get(path)).content + b"\n" for path in PATHS])


async def recordings() -> dict[str, bytes]:
    """File -> what the deeds lead to."""
    node = await node_with_all()
    messages = messages_of(node)
    return {"journal": journal_of(node), "messages": messages, "answers": await answers_of(messages)}


def record_devices(folder: Path) -> None:
    """Writes the device record of a node whose GPU 7 is cordoned."""
    record = RecordFile(folder, "a boot")
    record.change(cordons={GPUS[7]: "its fan is replaced"}, epoch=5)


def main(folder: Path) -> None:
    record_devices(folder)
    for name, content in anyio.run(recordings).items():
        (folder / name).write_bytes(content)


RECORDED = Path(__file__).parents[1] / "recorded" / "0.1.0"
JOURNAL = (RECORDED / "journal").read_bytes()
MESSAGES = (RECORDED / "messages").read_bytes()
ANSWERS = (RECORDED / "answers").read_bytes()


def read_journal(content: bytes) -> journal_format.JournalContent:
    found = journal_format.read_journal(content, NODE, None)
    assert (None, None, 0) == (found.damage, found.unconfirmed, found.unfinished)
    return found


def test_the_recordings_hold_devices_in_every_way() -> None:
    """Otherwise the tests below would pass for nothing."""
    for way in (
        b"GPU-1::2",
        b"MIG-0::1",
        b'"parents":{"0000:91:00.2":"mlx5_1"}',
        b'"virtual_functions":',
        b'"displaced":[',
    ):
        assert way in JOURNAL
        assert way.replace(b'"', b'\\"') in MESSAGES


def test_a_recorded_journal_is_written_again_byte_for_byte() -> None:
    header = journal_format.encode_line(journal_format.JournalHeader(version=journal_format.VERSION, node=NODE))

    again = header + b"".join(journal_format.encode_line(line.entry) for line in read_journal(JOURNAL).lines)

    assert JOURNAL.splitlines() == again.splitlines()


def test_a_state_folded_from_a_recorded_journal_has_the_recorded_digest() -> None:
    events = [event for line in read_journal(JOURNAL).lines for event in line.entry.events]
    *before, last = events
    assert isinstance(last, AllocationsSnapshot)

    state = replay(NODE, before[1:])

    assert last.digest == state.digest
    assert [*last.allocations] == [*state.allocations.values()]


@pytest.mark.parametrize("line", MESSAGES.splitlines(), ids=lambda line: line.split(b'"', 2)[1].decode())
def test_a_recorded_message_is_written_again_byte_for_byte(line: bytes) -> None:
    message, time = message_of(line)

    assert message == wire.encode_event(wire.decode_event(message), time)


def test_the_registry_answers_recorded_messages_as_it_did() -> None:
    assert ANSWERS.splitlines() == anyio.run(answers_of, MESSAGES).splitlines()


def test_the_same_deeds_are_recorded_as_they_were() -> None:
    """Refusals aside: their sentences are for people, and may be worded anew."""

    def facts(content: bytes) -> list[object]:
        events = (event for line in read_journal(content).lines for event in line.entry.events)
        return [event for event in events if not isinstance(event, AllocationRefused)]

    again = anyio.run(recordings)["journal"]

    assert facts(JOURNAL) == facts(again)
    assert replayed(JOURNAL) == replayed(again)


def test_a_recorded_device_record_is_read(tmp_path: Path) -> None:
    shutil.copy(RECORDED / "devices.json", tmp_path)
    file = RecordFile(tmp_path, "another boot")

    assert file.load() is None
    assert {GPUS[7]: "its fan is replaced"} == file.kept.cordons


def replayed(content: bytes) -> NodeState:
    lines = read_journal(content).lines
    return replay(NODE, [event for line in lines for event in line.entry.events][1:])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
