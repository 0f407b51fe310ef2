"""`topoalign watch`: prints allocation events as they occur, one line each, as text or NDJSON."""

from contextlib import aclosing
from datetime import datetime

import anyio
import click
import msgspec

from topoalign.cli import formatting, output
from topoalign.cli.link import NodeLink, connect_to_bus, newest_topology, on_node
from topoalign.client import Client, Delivery
from topoalign.core.model.errors import clean
from topoalign.core.model.events import (
    Allocation,
    AllocationBound,
    AllocationDeviated,
    AllocationGranted,
    AllocationRefused,
    AllocationReleased,
    AllocationsSnapshot,
    Event,
)
from topoalign.core.model.ids import GPU, AllocationID, NodeName
from topoalign.core.model.requests import LARGEST_QUANTITY
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Bus, Stream


@click.command()
@click.option(
    "--since", type=click.IntRange(0, LARGEST_QUANTITY), metavar="SEQ", help="Start after this position of the stream."
)
@click.option(
    "--count", type=click.IntRange(1, LARGEST_QUANTITY), metavar="N", help="End after N events.  [default: Ctrl-C]"
)
@on_node
def watch(link: NodeLink, since: int | None, count: int | None) -> None:
    """
    Print allocation events as they occur, of all nodes, or with --node of one. Live allocations come first.

    The number at the beginning of a line is its position; continue from there with --since.

    \b
    Examples:
      topoalign watch
      topoalign watch --since 0 --json | jq 'select(.event.type == "AllocationRefused")'
    """
    anyio.run(until_nobody_reads, link, since, count)


async def until_nobody_reads(link: NodeLink, since: int | None, count: int | None) -> None:
    """Prints events until the reader of stdout is gone, which no later write might notice, as with `| head -1`."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(end_with_reader, tasks.cancel_scope)
        await print_events(link, since, count)
        tasks.cancel_scope.cancel()


async def end_with_reader(scope: anyio.CancelScope) -> None:
    """Cancels `scope` once the read end of the stdout pipe is closed. Returns at once if stdout is not a pipe."""
    pipe = output.pipe()
    if pipe is not None:
        await anyio.wait_readable(pipe)
        scope.cancel()


async def print_events(link: NodeLink, since: int | None, count: int | None) -> None:
    """Print events of all nodes or of one, until `count` of them are printed. Raises the errors of the client."""
    async with connect_to_bus(link.nats, log_level="warning") as bus:
        node = NodeName(link.node_option) if link.node_option is not None else None
        printer = EventPrinter(bus)
        printed = 0
        await bus.last_position(Stream.ALLOCATIONS)  # fails without permission; following would wait for it
        async with aclosing(Client(bus, name="cli").allocations(since, node)) as events:
            async for delivery in events:
                if link.as_json:
                    # As its writer published it, with fields of later versions, on one line.
                    event = msgspec.Raw(msgspec.json.format(delivery.body, indent=-1))
                    output.print_json_line({"event": event, "position": delivery.position, "time": delivery.time})
                else:
                    await printer.print(delivery)
                printed += 1
                if printed == count:
                    return


class EventPrinter:
    """Prints events as text. Keeps the live allocations, because a release has only the allocation's id."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._held: dict[tuple[NodeName, AllocationID], Allocation] = {}
        self._topologies: dict[NodeName, Topology] = {}

    async def print(self, delivery: Delivery) -> None:
        """Print one event, with its position and its local time of day."""
        event = delivery.event
        topology = await self.topology(event)
        time = datetime.fromtimestamp(delivery.time).strftime("%H:%M:%S") if delivery.time is not None else "--:--:--"
        for line in self.lines(event, topology):
            output.print_line(f"{delivery.position:>6} {time} {clean(event.node)} {line}")

    async def topology(self, event: Event) -> Topology:
        """The node's topology, requested again when a device is not in it."""
        known = self._topologies.get(event.node)
        gpus = event.allocation.devices.get(GPU, ()) if isinstance(event, AllocationGranted) else ()
        if known is None or any(known.parent_of(gpu) not in known.gpu_by_id for gpu in gpus):
            known = self._topologies[event.node] = await newest_topology(self._bus, event.node) or Topology()
        return known

    def lines(self, event: Event, topology: Topology) -> list[str]:
        """The lines for an event, the first one with its kind."""
        match event:
            case AllocationsSnapshot():
                held = [self.holds(event.node, allocation, topology) for allocation in event.allocations]
                return [f"snapshot  {len(held)} live", *(f"  holds   {line}" for line in held)]
            case AllocationGranted():
                return [
                    f"granted   {self.holds(event.node, event.allocation, topology)}",
                    *describe_displaced(event.allocation),
                ]
            case AllocationBound():
                known = self._held.get((event.node, event.allocation), Allocation(id=event.allocation))
                bound = msgspec.structs.replace(
                    known, owner=event.owner, pod_uid=event.pod_uid, displaced=event.displaced
                )
                return [f"bound     {self.holds(event.node, bound, topology)}", *describe_displaced(bound)]
            case AllocationReleased():
                gone = self._held.pop((event.node, event.allocation), Allocation(id=event.allocation))
                return [f"released  {describe_event(gone, topology)} ({clean(event.reason)})"]
            case AllocationRefused():
                pod = clean(f"{event.namespace}/{event.pod}", 200)
                return [f"refused   {pod}: {clean(event.reason)}, {clean(event.finding, 300)}"]
            case AllocationDeviated():
                got, wanted = (
                    clean(formatting.shorts(GPU, devices, topology), 300)
                    for devices in (event.allocated, event.preferred)
                )
                return [f"deviated  {clean(event.allocation, 120)}: the kubelet gave {got} instead of {wanted}"]
            case _:
                return [clean(type(event).__name__)]

    def holds(self, node: NodeName, allocation: Allocation, topology: Topology) -> str:
        """The line for a live allocation, which is stored until its release."""
        self._held[node, allocation.id] = allocation
        return describe_event(allocation, topology)


def describe_event(allocation: Allocation, topology: Topology) -> str:
    """An allocation on one line, its owner first and its id last."""
    return (
        f"{formatting.owner(allocation.owner)}: {formatting.brief(allocation, topology)} [{clean(allocation.id, 120)}]"
    )


def describe_displaced(allocation: Allocation) -> list[str]:
    """Lines about other owners of the same devices."""
    return [
        f"  shared with {formatting.owner(former.owner)} [{clean(former.allocation, 120)}], which was not seen to end"
        for former in allocation.displaced
    ]
