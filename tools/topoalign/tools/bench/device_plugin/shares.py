"""
The cases in which shares of GPUs are given out and kept: what a grant costs beside what is held, and many callers at once.
"""

import re
import time
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any
from urllib.request import urlopen

from topoalign.core.model.ids import DeviceID
from topoalign.testing.ports import kept_ports
from topoalign.tools.bench.device_plugin.kubelet import PATIENCE_SECONDS, Kubelet, allocate_request
from topoalign.tools.bench.device_plugin.machine import shared_node
from topoalign.tools.bench.device_plugin.node import WARM, Row, Settings
from topoalign.tools.measuring import summarize_times

REPLICAS = 1024
"""Shares of each of the eight GPUs."""
SIZE = 4
"""Shares of each Allocate beside others that are held."""
EARLIER = 1_000
"""Grants."""
CALLERS = 64
KEPT = {"RECONCILE_SECONDS": "3600"}
"""Nobody looks for what has ended: what is given out stays held."""
SYNCS = re.compile(rb"^topoalign_allocator_journal_syncs_total (\S+)", re.MULTILINE)


def measure(settings: Settings, calls: int) -> Iterator[Row]:
    """Both cases, with this many grants each, at most `EARLIER`."""
    grants = min(calls, EARLIER)
    yield allocate_beside_others(settings | KEPT, grants)
    yield allocate_by_many(settings | KEPT, grants)


def allocate_beside_others(settings: Settings, calls: int) -> Row:
    """The case `allocate-4-after-1000`: two agents in turn, of which one has given out a share a thousand times."""
    with (
        shared_node("after-none", settings, REPLICAS) as (few, _, shares),
        shared_node("after-1000", settings, REPLICAS) as (many, agent, _),
    ):
        give = many.method("Allocate")
        for share in shares[-EARLIER:]:
            give(allocate_request([share]))
        after_none = []
        after_many = []
        for number in range(WARM + calls):
            asked = allocate_request(shares[number * SIZE : (number + 1) * SIZE])
            after_none.append(timed(few, asked))
            after_many.append(timed(many, asked))
        row = summarize_times(f"allocate-{SIZE}-after-{EARLIER}", after_many[WARM:])
        before = summarize_times("", after_none[WARM:])
        return row | {"after_none_p50_ms": before["p50_ms"], "rss_mb": agent.rss_mb}


def timed(kubelet: Kubelet, request: bytes) -> float:
    """The milliseconds of one Allocate."""
    give = kubelet.method("Allocate")
    began = time.perf_counter()
    give(request)
    return (time.perf_counter() - began) * 1000


def allocate_by_many(settings: Settings, calls: int) -> Row:
    """The case `allocate-64-callers`: each asks for a share, and for the next as soon as it is answered."""
    with (
        kept_ports(1) as (port,),
        shared_node("callers", settings | {"HTTP_PORT": str(port)}, REPLICAS) as (kubelet, agent, shares),
    ):
        answered(kubelet, shares[:WARM], 1)
        alone = answered(kubelet, shares[WARM : WARM + calls], 1)
        synced = syncs(port)
        together = answered(kubelet, shares[WARM + calls : WARM + 3 * calls], CALLERS)
        return summarize_times(f"allocate-{CALLERS}-callers", [milliseconds for milliseconds, _ in together]) | {
            "per_second": per_second(together),
            "one_caller_per_second": per_second(alone),
            "fsyncs": syncs(port) - synced,
            "grants": len(together),
            "rss_mb": agent.rss_mb,
        }


Answered = tuple[float, float]
"""How many milliseconds a call took, and when it was answered (monotonic seconds)."""


def answered(kubelet: Kubelet, shares: Sequence[DeviceID], callers: int) -> list[Answered]:
    """Asks for each of these shares, with so many calls under way on the kubelet's one connection."""
    method = kubelet.future("Allocate")
    done: SimpleQueue[tuple[Any, float, float]] = SimpleQueue()
    found: list[Answered] = []

    def ask(share: DeviceID) -> None:
        began = time.monotonic()
        call = method(allocate_request([share]))
        call.add_done_callback(lambda call: done.put((call, began, time.monotonic())))

    for share in shares[:callers]:
        ask(share)
    for number in range(len(shares)):
        call, began, ended = done.get(timeout=PATIENCE_SECONDS)
        call.result()
        found.append(((ended - began) * 1000, ended))
        if number + callers < len(shares):
            ask(shares[number + callers])
    return found


def per_second(calls: Sequence[Answered]) -> float:
    """How many of the calls, after the first of them, were answered in a second."""
    return round((len(calls) - 1) / (calls[-1][1] - calls[0][1]), 1)


def syncs(port: int) -> int:
    """How often the agent has synced its journal."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_SECONDS) as page:
        found = SYNCS.search(page.read())
    assert found is not None, "the agent counts its syncs"
    return int(float(found[1]))
