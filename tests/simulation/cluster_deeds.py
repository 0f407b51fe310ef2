"""What can happen in a simulated cluster, and how often: pods come and go, and what they depend on fails for a while."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from simulation.cluster_nodes import Node
from simulation.cluster_pods import GANG_SIZES
from simulation.cluster_registries import Registry

if TYPE_CHECKING:
    from simulation.cluster_scenario import ClusterScenario

AWAY_SECONDS = (0.3, 2.0, 6.0, 15.0)
"""For so long a process is dead, stopped or cut off."""
RUNS_SECONDS = (3.0, 20.0, None, None)
"""For so long a pod runs; None: until it is deleted."""
BURSTS = (2, 3, 4)
MEMBER_SECONDS = (0.1, 5.0, 30.0)
"""Between the members of a gang that is not created at once."""


class ClusterDeed(NamedTuple):
    """Something that can happen."""

    name: str
    weight: int
    do: Callable[["ClusterScenario"], None]


def create_pod(scenario: "ClusterScenario") -> None:
    seconds = scenario.world.chance.choice(RUNS_SECONDS)
    scenario.pods.create(priority=0, seconds=seconds)


def create_important_pod(scenario: "ClusterScenario") -> None:
    """One that preempts others."""
    scenario.pods.create(priority=1000)


def create_gang(scenario: "ClusterScenario") -> None:
    """Its members come at once, or one of them comes later, or never."""
    chance = scenario.world.chance
    size, missing = chance.choice(GANG_SIZES), chance.choice((0, 0, 0, 1))
    member = scenario.pods.create_gang(size, size - missing)
    if missing and chance.random() < 0.7:
        scenario.later(chance.choice(MEMBER_SECONDS), member)


def create_burst(scenario: "ClusterScenario") -> None:
    """Pods and gangs that come in one moment, as controllers create them."""
    chance = scenario.world.chance
    for _ in range(chance.choice(BURSTS)):
        create = create_gang if chance.random() < 0.5 else create_pod
        create(scenario)


def delete_pod(scenario: "ClusterScenario") -> None:
    names = scenario.pods.present()
    if names:
        scenario.pods.delete(scenario.world.chance.choice(names))


def delete_several(scenario: "ClusterScenario") -> None:
    """As a controller that is deleted with its pods."""
    names = scenario.pods.present()
    for name in scenario.world.chance.sample(names, len(names) // 2):
        scenario.pods.delete(name)


def some_registry(scenario: "ClusterScenario") -> Registry | None:
    return scenario.untroubled(scenario.registries)


def some_node(scenario: "ClusterScenario") -> Node | None:
    return scenario.untroubled([*scenario.nodes.values()])


def kill_registry(scenario: "ClusterScenario") -> None:
    scenario.kill(some_registry(scenario))


def stop_registry(scenario: "ClusterScenario") -> None:
    scenario.stop(some_registry(scenario))


def cut_registry_from_bus(scenario: "ClusterScenario") -> None:
    scenario.cut_from_bus(some_registry(scenario))


def cut_registry_from_api(scenario: "ClusterScenario") -> None:
    scenario.cut_from_api(some_registry(scenario))


def kill_allocator(scenario: "ClusterScenario") -> None:
    scenario.kill(some_node(scenario))


def stop_allocator(scenario: "ClusterScenario") -> None:
    scenario.stop(some_node(scenario))


def cut_node_from_bus(scenario: "ClusterScenario") -> None:
    scenario.cut_from_bus(some_node(scenario))


def stop_bus(scenario: "ClusterScenario") -> None:
    everybody: list[Registry | Node] = [*scenario.registries, *scenario.nodes.values()]
    for each in everybody:
        if each.name not in scenario.troubled:
            scenario.cut_from_bus(each, seconds=3.0)


def restart_scheduler(scenario: "ClusterScenario") -> None:
    scenario.restart_scheduler()


CLUSTER_DEEDS = (
    ClusterDeed("pod", 30, create_pod),
    ClusterDeed("important pod", 5, create_important_pod),
    ClusterDeed("gang", 7, create_gang),
    ClusterDeed("burst", 3, create_burst),
    ClusterDeed("delete", 16, delete_pod),
    ClusterDeed("delete several", 1, delete_several),
    ClusterDeed("kill registry", 3, kill_registry),
    ClusterDeed("stop registry", 3, stop_registry),
    ClusterDeed("registry without bus", 3, cut_registry_from_bus),
    ClusterDeed("registry without API server", 3, cut_registry_from_api),
    ClusterDeed("kill allocator", 3, kill_allocator),
    ClusterDeed("stop allocator", 3, stop_allocator),
    ClusterDeed("node without bus", 4, cut_node_from_bus),
    ClusterDeed("no bus", 1, stop_bus),
    ClusterDeed("restart scheduler", 2, restart_scheduler),
)
