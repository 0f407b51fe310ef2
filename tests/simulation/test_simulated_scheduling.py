"""What a cluster goes through when a real scheduler stands before it: preemption, bursts, pods that end and are replaced."""

from collections.abc import Awaitable, Callable, Sequence

import anyio
from faults_support import THOROUGH
from simulation.loop import SimulatedLoop, simulate
from simulation.scenario import quietly
from simulation.scheduled_cluster import ScheduledCluster

from topoalign.tools.bench.filter.cluster import Kind, kind
from topoalign.tools.bench.schedule.nodes import MIXED

SEEDS = range(200 if THOROUGH else 6)
FEWER = SEEDS[:: 2 if THOROUGH else 3]
"""For pods that take long."""
SAME = (kind("hgx-h100", "restricted"),) * 6
GPUS_OF_ALL = 8
"""At most, of a node."""


def run(
    seed: int, held: int, load: Callable[[ScheduledCluster], Awaitable[None]], kinds: Sequence[Kind] = MIXED
) -> ScheduledCluster:
    """A cluster of 14 nodes with 100 GPUs. `held`: GPUs of each node that pods with one GPU and priority 0 hold at first."""

    async def main(loop: SimulatedLoop) -> ScheduledCluster:
        cluster = ScheduledCluster(loop, seed, kinds, held)
        await cluster.run(lambda: load(cluster))
        return cluster

    with quietly():
        return simulate(seed, main)


def test_a_preemption_costs_no_more_pods_than_its_best_node() -> None:
    """
    S01. 100 GPUs are full of pods with one GPU, and pods of high priority ask for 1, 2, 4 and 8. Each victim has one GPU, so
    the best node loses as many pods as GPUs are asked for.
    """

    async def load(cluster: ScheduledCluster) -> None:
        sizes = [1, 2, 4, 8]
        cluster.chance.shuffle(sizes)
        for gpus in sizes:
            cluster.create(f"high-{gpus}", gpus, priority=1000)
            await anyio.sleep(cluster.chance.choice((0.0, 0.3, 8.0)))
        with anyio.move_on_after(120):
            await cluster.until(lambda: all(cluster.phase(f"high-{gpus}") == "Running" for gpus in sizes))

    for seed in SEEDS:
        cluster = run(seed, GPUS_OF_ALL, load)
        lost = dict.fromkeys((1, 2, 4, 8), 0)
        for preemption in cluster.scheduler.preemptions:
            gpus = int(preemption.pod[1].removeprefix("high-"))
            lost[gpus] += len(preemption.victims)
            assert preemption.node == cluster.node_of(preemption.pod[1]), "no node loses pods for a pod of another one"

        assert dict.fromkeys(lost, "Running") == {gpus: cluster.phase(f"high-{gpus}") for gpus in lost}
        assert {gpus: gpus for gpus in lost} == lost
        assert {} == cluster.refused


def test_no_pod_of_a_burst_waits_for_another() -> None:
    """
    S05. 90 pods with one GPU fit all, and ask for the same. No bind fails, so none comes into the scheduler's backoff, and
    their kubelets admit them in whatever order they come.
    """
    names = [f"p{number}" for number in range(90)]

    async def load(cluster: ScheduledCluster) -> None:
        for name in names:
            cluster.create(name, 1, cpus=4)
        with anyio.move_on_after(60):
            await cluster.until(lambda: all(cluster.phase(name) == "Running" for name in names))

    for seed in FEWER:
        cluster = run(seed, 0, load)

        assert {"Running"} == {cluster.phase(name) for name in names}
        assert ([], {}) == (cluster.scheduler.errors, cluster.scheduler.failed)


def test_pods_that_come_and_go_are_refused_by_no_node() -> None:
    """S05. 120 pods of 1 to 3 s on nodes of four policies, whose kubelets take them late and out of order."""
    names = [f"p{number}" for number in range(120)]

    async def load(cluster: ScheduledCluster) -> None:
        for name in names:
            gpus = cluster.chance.choice((1, 1, 1, 2, 2, 4, 8))
            cluster.create(name, gpus, cpus=2 * gpus, seconds=cluster.chance.uniform(1, 3))
        with anyio.move_on_after(200):
            await cluster.until(lambda: all(cluster.phase(name) == "Succeeded" for name in names))

    for seed in FEWER:
        cluster = run(seed, 0, load)

        assert {"Succeeded"} == {cluster.phase(name) for name in names}
        assert {} == cluster.refused


def test_a_pod_that_waits_is_bound_when_its_predecessor_ends() -> None:
    """S05. Every node is full of one pod, and its facts show the end of a pod seconds after the API server does."""

    async def load(cluster: ScheduledCluster) -> None:
        held = [f"old-{number}" for number in range(len(SAME))]
        for name in held:
            cluster.create(name, 8)
        with anyio.move_on_after(60):
            await cluster.until(lambda: all(cluster.phase(name) == "Running" for name in held))
        cluster.create("waits", 8)
        await anyio.sleep(cluster.chance.uniform(1, 3))
        cluster.api.delete_pod("default", "old-0")
        with anyio.move_on_after(60):
            await cluster.until(lambda: cluster.phase("waits") == "Running")

    for seed in SEEDS:
        cluster = run(seed, 0, load, SAME)

        assert "Running" == cluster.phase("waits")
        assert cluster.bound_at["waits"] - cluster.gone_at["old-0"] <= 0.5, f"seed {seed}"
