"""
Defines the scores of `prioritize` by name (`TOPOALIGN_SCORING`): 0 to 10, higher is better.

A scheduler requests the scores of thousands of nodes. So each input of a score is computed only after a change: the
needs of a pod once for each kind of machine, the free resources of a node once for each change of the node, and the key
of a node for a pod once for each change of either. The scores are computed from the keys of all nodes in the request.

    scorer = scorer_by_name(Scoring.QUALITY, NodePacking.BINPACK)
    need = scorer.need(topology, demand)
    left = scorer.left(state, demand.rules)
    scorer.scores([scorer.key(topology, need, left), ...])
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import nsmallest
from typing import Any

import msgspec

from topoalign.core.demand.pod_demand import PodDemand
from topoalign.core.demand.share_annotations import NODE_POLICY, GpuOrder
from topoalign.core.demand.shares import units_asked
from topoalign.core.model.holdings import Amount
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.device_offers import CORES
from topoalign.core.model.topology.model import Topology
from topoalign.core.scoring import numa, quality
from topoalign.core.scoring.numa import NumaNeed, NumaScore
from topoalign.core.scoring.quality import NodePacking
from topoalign.core.scoring.zones import Zone, zones_of
from topoalign.core.sharing.choosers import shared_gpus
from topoalign.core.sharing.gaia.admission import AdmissionNode, Load, admission_order_key, asks_for_gpu
from topoalign.core.sharing.hami.gpu_scores import hami_gpus_score
from topoalign.core.state.fold import NodeState

# Orders nodes as gpu-admission does: of the nodes on which the pod fits, the one with the least free comes first.
#
#     by free cores of all GPUs in units, then by their free memory, then by name
#     a: 150 cores and 200 blocks, b: 150 and 180, c: 800 and 1280 are tried in the order b, a, c
#
# gpu-admission returns only the first node on which the pod fits. Here, the others follow, and last those on which the
# pod does not fit. gpu-admission does not restrict a pod that requests no units or only memory: all nodes are equal for
# it.
# Source: gpu-admission 47d56ae, predicate.


Containers = tuple[Amount, ...]
"""The units that each container of a pod requests. (): gpu-admission does not restrict the pod."""


def unit_containers(topology: Topology, demand: PodDemand) -> Containers:
    """The units of each app container that requests some. gpu-admission considers no other containers."""
    asked = (units_asked(topology, each.devices) for each in demand.containers if each.role == "app")
    containers = tuple(each for each in asked if each is not None)
    return containers if asks_for_gpu(containers) else ()


def admission_node(state: NodeState) -> AdmissionNode | None:
    """A node with its GPUs in units. GPUs that are allocated as a whole are unusable. None: it has no GPUs in units."""
    units = state.ownership.units_left
    if not units:
        return None
    whole = {gpu for each in state.allocations.values() for gpu, held in each.amounts.items() if held.cores >= CORES}
    gpus = [
        msgspec.structs.replace(gpu, usable=gpu.usable and gpu.device not in whole)
        for gpu in shared_gpus(state.hardware, units)
        if gpu.device in units
    ]
    return AdmissionNode(name=state.node, gpus=tuple(gpus))


def gaia_order(containers: Containers, node: AdmissionNode | None) -> tuple[bool, Load] | tuple[()] | None:
    """The sort key of a node for a pod. None: gpu-admission does not try the node."""
    if not containers:
        return ()
    return None if node is None else admission_order_key(node, containers)


Key = tuple[Any, ...] | None
"""The sort key of a node: the best node has the lowest. None: the node comes last."""
TEN = 10


class Scoring(StrEnum):
    """Names of the scores."""

    QUALITY = "quality"
    """The quality of the devices that the pod would get, and of those that would stay free (`scoring.quality`)."""
    LEAST_ALLOCATED = NumaScore.LEAST_ALLOCATED.value
    MOST_ALLOCATED = NumaScore.MOST_ALLOCATED.value
    BALANCED = NumaScore.BALANCED.value
    LEAST_NUMA_NODES = NumaScore.LEAST_NUMA_NODES.value
    GAIA = "gaia"
    """The order in which gpu-admission prefers nodes."""
    HAMI = "hami"
    """How full the GPUs in slots are, as HAMi ranks nodes."""


def by_place(keys: Sequence[Key]) -> list[int]:
    """10 for the lowest key, one less for each following key, and 1 from the tenth key on. None gets 0."""
    lowest = nsmallest(TEN - 1, {key for key in keys if key is not None})
    scores = {None: 0} | {key: TEN - place for place, key in enumerate(lowest)}
    return [scores.get(key, 1) for key in keys]


@dataclass(frozen=True)
class NodeScorer:
    """One way to score nodes: a function for each input that changes independently."""

    need: Callable[[Topology, PodDemand], Any]
    """The properties of a pod and its rules that the score depends on, for machines of this shape."""
    left: Callable[[NodeState, AdmissionRules], Any]
    """The free resources of a node. Raises NotEnoughCpus and TooMuchWork if the reserved CPUs cannot be chosen."""
    key: Callable[[Topology, Any, Any], Key]
    """The sort key of a node for a pod. The topology is as the node announced it. Equal machines share its shape."""
    scores: Callable[[Sequence[Key]], Sequence[int]] = by_place


# Orders nodes as HAMi does: by how full their GPUs in slots are before the pod arrives.
#
# HAMi's score of a node is 10 times the sum of its held slots, cores and memory, each as a fraction of what all of
# its GPUs in slots offer together. The pod's annotation `hami.io/node-scheduler-policy` sets whether the fullest node comes
# first (`binpack`, the default) or the emptiest (`spread`). The requests of the pod, links and NUMA nodes do not count:
#
#     nodes a and b have two GPUs each, with 10 slots, 100 cores and 8000 MiB per GPU
#     a: 1 slot with 25 cores and 2000 MiB is held: 10 x (1/20 + 25/200 + 2000/16000) = 3
#     b: 1 slot with 75 cores and 6000 MiB is held: 10 x (1/20 + 75/200 + 6000/16000) = 8
#     binpack ranks b before a, spread ranks a before b
#
# A node without GPUs in slots counts as an empty one. HAMi does not restrict pods that request no GPU: for them, all
# nodes are equal. Source: HAMi 4707fb02.


def policy_of(topology: Topology, demand: PodDemand) -> str | None:
    """The policy by which nodes are ranked for a pod. None: HAMi does not rank nodes for it."""
    asks = any(amount and topology.kind_of(name) in ("gpu", "slot") for name, amount in demand.devices.items())
    return node_policy(demand.annotations) if asks else None


def node_policy(annotations: Mapping[str, str], policy: str = GpuOrder.BINPACK) -> str:
    """The policy by which nodes are ranked for a pod with these annotations. `policy`: the default."""
    return annotations.get(NODE_POLICY, policy)


def hami_node_score(state: NodeState) -> float:
    """HAMi's score of a node."""
    left = state.ownership.slots_left
    return hami_gpus_score(shared_gpus(state.hardware, left)) if left else 0.0


def hami_order(policy: str | None, score: float) -> tuple[float, ...]:
    """The sort key of a node with this score: the fullest node comes first, with `spread` the emptiest."""
    return () if policy is None else (score if policy == GpuOrder.SPREAD else -score,)


HAMI = NodeScorer(
    need=policy_of,
    left=lambda state, rules: hami_node_score(state),
    key=lambda topology, policy, score: hami_order(policy, score),
)
GAIA = NodeScorer(
    need=unit_containers,
    left=lambda state, rules: admission_node(state),
    key=lambda topology, containers, node: gaia_order(containers, node),
)


def scorer_by_name(scoring: Scoring, packing: NodePacking) -> NodeScorer:
    """The scorer with this name. `packing` applies only to `quality`."""
    match scoring:
        case Scoring.QUALITY:
            return NodeScorer(
                need=quality.device_need,
                left=lambda state, rules: quality.free_devices(state),
                key=lambda topology, need, free: quality.node_key(topology, need, free, packing),
            )
        case Scoring.GAIA:
            return GAIA
        case Scoring.HAMI:
            return HAMI
        case _:
            return numa_scorer(NumaScore(scoring))


def numa_scorer(kind: NumaScore) -> NodeScorer:
    """The scorer whose scores are a tenth of NodeResourceTopologyMatch's, rounded down (`scoring.numa`)."""

    def key(topology: Topology, need: NumaNeed, zones: Sequence[Zone]) -> Key:
        return (-(numa.numa_score(kind, need, zones) * TEN // numa.BEST),)

    return NodeScorer(
        lambda topology, demand: numa.numa_need(demand),
        zones_of,
        key,
        lambda keys: [0 if key is None else -key[0] for key in keys],
    )
