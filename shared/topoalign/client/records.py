"""
Reads what is known of a cluster now, as records: the newest facts of each node, folded as every subscriber folds them.

What is reserved counts for as long as the newest message says, from now on: the registry publishes the end of each
reservation, so a message that is long over is one of a cluster without a registry.
"""

from contextlib import aclosing

import anyio

from topoalign.client.heard import Heard
from topoalign.client.subscriber import Client
from topoalign.core import wire
from topoalign.core.diagnosis.records import ClusterRecord, record_of
from topoalign.core.model.errors import BadRequest, BusUnavailable
from topoalign.core.model.events import ReservationsChanged
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Bus, Clock, Stream
from topoalign.core.state.fold import NodeState

PAUSE = 0.02
"""Seconds between two looks at whether all has been read."""


async def read_cluster(bus: Bus, clock: Clock, node: NodeName | None = None, within: float = 60.0) -> ClusterRecord:
    """
    The records of all nodes, or of one, by name. A node whose facts are not whole lacks its allocations.

    Raises BusUnavailable where the streams were not read in so many seconds, and BusRefused.
    """
    states: dict[NodeName, NodeState] = {}
    client = Client(bus, clock, "cli", bodies=False)

    def apply(heard: Heard) -> None:
        name = heard.event.node
        state = states.get(name) or NodeState(node=name)
        states[name] = state.with_ledger_of(heard.state) if heard.state is not None else state.apply(heard.event)

    async def nodes() -> None:
        async with aclosing(client.nodes(node)) as events:
            async for heard in events:
                apply(heard)

    async def allocations() -> None:
        async with aclosing(client.allocations(node=node, superseded=False)) as events:
            async for heard in events:
                apply(heard)

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
    found = [record_of(states[name], await newest_reservations(bus, name)) for name in sorted(states)]
    return ClusterRecord(time=clock.wall(), nodes=tuple(found))


async def newest_reservations(bus: Bus, node: NodeName) -> ReservationsChanged | None:
    """What is reserved on a node; None where nothing is, or nothing that can be read."""
    received = await bus.newest(Stream.ALLOCATIONS, wire.reservation_subject(node))
    if received is None:
        return None
    try:
        event = wire.decode(received.message)
    except BadRequest:  # whatever anybody may have written there; the registry puts it aside
        return None
    return event if isinstance(event, ReservationsChanged) else None
