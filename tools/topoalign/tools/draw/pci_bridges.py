"""
The PCIe tree of a drawing: host bridges and switches, without bridges that do not branch.

Linux shows every port of a switch as a bridge. Between two devices only the points where their paths separate matter,
so a chain of bridges counts as one, with the name of the last one before the branch: the switch's upstream port.

A pasted matrix has no bridges, only the path classes between devices. There groups take the place of bridges.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

from topoalign.core.model.errors import clean
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.device_links import Link, PcieClass
from topoalign.tools.draw.device import DrawnDevice

DEEPEST = 6
"""Levels that are drawn. Real machines have three; deeper devices are attached to the last of them."""

FARTHEST_FIRST = tuple(reversed(PcieClass))
PATHS = (PcieClass.PHB, PcieClass.PXB, PcieClass.PIX)
MEANINGS = {
    PcieClass.PHB: "PHB: between these devices is the PCIe host bridge",
    PcieClass.PXB: "PXB: between these devices are several PCIe bridges, but not the host bridge",
    PcieClass.PIX: "PIX: between these devices is at most one PCIe bridge",
}
"""Below a drawing."""

Links = Mapping[tuple[DeviceID, DeviceID], Link]
Ways = list[tuple[tuple[str, ...], DrawnDevice]]
"""Devices, each with the bridges above it, from the host bridge down."""


@dataclass(frozen=True)
class Bridge:
    """A host bridge, a PCIe switch, or a path class that stands for an unknown bridge between devices."""

    address: str
    """"" where only the path is known."""
    host: bool
    children: tuple["Child", ...]
    path: PcieClass | None = None
    """The path class between the devices below it: PIX, PXB or PHB, as in a pasted matrix. None: it has an address."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Its possible labels, the longest first."""
        if self.path is not None:
            return (self.path.value,)
        kinds = ("PCIe host bridge ", "host bridge ", "host ", "") if self.host else ("PCIe switch ", "switch ", "")
        return tuple(kind + clean(self.address) for kind in kinds)


Child: TypeAlias = Bridge | DrawnDevice


def pcie_tree(devices: Iterable[DrawnDevice], parents: Mapping[str, str | None], links: Links) -> tuple[Child, ...]:
    """The bridges with these devices below them, then the devices without a known bridge, grouped by their paths."""
    paths = [(way(device.bridge, parents), device) for device in devices]
    lost = sorted((device for bridges, device in paths if not bridges), key=lambda device: device.order)
    return children([pair for pair in paths if pair[0]], 0) + by_path(lost, links, PATHS)


def by_path(devices: Sequence[DrawnDevice], links: Links, paths: Sequence[PcieClass]) -> tuple[Child, ...]:
    """
    Devices in groups within groups, the first of these paths outermost: PHB around PXB around PIX.

    A group is devices that are connected by links of that path or a nearer one, if no link between two of them is known to
    be farther. So 0-1 PIX, 2-3 PIX and all else PHB is PHB(PIX(0, 1), PIX(2, 3)). Where NVLinks hide a path it is not known.
    """
    if not paths or len(devices) < 2:
        return tuple(devices)
    near = set(PcieClass.__members__.values()) - set(FARTHEST_FIRST[: FARTHEST_FIRST.index(paths[0])])

    def path(a: DrawnDevice, b: DrawnDevice) -> PcieClass | None:
        link = links.get((a.id, b.id))
        return None if link is None else link.pcie

    found: list[Child] = []
    for group in group_joined(devices, lambda a, b: path(a, b) in near):
        inner = by_path(group, links, paths[1:])
        whole = all(path(a, b) in (None, *near) for a, b in combinations(group, 2))
        alone = len(inner) == 1
        found += inner if alone or not whole else [Bridge("", paths[0] is PcieClass.PHB, inner, paths[0])]
    return tuple(sorted(found, key=lambda one: isinstance(one, DrawnDevice)))  # bridges first


def group_joined(
    devices: Sequence[DrawnDevice], joined: Callable[[DrawnDevice, DrawnDevice], bool]
) -> list[list[DrawnDevice]]:
    """The devices in groups, in order: two that are joined, directly or through others, are in one group."""
    left = list(devices)
    groups = []
    while left:
        group = [left.pop(0)]
        for one in group:  # grows while it is walked
            neighbours = [other for other in left if joined(one, other)]
            group += neighbours
            left = [other for other in left if other not in neighbours]
        groups.append(sorted(group, key=lambda device: device.order))
    return groups


def way(bridge: str | None, parents: Mapping[str, str | None]) -> tuple[str, ...]:
    """The bridges from the host bridge down to this one. An ancestor that is missing or comes twice ends it."""
    above: dict[str, None] = {}
    while bridge is not None and bridge in parents and bridge not in above:
        above[bridge] = None
        bridge = parents[bridge]
    return tuple(reversed(above))


def children(paths: Ways, level: int) -> tuple[Child, ...]:
    """
    The bridges below a level of the tree, then the devices that are directly there. Deeper than `DEEPEST`, devices are
    attached to the last level.
    """
    branches: dict[str, Ways] = {}
    direct = []
    for bridges, device in paths:
        if bridges and level < DEEPEST:
            branches.setdefault(bridges[0], []).append((bridges, device))
        else:
            direct.append(device)
    found = [branch(inside, level) for inside in branches.values()]
    devices = [*direct, *(one for one in found if isinstance(one, DrawnDevice))]
    bridges_below = (one for one in found if isinstance(one, Bridge))
    return (*bridges_below, *sorted(devices, key=lambda device: device.order))


def branch(paths: Ways, level: int) -> Child:
    """Makes the branch of these devices, all below one bridge: the last bridge that they share, or a single device."""
    if level and len(paths) == 1:
        return paths[0][1]
    shared = 1
    while level and len({bridges[shared : shared + 1] for bridges, _ in paths}) == 1 and len(paths[0][0]) > shared:
        shared += 1
    inside = children([(bridges[shared:], device) for bridges, device in paths], level + 1)
    return Bridge(paths[0][0][shared - 1], level == 0, inside)


def devices_in(children: Iterable[Child]) -> list[DrawnDevice]:
    """Every device below these, in the order of the drawing."""
    found: list[DrawnDevice] = []
    for child in children:
        found += devices_in(child.children) if isinstance(child, Bridge) else [child]
    return found


def paths_in(children: Iterable[Child]) -> set[PcieClass]:
    """The paths that stand for bridges without a known address."""
    bridges = [child for child in children if isinstance(child, Bridge)]
    below = (paths_in(bridge.children) for bridge in bridges)
    return {bridge.path for bridge in bridges if bridge.path is not None}.union(*below)


def levels(children: Iterable[Child]) -> int:
    """The largest number of bridges one below the other."""
    return max((1 + levels(child.children) for child in children if isinstance(child, Bridge)), default=0)
