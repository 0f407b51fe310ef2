"""
The live allocations of all nodes in the order of node and id, so that a page of them costs what it returns.

Three kinds of sorted lists of keys: one of all allocations, one for each namespace, one for each pod name. A query walks
the narrowest list that holds its answer, from the key where the last page ended. With a pod and a namespace that is the
list of the pod: what it holds of other namespaces is for the caller to leave out.

A grant or a release moves the keys behind it in up to three lists; with 40,000 allocations that takes some microseconds.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping

from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import AllocationID, NodeName
from topoalign.registry.paging import Key

AllocationKey = tuple[NodeName, AllocationID]


class AllocationIndex:
    """Keys of the live allocations, sorted, as a whole and by owner."""

    def __init__(self) -> None:
        self._all: list[AllocationKey] = []
        self._by_namespace: dict[str, list[AllocationKey]] = {}
        self._by_pod: dict[str, list[AllocationKey]] = {}

    def update(
        self, node: NodeName, before: Mapping[AllocationID, Allocation], now: Mapping[AllocationID, Allocation]
    ) -> None:
        """Takes over what changed among the live allocations of one node."""
        if before is now:
            return
        for name, had in before.items():
            if now.get(name) is not had:
                self._remove((node, name), had)
        for name, held in now.items():
            if before.get(name) is not held:
                self._add((node, name), held)

    def keys(
        self, after: Key = (), node: NodeName | None = None, namespace: str | None = None, pod: str | None = None
    ) -> Iterator[AllocationKey]:
        """The keys behind this one, in order: of one node, and of one pod name or else of one namespace, where given."""
        if pod is not None:
            keys = self._by_pod.get(pod, [])
        elif namespace is not None:
            keys = self._by_namespace.get(namespace, [])
        else:
            keys = self._all
        start: Key = after if node is None else max(after, (node,))
        for place in range(bisect_right(keys, start), len(keys)):
            key = keys[place]
            if node is not None and key[0] != node:
                return
            yield key

    def _lists(self, allocation: Allocation) -> Iterator[tuple[dict[str, list[AllocationKey]], str]]:
        if allocation.owner is not None:
            yield self._by_namespace, allocation.owner.namespace
            yield self._by_pod, allocation.owner.pod

    def _add(self, key: AllocationKey, allocation: Allocation) -> None:
        insort(self._all, key)
        for lists, name in self._lists(allocation):
            insort(lists.setdefault(name, []), key)

    def _remove(self, key: AllocationKey, allocation: Allocation) -> None:
        del self._all[bisect_left(self._all, key)]
        for lists, name in self._lists(allocation):
            keys = lists[name]
            del keys[bisect_left(keys, key)]
            if not keys:
                del lists[name]
