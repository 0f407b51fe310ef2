"""
A cluster as a real kube-scheduler was recorded in front of it, with our extender and without it, in turn.

14 machines with 100 GPUs, of several kinds and policies; kubelets admit a pod 0.2 to 5 s after its bind, and nodes show the
end of a pod 1 to 12 s after the API server. The scheduler needs `CYCLE_SECONDS` for a pod beside its extender.
"""

import time
from collections.abc import Sequence
from random import Random
from statistics import fmean
from typing import NamedTuple

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from topoalign.core.model.ids import NodeName
from topoalign.runtime.clock import SystemClock
from topoalign.runtime.tasks import background
from topoalign.testing.fake_api_server.objects import Object
from topoalign.testing.fake_scheduler.scheduler import FakeScheduler
from topoalign.tools.bench.device_plugin.node import Row
from topoalign.tools.bench.registry.reader import PATIENCE_SECONDS, NotAnswered
from topoalign.tools.bench.schedule.control_plane import ControlPlane
from topoalign.tools.bench.schedule.cycle import bind_all
from topoalign.tools.bench.schedule.nodes import Nodes
from topoalign.tools.measuring import summarize_times

CYCLE_SECONDS = 0.017
"""A real kube-scheduler 1.36.2 placed 53 pods a second without an extender, with an API server and etcd."""
GPUS = (1, 1, 1, 2, 2, 4, 8)
"""That a pod of `stream` asks for, by chance."""


class Load(NamedTuple):
    """A pod that is created at the beginning."""

    gpus: int
    cpus: int
    """Of its own, each with 4 GiB."""
    seconds: float | None
    """How long it runs; None: to the end."""


class Outcome(NamedTuple):
    """What became of the pods."""

    ran: int
    pods_per_second: float
    """Of those that ran, until the last one was bound."""
    milliseconds: list[float]
    """From the creation of a pod until it was bound."""
    refused: int
    """By their nodes."""
    failed: int
    """`FailedScheduling` events."""


def burst(count: int) -> list[Load]:
    """So many pods that fit all, and ask for the same."""
    return [Load(1, 4, None)] * count


def stream(count: int) -> list[Load]:
    """So many pods that end after 1 to 3 s, most of which wait for others."""
    chance = Random(0)
    sizes = [chance.choice(GPUS) for _ in range(count)]
    return [Load(gpus, 2 * gpus, chance.uniform(1, 3)) for gpus in sizes]


REAL_LIKE = {"burst": burst(90), "stream": stream(120)}
"""The loads that were recorded in front of a real scheduler."""


async def place(plane: ControlPlane, everywhere: Nodes, load: Sequence[Load], *, extended: bool) -> Outcome:
    """Schedules the pods. `extended`: with our extender. Raises NotAnswered, AllocatorsEnded."""
    scheduler = FakeScheduler(
        plane.cluster, plane.extender if extended else None, SystemClock(), cycle_seconds=CYCLE_SECONDS
    )
    run = Placing(plane, everywhere)
    async with background() as tasks:
        tasks.start_soon(bind_all, plane.cluster, everywhere)
        tasks.start_soon(run.note_binds)
        await tasks.start(scheduler.run)
        for number, each in enumerate(load):
            run.create(f"pod-{number}", each)
        with anyio.move_on_after(PATIENCE_SECONDS) as waiting:
            await run.admit_all(tasks)
        if waiting.cancelled_caught:
            raise NotAnswered("the pods", f"not all of {len(load)} run: {scheduler.errors[-1:]}")
        await plane.extender.all_answered()
    bound = [run.bound[uid] - run.created[uid] for uid in run.bound]
    ran = len(load) - run.refused
    seconds = max(run.bound.values()) - min(run.created.values())
    milliseconds = [1000 * each for each in bound]
    return Outcome(ran, ran / seconds, milliseconds, run.refused, scheduler.failed.total())


class Placing:
    """Pods from their creation until their kubelets have judged all of them."""

    def __init__(self, plane: ControlPlane, everywhere: Nodes) -> None:
        self.created: dict[str, float] = {}
        """UID -> seconds."""
        self.bound: dict[str, float] = {}
        self.refused = 0
        self._cluster = plane.cluster
        self._everywhere = everywhere
        self._load: dict[str, Load] = {}
        self._judged = 0

    def create(self, name: str, load: Load) -> None:
        """A pod is created."""
        limits = {"nvidia.com/gpu": str(load.gpus), "cpu": str(load.cpus), "memory": f"{4 * load.cpus}Gi"}
        container = {"name": "main", "image": "none", "resources": {"limits": limits, "requests": limits}}
        made = self._cluster.add_pod({"metadata": {"name": name}, "spec": {"containers": [container]}})
        uid = made["metadata"]["uid"]
        self.created[uid] = time.perf_counter()
        self._load[uid] = load

    async def note_binds(self) -> None:
        """Notes when each pod was bound, for ever."""
        pods = self._cluster.pods
        seen = pods.newest
        while True:
            for change in pods.since(seen):
                seen = change.version
                if change.object["spec"].get("nodeName"):
                    self.bound.setdefault(change.object["metadata"]["uid"], time.perf_counter())
            await pods.wait()

    async def admit_all(self, tasks: TaskGroup) -> None:
        """Until the kubelets have judged all pods."""
        while self._judged < len(self.created):
            admitted = await to_thread.run_sync(self._everywhere.next, abandon_on_cancel=True)
            self._judged += 1
            pod = next(each for each in self._cluster.pods if each["metadata"]["uid"] == admitted.uid)
            self.refused += bool(admitted.code)
            self._set_phase(pod, "Failed" if admitted.code else "Running")
            seconds = self._load[admitted.uid].seconds
            if not admitted.code and seconds is not None:
                tasks.start_soon(self._end, pod, seconds)

    async def _end(self, pod: Object, seconds: float) -> None:
        """The pod ends so many seconds later: its kubelet frees what it held, then the API server shows it."""
        await anyio.sleep(seconds)
        self._everywhere.terminate(NodeName(pod["spec"]["nodeName"]), pod["metadata"]["uid"])
        self._set_phase(pod, "Succeeded")

    def _set_phase(self, pod: Object, phase: str) -> None:
        self._cluster.set_status(pod["metadata"]["namespace"], pod["metadata"]["name"], phase=phase)


def compare(case: str, extended: Sequence[Outcome], alone: Sequence[Outcome]) -> Row:
    """The row of a case, of all rounds."""
    took = [each for outcome in extended for each in outcome.milliseconds]
    took_alone = [each for outcome in alone for each in outcome.milliseconds]
    rate = fmean(each.pods_per_second for each in extended)
    rate_alone = fmean(each.pods_per_second for each in alone)
    return summarize_times(case, took) | {
        "p99_alone_ms": summarize_times(case, took_alone)["p99_ms"],
        "pods_per_second": round(rate, 1),
        "pods_per_second_alone": round(rate_alone, 1),
        "part_of_rate": round(rate / rate_alone, 2),
        "failed_scheduling": sum(each.failed for each in extended),
        "refused": sum(each.refused for each in extended),
        "refused_alone": sum(each.refused for each in alone),
    }
