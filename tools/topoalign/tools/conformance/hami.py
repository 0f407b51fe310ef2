"""The suite `hami/nrt_score`: the scores of the scheduler plugin NodeResourceTopologyMatch 903da7df."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from topoalign.core.demand.resource_quantities import Quantities, pod_wide
from topoalign.core.model.ids import ContainerName, PodName, ResourceName
from topoalign.core.model.requests import ContainerRequest, PodRequest, Qos
from topoalign.core.scoring.numa import NumaNeed, NumaScore, numa_score
from topoalign.core.scoring.zones import Zone
from topoalign.tools.conformance.case_files import results
from topoalign.tools.conformance.suite import CaseResult, Outcome, Suite

SCORES = {
    "LeastAllocated": NumaScore.LEAST_ALLOCATED,
    "MostAllocated": NumaScore.MOST_ALLOCATED,
    "BalancedAllocation": NumaScore.BALANCED,
    "LeastNUMANodes": NumaScore.LEAST_NUMA_NODES,
}
"""The plugin's names of the strategies."""


class NumaNode(msgspec.Struct, frozen=True):
    """What a NUMA node of a case has left, and its distances to others, by their ids."""

    numa: int
    available: dict[ResourceName, int]
    distances: dict[int, int] | None = None


class NrtInput(msgspec.Struct, frozen=True):
    """The pod and the nodes of a case. Amounts are in any unit, the same for requests and nodes."""

    strategy: str
    policy: str
    scope: str
    qos: str
    containers: list[dict[ResourceName, int]]
    nodes: dict[str, list[NumaNode]]
    init_containers: list[dict[ResourceName, int]] = []
    max_numa_nodes: int = 8


class NrtExpected(msgspec.Struct, frozen=True):
    """The expected scores, and where it is told a node that has the highest."""

    scores: dict[str, int]
    best: str | None = None


class NrtCase(msgspec.Struct, frozen=True):
    """A case of the suite."""

    id: str
    input: NrtInput
    expect: NrtExpected


def nrt_score(path: Path) -> Iterator[CaseResult]:
    """The results of a case file."""
    return results(path, NrtCase, outcome)


def outcome(case: NrtCase) -> Outcome:
    """The scores of all nodes; the best node passes if no other has a higher score."""
    need = need_of(case.input)
    nodes = {name: [zone_of(each) for each in nodes] for name, nodes in case.input.nodes.items()}
    scores = {name: numa_score(SCORES[case.input.strategy], need, zones) for name, zones in nodes.items()}
    expected = case.expect
    best = case.expect.best
    if best is not None and scores.get(best) != max(scores.values(), default=None):
        best = max(scores, key=scores.__getitem__, default=None)
    return expected, NrtExpected(scores, best)


def need_of(pod: NrtInput) -> NumaNeed:
    """What the scores depend on, of the pod and the node's rules."""
    init, apps = ([container(each) for each in some] for some in (pod.init_containers, pod.containers))
    whole = PodRequest(name=PodName("pod"), init_containers=tuple(init), containers=tuple(apps))
    return NumaNeed(
        policy=pod.policy,
        scope=pod.scope,
        most_nodes=pod.max_numa_nodes,
        guaranteed=pod.qos == Qos.GUARANTEED,
        containers=tuple(each.requests for each in (*init, *apps)),
        whole=pod_wide(whole, lambda each: each.requests),
    )


def container(requests: Quantities) -> ContainerRequest:
    """A container that requests this."""
    return ContainerRequest(name=ContainerName("main"), requests=dict(requests))


def zone_of(node: NumaNode) -> Zone:
    """A NUMA node of which nothing else is known."""
    return Zone(node.numa, node.available, node.available, node.available, node.distances or {})


SUITES: dict[str, Suite] = {"hami/nrt_score": nrt_score}
