"""What the scheduler itself counts: extended resources of nodes, and what pods on them ask for."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping

from topoalign.testing.fake_api_server.objects import Object

Key = tuple[str, str]
"""Namespace and name of a pod."""


class Room:
    """How much of each node's `status.allocatable` is not requested by pods on it: bound, assumed or nominated."""

    def __init__(self) -> None:
        self._allocatable: dict[str, dict[str, int]] = {}
        self._left: dict[str, dict[str, int]] = {}
        """Node that is not cordoned -> what bound and assumed pods leave of each resource that it counts."""
        self._pods: dict[Key, tuple[str, Counter[str]]] = {}
        """Pod -> its node, and what it requests."""
        self._requested: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Node -> what its pods request."""
        self._nominated: dict[Key, tuple[str, int, Counter[str]]] = {}
        """Pod -> the node where it preempted others, its priority, and what it requests."""
        self._first = 0

    def put_node(self, node: Object) -> bool:
        """A node was created or changed. Returns whether it may have more room than before."""
        name = node["metadata"]["name"]
        allocatable = node["status"].get("allocatable") or {}
        counted = {each: int(amount) for each, amount in allocatable.items() if "/" in each}
        if node["spec"].get("unschedulable"):
            self.drop_node(name)
            return False
        if self._allocatable.get(name) == counted:
            return False
        self._allocatable[name] = counted
        requested = self._requested[name]
        self._left[name] = {each: amount - requested[each] for each, amount in counted.items()}
        return True

    def drop_node(self, name: str) -> None:
        """A node is gone, or takes no pods."""
        self._allocatable.pop(name, None)
        self._left.pop(name, None)

    def put_pod(self, key: Key, pod: Object, node: str) -> None:
        """The pod is on this node, or about to be. It may be bound to another one than it was assumed on (AddPod)."""
        self._nominated.pop(key, None)
        if key in self._pods and self._pods[key][0] != node:
            self.drop_pod(key)
        if key not in self._pods:
            self._pods[key] = node, requests_of(pod)
            self._take(key, 1)

    def drop_pod(self, key: Key) -> None:
        """The pod holds nothing any more."""
        self._nominated.pop(key, None)
        if key in self._pods:
            self._take(key, -1)
            del self._pods[key]

    def nominate(self, key: Key, pod: Object, node: str) -> None:
        """The pod has this node as `status.nominatedNodeName`; empty: none."""
        self._nominated.pop(key, None)
        if node:
            self._nominated[key] = node, priority_of(pod), requests_of(pod)

    def nodes_for(self, pod: Object) -> list[str]:
        """The nodes with room, beginning with another one each time."""
        names = self.with_room(pod, self._left)
        self._first = (self._first + 1) % max(1, len(names))
        return names[self._first :] + names[: self._first]

    def with_room(self, pod: Object, nodes: Iterable[str]) -> list[str]:
        """Those of these nodes with room for the pod. A resource that a node does not count limits nothing there."""
        left = self._left
        requested = requests_of(pod)
        names = [name for name in nodes if name in left]
        for each, amount in requested.items():
            names = [name for name in names if left[name].get(each, amount) >= amount]
        held = self._held_by_nominated(pod)
        return [name for name in names if name not in held or self._has_room(name, requested, held[name])]

    def has_room_without(self, pod: Object, node: str, gone: Collection[Key]) -> bool:
        """Whether the node has room for the pod once these pods of it are gone."""
        held = Counter(self._held_by_nominated(pod).get(node, ()))
        for key in gone:
            held.subtract(self._pods[key][1])
        return node in self._left and self._has_room(node, requests_of(pod), held)

    def nodes_beside(self, nodes: Iterable[str]) -> list[str]:
        """All nodes that take pods, but these."""
        others = set(nodes)
        return [name for name in self._left if name not in others]

    def _held_by_nominated(self, pod: Object) -> Mapping[str, Counter[str]]:
        """Node -> what other pods hold there that preempted pods and are at least as important."""
        held: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for other, (node, importance, requested) in self._nominated.items():
            if other != key_of(pod) and importance >= priority_of(pod):
                held[node].update(requested)
        return held

    def _has_room(self, node: str, requested: Counter[str], held: Counter[str]) -> bool:
        left = self._left[node]
        return all(each not in left or left[each] - held[each] >= amount for each, amount in requested.items())

    def _take(self, key: Key, sign: int) -> None:
        node, requested = self._pods[key]
        left = self._left.get(node, {})
        here = self._requested[node]
        for each, amount in requested.items():
            here[each] += sign * amount
            if each in left:
                left[each] -= sign * amount


def key_of(pod: Object) -> Key:
    """Namespace and name of a pod."""
    return pod["metadata"]["namespace"], pod["metadata"]["name"]


def priority_of(pod: Object) -> int:
    """Of the pod; 0 where it has none."""
    return int(pod["spec"].get("priority") or 0)


def requests_of(pod: Object) -> Counter[str]:
    """How many of each extended resource the pod's containers request."""
    amounts: Counter[str] = Counter()
    for container in pod["spec"]["containers"]:
        resources = container.get("resources") or {}
        for name, amount in {**(resources.get("requests") or {}), **(resources.get("limits") or {})}.items():
            if "/" in name:
                amounts[name] += int(amount)
    return amounts
