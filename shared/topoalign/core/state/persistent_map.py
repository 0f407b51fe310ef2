"""
An immutable mapping. A changed copy shares the unchanged entries, so the next state of a node does not copy them.

A map consists of a dict, which several maps share, and of the few changes to it. `put` and `drop` return a new map and
copy only the changes. If the number of changes exceeds about the square root of the number of entries, they are merged
into a new dict. So with n entries, a change costs O(sqrt n) on average, unless a dropped key is put again: a few
microseconds with 20,000 entries. Iteration is in the order in which the keys were first put, as in a dict.
"""

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from enum import Enum
from math import isqrt
from typing import Final, TypeVar

K = TypeVar("K")
V = TypeVar("V")

FEWEST = 8
"""Number of changes that do not cause a merge, regardless of the size of the dict."""


class Gone(Enum):
    """The type of the marker, among the changes, for dropped keys of the shared dict."""

    GONE = 0


GONE: Final = Gone.GONE


class PersistentMap(Mapping[K, V]):
    """An immutable mapping; equal to any other mapping with the same entries."""

    __slots__ = ("_layers", "_size")

    def __init__(self, entries: Mapping[K, V]) -> None:
        """The entries are not copied, so the caller must not change them afterwards."""
        self._layers: tuple[Mapping[K, V], Mapping[K, V | Gone]] = (entries, {})
        self._size = len(entries)

    def put(self, key: K, value: V) -> "PersistentMap[K, V]":
        """The map with this entry. An existing key keeps its place in the order."""
        before = self
        if self._layers[1].get(key) is GONE:
            before = PersistentMap(self._merged)  # a key that is put again after a drop becomes the newest
        base, changes = before._layers
        return PersistentMap._of(base, {**changes, key: value}, self._size + (key not in self))

    def drop(self, key: K) -> "PersistentMap[K, V]":
        """The map without this key. Raises KeyError if the key does not exist."""
        if key not in self:
            raise KeyError(key)
        base, changes = self._layers
        after: dict[K, V | Gone] = {name: value for name, value in changes.items() if name != key}
        if key in base:
            after[key] = GONE
        return PersistentMap._of(base, after, self._size - 1)

    @classmethod
    def _of(cls, base: Mapping[K, V], changes: Mapping[K, V | Gone], size: int) -> "PersistentMap[K, V]":
        found = cls(base)
        found._layers = (base, changes)
        found._size = size
        if len(changes) > FEWEST + isqrt(len(base)):
            found._layers = (found._merged, {})
        return found

    @property
    def _merged(self) -> Mapping[K, V]:
        """All entries in one dict. The dict then replaces the two layers, which does not change the entries."""
        base, changes = self._layers
        if changes:
            entries = dict(base)
            for key, value in changes.items():
                if value is GONE:
                    del entries[key]
                else:
                    entries[key] = value
            self._layers = base, _ = entries, {}
        return base

    def __getitem__(self, key: K) -> V:
        base, changes = self._layers
        if key in changes:
            value = changes[key]
            if value is GONE:
                raise KeyError(key)
            return value
        return base[key]

    def __contains__(self, key: object) -> bool:
        base, changes = self._layers
        return changes[key] is not GONE if key in changes else key in base  # type: ignore[index]  # it is one of them

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[K]:
        return iter(self._merged)

    def keys(self) -> KeysView[K]:
        """The keys, in order."""
        return self._merged.keys()

    def values(self) -> ValuesView[V]:
        """The values, in the order of their keys."""
        return self._merged.values()

    def items(self) -> ItemsView[K, V]:
        """Keys and values, in order."""
        return self._merged.items()

    def __repr__(self) -> str:
        return f"PersistentMap({dict(self._merged)!r})"
