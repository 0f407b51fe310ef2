"""
Reads the records of a cluster: the newest facts of each node, folded as every subscriber folds them.

A reservation's duration, which the newest message contains, is counted from the reading. This is accurate enough: the
registry publishes each reservation's end, so only a cluster without a registry has a reservation that expired long ago.
"""

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

import anyio
import msgspec

from topoalign.client.node_folds import Delivery
from topoalign.client.subscriber import Client
from topoalign.client.verifying import writer_position_of
from topoalign.core import wire
from topoalign.core.diagnosis.hami_nodes import ForeignPage, ForeignRequest
from topoalign.core.diagnosis.node_records import ClusterRecord, NodeRecord, record_node
from topoalign.core.model.errors import BadRequest, BusUnavailable, Unavailable, Undecodable
from topoalign.core.model.events import ReservationsChanged
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Bus, Clock, Stream
from topoalign.core.state.fold import NodeState
from topoalign.runtime.tasks import for_each

PAUSE = 0.02
"""Seconds between two checks whether the streams have been read."""
ANSWER_SECONDS = 2.0
"""Timeout of the request whether an allocator is alive, as in the registry."""
ASKED_AT_ONCE = 32
"""Maximum number of concurrent requests to allocators."""


async def read_cluster(bus: Bus, clock: Clock, node: NodeName | None = None, within: float = 60.0) -> ClusterRecord:
    """
    The records of all nodes, or of one, sorted by name. The allocations of a node with missing facts are left out. Each
    allocator is asked whether it is alive, and a registry is asked which nodes HAMi manages.

    Raises BusUnavailable if the streams cannot be read `within` this number of seconds, and BusRefused.
    """
    states: dict[NodeName, NodeState] = {}
    client = Client(bus, clock, "cli", bodies=False)

    async def fold(deliveries: AsyncGenerator[Delivery, None]) -> None:
        async with aclosing(deliveries):
            async for delivery in deliveries:
                name = delivery.event.node
                state = states.get(name) or NodeState(node=name)
                states[name] = (
                    state.with_ledger_of(delivery.state) if delivery.state is not None else state.apply(delivery.event)
                )

    for stream in (Stream.NODES, Stream.ALLOCATIONS):  # raises BusRefused, for which following would wait
        await bus.last_position(stream)
    with anyio.move_on_after(within) as limit:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fold, client.nodes(node))
            tasks.start_soon(fold, client.allocations(node=node, superseded=False))
            while any(client.unread.get(stream) != 0 for stream in (Stream.NODES, Stream.ALLOCATIONS)):
                await clock.sleep(PAUSE)
            tasks.cancel_scope.cancel()
    if limit.cancelled_caught:
        raise BusUnavailable(f"the streams of the cluster were not read within {within:g} s")
    silent = await silent_nodes(bus, states)
    foreign = await read_foreign_nodes(bus, node)
    found = [NodeRecord(node=name, foreign=foreign[name]) for name in foreign if name not in states]
    for name, state in states.items():
        record = record_node(state, await newest_reservations(bus, name), silent=name in silent)
        found.append(msgspec.structs.replace(record, foreign=foreign.get(name, "")))
    return ClusterRecord(time=clock.wall(), nodes=tuple(sorted(found, key=lambda record: record.node)))


async def read_foreign_nodes(bus: Bus, node: NodeName | None = None) -> dict[NodeName, str]:
    """Node that HAMi manages -> code of its refusal, for all nodes or for one. Empty if no registry answers."""
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


async def silent_nodes(bus: Bus, nodes: Iterable[NodeName]) -> set[NodeName]:
    """The nodes whose allocators do not answer. Raises BusRefused without the permission to ask them."""
    silent: set[NodeName] = set()

    async def ask(node: NodeName) -> None:
        try:
            await writer_position_of(bus, node, ANSWER_SECONDS)
        except BusUnavailable:
            silent.add(node)

    await for_each([*nodes], ask, at_once=ASKED_AT_ONCE)
    return silent


async def newest_reservations(bus: Bus, node: NodeName) -> ReservationsChanged | None:
    """The newest reservations on a node; None if there are none, or if they cannot be decoded."""
    received = await bus.newest(Stream.RESERVATIONS, wire.reservation_subject(node))
    if received is None:
        return None
    try:
        event = wire.decode_event(received.message)
    except BadRequest:  # any client can have written it; the registry puts it on the dead-letter stream
        return None
    return event if isinstance(event, ReservationsChanged) else None


def node_subjects(node: NodeName) -> list[tuple[Stream, str]]:
    """Stream and subject of everything that the services of a node can have published."""
    return [
        (wire.STORED[event], f"{wire.PREFIX}.{pattern.format(node=wire.encode_node_token(node))}")
        for event, (pattern, _) in wire.SUBJECTS.items()
        if event is not ReservationsChanged
    ]


async def has_published(bus: Bus, node: NodeName) -> bool:
    """Whether the streams contain anything that this node published. Raises BusUnavailable, BusRefused."""
    return any([await bus.last_position(stream, subject) for stream, subject in node_subjects(node)])


async def forget_node(bus: Bus, node: NodeName) -> None:
    """Deletes everything that the node published, and the reservations on it. Raises BusUnavailable, BusRefused."""
    for stream, subject in [*node_subjects(node), (Stream.RESERVATIONS, wire.reservation_subject(node))]:
        await bus.forget(stream, subject)
