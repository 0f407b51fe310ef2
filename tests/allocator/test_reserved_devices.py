"""Reservations that are received on the bus steer what the kubelet is told to take; nothing is given out because of them."""

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import msgspec
import pytest
from device_allocations_support import GPUS, Node
from fact_support import changed, ids, reservation, reserved_container

from topoalign.allocator.allocate.node_reservations import READ_SECONDS, RECEIVE_SECONDS, NodeReservationList
from topoalign.core import wire
from topoalign.core.model.events import AllocationDeviated, ReservationsChanged
from topoalign.core.model.ids import GPU, AllocationID, DeviceID, NodeName
from topoalign.core.ports import Message
from topoalign.core.state.fold import NodeState
from topoalign.core.state.node_reservations import NodeReservations
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.tasks import background

pytestmark = pytest.mark.anyio


class ReservedNode(Node):
    """A node that follows its reservations on a bus in memory."""

    def __init__(self) -> None:
        self.bus = MemoryBus()
        self.reservations: NodeReservationList
        super().__init__(reservations=self)
        self.reservations = NodeReservationList(self.ledger, self.bus, self.clock)

    def current(self) -> NodeReservations:
        return self.reservations.current()

    async def until_read(self) -> None:
        await self.reservations.until_read()

    async def say(self, message: Message) -> None:
        await self.bus.publish(message)
        await self.clock.advance(0)

    async def reserve(self, event: ReservationsChanged) -> None:
        await self.say(wire.encode_event(event, 0.0))

    async def preferred(self, size: int, *available: DeviceID) -> set[DeviceID]:
        return {*await self.device_allocations.prefer(GPU, available or GPUS, (), size)}


@asynccontextmanager
async def following() -> AsyncIterator[ReservedNode]:
    node = ReservedNode()
    async with background() as tasks:
        tasks.start_soon(node.reservations.run)
        await node.clock.advance(0)
        yield node


async def test_a_reservation_is_the_answer_where_it_fits() -> None:
    async with following() as node:
        await node.reserve(changed(reservation("a", reserved_container("GPU-1", "GPU-6"))))

        assert {*ids("GPU-1", "GPU-6")} == await node.preferred(2)


async def test_what_is_reserved_is_spared_while_there_are_others() -> None:
    async with following() as node:
        await node.reserve(changed(reservation("a", reserved_container(*GPUS[:6]))))

        assert {*GPUS[6:]} == await node.preferred(2)
        assert {*GPUS[6:]} <= await node.preferred(3)


async def test_two_pods_of_one_kind_get_each_its_own_reservation() -> None:
    async with following() as node:
        pods = [
            reservation("a", reserved_container("GPU-1", "GPU-6")),
            reservation("b", reserved_container("GPU-2", "GPU-5")),
        ]
        await node.reserve(changed(*pods))
        found = []
        for _ in pods:
            found.append(await node.preferred(2))
            await node.device_allocations.allocate(GPU, [sorted(found[-1])])

        assert [{*ids("GPU-1", "GPU-6")}, {*ids("GPU-2", "GPU-5")}] == found


async def test_a_reservation_ends_with_its_seconds_and_by_the_next_message() -> None:
    async with following() as node:
        plain = await node.preferred(2)
        await node.reserve(changed(reservation("a", reserved_container("GPU-1", "GPU-6"), seconds=5.0)))
        lasting = await node.preferred(2)
        await node.clock.advance(5)
        over = await node.preferred(2)
        await node.reserve(changed(reservation("b", reserved_container("GPU-1", "GPU-6")), seq=2))
        await node.reserve(changed(seq=3))

        assert ({*ids("GPU-1", "GPU-6")}, plain, plain) == (lasting, over, await node.preferred(2))


async def test_other_devices_than_the_reserved_ones_are_adopted_and_told() -> None:
    async with following() as node:
        await node.reserve(changed(reservation("a", reserved_container("GPU-1", "GPU-6"))))
        await node.preferred(2)
        await node.device_allocations.allocate(GPU, [[GPUS[2], GPUS[3]]])

        (deviation,) = node.said(AllocationDeviated)
        assert (ids("GPU-1", "GPU-6"), (GPUS[2], GPUS[3])) == (deviation.preferred, deviation.allocated)


async def test_a_start_reads_the_newest_message() -> None:
    node = ReservedNode()
    await node.reserve(changed(reservation("a", reserved_container("GPU-0", "GPU-7"))))
    await node.reserve(changed(reservation("b", reserved_container("GPU-1", "GPU-6")), seq=2))
    async with background() as tasks:
        tasks.start_soon(node.reservations.run)
        await node.clock.advance(0)

        assert {*ids("GPU-1", "GPU-6")} == await node.preferred(2)


async def test_a_message_that_is_no_reservation_of_the_node_is_passed_over() -> None:
    async with following() as node:
        sound = changed(reservation("a", reserved_container("GPU-1", "GPU-6")))
        await node.reserve(sound)
        other = wire.encode_event(changed(seq=2), 0.0)
        await node.say(msgspec.structs.replace(other, body=b"{"))
        await node.say(
            msgspec.structs.replace(
                wire.encode_event(msgspec.structs.replace(sound, node=NodeName("node-2"), seq=3), 0.0),
                subject=other.subject,
            )
        )

        assert 2 == node.reservations.unreadable
        assert {*ids("GPU-1", "GPU-6")} == await node.preferred(2)


async def test_an_agent_that_has_just_begun_waits_for_what_is_reserved() -> None:
    """The kubelet may come for a pod that was bound before: NICs come with its GPUs by what is reserved."""
    node = ReservedNode()
    await node.bus.publish(wire.encode_event(changed(reservation("a", reserved_container("GPU-1", "GPU-6"))), 0.0))
    found: list[set[DeviceID]] = []

    async def ask() -> None:
        found.append(await node.preferred(2))

    async with background() as tasks:
        tasks.start_soon(ask)
        await node.clock.advance(READ_SECONDS / 2)
        assert [] == found
        tasks.start_soon(node.reservations.run)
        await node.clock.advance(0)

    assert [{*ids("GPU-1", "GPU-6")}] == found


async def test_what_a_registry_has_just_reserved_is_heard_before_it_is_asked_for() -> None:
    """The pod was confirmed here, reserved and bound, and the kubelet asks before the reservation has come."""
    async with following() as node:
        await node.reserve(changed(reservation("a", reserved_container("GPU-1", "GPU-6"))))
        node.reservations.expect()
        await node.bus.publish(
            wire.encode_event(changed(reservation("a", reserved_container("GPU-2", "GPU-5")), seq=2), 0.0)
        )

        assert {*ids("GPU-2", "GPU-5")} == await node.preferred(2)


async def test_a_kubelet_waits_for_an_expected_reservation_for_a_moment_only() -> None:
    """Nothing follows the stream, as where a connection is stuck."""
    node = ReservedNode()
    await node.clock.advance(READ_SECONDS)
    await node.bus.publish(wire.encode_event(changed(reservation("a", reserved_container("GPU-1", "GPU-6"))), 0.0))
    node.reservations.expect()
    done: list[float] = []

    async def ask() -> None:
        await node.preferred(2)
        done.append(node.clock.monotonic())

    began = node.clock.monotonic()
    async with background() as tasks:
        tasks.start_soon(ask)
        await node.clock.advance(2 * RECEIVE_SECONDS)

    assert [began + RECEIVE_SECONDS] == done


@pytest.mark.parametrize("is_there", [True, False])
async def test_an_agent_waits_for_reservations_no_longer_than_it_must(is_there: bool) -> None:
    """Where nothing is reserved for the node, not at all; without a bus for a moment after its start, and then no more."""
    node = ReservedNode()
    done: list[float] = []

    async def ask() -> None:
        for _ in range(2):
            await node.device_allocations.allocate(GPU, [GPUS[len(done) : len(done) + 1]])
            done.append(node.clock.monotonic())

    began = node.clock.monotonic()
    async with background() as tasks:
        if is_there:
            tasks.start_soon(node.reservations.run)
            await node.clock.advance(0)
        tasks.start_soon(ask)
        await node.clock.advance(2 * READ_SECONDS)

    assert [began + (0 if is_there else READ_SECONDS)] * 2 == done


async def test_a_state_is_compared_with_what_is_reserved_twice_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once more where it shows something of it: one call of the kubelet asks a dozen times for what is reserved."""
    seen: list[NodeState] = []
    observe = NodeReservations.observe

    def noted(
        reserved: NodeReservations, state: NodeState, origins: Mapping[AllocationID, AllocationID], *, own: bool
    ) -> NodeReservations:
        seen.append(state)
        return observe(reserved, state, origins, own=own)

    monkeypatch.setattr(NodeReservations, "observe", noted)
    async with following() as node:
        await node.reserve(
            changed(reservation("a", reserved_container("GPU-1")), reservation("b", reserved_container("GPU-2")))
        )
        await node.device_allocations.allocate(GPU, [ids("GPU-1")])
        preferred = await node.preferred(1)

    assert {*ids("GPU-2")} == preferred
    assert 2 == max(Counter(map(id, seen)).values())
