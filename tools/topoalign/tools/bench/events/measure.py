"""The cases, each with an agent, a kubelet, a subscriber and a nats-server of its own."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from anyio.from_thread import start_blocking_portal

from topoalign.core.model.ids import DeviceID
from topoalign.runtime.nats_server import local_nats
from topoalign.tools.bench.device_plugin.kubelet import PATIENCE_SECONDS, BenchStuck, allocate_request
from topoalign.tools.bench.device_plugin.machine import shared_node
from topoalign.tools.bench.device_plugin.node import WARM, Row, scratch
from topoalign.tools.bench.device_plugin.shares import KEPT, REPLICAS
from topoalign.tools.measuring import summarize_times

T = TypeVar("T")

LOOK_SECONDS = 0.02
"""Between two looks at what the subscriber has written."""


def measure(rates: Mapping[str, int], seconds: float) -> Iterator[Row]:
    """A case for each rate (Allocates a second), for so many seconds."""
    for case, rate in rates.items():
        with (
            start_blocking_portal() as portal,
            scratch() as folder,
            portal.wrap_async_context_manager(local_nats(folder / "nats")) as url,
        ):
            yield delays(case, rate, seconds, url, folder)


def delays(case: str, rate: int, seconds: float, url: str, folder: Path) -> Row:
    """The case in which so many Allocates are made in a second."""
    settings = {"NATS_URL": url, "LOG_LEVEL": "error", **KEPT}
    with (
        shared_node(case, settings, REPLICAS) as (kubelet, agent, shares),
        subscriber(url, case, folder / "delivery") as delivery,
    ):
        give = kubelet.method("Allocate")
        asked = shares[: WARM + int(rate * seconds)]
        answered: dict[DeviceID, float] = {}
        began = time.monotonic()
        for number, share in enumerate(asked):
            time.sleep(max(0.0, began + number / rate - time.monotonic()))
            give(allocate_request([share]))
            answered[share] = time.monotonic()
        had = until(
            lambda: delivery() if len(delivery()) == len(asked) else None, "the events of all grants were not received"
        )
        milliseconds = [max(0.0, had[share] - at) * 1000 for share, at in answered.items()]
        per_second = round((len(asked) - 1) / (answered[asked[-1]] - answered[asked[0]]), 1)
        return summarize_times(case, milliseconds[WARM:]) | {"per_second": per_second, "rss_mb": agent.rss_mb}


@contextmanager
def subscriber(url: str, node: str, file: Path) -> Iterator[Callable[[], dict[DeviceID, float]]]:
    """A subscriber that writes this file. Yields what reads it: share -> when it was received (monotonic seconds)."""
    command = [sys.executable, "-m", "topoalign.tools.bench.events.subscriber", url, node, str(file)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        until(lambda: lines(file) or None, "the subscriber has received nothing of the node")
        yield lambda: {DeviceID(share): float(at) for share, at in (line.split() for line in lines(file)[1:])}
    finally:
        process.terminate()
        process.wait()


def lines(file: Path) -> Sequence[str]:
    """The whole lines of a file that is still written."""
    return file.read_text().split("\n")[:-1] if file.is_file() else []


def until(look: Callable[[], T | None], otherwise: str) -> T:
    """What `look` finds. Raises BenchStuck with `otherwise` after PATIENCE_SECONDS."""
    patience = time.monotonic() + PATIENCE_SECONDS
    while (found := look()) is None:
        if time.monotonic() > patience:
            raise BenchStuck(otherwise)
        time.sleep(LOOK_SECONDS)
    return found
