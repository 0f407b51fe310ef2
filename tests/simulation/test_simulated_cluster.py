"""No seed of a cluster breaks an invariant, and a simulation that is given a broken registry finds it."""

import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import anyio
import pytest
from faults_support import THOROUGH
from simulation.campaign import campaign
from simulation.cluster_checks import ClusterChecks
from simulation.cluster_deeds import CLUSTER_DEEDS
from simulation.cluster_nodes import Node
from simulation.cluster_plants import CLUSTER_PLANTS
from simulation.cluster_pods import Pods
from simulation.cluster_registries import Service
from simulation.cluster_scenario import run_cluster
from simulation.cluster_world import ClusterWorld
from simulation.divisions import BLOCKS, CORES, MEMORY
from simulation.loop import SimulatedLoop, simulate
from simulation.outcome import Outcome
from simulation.world import Violation

from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import PodRequest
from topoalign.kubelet.files.manifest import (
    ManifestContainer,
    ManifestMetadata,
    ManifestResources,
    ManifestSpec,
    PodManifest,
)
from topoalign.testing.fake_scheduler.preemption import Preemption
from topoalign.tools.bench.schedule.node import Bound

SAMPLE = range(4, 14)
"""Among these are clusters of all kinds."""
SEEDS = range(2_000) if THOROUGH else SAMPLE
UNITS = 1
"""A seed whose nodes have GPUs in units."""
NOTHING_LOST = 2
"""A seed in whose cluster no call is late, and no namespace has a quota."""
LOSSY = 0
"""A seed in whose cluster calls are late, and answers are lost."""
RELEASED_SECONDS = 10.0
"""After its end a node has released what a pod had."""
MOST_SEEDS = 2_000
"""Within so many a planted defect is found."""
TESTS = Path(__file__).parents[1]


@cache
def played(seed: int) -> Outcome:
    """Each once, for all tests."""
    return run_cluster(seed)


@pytest.mark.timeout(0 if THOROUGH else 300)
def test_no_seed_of_a_cluster_breaks_an_invariant() -> None:
    """K0 to K6 after every step, K7 and K8 in the end."""
    if THOROUGH:
        found = [report for _, report in campaign(SEEDS, of_cluster=True)]
    else:
        found = [outcome.report() for outcome in map(played, SEEDS) if outcome.violation is not None]

    assert [] == found, "\n\n".join(found[:3])


@pytest.mark.parametrize("plant", CLUSTER_PLANTS)
def test_a_seed_finds_a_planted_defect_of_registries(plant: str) -> None:
    """By the invariant that it breaks; the same seed finds nothing without it, and its report has the command."""
    first = CLUSTER_PLANTS[plant].first
    found = next(
        outcome
        for outcome in (run_cluster(seed, plant) for seed in range(first, first + MOST_SEEDS))
        if outcome.violation is not None
    )

    assert found.violation is not None
    assert CLUSTER_PLANTS[plant].breaks == found.violation.invariant
    assert found.report(plant=plant).endswith(f"replay: make simulate SEED={found.seed} WORLDS=cluster PLANT={plant}")
    assert played(found.seed).violation is None


def test_the_same_seed_gives_the_same_cluster_in_another_process() -> None:
    """Nor does it matter how that process orders its sets."""
    seed = SEEDS[1]
    done = subprocess.run(
        [sys.executable, "-m", "simulation", str(seed), "--worlds", "cluster"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS), str(TESTS / "support"))), "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert played(seed).digest == done.stdout.split()[-1]


def test_clusters_go_through_all_that_can_happen() -> None:
    """A simulation in which nothing happens finds nothing."""
    happened: Counter[str] = Counter()
    divisions = set[str]()
    for seed in SAMPLE:
        for _, _, what, *details in played(seed).trace:
            happened[f"deed: {details[1]}" if what == "step" else what] += 1
            if what == "cluster":
                divisions.add(details[1])

    assert {f"deed: {each.name}" for each in CLUSTER_DEEDS} <= happened.keys()
    assert {"admitted", "preempted", "reserved", "wake", "bind", "killed", "stopped", "converged"} <= happened.keys()
    assert {"whole", "slots", "units"} == divisions


def test_what_a_pod_was_given_before_its_refusal_is_released_with_it() -> None:
    """Of a cluster's node; else a record would stay that belongs to no pod. The agent reads it from PodResources."""
    limits: dict[str, str | int | float | None] = {CORES: 5, MEMORY: 2 * BLOCKS + 1}
    spec = ManifestSpec(containers=[ManifestContainer(name="main", resources=ManifestResources(limits=limits))])

    async def run(loop: SimulatedLoop) -> tuple[set[str], int, int]:
        world = ClusterWorld(UNITS, loop)
        async with anyio.create_task_group() as world.tasks:
            node = Node(world, NodeName("node-0"), "none")
            await anyio.sleep(1)
            for number in range(5):  # the kubelet asks for cores and memory in any order
                pod = PodManifest(
                    metadata=ManifestMetadata(name=f"p{number}", namespace="default", uid=f"u{number}"), spec=spec
                )
                await node.admit(world.bus, Bound(node.name, f"u{number}", pod))
            codes, given = {code for _, code in node.refusals}, len(node.ledger.state.allocations)
            await anyio.sleep(RELEASED_SECONDS)
            loop.kill(node.process)
            world.tasks.cancel_scope.cancel()
        return codes, given, len(node.ledger.state.allocations)

    codes, given, left = simulate(0, run)

    assert {"NotEnough"} == codes
    assert given > 0
    assert 0 == left


@pytest.mark.parametrize("outage", [True, False])
def test_an_outage_that_ended_explains_a_second_preemption(outage: bool) -> None:
    """Both are seen at one look, after the pod was bound. Found by seed 12359."""

    async def run(loop: SimulatedLoop) -> str:
        world = ClusterWorld(NOTHING_LOST, loop)
        assert world.rate == 0
        pods = Pods(world, lambda name, seconds: None)
        checks = ClusterChecks(world, {}, [], pods, 0, Service(world, []))
        pods.create(priority=1000)
        world.api.bind("default", "p0", {"target": {"name": "node-1"}})
        await anyio.sleep(1)
        if outage:
            world.begin_outage()
            world.end_outage()
        await anyio.sleep(1)
        try:
            checks.after_step([Preemption(("default", "p0"), node, ()) for node in ("node-0", "node-1")])
        except Violation as violation:
            return violation.invariant
        return ""

    assert ("" if outage else "K4") == simulate(0, run)


@pytest.mark.parametrize("seed", [LOSSY, NOTHING_LOST])
def test_what_lost_calls_led_to_is_explained_for_a_moment(seed: int) -> None:
    """A registry takes a node for stale until it asks again, and a pod preempts others elsewhere. Found by seed 24789."""

    async def run(loop: SimulatedLoop) -> list[bool]:
        world = ClusterWorld(seed, loop)
        await anyio.sleep(1)
        world.clear()
        return [world.is_disturbed_since(loop.time() + seconds) for seconds in (0, 60)]

    assert [seed == LOSSY, False] == simulate(0, run)


@pytest.mark.parametrize("deleted", [True, False])
def test_a_refusal_counts_unless_the_pod_was_deleted_during_its_admission(deleted: bool) -> None:
    """Its reservation ends with it, and another pod may have the devices. Found by seed 22273."""

    class RefusingNode(Node):
        async def _admit(self, uid: str, pod: PodRequest) -> str:
            if deleted:
                await self.terminate(self.world.bus, uid)
            return "ShareSplit"

    async def run(loop: SimulatedLoop) -> list[tuple[str, str]]:
        world = ClusterWorld(UNITS, loop)
        async with anyio.create_task_group() as world.tasks:
            node = RefusingNode(world, NodeName("node-0"), "none")
            pod = PodManifest(
                metadata=ManifestMetadata(name="p0", namespace="default", uid="u0"),
                spec=ManifestSpec(containers=[ManifestContainer(name="main")]),
            )
            await node.admit(world.bus, Bound(node.name, "u0", pod))
            loop.kill(node.process)
            world.tasks.cancel_scope.cancel()
        return node.refusals

    assert ([] if deleted else [("u0", "ShareSplit")]) == simulate(0, run)
