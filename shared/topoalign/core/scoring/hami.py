"""
The order in which HAMi ranks nodes: by how full their GPUs in slots are before the pod comes.

HAMi's score of a node is 10 times the sum of its slots, cores and memory that are held, as parts of what all of its GPUs in
slots offer together. The pod's annotation `hami.io/node-scheduler-policy` says whether the fullest node comes first
(`binpack`, the default) or the emptiest (`spread`). What the pod asks for, links and NUMA nodes count nothing:

    two GPUs of 10 slots, 100 cores and 8000 MiB on each node; held is 1 slot with 25 cores and 2000 MiB on a, with 75 cores
    and 6000 MiB on b: a has 10 x (1/20 + 25/200 + 2000/16000) = 3, b 10 x (1/20 + 75/200 + 6000/16000) = 8
    binpack ranks b before a, spread a before b

A node without GPUs in slots counts as an empty one. Pods that ask for no GPU HAMi lets go anywhere: to them all are equal.
Source: HAMi 4707fb02 (spec hami.md 2.7).
"""

from collections.abc import Mapping

from topoalign.core.demand.pod_demand import PodDemand
from topoalign.core.demand.share_annotations import NODE_POLICY
from topoalign.core.model.topology.model import Topology
from topoalign.core.sharing.choosers import slot_candidates
from topoalign.core.sharing.hami.scores import node_score
from topoalign.core.sharing.hami.selection import BINPACK, SPREAD
from topoalign.core.sharing.slots_as_hami import usage_of_cards
from topoalign.core.state.fold import NodeState


def policy_of(topology: Topology, demand: PodDemand) -> str | None:
    """By which policy nodes are ranked for a pod; None: HAMi does not look at it."""
    asks = any(amount and topology.kind_of(name) in ("gpu", "slot") for name, amount in demand.devices.items())
    return node_policy(demand.request.annotations) if asks else None


def node_policy(annotations: Mapping[str, str], policy: str = BINPACK) -> str:
    """By which policy nodes are ranked for a pod with these annotations; `policy` where they name none."""
    return annotations.get(NODE_POLICY, policy)


def fullness(state: NodeState) -> float:
    """HAMi's score of a node."""
    left = state.ownership.slots_left
    return node_score(usage_of_cards(slot_candidates(state.hardware, left), left)) if left else 0.0


def order(policy: str | None, score: float) -> tuple[float, ...]:
    """The key that sorts nodes of such scores for a pod: the fullest first, with `spread` the emptiest."""
    return () if policy is None else (score if policy == SPREAD else -score,)
