"""
Lists in pages: `limit` is the largest length of a page, `continue` starts after the previous page.

A page ends at the key of its last row, so rows that appear or disappear between two pages shift nothing. The token is
opaque to the reader and checked like all input from outside.
"""

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Generic, TypeVar

import msgspec

from topoalign.core.model.errors import InvalidField, quoted
from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import AllocationID, NodeName

T = TypeVar("T")
Key = tuple[str, ...]

DEFAULT_LIMIT = 500
MOST = 1_000
"""Rows in one answer."""


class Page(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """A part of a list."""

    items: tuple[T, ...]
    next: str | None = msgspec.field(name="continue")
    """Give this as `continue` to read on; null on the last page."""


def limit_of(text: str | None) -> int:
    """Raises InvalidField."""
    if text is None:
        return DEFAULT_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and 1 <= int(text) <= MOST):
        raise InvalidField("limit", quoted([text]), f"give a whole number from 1 to {MOST}")
    return int(text)


def parse_continue(token: str | None) -> Key:
    """The key a page begins after; () for the first. Raises InvalidField."""
    if token is None:
        return ()
    try:
        return msgspec.json.decode(urlsafe_b64decode(token.encode()), type=Key)
    except (msgspec.DecodeError, binascii.Error, ValueError, RecursionError):
        raise InvalidField("continue", quoted([token]), "give back what the last page had, unchanged") from None


def page(rows: Iterable[tuple[Key, T]], limit: int) -> Page[T]:
    """The first `limit` rows of what comes in the order of its keys. No more than one row behind them is looked at."""
    found = list(islice(rows, limit + 1))
    more = len(found) > limit
    token = urlsafe_b64encode(msgspec.json.encode(found[limit - 1][0])).decode() if more else None
    return Page(items=tuple(item for _, item in found[:limit]), next=token)


# The live allocations of all nodes in the order of node and id, so that a page of them costs what it returns.
#
# Three sorted lists have an entry for each allocation: (node, id), (namespace, node, id) and (pod, node, id). What a
# query asks for is a range of one of them, and it is walked from where the last page ended. With a pod and a namespace
# that is the range of the pod: what it holds of other namespaces is for the caller to leave out.
#
# A grant or a release moves the entries behind it; in lists of 40,000 that takes some microseconds.


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
