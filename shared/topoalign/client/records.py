"""
Reads what is known of a cluster now, as records: the newest facts of each node, folded as every subscriber folds them.

What is reserved counts for as long as the newest message says, from now on: the registry publishes the end of each
reservation, so a message that is long over is one of a cluster without a registry.
"""

from collections.abc import Iterable
from contextlib import aclosing

import anyio
import msgspec

from topoalign.client.fold import Delivery
from topoalign.client.subscriber import Client
from topoalign.client.verifying import writer_position_of
from topoalign.core import wire
from topoalign.core.diagnosis.hami_nodes import ForeignPage, ForeignRequest
from topoalign.core.diagnosis.node_records import ClusterRecord, NodeRecord, record_node
from topoalign.core.model.errors import BadRequest, BusRefused, BusUnavailable, Unavailable, Undecodable
from topoalign.core.model.events import ReservationsChanged
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Bus, Clock, Stream
from topoalign.core.state.fold import NodeState

PAUSE = 0.02
"""Seconds between two looks at whether all has been read."""
ANSWER_SECONDS = 2.0
"""For an allocator to answer whether it is there; as long as the registry gives it."""
ASKED_AT_ONCE = 32
"""Allocators that are asked at the same time."""


async def read_cluster(bus: Bus, clock: Clock, node: NodeName | None = None, within: float = 60.0) -> ClusterRecord:
    """
    The records of all nodes, or of one, by name. A node whose facts are not whole lacks its allocations. Each allocator is
    asked whether it is there, and a registry which nodes HAMi runs.

    Raises BusUnavailable where the streams were not read in so many seconds, and BusRefused.
    """
    states: dict[NodeName, NodeState] = {}
    client = Client(bus, clock, "cli", bodies=False)

    def apply(delivery: Delivery) -> None:
        name = delivery.event.node
        state = states.get(name) or NodeState(node=name)
        states[name] = (
            state.with_ledger_of(delivery.state) if delivery.state is not None else state.apply(delivery.event)
        )

    async def nodes() -> None:
        async with aclosing(client.nodes(node)) as events:
            async for delivery in events:
                apply(delivery)

    async def allocations() -> None:
        async with aclosing(client.allocations(node=node, superseded=False)) as events:
            async for delivery in events:
                apply(delivery)

    for stream in (Stream.NODES, Stream.ALLOCATIONS):  # following waits for a bus that refuses, here somebody waits
        await bus.last_position(stream)
    with anyio.move_on_after(within) as limit:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(nodes)
            tasks.start_soon(allocations)
            while any(client.unread.get(stream) != 0 for stream in (Stream.NODES, Stream.ALLOCATIONS)):
                await clock.sleep(PAUSE)
            tasks.cancel_scope.cancel()
    if limit.cancelled_caught:
        raise BusUnavailable(f"the streams of the cluster were not read within {within:g} s")
    silent = await silent_nodes(bus, clock, states)
    foreign = await foreign_nodes(bus, node)
    found = [NodeRecord(node=name, foreign=foreign[name]) for name in foreign if name not in states]
    for name, state in states.items():
        record = record_node(state, await newest_reservations(bus, name), silent=name in silent)
        found.append(msgspec.structs.replace(record, foreign=foreign.get(name, "")))
    return ClusterRecord(time=clock.wall(), nodes=tuple(sorted(found, key=lambda record: record.node)))


async def foreign_nodes(bus: Bus, node: NodeName | None = None) -> dict[NodeName, str]:
    """
    Node -> code of the reason, of all nodes that HAMi runs or of one. None of them where no registry tells: without
    Kubernetes there are none that are known.
    """
    found: dict[NodeName, str] = {}
    has_more = True
    while has_more:
        question = msgspec.json.encode(ForeignRequest(after=max(found, default=NodeName(""))))
        try:
            page = wire.decode_answer(await bus.ask(wire.foreign_subject(), question, ANSWER_SECONDS), ForeignPage)
        except (Unavailable, Undecodable):
            return {}
        has_more = page.has_more and not page.nodes.keys() <= found.keys()
        found |= page.nodes
    return {name: code for name, code in found.items() if node in (None, name)}


async def silent_nodes(bus: Bus, clock: Clock, nodes: Iterable[NodeName]) -> set[NodeName]:
    """Those of the nodes whose allocators do not answer. Raises BusRefused where they may not be asked."""
    silent: set[NodeName] = set()
    refused: list[BusRefused] = []
    left = iter(nodes)

    async def ask() -> None:
        for node in left:
            try:
                await writer_position_of(bus, clock, node, ANSWER_SECONDS)
            except BusRefused as error:
                refused.append(error)
                return
            except BusUnavailable:
                silent.add(node)

    async with anyio.create_task_group() as tasks:
        for _ in range(ASKED_AT_ONCE):
            tasks.start_soon(ask)
    if refused:
        raise refused[0]
    return silent


async def newest_reservations(bus: Bus, node: NodeName) -> ReservationsChanged | None:
    """What is reserved on a node; None where nothing is, or nothing that can be read."""
    received = await bus.newest(Stream.RESERVATIONS, wire.reservation_subject(node))
    if received is None:
        return None
    try:
        event = wire.decode_event(received.message)
    except BadRequest:  # whatever anybody may have written there; the registry puts it aside
        return None
    return event if isinstance(event, ReservationsChanged) else None


# Deletes the facts of a node that is gone for good, and detects that they were deleted.


def subjects_of(node: NodeName) -> list[tuple[Stream, str]]:
    """Stream and subject of everything that the services of a node can have said."""
    return [
        (wire.STORED[event], f"{wire.PREFIX}.{pattern.format(node=wire.encode_node_token(node))}")
        for event, (pattern, _) in wire.SUBJECTS.items()
        if event is not ReservationsChanged
    ]


async def has_published(bus: Bus, node: NodeName) -> bool:
    """Whether the streams keep anything that this node said. Raises BusUnavailable, BusRefused."""
    return any([await bus.last_position(stream, subject) for stream, subject in subjects_of(node)])


async def forget_node(bus: Bus, node: NodeName) -> None:
    """
    Deletes everything that the node said, and what was reserved on it. Raises BusUnavailable, and BusRefused where it may
    not be done.
    """
    for stream, subject in [*subjects_of(node), (Stream.RESERVATIONS, wire.reservation_subject(node))]:
        await bus.forget(stream, subject)
