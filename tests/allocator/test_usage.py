"""What the kubelet gives to containers that never call us is read with everything else, said, and used in predictions."""

from pathlib import Path

import msgspec
import pytest
from bus_support import FailingBus
from decision_support import container, machine, node, pod
from device_allocations_support import GPUS, NODE, Node
from fact_support import owner
from kubelet_files_support import basis_from

from topoalign.allocator.ledger import ledger
from topoalign.allocator.reconciliation.pod_resources import read_container_usage
from topoalign.allocator.reconciliation.usage_publisher import (
    AGAIN_SECONDS,
    POLL_SECONDS,
    RENEW_SECONDS,
    UsagePublisher,
)
from topoalign.allocator.requests.kubelet_files import KubeletFiles
from topoalign.client import Client
from topoalign.core import wire
from topoalign.core.admission.admit import admit
from topoalign.core.model.decisions import Admission
from topoalign.core.model.events import ContainerUsage, MemoryBlock, MemoryExcess, UsageObserved
from topoalign.core.model.ids import GPU, MEMORY, AllocationID, DeviceID, ResourceName
from topoalign.core.ports import Stream
from topoalign.core.state.fold import NodeState
from topoalign.kubelet.files import kubelet_configuration
from topoalign.kubelet.grpc.api import v1
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.tasks import background

pytestmark = pytest.mark.anyio
FPGA = ResourceName("example.com/fpga")
GIB = 1 << 30


def block(size: int, *nodes: int, taken: tuple[int, ...] = ()) -> MemoryBlock:
    return MemoryBlock(resource=MEMORY, nodes=nodes, size=size, taken=taken or (size, *(0 for _ in nodes[1:])))


def used(pod: str, cpus: str = "", *memory: MemoryBlock, **devices: tuple[str, ...]) -> ContainerUsage:
    names = {"gpu": GPU, "fpga": FPGA}
    held = {names[kind]: tuple(map(DeviceID, ids)) for kind, ids in devices.items()}
    return ContainerUsage(owner=owner(pod), cpus=cpus, memory=memory, devices=held)


def observed(node: Node) -> tuple[ContainerUsage, ...]:
    return newest(node).containers


def newest(node: Node) -> UsageObserved:
    assert node.ledger.state.usage is not None
    return node.ledger.state.usage


async def test_cpus_memory_and_foreign_devices_are_observed() -> None:
    """CPUs, memory and foreign devices are observed, and our own devices are not."""
    it = Node()
    it.kubelet.usage = (
        used("ours", gpu=("GPU-0",)),
        used("both", "0-3", gpu=("GPU-1",), fpga=("f-0",)),
        used("theirs", "8", block(GIB, 0)),
        used("nothing"),
    )
    await it.device_allocations.reconcile()

    assert (used("both", "0-3", fpga=("f-0",)), used("theirs", "8", block(GIB, 0))) == observed(it)


async def test_a_block_on_several_nodes_fills_the_lowest_first() -> None:
    """A block on several NUMA nodes fills the lowest first, as far as it has memory."""
    it = Node()
    it.kubelet.usage = (used("a", "", block(40 * GIB, 0)), used("b", "", block(30 * GIB, 0, 1)))
    await it.device_allocations.reconcile()

    assert [(40 * GIB,), (24 * GIB, 6 * GIB)] == [each.memory[0].taken for each in observed(it)]


async def test_what_is_shown_twice_under_one_name_counts_twice() -> None:
    """A pod that ends and the one that takes its place under the same name: PodResources knows no UIDs."""
    it = Node()
    shown = (
        used("a", "8", block(GIB, 1), fpga=("f-1",)),
        used("a", "0-3", block(2 * GIB, 0), fpga=("f-0",), gpu=("GPU-1",)),
    )
    it.kubelet.usage = shown
    await it.device_allocations.reconcile()
    first = it.ledger.state.usage
    it.kubelet.usage = shown[::-1]
    await it.device_allocations.reconcile()

    assert (used("a", "0-3,8", block(2 * GIB, 0), block(GIB, 1), fpga=("f-0", "f-1")),) == observed(it)
    assert first is it.ledger.state.usage


async def test_the_same_in_another_order_is_no_news() -> None:
    it = Node()
    it.kubelet.usage = (used("a", "0"), used("b", "1"))
    await it.device_allocations.reconcile()
    first = it.ledger.state.usage
    it.kubelet.usage = (used("b", "1"), used("a", "0"))
    await it.device_allocations.reconcile()
    same = it.ledger.state.usage
    it.kubelet.usage = (used("a", "0"),)
    await it.device_allocations.reconcile()

    assert first is same
    assert first is not None and it.ledger.state.usage is not None
    assert (first.epoch, first.revision + 1) == (it.ledger.state.usage.epoch, it.ledger.state.usage.revision)


def test_what_podresources_says_of_a_container_is_read_whole() -> None:
    shown = v1.ContainerResources(
        name="main",
        cpu_ids=[3, 1, 2],
        memory=[
            v1.ContainerMemory(
                memory_type="memory",
                size=7,
                topology=v1.TopologyInfo(nodes=[v1.NumaNode(id=1), v1.NumaNode(id=0)]),
            )
        ],
    )

    expected = used("train", "1-3", block(7, 0, 1, taken=(7, 0)), gpu=("GPU-0", "GPU-1"))
    assert expected == read_container_usage(
        v1.PodResources(name="train", namespace="default"), shown, {GPU: {DeviceID("GPU-1"), DeviceID("GPU-0")}}
    )


@pytest.mark.parametrize("wrong", [v1.NumaNode(id=-1), v1.NumaNode(id=1 << 40)])
def test_memory_of_a_numa_node_that_cannot_be_is_not_read(wrong: v1.NumaNode) -> None:
    shown = v1.ContainerResources(
        name="main",
        memory=[v1.ContainerMemory(memory_type="memory", size=7, topology=v1.TopologyInfo(nodes=[wrong]))],
    )

    with pytest.raises(ValueError, match="range"):
        read_container_usage(v1.PodResources(name="train", namespace="default"), shown, {})


async def test_a_stream_that_has_lost_the_usage_of_an_idle_node_is_told_it_anew() -> None:
    """What does not change would else never be said again, and predictions would give its CPUs to others."""
    it, bus = Node(), FailingBus()
    it.kubelet.usage = (used("a", "0-3"),)
    await it.device_allocations.reconcile()
    async with background() as tasks:
        printer = UsagePublisher(it.ledger, bus, it.clock, bus)
        tasks.start_soon(printer.run)
        tasks.start_soon(printer.watch)
        await it.clock.advance(POLL_SECONDS)
        once = bus.tries
        bus.emptied = True
        await it.clock.advance(POLL_SECONDS)
        assert (1, 2) == (once, bus.tries)
        async with bus.follow(Stream.NODES, wire.subject(newest(it))) as messages:
            said = [wire.decode_event((await anext(messages)).message) for _ in range(2)]

    assert (1, newest(it)) == (getattr(said[0], "revision", None), said[1])
    assert 2 == newest(it).revision


async def test_however_often_it_is_asked_for_usage_takes_few_epochs() -> None:
    """Whoever may publish can forge any number of readings, for each of which a registry asks."""
    it = Node()
    bus = MemoryBus()
    it.kubelet.usage = (used("a", "0-3"),)
    await it.device_allocations.reconcile()
    printer = UsagePublisher(it.ledger, bus, it.clock, bus)
    epochs: list[int] = []
    for _ in range(3):
        for _ in range(3):
            printer.announce()
            epochs.append(newest(it).epoch)
        await it.clock.advance(RENEW_SECONDS)

    assert 3 == len({*epochs})
    assert sorted(epochs) == epochs


def test_a_container_is_above_its_memory_while_it_has_an_allocation() -> None:
    """It may hold the device by several, of which one has ended."""
    first, second = AllocationID("a"), AllocationID("b")
    excess = MemoryExcess(allocations=(first, second), device=DeviceID("GPU-0"), given=1, used=2)
    seen = ledger.observed(
        UsageObserved(node=NODE, epoch=1, revision=0, containers=()), {"exceeding": (excess,)}, {first, second}
    )

    assert (excess,) == ledger.observed(seen, {}, {second}).exceeding
    assert () == ledger.observed(seen, {}, {AllocationID("c")}).exceeding


async def test_only_the_newest_reading_is_said_when_the_bus_was_away() -> None:
    it, bus = Node(), FailingBus()
    bus.away = True
    async with background() as tasks:
        tasks.start_soon(UsagePublisher(it.ledger, bus, it.clock, bus).run)
        for cpu in range(5):
            it.kubelet.usage = (used("a", str(cpu)),)
            await it.device_allocations.reconcile()
            await it.clock.advance(0)
        bus.away = False
        await it.clock.advance(AGAIN_SECONDS)
        tries = bus.tries
        await it.clock.advance(600)

    assert tries == bus.tries, "said once"
    delivery = []
    async with bus.follow(Stream.NODES, ">") as messages:
        async for received in messages:
            delivery.append(wire.decode_event(received.message))
            if received.position == await bus.last_position(Stream.NODES):
                break
    assert [it.ledger.state.usage] == delivery
    assert "4" == observed(it)[0].cpus


async def test_a_subscriber_folds_the_usage_of_a_node() -> None:
    it, bus = Node(), MemoryBus()
    it.kubelet.usage = (used("a", "0-3"),)
    await it.device_allocations.reconcile()
    async with background() as tasks:
        tasks.start_soon(UsagePublisher(it.ledger, bus, it.clock, bus).run)
        events = Client(bus).nodes(node=NODE)
        delivery = (await anext(events)).event
        await events.aclose()

    assert NodeState(node=NODE).apply(delivery).usage == it.ledger.state.usage == delivery


@pytest.mark.parametrize("files", ["absent", "damaged"])
async def test_a_prediction_without_checkpoints_counts_what_podresources_showed(tmp_path: Path, files: str) -> None:
    """
    A prediction counts what PodResources showed where the checkpoints cannot be read. 5 of 8 CPUs of NUMA node 0 are held
    by a container without devices, and so are 60 of its 64 GiB.
    """
    (tmp_path / "config.yaml").write_text(
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\ntopologyManagerPolicy: single-numa-node\n"
        'cpuManagerPolicy: static\nreservedSystemCPUs: "0"\nmemoryManagerPolicy: Static\n'
        "reservedMemory: [{numaNode: 0, limits: {memory: 1Gi}}]\n"
    )
    if files == "damaged":
        for name in ("cpu_manager_state", "memory_manager_state"):
            (tmp_path / name).write_text("{")
    rules = kubelet_configuration.load_configuration(tmp_path / "config.yaml")
    state = node(machine())
    held = admit(state, pod(container("main", cpus=5, gib=60), name="uid-1"), rules)
    assert isinstance(held, Admission)
    (running,) = held.allocations
    usage = UsageObserved(
        node=state.node,
        epoch=1,
        revision=1,
        containers=(ContainerUsage(owner=owner("db"), cpus=running.cpus, memory=running.memory),),
    )
    asking = pod(container("main", cpus=4, gib=8))
    reader = KubeletFiles(tmp_path / "config.yaml", tmp_path, rules)
    known = await basis_from(reader, state.apply(usage))
    without = await basis_from(reader, state)

    with_usage, blind = admit(known.state, asking, known.rules), admit(without.state, asking, without.rules)
    assert isinstance(with_usage, Admission) and isinstance(blind, Admission)
    assert ((1,), (0,)) == (with_usage.allocations[0].affinity, blind.allocations[0].affinity)
    assert 2 == sum("what PodResources showed last counts instead" in note for note in known.notes)
    assert msgspec.structs.replace(running, id=running.id).cpu_ids <= known.state.ownership.cpus_in_use


async def test_memory_in_podresources_leaves_free_what_the_configuration_keeps(tmp_path: Path) -> None:
    """
    Memory that PodResources showed leaves free what the configuration keeps. 70 of 2 x 64 GiB are held by a group, and 4 of
    node 0 are kept: 54 GiB are left to the group, and not 58.
    """
    (tmp_path / "config.yaml").write_text(
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\ntopologyManagerPolicy: restricted\n"
        "memoryManagerPolicy: Static\nreservedMemory: [{numaNode: 0, limits: {memory: 4Gi}}]\n"
    )
    rules = kubelet_configuration.load_configuration(tmp_path / "config.yaml")
    it = Node()
    it.kubelet.usage = (used("a", "", block(70 * GIB, 0, 1)),)
    await it.device_allocations.reconcile()
    assert it.ledger.state.usage is not None
    state = node(machine()).apply(it.ledger.state.usage)
    asked = [pod(container("main", cpus=1, gib=gib)) for gib in (54, 55)]
    known = await basis_from(KubeletFiles(tmp_path / "config.yaml", tmp_path, rules), state)

    assert [60 * GIB, 10 * GIB] == [known.state.memory[number].reserved[MEMORY] for number in (0, 1)]
    fits, does_not = (admit(known.state, each, msgspec.structs.replace(known.rules, policy="none")) for each in asked)
    assert isinstance(fits, Admission) and not isinstance(does_not, Admission)


async def test_what_is_observed_never_takes_our_devices_for_foreign() -> None:
    it = Node()
    await it.device_allocations.allocate(GPU, [[GPUS[0]]])
    it.kubelet.usage = (used("train", gpu=("GPU-0",)),)
    it.kubelet.show("train", GPUS[0])
    await it.device_allocations.reconcile()

    assert () == observed(it)
