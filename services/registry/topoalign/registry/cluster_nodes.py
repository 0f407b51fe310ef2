"""
Folds the facts of all nodes.

The fold is `NodeState.apply`, the same as in the allocators. In addition the cluster keeps for each node when an
allocation was granted, when the node last published, and whether its allocator answers. A node whose allocator does not
answer is stale: its view was true, but no service confirms it now.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from topoalign.client import Delivery
from topoalign.core.model.errors import NotFound
from topoalign.core.model.events import (
    Allocation,
    AllocationBound,
    AllocationGranted,
    AllocationReleased,
    AllocationsSnapshot,
    Event,
    UsageObserved,
)
from topoalign.core.model.ids import AllocationID, NodeName
from topoalign.core.state.fold import NodeState

T = TypeVar("T")
Key = tuple[str, ...]
AllocationKey = tuple[NodeName, AllocationID]


@dataclass(eq=False)
class ClusterNode:
    """One node of the cluster. Times are wall seconds of the node's clock."""

    state: NodeState
    since: dict[AllocationID, float] = field(default_factory=dict)
    """When a live allocation was granted, where its grant was received."""
    last_event: float | None = None
    """When the newest fact became true. None: no fact carried a time."""
    answering: bool = False
    """Whether the node's allocator answered when last asked, or has published since."""
    _derived: dict[Callable[[NodeState], Any], Any] = field(default_factory=dict)
    """Function -> what it has made of `_derived_from`."""
    _derived_from: NodeState | None = None

    def apply(self, delivery: Delivery, *, usage: bool = False) -> None:
        """Applies the next fact of the node. `usage`: whether to keep the kubelet's allocations, which can be large."""
        if delivery.anew:
            self.last_event = None  # a forged fact may be of any time
        if delivery.state is not None:
            self.state = self.state.with_ledger_of(delivery.state)
        elif usage or not isinstance(delivery.event, UsageObserved):
            self.state = self.state.apply(delivery.event)
        if delivery.time is None:
            return
        self.last_event = max(self.last_event or delivery.time, delivery.time)
        if isinstance(delivery.event, AllocationGranted):
            self.since[delivery.event.allocation.id] = delivery.time
        if len(self.since) > len(self.state.allocations):
            self.since = {name: at for name, at in self.since.items() if name in self.state.allocations}

    def derived(self, function: Callable[[NodeState], T]) -> T:
        """The result of this function for the state, called once for each state."""
        if self._derived_from is not self.state:
            self._derived = {}
            self._derived_from = self.state
        if function not in self._derived:
            # Of a copy: the cached properties of a state take more memory than the state, and are not kept.
            self._derived[function] = function(bare(self.state))
        result: T = self._derived[function]
        return result


def changed_by(event: Event) -> tuple[AllocationID, ...] | None:
    """Ids of the live allocations that a fact may change; None: any of its node."""
    match event:
        case AllocationGranted():
            return (event.allocation.id,)
        case AllocationBound() | AllocationReleased():
            return (event.allocation,)
        case AllocationsSnapshot():
            return None
        case _:
            return ()


def bare(state: NodeState) -> NodeState:
    """A copy of a state without cached properties."""
    allocations = {name: copy(allocation) for name, allocation in state.allocations.items()}
    discovered = state.topology
    if discovered is not None:
        discovered = msgspec.structs.replace(discovered, topology=discovered.topology.without_tables())
    return msgspec.structs.replace(state, topology=discovered, allocations=allocations)


class AllocationIndex:
    """
    The live allocations of all nodes in the order of node and id, so that a page of them costs what it returns.

    Three sorted lists have an entry for each allocation: (node, id), (namespace, node, id) and (pod, node, id). A query
    walks a range of one of them, from where the last page ended. With a pod and a namespace that is the range of the pod,
    and the caller leaves out other namespaces. A grant or a release moves the entries behind it; in lists of 40,000 that
    takes some microseconds.
    """

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
        """Updates the live allocations of one node. `names`: those that may have changed; None: any."""
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
        """Yields the keys after this one: of one node, and of one pod name or else of one namespace, if given."""
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


class Cluster:
    """The nodes by name, and their live allocations by node and id."""

    def __init__(self, *, usage: bool = False) -> None:
        """`usage`: whether to keep the kubelets' allocations, on which predictions are based."""
        self.listeners: list[Callable[[NodeName], object]] = []
        """
        Called after each change of a node's facts, of whether it answers, and of whether its allocations are certain, and
        after it is forgotten.
        """
        self._usage = usage
        self._members: dict[NodeName, ClusterNode] = {}
        self._names: list[NodeName] = []
        """Sorted."""
        self._index = AllocationIndex()

    def apply(self, delivery: Delivery) -> None:
        """Fold an event into its node, which is added at its first event."""
        node = delivery.event.node
        member = self._members.get(node)
        if member is None:
            member = self._members[node] = ClusterNode(NodeState(node=node))
            insort(self._names, node)
        before = member.state
        member.apply(delivery, usage=self._usage)
        now = member.state
        is_next = (now.epoch, now.seq) == (before.epoch, before.seq + 1)  # else it has more changes than the fact has
        self._index.update(node, before.allocations, now.allocations, changed_by(delivery.event) if is_next else None)
        self.notify(node)

    def answers(self, node: NodeName, answering: bool) -> None:
        """Notes whether the node's allocator answers."""
        member = self._members[node]
        if member.answering != answering:
            member.answering = answering
            self.notify(node)

    def forget(self, node: NodeName) -> None:
        """Removes this node until it publishes again."""
        member = self._members.pop(node, None)
        if member is not None:
            del self._names[bisect_left(self._names, node)]
            self._index.update(node, member.state.allocations, {})
            self.notify(node)

    def notify(self, node: NodeName) -> None:
        """Calls the listeners, also after a node's allocations have become certain or uncertain."""
        for listener in self.listeners:
            listener(node)

    def member(self, node: NodeName) -> ClusterNode:
        """Raises NotFound."""
        try:
            return self._members[node]
        except KeyError:
            raise NotFound("node", node, "GET /v1/nodes lists the nodes that have announced themselves") from None

    def is_answering(self, node: NodeName) -> bool:
        """Whether the node is known, and its allocator answers."""
        member = self._members.get(node)
        return member is not None and member.answering

    @property
    def nodes(self) -> tuple[NodeName, ...]:
        """Names of all nodes, sorted."""
        return tuple(self._names)

    def members(self, after: str = "") -> Iterator[ClusterNode]:
        """The nodes whose names come after this one, in the order of their names."""
        return (self._members[self._names[n]] for n in range(bisect_right(self._names, after), len(self._names)))

    def allocations(
        self, after: Key = (), node: NodeName | None = None, namespace: str | None = None, pod: str | None = None
    ) -> Iterator[tuple[AllocationKey, ClusterNode, Allocation]]:
        """
        The live allocations after this key, by node and id; of one node, namespace or pod if given. With pod and namespace,
        pods of the same name in other namespaces are skipped; else only rows that are returned are read.
        """
        for key in self._index.keys(after, node, namespace, pod):
            member = self._members[key[0]]
            allocation = member.state.allocations[key[1]]
            owner = allocation.owner
            if namespace is None or (owner is not None and owner.namespace == namespace):
                yield key, member, allocation

    def __contains__(self, node: NodeName) -> bool:
        return node in self._members

    def __iter__(self) -> Iterator[ClusterNode]:
        """The nodes in the order of their names."""
        return self.members()
