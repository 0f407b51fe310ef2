"""What the scheduler itself counts: extended resources of nodes, and what pods on them ask for."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable

from topoalign.testing.fake_api_server.objects import Object

Key = tuple[str, str]
"""Namespace and name of a pod."""


class Room:
    """How much of each node's `status.allocatable` is not requested by pods on it: bound, assumed or nominated."""

    def __init__(self) -> None:
        self._allocatable: dict[str, dict[str, int]] = {}
        self._closed: set[str] = set()
        """Nodes that are cordoned."""
        self._pods: dict[Key, tuple[str, Counter[str]]] = {}
        """Pod -> its node, and what it requests."""
        self._requested: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Node -> what its pods request."""
        self._nominated: dict[Key, tuple[str, int, Counter[str]]] = {}
        """Pod -> the node where it preempted others, its priority, and what it requests."""
        self._first = 0

    def put_node(self, node: Object) -> bool:
        """A node was created or changed. Returns whether it may have more room than before."""
        name, status = node["metadata"]["name"], node["status"]
        counted = {each: int(amount) for each, amount in (status.get("allocatable") or {}).items() if "/" in each}
        was_closed = name in self._closed
        self._closed.discard(name)
        if node["spec"].get("unschedulable"):
            self._closed.add(name)
        before = self._allocatable.get(name)
        self._allocatable[name] = counted
        return before != counted or (was_closed and name not in self._closed)

    def drop_node(self, name: str) -> None:
        """A node is gone."""
        self._allocatable.pop(name, None)
        self._closed.discard(name)

    def put_pod(self, key: Key, pod: Object, node: str) -> None:
        """The pod is on this node, or about to be."""
        self.nominate(key, pod, "")
        if key not in self._pods:
            requested = requests_of(pod)
            self._pods[key] = node, requested
            self._requested[node].update(requested)

    def drop_pod(self, key: Key) -> None:
        """The pod holds nothing any more."""
        self._nominated.pop(key, None)
        if key in self._pods:
            node, requested = self._pods.pop(key)
            self._requested[node].subtract(requested)

    def nominate(self, key: Key, pod: Object, node: str) -> None:
        """The pod has this node as `status.nominatedNodeName`; empty: none."""
        self._nominated.pop(key, None)
        if node:
            self._nominated[key] = node, priority_of(pod), requests_of(pod)

    def nodes_for(self, pod: Object) -> list[str]:
        """The nodes with room, beginning with another one each time."""
        names = self.with_room(pod, self._allocatable)
        self._first = (self._first + 1) % max(1, len(names))
        return names[self._first :] + names[: self._first]

    def with_room(self, pod: Object, nodes: Iterable[str]) -> list[str]:
        """Those of these nodes with room for the pod."""
        requested, key = requests_of(pod), key_of(pod)
        held = self._held_by_nominated(key, priority_of(pod))
        return [name for name in nodes if self._has_room(name, requested, held.get(name, Counter()))]

    def has_room_without(self, pod: Object, node: str, gone: Collection[Key]) -> bool:
        """Whether the node has room for the pod once these pods are gone."""
        freed: Counter[str] = Counter()
        for key in gone:
            if key in self._pods and self._pods[key][0] == node:
                freed.update(self._pods[key][1])
        held = self._held_by_nominated(key_of(pod), priority_of(pod)).get(node, Counter[str]())
        held.subtract(freed)
        return self._has_room(node, requests_of(pod), held)

    def nodes_beside(self, nodes: Collection[str]) -> list[str]:
        """All nodes but these, and but those that are cordoned."""
        return [name for name in self._allocatable if name not in nodes and name not in self._closed]

    def _held_by_nominated(self, key: Key, priority: int) -> dict[str, Counter[str]]:
        """Node -> what other pods hold there that preempted pods and are at least as important."""
        held: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for other, (node, importance, requested) in self._nominated.items():
            if other != key and importance >= priority:
                held[node].update(requested)
        return held

    def _has_room(self, name: str, requested: Counter[str], held: Counter[str]) -> bool:
        allocatable, here = self._allocatable.get(name), self._requested[name]
        if allocatable is None or name in self._closed:
            return False
        return all(
            each not in allocatable or allocatable[each] - here[each] - held[each] >= amount
            for each, amount in requested.items()
        )


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
