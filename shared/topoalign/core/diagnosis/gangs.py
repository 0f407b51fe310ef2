"""
How many of several like pods fit on the nodes of a cluster at once.

Each node is filled until it refuses one more. Nodes do not depend on one another, so the sum is the most that fits, as their
kubelets decide. A pod is decided in full only where the totals leave room for another one after it.
"""

from collections.abc import Iterable, Iterator

import msgspec

from topoalign.core.diagnosis.nodes import Node, Question
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.decisions import Admission
from topoalign.core.model.ids import AllocationID, NodeName


def placed(question: Question, admitting: Iterable[Node], pods: int) -> dict[NodeName, int]:
    """Node -> how many of so many pods it takes; the nodes, each of which would admit one, are filled in their order."""
    taken: dict[NodeName, int] = {}
    left = pods
    for node in admitting:
        if not left:
            break
        taken[node.name] = capacity(question, node, left)
        left -= taken[node.name]
    return taken


def capacity(question: Question, node: Node, most: int) -> int:
    """How many pods, at most so many, fit on a node that would admit one."""
    for count in range(1, most):
        if not leaves_room(question, node):
            return count
        decision = question.decide(node)
        assert isinstance(decision, Admission), "the node has been asked"
        node = node.holding(named(decision, count))
        if question.code(node):
            return count
    return most


def leaves_room(question: Question, node: Node) -> bool:
    """Whether the totals are enough for two pods: what the first one keeps, and what the second one needs."""
    demand = question.of(node.kind).demand
    free = node.free
    lasting = [each for each in demand.containers if each.role != "init"]
    if free.cpus < sum(each.cpus for each in lasting) + demand.cpus:
        return False
    return all(
        free.devices[name] >= amount + sum(each.devices.get(name, 0) for each in lasting)
        for name, amount in demand.devices.items()
        if name in free.devices
    )


def named(decision: Admission, count: int) -> Iterator[Allocation]:
    """The allocations of the n-th pod, under ids that those of the others do not have."""
    for each in decision.allocations:
        yield msgspec.structs.replace(each, id=AllocationID(f"pod {count}/{each.id}"))
