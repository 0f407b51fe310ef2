"""What a cluster goes through when a real scheduler stands before it: preemption, bursts, pods that end and are replaced."""

from collections.abc import Awaitable, Callable

import anyio
from faults_support import THOROUGH
from simulation.loop import SimulatedLoop, simulate
from simulation.scenario import quietly
from simulation.scheduled_cluster import ScheduledCluster

from topoalign.tools.bench.schedule.nodes import MIXED

SEEDS = range(200 if THOROUGH else 6)
GPUS_OF_ALL = 8
"""At most, of a node."""


def run(seed: int, held: int, load: Callable[[ScheduledCluster], Awaitable[None]]) -> ScheduledCluster:
    """A cluster of 14 nodes with 100 GPUs. `held`: GPUs of each node that pods with one GPU and priority 0 hold at first."""

    async def main(loop: SimulatedLoop) -> ScheduledCluster:
        cluster = ScheduledCluster(loop, seed, MIXED, held)
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
