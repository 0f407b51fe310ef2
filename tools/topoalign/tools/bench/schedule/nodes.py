"""
What runs on the nodes of a cluster, in a process of its own: allocators that answer, and kubelets that admit.

The process runs `main`. It gets the address of NATS, the name of the cluster's nodes (`FLEETS`) and their number, publishes
their facts, and answers for their allocators: whether they are alive, and by the node's own decision what they would give a
pod. It reads a `Bound` a line, decides about that pod as its kubelet would, publishes what the node shows of it, and writes
an `Admitted` a line. After a `Terminated` it publishes that the pod has ended.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import NamedTuple

import anyio
import msgspec

from topoalign.cli.link import connect_to_bus
from topoalign.core import wire
from topoalign.core.model.decisions import Decision
from topoalign.core.model.errors import NotFound
from topoalign.core.model.events import ReservationsChanged
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import ConfirmRequest, NodeRequest, WriterPosition
from topoalign.core.ports import Bus, Endpoint, Stream
from topoalign.runtime.clock import SystemClock
from topoalign.runtime.replies import answer_with
from topoalign.runtime.tasks import background
from topoalign.tools.bench.filter.cluster import HALF, BusyNode, kind
from topoalign.tools.bench.registry.allocators import AllocatorsEnded, standing
from topoalign.tools.bench.registry.filling import fill
from topoalign.tools.bench.schedule.node import AS_RECORDED, AT_ONCE, Admitted, Bound, Delays, Node

SERVING = "serving"
MIXED = tuple(
    kind(machine, policy)
    for machine, policy in (
        ("hgx-h100", "restricted"),
        ("dgx-a100", "single-numa-node"),
        ("hgx-h100", "best-effort"),
        ("two-socket-8xpcie", "best-effort"),
        ("epyc-nps4-4gpu", "best-effort"),
        ("8x-l40s", "none"),
        ("hgx-h100", "restricted"),
        ("dgx-a100", "best-effort"),
        ("epyc-nps4-4gpu", "restricted"),
        ("hgx-b200", "restricted"),
        ("two-socket-8xpcie", "single-numa-node"),
        ("8x-l40s", "best-effort"),
        ("epyc-nps4-4gpu", "none"),
        ("hgx-h100", "best-effort"),
    )
)
"""14 machines with 100 GPUs."""


class Fleet(NamedTuple):
    """The nodes of a cluster."""

    create: Callable[[int], BusyNode]
    """Makes the node with this number, as it is at first."""
    delays: Delays


FLEETS = {
    "half-full": Fleet(lambda number: BusyNode(number, HALF), AT_ONCE),
    "mixed": Fleet(lambda number: BusyNode(number, 0, kinds=MIXED), AS_RECORDED),
}


class Terminated(msgspec.Struct, frozen=True, tag=True):
    """A pod has ended at its kubelet."""

    node: NodeName
    uid: str


class Nodes:
    """The process. Made by `nodes`."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    def bind(self, node: NodeName, uid: str, pod: object) -> None:
        """A pod was bound."""
        self._write({"type": "Bound", "node": node, "uid": uid, "pod": pod})

    def terminate(self, node: NodeName, uid: str) -> None:
        """A pod has ended at its kubelet."""
        self._write(Terminated(node, uid))

    def _write(self, what: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(what) + b"\n")
        self._process.stdin.flush()

    def next(self) -> Admitted:
        """What became of one of the pods that were bound. Raises AllocatorsEnded."""
        return msgspec.json.decode(self._line(), type=Admitted)

    def until_serving(self) -> None:
        """Until everything is published, and questions are answered. Raises AllocatorsEnded."""
        while self._line().strip() != SERVING.encode():
            pass

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise AllocatorsEnded
        return line


@contextmanager
def nodes(url: str, size: int, fleet: str = "half-full") -> Iterator[Nodes]:
    """So many nodes of a fleet, while the context is open. Raises AllocatorsEnded."""
    command = [sys.executable, "-c", f"from {__name__} import main; main()", url, fleet, str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            all_nodes = Nodes(process)
            all_nodes.until_serving()
            yield all_nodes
        finally:
            process.terminate()


async def serve(url: str, fleet: Fleet, size: int) -> None:
    """Answers and admits until it is cancelled."""
    chance = Random(0)
    clock = SystemClock()
    made = [Node(partial(fleet.create, number), clock, fleet.delays, chance) for number in range(size)]
    cluster = {each.busy.node: each for each in made}
    for _ in fill(url, (event for each in made for event in each.busy.said())):
        pass

    def node_of(name: NodeName) -> Node:
        if name not in cluster:
            raise NotFound("node", name, "ask for a node of the benchmark")
        return cluster[name]

    async def alive(request: NodeRequest) -> WriterPosition:
        return standing(node_of(request.node).busy)

    async def confirm(request: ConfirmRequest) -> Decision:
        return node_of(request.node).confirm(request)

    async def do(bus: Bus, what: Bound | Terminated) -> None:
        node = cluster[what.node]
        if isinstance(what, Terminated):
            await node.terminate(bus, what.uid)
        else:
            print(msgspec.json.encode(await node.admit(bus, what)).decode(), flush=True)

    async def follow_reservations(bus: Bus) -> None:
        async with bus.follow(Stream.RESERVATIONS, wire.reservation_subject()) as messages:
            async for received in messages:
                event = wire.decode_event(received.message)
                if isinstance(event, ReservationsChanged) and event.node in cluster:
                    cluster[event.node].reserve(event, received.position)

    endpoints = [
        Endpoint(name="alive", subject=subject("alive"), answer=answer_with(NodeRequest, alive)),
        Endpoint(name="confirm", subject=subject("confirm"), answer=answer_with(ConfirmRequest, confirm)),
    ]
    async with connect_to_bus(url) as bus, bus.serve("topoalign-allocator", endpoints), background() as tasks:
        tasks.start_soon(follow_reservations, bus)
        print(SERVING, flush=True)
        async for line in anyio.wrap_file(sys.stdin.buffer):
            tasks.start_soon(do, bus, msgspec.json.decode(line, type=Bound | Terminated))


def subject(verb: str) -> str:
    """Of a question to any node's allocator."""
    return wire.admission_subject(NodeName("node"), verb).replace(".node.", ".*.")


def main() -> None:
    """The process: its arguments are the address of NATS, the name of a fleet and the number of nodes."""
    url, fleet, size = sys.argv[1:]
    anyio.run(serve, url, FLEETS[fleet], int(size))
