"""
Decides about a pod on all nodes of a cluster, and explains the result.

Each node that Kubernetes' constraints allow for the pod decides. The refusing nodes are counted by reason. The reasons
are in the order of their resolvability, those of nodes that can change soonest first:

1. nodes that would admit the pod if no container held anything there;
2. nodes that would admit it if, in addition, all their devices were healthy;
3. nodes whose decision is unknown;
4. nodes that would admit it without Kubernetes' constraints;
5. nodes that would never admit it;
6. nodes whose GPUs another system allocates;
7. nodes that do not have a requested resource.

Within each group, the reason of the most nodes comes first. So if ten nodes with GPUs are full, a thousand nodes
without GPUs are not shown as the reason why a GPU pod waits.

The first node of each reason is explained in full (`admission.resolvability`), so waiting is advised only if it helps.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from topoalign.core.admission.resolvability import UNDECIDED
from topoalign.core.demand.unserved import not_covered
from topoalign.core.diagnosis.changes import cheapest_changes
from topoalign.core.diagnosis.cluster_answer import ClusterAnswer, Ranked, RefusalReason
from topoalign.core.diagnosis.hami_nodes import REASONS
from topoalign.core.diagnosis.node_decisions import ClusterQuestion, Nodes, QueriedNode
from topoalign.core.diagnosis.planned import GangFirst
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.decisions import Admission, Refusal, Resolvability
from topoalign.core.model.errors import NoFit, TopoalignError
from topoalign.core.model.ids import AllocationID, NodeName
from topoalign.core.model.requests import NO_CHANGES, PodRequest, RuleChanges
from topoalign.core.model.topology.model import Topology
from topoalign.core.placement.gpus.bandwidth import Members
from topoalign.core.placement.preference import positions_by_gpu, set_scorer
from topoalign.core.scoring.scorers import NodeScorer

MOST_EXAMPLES = 3
FULL = "FullWithThese"
"""Code of a node that admits some of several pods, but not all."""


def diagnose(
    nodes: Nodes,
    pod: PodRequest,
    scorer: NodeScorer,
    changes: RuleChanges = NO_CHANGES,
    pods: int = 1,
    seams: int = 0,
) -> ClusterAnswer:
    """
    Decides where `pods` pods like this one fit in the cluster. `changes`: rules that replace those of each kubelet.
    `seams`: the number of best nodes for which the seam is computed. Each seam requires a full decision (0.3 ms).
    Raises InvalidField for an invalid pod or invalid rules.
    """
    question = ClusterQuestion(nodes, pod, changes)
    codes = {node.name: question.code(node) for node in nodes.asked}
    admitting = rank_nodes(question, [node for node in nodes.asked if not codes[node.name]], scorer)
    refusing = [node for node in nodes.asked if codes[node.name]]
    taken = place_pods(question, [node for node, _ in admitting], pods)
    fit = sum(taken.values())
    reasons = sorted(
        (
            *list_reasons(question, nodes, codes),
            *list_full_nodes(taken, fit < pods),
        ),
        key=lambda reason: (
            reason.code != FULL,  # first the nodes that admit some of the pods,
            tuple(Resolvability).index(reason.resolvability),  # then the most likely to change,
            -reason.nodes,  # then the most frequent,
            reason.code,
            reason.finding,  # differs only for nodes that Kubernetes excludes
        ),
    )
    return ClusterAnswer(
        not_covered=tuple(dict.fromkeys(each for demand in question.demands for each in not_covered(demand))),
        pods=pods,
        fit=fit,
        nodes=len(nodes),
        admitting=tuple(
            Ranked(node.name, score, seam_on(question, node) if place < seams else "")
            for place, (node, score) in enumerate(admitting)
        ),
        reason=reasons[0] if fit < pods and reasons else None,
        reasons=tuple(reasons),
        changes=() if admitting else tuple(cheapest_changes(question, refusing)),
        placed=taken if pods > 1 else {},
    )


def rank_nodes(
    question: ClusterQuestion, admitting: list[QueriedNode], scorer: NodeScorer
) -> list[tuple[QueriedNode, int]]:
    """The nodes with their scores, the best first. Equal ones are in the order of the scorer, then by name."""
    needs: dict[object, Any] = {}
    known = []
    for node in admitting:
        demand = question.of(node.kind).demand
        shape = node.announced.shape
        at = node.kind, id(shape)
        if at not in needs:
            needs[at] = scorer.need(shape, demand)
        known.append((node, needs[at], scorer.left(node.state, demand.rules)))
    keys = [scorer.key(node.announced, need, left) for node, need, left in known]
    found = sorted(
        zip(scorer.scores(keys), keys, admitting, strict=True),
        key=lambda each: (
            -each[0],
            each[1] or (),  # then the order of the scorer,
            each[2].name,
        ),
    )
    return [(node, score) for score, _, node in found]


def list_reasons(question: ClusterQuestion, nodes: Nodes, codes: Mapping[NodeName, str]) -> Iterator[RefusalReason]:
    """
    One reason for each code and resolvability of the nodes that do not admit the pod. For nodes that Kubernetes
    excludes, one for each finding, too. `codes`: the refusal code of each of `nodes.asked`.
    """
    groups: dict[tuple[str, Resolvability, str], list[tuple[NodeName, QueriedNode | TopoalignError]]] = {}
    for node in nodes.asked:
        if codes[node.name]:
            key = codes[node.name], resolvability_of_node(question, node), ""
            groups.setdefault(key, []).append((node.name, node))
    for each in nodes.excluded:
        resolvability = Resolvability.EXCLUDED if each.node is None else resolvability_of_node(question, each.node)
        if resolvability is Resolvability.IN_USE:
            resolvability = Resolvability.EXCLUDED
        key = each.reason.code, resolvability, each.reason.finding
        groups.setdefault(key, []).append((each.name, each.reason))
    for name, error in nodes.unasked.items():
        resolvability = Resolvability.FOREIGN if error.code in REASONS else Resolvability.NOT_KNOWN
        groups.setdefault((error.code, resolvability, ""), []).append((name, error))
    for (code, resolvability, _), members in groups.items():
        first = members[0][1]
        refusal = first if isinstance(first, TopoalignError) else explain_refusal(question, first)
        yield RefusalReason(
            code=code,
            resolvability=resolvability,
            nodes=len(members),
            examples=tuple(name for name, _ in members[:MOST_EXAMPLES]),
            finding=refusal.finding,
            remedy=refusal.remedy,
        )


def explain_refusal(question: ClusterQuestion, node: QueriedNode) -> Refusal | NoFit:
    """The explained refusal of a node, for its finding and remedy."""
    if (missing := question.of(node.kind).missing) is not None:
        return missing
    decision = question.explain(node)
    # The kubelet would admit the pod, but the registry does not bind it.
    return GangFirst() if isinstance(decision, Admission) else decision


def resolvability_of_node(question: ClusterQuestion, node: QueriedNode) -> Resolvability:
    """Whether waiting can help on a node that refuses the pod."""
    if question.of(node.kind).missing is not None:
        return Resolvability.MISSING
    empty = node.emptied()
    code = question.code(empty)
    if not code or code in UNDECIDED:
        return Resolvability.NOT_KNOWN if code else Resolvability.IN_USE
    restored = empty.restored()
    return Resolvability.NEVER if restored is None or question.code(restored) else Resolvability.UNHEALTHY


def list_full_nodes(taken: Mapping[NodeName, int], is_full: bool) -> Iterator[RefusalReason]:
    """The reason that the nodes are full after some of the pods, if `is_full`: not all pods fit."""
    if not taken or not is_full:
        return
    yield RefusalReason(
        code=FULL,
        resolvability=Resolvability.IN_USE,
        nodes=len(taken),
        examples=tuple(taken)[:MOST_EXAMPLES],
        finding=f"these nodes take {sum(taken.values())} of the pods and have no room for another one",
        remedy="ask for fewer pods, or wait until something is released",
    )


# Counts how many of several equal pods fit on the nodes of a cluster at the same time.
#
# Each node is filled until it refuses another pod. Nodes do not depend on one another, so the sum is the maximum number
# of pods that their kubelets would admit.


def place_pods(question: ClusterQuestion, admitting: Iterable[QueriedNode], pods: int) -> dict[NodeName, int]:
    """Node -> number of pods that it admits. `admitting`: nodes that admit one pod; they are filled in this order."""
    taken: dict[NodeName, int] = {}
    left = pods
    for node in admitting:
        if not left:
            break
        taken[node.name] = count_fitting_pods(question, node, left)
        left -= taken[node.name]
    return taken


def count_fitting_pods(question: ClusterQuestion, node: QueriedNode, most: int) -> int:
    """Number of pods, up to `most`, that fit on a node that would admit one."""
    for count in range(1, most):
        decision = question.decide(node)
        assert isinstance(decision, Admission), "the node has been asked"
        # The allocations of each pod need unique ids.
        node = node.holding(
            msgspec.structs.replace(each, id=AllocationID(f"pod {count}/{each.id}")) for each in decision.allocations
        )
        if question.code(node):
            return count
    return most


# Computes the weakest seam of the GPUs that a pod would get on a node.
#
# The kubelet's full decision is computed, so these are the GPUs that it would allocate, regardless of the scorer. For
# several containers, the weakest seam counts. Plain init containers count only if no other container gets GPUs, because
# the other containers reuse their GPUs. MIG instances have no traffic between GPUs, so they have no seam.


def seam_on(question: ClusterQuestion, node: QueriedNode) -> str:
    """Human-readable: `18 NVLinks, 722 GB/s`. Empty: the node refuses the pod, or no container gets several GPUs."""
    decision = question.decide(node)
    if not isinstance(decision, Admission):
        return ""
    held = [(each.role, gpu_positions_of_allocation(each, node.announced)) for each in decision.allocations]
    lasting = [members for role, members in held if role != "init" and members]
    several = [members for members in lasting or [members for _, members in held] if len(members) > 1]
    scorer = set_scorer(node.announced.shape)
    return scorer.describe(min(several, key=scorer.seam)) if several else ""


def gpu_positions_of_allocation(allocation: Allocation, topology: Topology) -> Members:
    """The positions of the GPUs that a container has, or has a share of, except those in MIG mode."""
    position = positions_by_gpu(topology)
    gpus = {topology.parent_of(device) for device in allocation.device_ids}
    return tuple(sorted(position[gpu.id] for gpu in topology.gpus if gpu.id in gpus and gpu.mig is None))
