"""
Lists single changes that make a pod fit that no node admits, the cheapest first.

- **less**: for each resource that only one container requests, the largest amount that some node would admit: devices,
  whole CPUs, GiB of memory. The cost is the fraction that is given up. Example: 3 GPUs instead of 4 cost 0.25;
- **moves**: pods that would have to leave one node. The cost is the number of their devices of the requested resources,
  divided by the requested number. The search covers the nodes with the smallest shortage (`MOST_NODES`);
- **other rules**: alignment of containers instead of the pod or the reverse, or a less strict policy. The cost is 1.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

import msgspec

from topoalign.core.admission.resolvability import OTHER_RULES, smaller_requests
from topoalign.core.admission.share_alignment import group_by_pod
from topoalign.core.diagnosis.cluster_answer import EvictionCandidate, SufficientChange
from topoalign.core.diagnosis.node_decisions import ClusterQuestion, QueriedNode
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.ids import ResourceName

MOST_NODES = 32
"""Maximum number of nodes that are searched for moves."""


def cheapest_changes(question: ClusterQuestion, refusing: Iterable[QueriedNode]) -> list[SufficientChange]:
    """The changes with which a pod fits that no node admits, the cheapest first. `refusing`: nodes that refuse it."""
    found = [*list_smaller_requests(question), *find_cheapest_moves(question, refusing), *list_other_rules(question)]
    return sorted(found, key=lambda change: change.cost)


def list_smaller_requests(question: ClusterQuestion) -> Iterator[SufficientChange]:
    """One change for each resource of which some node would admit a smaller amount."""

    for found in smaller_requests(question.pod, lambda pod: bool(question.changed(pod=pod).admitting())):
        nodes = question.changed(pod=found.pod).admitting()
        yield SufficientChange(
            text=found.text,
            cost=1 - found.amount / found.asked,
            nodes=len(nodes),
            example=nodes[0].name,
            asked={found.resource: found.amount},
        )


def list_other_rules(question: ClusterQuestion) -> Iterator[SufficientChange]:
    """The first of OTHER_RULES with which a node would admit the pod."""
    for key, value in OTHER_RULES:
        nodes = question.changed(rules={key: value}).admitting()
        had = {node.name: getattr(question.of(node.kind).demand.rules, key) for node in nodes}
        differing = [node for node in nodes if had[node.name] != value]
        if differing:
            yield SufficientChange(
                text=f"{key} {value} instead of {had[differing[0].name]} in the kubelet's configuration",
                cost=1.0,
                nodes=len(differing),
                example=differing[0].name,
                rules={key: value},
            )
            return


def find_cheapest_moves(question: ClusterQuestion, refusing: Iterable[QueriedNode]) -> Iterator[SufficientChange]:
    """The cheapest of the found moves, with the number of nodes for which a move was found."""
    nearest_first = sorted(refusing, key=lambda node: (measure_shortage(question, node), node.name))
    possible = (node for node in nearest_first if not question.code(node.emptied()))
    found = [cheapest_move(question, node) for node in islice(possible, MOST_NODES)]
    known = [each for each in found if each is not None]
    if known:
        best = min(known, key=lambda change: (change.cost, len(change.moved), change.example))
        yield msgspec.structs.replace(best, nodes=len(known))


def measure_shortage(question: ClusterQuestion, node: QueriedNode) -> float:
    """The missing fraction of each requested device resource on a node, summed over the resources."""
    demand = question.of(node.kind).demand
    free = node.free.devices
    wanted = [(amount, free.get(name, 0)) for name, amount in demand.devices.items() if amount]
    return sum(max(0, amount - has) / amount for amount, has in wanted)


def cheapest_move(question: ClusterQuestion, node: QueriedNode) -> SufficientChange | None:
    """
    The pods that have to leave this node. None: no move suffices.

    If moving one pod suffices, the one with the fewest devices is moved. Otherwise, pods are moved by ascending number
    of devices until the pod fits. Then each pod whose move is unnecessary stays, those with the most devices first.
    """
    wanted = {name: amount for name, amount in question.of(node.kind).demand.devices.items() if amount}
    # without reserved allocations, whose pods do not run yet
    pods = group_by_pod(each for name, each in node.state.allocations.items() if name not in node.reserved)
    order = sorted(pods, key=lambda pod: (_count_held(pods[pod], wanted), pod))

    def suffice(gone: Sequence[str]) -> bool:
        return not question.code(node.without([each.id for pod in gone for each in pods[pod]]))

    sets = chain(([pod] for pod in order), (order[:number] for number in range(2, len(order) + 1)))
    gone = next(filter(suffice, sets), [])
    for pod in reversed(gone):
        others = [each for each in gone if each != pod]
        if others and suffice(others):
            gone = others
    if not gone:
        return None
    moved = tuple(moved_pod(pod, pods[pod]) for pod in gone)
    devices = sum(_count_held(pods[pod], wanted) for pod in gone)
    return SufficientChange(
        text=f"move {', '.join(map(describe_moved, moved))} from {node.name}",
        cost=devices / sum(wanted.values()) if wanted else float(len(gone)),
        nodes=1,
        example=node.name,
        moved=moved,
    )


def _count_held(allocations: Iterable[Allocation], wanted: Mapping[ResourceName, int]) -> int:
    return sum(len(each.devices.get(name, ())) for each in allocations for name in wanted)


def moved_pod(uid: str, allocations: Iterable[Allocation]) -> EvictionCandidate:
    """The pod to move, with its name if the node knows it."""
    names = (each.owner for each in allocations if each.owner is not None and each.owner.namespace)
    owner = next(names, None)
    devices = Counter[ResourceName]()
    for each in allocations:
        devices.update({name: len(ids) for name, ids in each.devices.items()})
    return EvictionCandidate(pod=f"{owner.namespace}/{owner.pod}" if owner is not None else uid, devices=dict(devices))


def describe_moved(moved: EvictionCandidate) -> str:
    """`ml/train (2 nvidia.com/gpu)`."""
    devices = ", ".join(f"{amount} {name}" for name, amount in moved.devices.items())
    return f"{moved.pod} ({devices})" if devices else moved.pod
