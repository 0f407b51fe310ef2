"""
What runs on the nodes of a cluster, in a process of its own: allocators that answer, and kubelets that admit.

The process runs `main`. It gets the address of NATS and the number of nodes, publishes what they have said, and answers for
their allocators: whether they are alive, and by the node's own decision what they would give a pod. It reads a `Bound` a
line, decides about that pod as its kubelet would, publishes what the node shows of it, and writes an `Admitted` a line.
After an `Ended` it publishes that a container has ended.
"""

import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property

import anyio
import msgspec

from topoalign.cli.link import connected
from topoalign.core import wire
from topoalign.core.admission.prediction import predict
from topoalign.core.model.decisions import Decision, Refusal
from topoalign.core.model.errors import NotFound
from topoalign.core.model.events import Event
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import AliveRequest, ConfirmRequest, Standing
from topoalign.core.ports import Bus, Endpoint
from topoalign.core.state.fold import NodeState, replay
from topoalign.kubelet.files.manifest import Pod, request_of
from topoalign.runtime.answers import answering
from topoalign.runtime.tasks import background
from topoalign.tools.bench.filter.cluster import HALF, BusyNode
from topoalign.tools.bench.registry.allocators import AllocatorsEnded, standing
from topoalign.tools.bench.registry.filling import fill

SERVING = "serving"


class Bound(msgspec.Struct, frozen=True, tag=True):
    """A pod was bound to a node."""

    node: NodeName
    uid: str
    pod: Pod


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The first container of a node ends."""

    node: NodeName


class Admitted(msgspec.Struct, frozen=True):
    """What became of a pod at its node."""

    uid: str
    code: str
    """Of the refusal; empty: it runs."""


class Nodes:
    """The process. Made by `nodes`."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    def bind(self, node: NodeName, uid: str, pod: object) -> None:
        """A pod was bound."""
        self._tell({"type": "Bound", "node": node, "uid": uid, "pod": pod})

    def end(self, node: NodeName) -> None:
        """The first container of a node ends."""
        self._tell(Ended(node))

    def _tell(self, what: object) -> None:
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
def nodes(url: str, size: int) -> Iterator[Nodes]:
    """So many nodes that are half full, while the context is open. Raises AllocatorsEnded."""
    command = [sys.executable, "-c", f"from {__name__} import main; main()", url, str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            all_nodes = Nodes(process)
            all_nodes.until_serving()
            yield all_nodes
        finally:
            process.terminate()


class Node:
    """One node: its allocator and its kubelet."""

    def __init__(self, number: int) -> None:
        self.busy = BusyNode(number, HALF)
        self._number, self._turn = number, anyio.Lock()

    @cached_property
    def _state(self) -> NodeState:
        """All that the node has said; few nodes are asked, so the others keep no topology."""
        first = BusyNode(self._number, HALF)
        return replay(first.node, first.said())

    def decide(self, request: ConfirmRequest) -> Decision:
        """What the node's allocator confirms."""
        return predict(self._state, request.pod, time.time(), reserved=request.reserved)

    async def admit(self, bus: Bus, bound: Bound) -> Admitted:
        """What its kubelet decides, one pod after another."""
        async with self._turn:
            decision = self.decide(ConfirmRequest(node=self.busy.node, pod=request_of(bound.pod)))
            if isinstance(decision, Refusal):
                return Admitted(bound.uid, decision.code)
            for given in decision.allocations:
                await self._publish(bus, self.busy.admitted(bound.uid, given))
        return Admitted(bound.uid, "")

    async def end(self, bus: Bus) -> None:
        """Its first container ends."""
        async with self._turn:
            await self._publish(bus, self.busy.ended())

    async def _publish(self, bus: Bus, events: Iterable[Event]) -> None:
        for event in events:
            self._state = self._state.apply(event)
            await bus.publish(wire.encode(event, time.time()))


async def serve(url: str, size: int) -> None:
    """Answers and admits until it is cancelled."""
    cluster = {each.busy.node: each for each in map(Node, range(size))}
    for _ in fill(url, (event for each in cluster.values() for event in each.busy.said())):
        pass

    def asked(name: NodeName) -> Node:
        if name not in cluster:
            raise NotFound("node", name, "ask for a node of the benchmark")
        return cluster[name]

    async def alive(request: AliveRequest) -> Standing:
        return standing(asked(request.node).busy)

    async def confirm(request: ConfirmRequest) -> Decision:
        return asked(request.node).decide(request)

    async def do(bus: Bus, told: Bound | Ended) -> None:
        if isinstance(told, Ended):
            await cluster[told.node].end(bus)
        else:
            print(msgspec.json.encode(await cluster[told.node].admit(bus, told)).decode(), flush=True)

    endpoints = [
        Endpoint(name="alive", subject=subject("alive"), answer=answering(AliveRequest, alive)),
        Endpoint(name="confirm", subject=subject("confirm"), answer=answering(ConfirmRequest, confirm)),
    ]
    async with connected(url) as bus, bus.serve("topoalign-allocator", endpoints), background() as tasks:
        print(SERVING, flush=True)
        async for line in anyio.wrap_file(sys.stdin.buffer):
            tasks.start_soon(do, bus, msgspec.json.decode(line, type=Bound | Ended))


def subject(verb: str) -> str:
    """Of a question to any node's allocator."""
    return wire.admission_subject(NodeName("node"), verb).replace(".node.", ".*.")


def main() -> None:
    """The process: its arguments are the address of NATS and the number of nodes."""
    url, size = sys.argv[1:]
    anyio.run(serve, url, int(size))
