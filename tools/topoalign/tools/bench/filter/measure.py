"""The cases, one cluster after the other: each has streams of its own, and one registry answers all calls."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import count, cycle

import msgspec
from anyio.from_thread import start_blocking_portal

from topoalign.testing.ports import kept_ports
from topoalign.tools.bench.device_plugin.agent import Agent, running
from topoalign.tools.bench.device_plugin.node import Row, scratch
from topoalign.tools.bench.filter.cluster import ALL, FACTS, HALF, BusyNode
from topoalign.tools.bench.filter.scheduler import Amounts, Filtered, Scheduler
from topoalign.tools.bench.registry import pages
from topoalign.tools.bench.registry.allocators import Allocators, allocators
from topoalign.tools.bench.registry.filling import UNDER_WAY, fill
from topoalign.tools.bench.registry.measure import streams
from topoalign.tools.bench.registry.reader import PATIENCE_SECONDS, NotAnswered, Reader, until
from topoalign.tools.measuring import summarize_times
from topoalign.tools.progress import show_progress

Answer = tuple[float, Filtered]
"""What a call took in milliseconds, and which nodes passed."""
WARM = 3
"""Calls that do not count."""
REPLICAS = 420
SHARES = 20
"""Shares of a GPU, and those that a pod asks for."""


class Cluster:
    """Nodes whose facts are in the streams of a nats-server, and a process that answers for them."""

    def __init__(self, nodes: Sequence[BusyNode], url: str, everybody: Allocators) -> None:
        self.nodes = nodes
        self.url = url
        self._everybody = everybody
        self._changing = cycle(nodes)

    def change(self, reader: Reader) -> None:
        """A container of the next node ends, and the registry shows it. Raises NotStored, NotAnswered."""
        node = next(self._changing)
        events = list(node.ended())
        self._everybody.stand_by([node])
        for _ in fill(self.url, events):
            pass
        path = f"{pages.NODES}/{node.node}"
        end = time.monotonic() + PATIENCE_SECONDS
        while msgspec.json.decode(reader.get(path), type=pages.Detail).summary.seq < node.state.seq:
            if time.monotonic() > end:
                raise NotAnswered(path, "the end of a container is not shown")


class Asking(msgspec.Struct):
    """A registry that has read all, and who asks it."""

    registry: Agent
    reader: Reader
    scheduler: Scheduler
    pages_port: int
    scheduler_port: int

    def measured(self, case: str, calls: int, call: Callable[[], Answer]) -> Row:
        """The row of so many calls."""
        for _ in range(WARM):
            call()
        self.registry.longest_block_ms()
        answers = [call() for _ in range(calls)]
        return summarize_times(case, [took for took, _ in answers]) | self.figures(answers[-1])

    def figures(self, answer: Answer) -> Row:
        """How many nodes passed, and figures of the process."""
        block = self.registry.longest_block_ms()
        return {"passed": len(answer[1].node_names), "longest_block_ms": block, "rss_mb": self.registry.rss_mb}


def half_full(size: int, calls: int, *, starts: int = 0, new: bool = False) -> Iterator[Row]:
    """
    The cases of this size: the first call after so many `starts`, one pod after another, and `new` requests.

    Raises NotStored, NotAnswered, AllocatorsEnded.
    """
    amounts = (Amounts(mib=1024 + number) for number in count())
    with filled(size, HALF) as cluster:
        if starts:
            yield cold(cluster, starts)
        with asking(cluster) as asked:

            def changed(amounts: Amounts) -> Answer:
                cluster.change(asked.reader)
                return asked.scheduler.schedule(amounts)

            yield asked.measured(str(size), calls, lambda: changed(Amounts()))
            if new:
                yield asked.measured(f"{size}-new", max(2, calls // 4), lambda: changed(next(amounts)))


def cold(cluster: Cluster, starts: int) -> Row:
    """The case `cold`: the first call after each start. At least two. Raises NotAnswered."""
    answers: list[Answer] = []
    figures: Row = {}
    for _ in range(starts):
        with asking(cluster) as asked:
            asked.registry.longest_block_ms()
            answers.append(asked.scheduler.schedule(Amounts()))
            figures = asked.figures(answers[-1])
    return summarize_times(f"{len(cluster.nodes)}-cold", [took for took, _ in answers]) | figures


def shared(size: int, calls: int) -> Row:
    """The case `shares` of this size: half of the shares of each GPU are held. Raises as `half_full`."""
    with filled(size, ALL, REPLICAS) as cluster, asking(cluster) as asked:

        def changed() -> Answer:
            cluster.change(asked.reader)
            return asked.scheduler.schedule(Amounts(gpus=SHARES))

        return asked.measured(f"{size}-shares", calls, changed)


def full(size: int, calls: int) -> Row:
    """The case `full` of this size: no node has a free GPU. Raises as `half_full`."""
    with filled(size, ALL) as cluster, asking(cluster) as asked:
        return asked.measured(f"{size}-full", calls, lambda: asked.scheduler.schedule(Amounts()))


@contextmanager
def filled(size: int, gpus_held: int, replicas: int = 1) -> Iterator[Cluster]:
    """A cluster of so many nodes while the context is open. Raises NotStored, AllocatorsEnded."""
    nodes = [BusyNode(number, gpus_held, replicas) for number in range(size)]
    with (
        start_blocking_portal() as portal,
        scratch() as folder,
        streams(portal, folder / "nats") as url,
    ):
        events = (event for node in nodes for event in node.said())
        for _ in show_progress(fill(url, events), "facts", size * FACTS // UNDER_WAY + 1):
            pass
        with allocators(url, folder / "standings", nodes) as everybody:
            yield Cluster(nodes, url, everybody)


@contextmanager
def asking(cluster: Cluster) -> Iterator[Asking]:
    """A registry that knows of each node what it needs to, while the context is open. Raises NotAnswered."""
    with kept_ports(2) as (pages_port, port):
        settings = {
            "NATS_URL": cluster.url,
            "HTTP_PORT": str(pages_port),
            "SCHEDULER_PORT": str(port),
            "LOG_LEVEL": "error",
        }
        with running("registry", settings, observed=True) as registry, closing(Reader(pages_port)) as reader:
            until(lambda: reader.is_ok("/readyz"), "the registry has not read the streams", registry)
            until(lambda: not pages.stale(reader), "a node is shown as stale", registry)
            with closing(Scheduler(port, [each.node for each in cluster.nodes])) as scheduler:
                yield Asking(registry, reader, scheduler, pages_port, port)
