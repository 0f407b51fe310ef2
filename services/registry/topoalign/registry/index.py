"""
The live allocations of all nodes in the order of node and id, so that a page of them costs what it returns.

Three sorted lists have an entry for each allocation: (node, id), (namespace, node, id) and (pod, node, id). What a query
asks for is a range of one of them, and it is walked from where the last page ended. With a pod and a namespace that is the
range of the pod: what it holds of other namespaces is for the caller to leave out.

A grant or a release moves the entries behind it; in lists of 40,000 that takes some microseconds.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping

from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import AllocationID, NodeName
from topoalign.registry.paging import Key

AllocationKey = tuple[NodeName, AllocationID]


class AllocationIndex:
    """Node and id of the live allocations, sorted, as a whole and by owner."""

    def __init__(self) -> None:
        self._all: list[Key] = []
        self._by_namespace: list[Key] = []
        self._by_pod: list[Key] = []

    def update(
        self,
        node: NodeName,
        before: Mapping[AllocationID, Allocation],
        now: Mapping[AllocationID, Allocation],
        names: Iterable[AllocationID] | None = None,
    ) -> None:
        """Takes over what changed among the live allocations of one node. `names`: those that may have; None: any."""
        if before is now:
            return
        for name in before.keys() | now.keys() if names is None else names:
            had = before.get(name)
            has = now.get(name)
            if had is has or (had is not None and has is not None and had.owner == has.owner):
                continue
            for entries, key in self._entries(node, had):
                del entries[bisect_left(entries, key)]
            for entries, key in self._entries(node, has):
                insort(entries, key)

    def keys(
        self, after: Key = (), node: NodeName | None = None, namespace: str | None = None, pod: str | None = None
    ) -> Iterator[AllocationKey]:
        """The keys behind this one, in order: of one node, and of one pod name or else of one namespace, where given."""
        common: Key = ()
        entries = self._all
        if pod is not None:
            entries = self._by_pod
            common = (pod,)
        elif namespace is not None:
            entries = self._by_namespace
            common = (namespace,)
        start = (*common, *after)
        if node is not None:
            common = (*common, node)
        for place in range(bisect_right(entries, max(start, common)), len(entries)):
            entry = entries[place]
            if entry[: len(common)] != common:
                return
            yield NodeName(entry[-2]), AllocationID(entry[-1])

    def _entries(self, node: NodeName, allocation: Allocation | None) -> Iterator[tuple[list[Key], Key]]:
        if allocation is None:
            return
        yield self._all, (node, allocation.id)
        if allocation.owner is not None:
            yield self._by_namespace, (allocation.owner.namespace, node, allocation.id)
            yield self._by_pod, (allocation.owner.pod, node, allocation.id)
