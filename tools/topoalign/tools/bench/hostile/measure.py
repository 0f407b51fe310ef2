"""Measures the cases one after the other, on one registry."""

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from threading import Event, Thread

from topoalign.cli.health_check import request_page
from topoalign.core.model.ids import NodeName
from topoalign.tools.bench.filter.cluster import HALF
from topoalign.tools.bench.filter.measure import Asking, asking, filled
from topoalign.tools.bench.filter.scheduler import Amounts, Scheduler, pod_json
from topoalign.tools.bench.hostile.attackers import KINDS
from topoalign.tools.bench.registry.reader import NotAnswered
from topoalign.tools.measuring import summarize_times

Row = dict[str, object]
OWN = "127.0.0.1"
OTHER = "127.0.0.2"
"""Addresses: that of the scheduler, and that of attackers."""
SCHEDULER_SECONDS = 5.0
"""After which a scheduler gives up a call."""
PAUSE_SECONDS = 0.01
"""Between two filters."""
PROBE_SECONDS = 0.1
WARM_SECONDS = 2.0
"""From the start of an attack to the measurement."""
ENDED_SECONDS = 6.0
"""After the end of an attack: requests that were begun have ended."""
NUMBERS = count()
AMOUNTS = (Amounts(mib=1024 + number) for number in count())


def attacked(size: int, connections: int, seconds: float) -> Iterator[Row]:
    """All cases. Raises NotStored, NotAnswered, AllocatorsEnded."""
    together = dict.fromkeys(KINDS, connections // len(KINDS))
    with filled(size, HALF) as cluster, asking(cluster) as asked:
        nodes = [each.node for each in cluster.nodes]
        yield measured("quiet", asked, nodes, seconds, {}, OTHER)
        for kind in KINDS:
            yield measured(kind, asked, nodes, seconds, {kind: connections}, OTHER)
        yield measured("all", asked, nodes, seconds, together, OTHER)
        yield measured("all-one-address", asked, nodes, seconds, together, OWN)


def measured(
    case: str, asked: Asking, nodes: Sequence[NodeName], seconds: float, attacks: Mapping[str, int], source: str
) -> Row:
    """The row of a case."""
    with ExitStack() as attack:
        for kind, number in attacks.items():
            port = asked.pages_port if kind == "unread-answers" else asked.scheduler_port
            attack.enter_context(attacking(kind, number, source, port))
        time.sleep(WARM_SECONDS if attacks else 0)
        asked.registry.longest_block_ms()
        with probing(asked.pages_port) as probes:
            took, used, failed = filters(asked, nodes, seconds)
        block = asked.registry.longest_block_ms()
    time.sleep(ENDED_SECONDS if attacks else 0)
    cpu = {f"cpu_{key}": value for key, value in summarize_times(case, used).items() if key.endswith("_ms")}
    figures = {"failed": failed, "livez_worst_ms": round(max(probes) * 1000, 1), "longest_block_ms": block}
    return summarize_times(case, took) | cpu | figures | {"rss_mb": asked.registry.rss_mb}


def filters(asked: Asking, nodes: Sequence[NodeName], seconds: float) -> tuple[list[float], list[float], int]:
    """
    Milliseconds of each filter, the CPU time in milliseconds that the registry used until it was answered, and how many were
    not answered: these count as `SCHEDULER_SECONDS`. A lost connection is made again.
    """
    took: list[float] = []
    used: list[float] = []
    failed = 0
    end = time.monotonic() + seconds
    scheduler = None
    while time.monotonic() < end:
        pod = pod_json(next(NUMBERS), next(AMOUNTS))
        cpu = asked.registry.cpu_seconds
        try:
            if scheduler is None:
                scheduler = Scheduler(asked.scheduler_port, nodes, SCHEDULER_SECONDS)
            took.append(scheduler.filter(pod, nodes)[0] * 1000)
        except (OSError, NotAnswered):
            failed += 1
            took.append(SCHEDULER_SECONDS * 1000)
            if scheduler is not None:
                scheduler.close()
                scheduler = None
        used.append((asked.registry.cpu_seconds - cpu) * 1000)
        time.sleep(PAUSE_SECONDS)
    if scheduler is not None:
        scheduler.close()
    return took, used, failed


@contextmanager
def probing(port: int) -> Iterator[list[float]]:
    """Asks for /livez while the context is open; the seconds of each answer, `SCHEDULER_SECONDS` where there was none."""
    took: list[float] = []
    ended = Event()

    def probe() -> None:
        while not ended.wait(PROBE_SECONDS):
            began = time.monotonic()
            is_alive = False
            with suppress(OSError, ValueError):
                is_alive, _ = request_page(OWN, port, "/livez", SCHEDULER_SECONDS)
            took.append(time.monotonic() - began if is_alive else SCHEDULER_SECONDS)

    thread = Thread(target=probe)
    thread.start()
    try:
        yield took
    finally:
        ended.set()
        thread.join()


@contextmanager
def attacking(kind: str, number: int, source: str, port: int) -> Iterator[None]:
    """An attack from a process of its own while the context is open."""
    command = [sys.executable, "-c", "from topoalign.tools.bench.hostile.attackers import main; main()"]
    command += [kind, str(number), source, str(port)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield
        finally:
            process.terminate()
