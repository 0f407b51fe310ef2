"""The cases, one after the other: the streams are filled once, and one registry answers all of them."""

import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from anyio.from_thread import BlockingPortal, start_blocking_portal

from topoalign.runtime import nats_server
from topoalign.runtime.nats_bus import apply_stores
from topoalign.testing.ports import kept_ports
from topoalign.tools.bench.device_plugin.agent import Agent, running
from topoalign.tools.bench.device_plugin.node import Row, scratch
from topoalign.tools.bench.registry import pages
from topoalign.tools.bench.registry.allocators import Allocators, allocators
from topoalign.tools.bench.registry.filling import UNDER_WAY, fill, said, said_again
from topoalign.tools.bench.registry.history import FACTS, MORE, READINGS, History
from topoalign.tools.bench.registry.reader import Reader, until
from topoalign.tools.progress import show_progress


def measure(nodes: int, calls: int) -> Iterator[Row]:
    """All cases with so many nodes. Raises NotStored, NotAnswered, AllocatorsEnded."""
    with (
        start_blocking_portal() as portal,
        scratch() as folder,
        streams(portal, folder / "nats") as url,
    ):
        histories = [History(number) for number in range(nodes)]
        for _ in show_progress(fill(url, said(histories)), "facts", nodes * (READINGS + FACTS) // UNDER_WAY + 1):
            pass
        with allocators(url, folder / "standings", histories) as everybody:
            yield from read(url, everybody, histories, calls)


def long(nodes: int, rounds: int) -> Row:
    """The case `start-N-events`: so many nodes whose containers have changed so often. Raises NotStored, NotAnswered."""
    events = nodes * (READINGS + FACTS + (rounds - 1) * MORE)
    with (
        start_blocking_portal() as portal,
        scratch() as folder,
        streams(portal, folder / "nats") as url,
        kept_ports(1) as (port,),
    ):
        histories = [History(number) for number in range(nodes)]
        for _ in show_progress(fill(url, said(histories, rounds)), "facts", events // UNDER_WAY + 1):
            pass
        settings = {"NATS_URL": url, "HTTP_PORT": str(port), "LOG_LEVEL": "error"}
        with running("registry", settings, observed=True) as registry, closing(Reader(port)) as reader:
            row = start(registry, reader, f"{events}-events") | figures(registry)
            until(lambda: pages.shows(reader, histories[-1]), "the last node is not shown as it is", registry)
            return row


@contextmanager
def streams(portal: BlockingPortal, folder: Path) -> Iterator[str]:
    """
    A nats-server with empty streams while the context is open. Yields its URL. Raises NatsServerFailed.

    It does not sync each message to the disk, which would take minutes: what is measured is reading.
    """
    server = nats_server.start_server(
        folder, f"listen: '127.0.0.1:-1'\njetstream {{ store_dir: {json.dumps(str(folder))} }}\n"
    )
    try:
        url = portal.call(nats_server.url_of, server, folder)
        portal.call(apply_stores, url)
        yield url
    finally:
        portal.call(nats_server.stop_server, server)


def read(url: str, everybody: Allocators, histories: list[History], calls: int) -> Iterator[Row]:
    """All cases, with a registry of these streams."""
    nodes = len(histories)
    with (
        kept_ports(1) as (port,),
        running("registry", {"NATS_URL": url, "HTTP_PORT": str(port), "LOG_LEVEL": "error"}, observed=True) as registry,
        closing(Reader(port)) as reader,
    ):
        yield start(registry, reader, str(nodes)) | figures(registry)
        yield asked(registry, everybody, reader, nodes) | figures(registry)
        for case in pages.cases(reader, calls):
            registry.longest_block_ms()
            yield case() | figures(registry) | {"stale": pages.stale(reader)}
        registry.longest_block_ms()
        yield (
            spoken_again(url, registry, everybody, reader, histories)
            | figures(registry)
            | {"stale": pages.stale(reader)}
        )


def start(registry: Agent, reader: Reader, what: str) -> Row:
    """The case `start-5000`: until so much is read."""
    until(lambda: reader.is_ok("/livez"), "the registry serves no HTTP pages", registry)
    registry.longest_block_ms()
    until(lambda: reader.is_ok("/readyz"), "the registry has not read the streams", registry)
    return once(f"start-{what}", registry.started)


def asked(registry: Agent, everybody: Allocators, reader: Reader, nodes: int) -> Row:
    """The case `asked-5000`."""
    began = time.monotonic()
    everybody.until_all_asked()
    reader.close()  # the registry may have closed the connection: nothing was asked for some seconds
    until(lambda: not pages.stale(reader), "a node is shown as stale", registry)
    return once(f"asked-{nodes}", began)


def spoken_again(url: str, registry: Agent, everybody: Allocators, reader: Reader, histories: list[History]) -> Row:
    """The case `spoken-again`."""
    began = time.monotonic()
    for _ in fill(url, said_again(histories)):
        pass
    everybody.stand_by(histories)
    reader.close()  # the registry may have closed the connection: nothing was asked for some seconds
    until(lambda: pages.shows(reader, histories[-1]), "the last node is not shown as it is", registry)
    return once("spoken-again", began)


def once(case: str, began: float) -> Row:
    """The row of a case that happens once and began then (monotonic seconds)."""
    milliseconds = round((time.monotonic() - began) * 1000, 1)
    return {"case": case, "n": 1, "p50_ms": milliseconds, "p99_ms": milliseconds}


def figures(registry: Agent) -> Row:
    """Of the process, after a case: its memory, and the longest block since that was asked last."""
    return {"longest_block_ms": registry.longest_block_ms(), "rss_mb": registry.rss_mb}
