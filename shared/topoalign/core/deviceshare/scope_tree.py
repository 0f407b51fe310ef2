"""
Chooses GPUs by the smallest scope of the machine that has enough: PCIe, then NUMA node, then node (koordinator
a7a1b76b, topology tree).

Among equally small scopes the one is taken that is most used already, so that whole ones stay whole. The default knows one
scope more, the switches below a root port.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from topoalign.core.deviceshare.candidates import Chooser, DeviceCandidate
from topoalign.core.deviceshare.inventory import InventoryDevice
from topoalign.core.deviceshare.koordinator_names import Level


class GpuScope(msgspec.Struct, frozen=True):
    """A part of the machine with the GPUs in it: the node, a NUMA node, a root complex, or its switches."""

    level: Level
    minors: tuple[int, ...]
    children: tuple["GpuScope", ...] = ()


class Found(NamedTuple):
    """A scope that has enough GPUs, with what it is compared by."""

    left: int
    """How many an init container of the pod left, of those that would be taken."""
    depth: int
    dirty: int
    """How many of the scopes around it, and it itself, hold a GPU that is in use."""
    score: int
    gpus: tuple[DeviceCandidate, ...]
    """All of it that have enough, those that were left first."""


def build_scope_tree(gpus: Sequence[InventoryDevice], *, compat: bool) -> GpuScope | None:
    """Builds the tree of a node's GPUs, by minor; None if one of them has no known place."""
    if any(gpu.place is None for gpu in gpus):
        return None
    paths = {gpu.minor: scope_path(gpu, compat=compat) for gpu in gpus}
    return _scope((), paths)


def scope_path(gpu: InventoryDevice, *, compat: bool) -> tuple[int | str, ...]:
    """The ids of the scopes around a GPU below the node, the widest first."""
    assert gpu.place is not None, "a tree is made of GPUs with a place"
    place = gpu.place
    return (place.node, place.pcie) if compat or not place.switch else (place.node, place.pcie, place.switch)


def _scope(prefix: tuple[int | str, ...], paths: Mapping[int, tuple[int | str, ...]]) -> GpuScope:
    depth = len(prefix)
    inside = {minor: path for minor, path in paths.items() if path[:depth] == prefix}
    below = {path[: depth + 1] for path in inside.values() if len(path) > depth}
    return GpuScope(
        level=(Level.NODE, Level.NUMA_NODE, Level.PCIE, Level.PCIE)[depth],
        minors=tuple(sorted(inside)),
        children=tuple(_scope(each, inside) for each in sorted(below)),
    )


class ScopeSearch(msgspec.Struct, frozen=True, kw_only=True):
    """The search for the smallest scope of a tree that has enough GPUs."""

    fitting: Mapping[int, DeviceCandidate]
    """Minor -> the GPU, of those that have enough."""
    used: Collection[int]
    """Minors of GPUs that are in use, or not to be considered."""
    count: int
    required: Level
    """The widest scope that will do."""
    shared: bool
    chooser: Chooser | None = None

    def best(self, tree: GpuScope) -> Sequence[DeviceCandidate] | None:
        """Chooses GPUs of the best scope of a tree; None if none will do. Asks the chooser once, about that scope."""
        found = self.best_in(tree)
        if found is None:
            return None
        return (self.chooser(found.gpus, self.count) if self.chooser else ()) or found.gpus[: self.count]

    def best_in(self, scope: GpuScope, depth: int = 0, dirty: int = 0) -> Found | None:
        """The best scope of those within one; None if it has not enough. `dirty` scopes around it hold used GPUs."""
        if len(scope.minors) < self.count:
            return None
        dirty += any(minor in self.used for minor in scope.minors)
        below = [self.best_in(child, depth + 1, dirty) for child in scope.children]
        best = max(filter(None, below), key=self.preference, default=None)
        if best is not None or scope.level < self.required:
            return best
        here = [self.fitting[minor] for minor in scope.minors if minor in self.fitting]
        if len(here) < self.count:
            return None
        if self.shared:
            here.sort(key=lambda each: -each.score)
        here.sort(key=lambda each: not each.device.left)
        left = sum(each.device.left for each in here[: self.count])
        return Found(left, depth, dirty, here[0].score, tuple(here))

    def preference(self, found: Found) -> tuple[int, int, int, int]:
        """The key that sorts scopes with enough GPUs; the greatest is the best."""
        return (
            found.left,  # the most that an init container left,
            found.depth,  # then the smallest scope,
            found.dirty,  # then the one that is used most already,
            found.score if self.shared else 0,  # then the best score; of equals the first
        )
