"""What the scheduler itself counts: extended resources of nodes, and what pods on them ask for."""

from collections import Counter, defaultdict

from topoalign.testing.fake_api_server.objects import Object

Key = tuple[str, str]
"""Namespace and name of a pod."""


class Room:
    """How much of each node's `status.allocatable` is not asked for by pods on it, bound or assumed."""

    def __init__(self) -> None:
        self._nodes: dict[str, dict[str, int]] = {}
        """Node -> what is left of each resource that it counts."""
        self._allocatable: dict[str, dict[str, int]] = {}
        self._pods: dict[Key, tuple[str, Counter[str]]] = {}
        """Pod -> its node, and what it asks for."""
        self._asked: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Node -> what its pods ask for."""
        self._first = 0

    def put_node(self, node: Object) -> None:
        """A node was created or changed."""
        name, status = node["metadata"]["name"], node["status"]
        counted = {each: int(amount) for each, amount in (status.get("allocatable") or {}).items() if "/" in each}
        if node["spec"].get("unschedulable"):
            self.drop_node(name)
        elif self._allocatable.get(name) != counted:
            self._allocatable[name] = counted
            asked = self._asked[name]
            self._nodes[name] = {each: amount - asked[each] for each, amount in counted.items()}

    def drop_node(self, name: str) -> None:
        """A node is gone, or takes no pods."""
        self._nodes.pop(name, None)
        self._allocatable.pop(name, None)

    def put_pod(self, key: Key, pod: Object, node: str) -> None:
        """The pod is on this node, or about to be."""
        if key not in self._pods:
            self._pods[key] = node, asked_by(pod)
            self._take(key, 1)

    def drop_pod(self, key: Key) -> None:
        """The pod holds nothing any more."""
        if key in self._pods:
            self._take(key, -1)
            del self._pods[key]

    def nodes_for(self, pod: Object) -> list[str]:
        """The nodes with room, from another one on each time."""
        names, left = list(self._nodes), self._nodes
        for each, amount in asked_by(pod).items():
            names = [name for name in names if left[name].get(each, amount) >= amount]
        self._first = (self._first + 1) % max(1, len(names))
        return names[self._first :] + names[: self._first]

    def _take(self, key: Key, sign: int) -> None:
        node, asked = self._pods[key]
        left, here = self._nodes.get(node, {}), self._asked[node]
        for each, amount in asked.items():
            here[each] += sign * amount
            if each in left:
                left[each] -= sign * amount


def asked_by(pod: Object) -> Counter[str]:
    """How many of each extended resource the pod's containers ask for."""
    amounts: Counter[str] = Counter()
    for container in pod["spec"]["containers"]:
        resources = container.get("resources") or {}
        for name, amount in {**(resources.get("requests") or {}), **(resources.get("limits") or {})}.items():
            if "/" in name:
                amounts[name] += int(amount)
    return amounts
