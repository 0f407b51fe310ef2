"""What is read of a cluster as records is what its nodes have said, reservations included."""

import msgspec
import pytest
from decision_support import container, machine, pod
from diagnosis_support import machines, node_with

from topoalign.client.stored_records import read_cluster, read_foreign_nodes
from topoalign.core import wire
from topoalign.core.diagnosis.hami_nodes import ForeignPage
from topoalign.core.diagnosis.node_records import ClusterRecord, NodeRecord
from topoalign.core.model.errors import BusRefused, BusUnavailable
from topoalign.core.model.events import Allocation, AllocationGranted, AllocationReleased, ReservationsChanged
from topoalign.core.model.ids import GPU, AllocationID, ContainerName, DeviceID, Namespace, NodeName, PodName
from topoalign.core.model.requests import WriterPosition
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.core.ports import Endpoint, Message
from topoalign.runtime.clock import SystemClock
from topoalign.runtime.memory_bus import MemoryBus

pytestmark = pytest.mark.anyio

A, B = (
    node_with(name, pod(container(gpus=1, cpus=2, gib=4)), topology=machines(machine(), number))
    for number, name in enumerate(("a", "b"))
)
RESERVED = Reservation(
    pod_uid="u",
    namespace=Namespace("ml"),
    pod=PodName("next"),
    containers=(ReservedContainer(container=ContainerName("main"), devices={GPU: (DeviceID("GPU-0000-3"),)}),),
    seconds_left=20.0,
)


async def said(bus: MemoryBus, *nodes: NodeRecord) -> None:
    """These nodes have announced themselves."""
    for each in nodes:
        for event in (each.topology, each.health, each.usage, each.allocations):
            if event is not None:
                await bus.publish(wire.encode_event(event, 1.0))


def reserving(node: str, seq: int, *reservations: Reservation) -> Message:
    event = ReservationsChanged(node=NodeName(node), epoch=1, seq=seq, writer="r", reservations=reservations)
    return wire.encode_event(event, 1.0)


async def alive(body: bytes) -> bytes:
    return wire.encode_answer(WriterPosition())


async def read(bus: MemoryBus, *silent: NodeRecord) -> ClusterRecord:
    """While the allocators of A and B answer, but for these."""
    nodes = [each.node for each in (A, B) if each not in silent]
    endpoints = [Endpoint(name="alive", subject=wire.admission_subject(each, "alive"), answer=alive) for each in nodes]
    async with bus.serve("topoalign-allocator", endpoints):
        return await read_cluster(bus, SystemClock())


async def test_the_records_are_what_the_nodes_have_said() -> None:
    bus = MemoryBus()
    await said(bus, B, A)

    found = await read(bus)

    assert (A, B) == found.nodes


async def test_a_node_is_silent_whose_allocator_does_not_answer() -> None:
    bus = MemoryBus()
    await said(bus, A, B)

    found = await read(bus, B)

    assert (A, msgspec.structs.replace(B, silent=True)) == found.nodes


async def test_a_registry_that_repeats_a_page_is_asked_no_more() -> None:
    """The next page has no other nodes than those before."""
    asked = 0

    async def page(body: bytes) -> bytes:
        nonlocal asked
        asked += 1
        assert asked <= 2
        return wire.encode_answer(ForeignPage(nodes={NodeName("h"): "ManagedByHami"}, has_more=True))

    bus = MemoryBus()
    async with bus.serve("registry", [Endpoint(name="foreign", subject=wire.foreign_subject(), answer=page)]):
        assert {"h": "ManagedByHami"} == await read_foreign_nodes(bus)


async def test_allocators_that_may_not_be_asked_are_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told instead: what is not known is not taken for an answer."""
    bus = MemoryBus()
    await said(bus, A)

    async def ask(subject: str, body: bytes, within: float) -> bytes:
        raise BusRefused("no permission", "grant it")

    monkeypatch.setattr(bus, "ask", ask)
    with pytest.raises(BusRefused, match="no permission"):
        await read_cluster(bus, SystemClock())


async def test_what_was_granted_and_released_since_a_snapshot_counts() -> None:
    bus = MemoryBus()
    await said(bus, A)
    assert A.allocations is not None
    (had,), seq = A.allocations.allocations, A.allocations.seq
    new = Allocation(id=AllocationID("new"), devices={GPU: (DeviceID("GPU-0000-2"),)})
    await bus.publish(wire.encode_event(AllocationGranted(node=A.node, epoch=1, seq=seq + 1, allocation=new), 2.0))
    await bus.publish(
        wire.encode_event(AllocationReleased(node=A.node, epoch=1, seq=seq + 2, allocation=had.id, reason="gone"), 3.0)
    )

    (found,) = (await read(bus)).nodes

    assert found.allocations is not None and (new,) == found.allocations.allocations


async def test_what_a_later_snapshot_stands_for_is_not_needed() -> None:
    """The events before the newest snapshot are gone from the stream, or cannot be read."""
    (had,) = A.allocations.allocations if A.allocations is not None else ()
    bus, lost = MemoryBus(), AllocationReleased(node=A.node, epoch=1, seq=1, allocation=had.id, reason="gone")
    await bus.publish(msgspec.structs.replace(wire.encode_event(lost, 1.0), body=b"{"))
    snapshot = msgspec.structs.replace(A.allocations, seq=7) if A.allocations is not None else None
    await said(bus, msgspec.structs.replace(A, allocations=snapshot))

    (found,) = (await read(bus)).nodes

    assert found.allocations is not None and (7, (had,)) == (found.allocations.seq, found.allocations.allocations)


async def test_the_newest_message_tells_what_is_reserved() -> None:
    bus = MemoryBus()
    await said(bus, A, B)
    await bus.publish(reserving("a", 1))
    await bus.publish(reserving("a", 2, RESERVED))
    await bus.publish(reserving("b", 1, msgspec.structs.replace(RESERVED, seconds_left=0.0)))

    first, second = (await read(bus)).nodes

    assert ((RESERVED,), ()) == (first.reserved, second.reserved)


async def test_what_the_node_shows_is_not_reserved_any_more() -> None:
    """The pod has it, by its UID."""
    assert A.allocations is not None
    (had,) = A.allocations.allocations
    assert had.owner is not None
    has = msgspec.structs.replace(had, pod_uid="u")
    shown = ReservedContainer(container=had.owner.container, devices=had.devices)
    bus = MemoryBus()
    await said(bus, msgspec.structs.replace(A, allocations=msgspec.structs.replace(A.allocations, allocations=(has,))))
    await bus.publish(reserving("a", 1, msgspec.structs.replace(RESERVED, containers=(shown,))))

    (found,) = (await read(bus)).nodes

    assert () == found.reserved


async def test_a_node_whose_facts_are_not_whole_lacks_its_allocations() -> None:
    """An event after a gap, of an allocator that does not answer when it is asked for a snapshot."""
    bus = MemoryBus()
    await said(bus, msgspec.structs.replace(A, allocations=None), B)
    await bus.publish(
        wire.encode_event(
            AllocationReleased(node=A.node, epoch=1, seq=9, allocation=AllocationID("x"), reason="gone"), 1.0
        )
    )

    first, second = (await read(bus)).nodes

    assert first.allocations is None and first.topology is not None
    assert B == second


async def test_a_message_that_cannot_be_read_reserves_nothing() -> None:
    bus = MemoryBus()
    await said(bus, A)
    await bus.publish(msgspec.structs.replace(reserving("a", 1, RESERVED), body=b"{"))

    (found,) = (await read(bus)).nodes

    assert () == found.reserved


async def test_streams_that_are_not_read_in_time_are_an_error() -> None:
    bus = MemoryBus()
    await said(bus, A)

    with pytest.raises(BusUnavailable, match="not read within 0 s"):
        await read_cluster(bus, SystemClock(), within=0)


async def test_nothing_is_known_of_an_empty_cluster() -> None:
    assert () == (await read(MemoryBus())).nodes
