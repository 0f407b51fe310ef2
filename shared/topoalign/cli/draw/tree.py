"""
PCIe as people draw it: host bridges and switches, without the bridges on which nothing branches.

Linux shows every port of a switch as a bridge. Between two devices only the places matter where their ways part, so a
chain of bridges counts as one, named after the last before the ways part: the switch's upstream port.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from topoalign.cli.draw.device import Device

DEEPEST = 6
"""Levels that are drawn. Real machines have three; what is deeper hangs on the last of them."""

Ways = list[tuple[tuple[str, ...], Device]]
"""Devices, each with the bridges above it, from the host bridge down."""


@dataclass(frozen=True)
class Bridge:
    """A host bridge, or a PCIe switch."""

    address: str
    host: bool
    children: tuple["Child", ...]


Child: TypeAlias = Bridge | Device


def pcie_tree(devices: Iterable[Device], parents: Mapping[str, str | None]) -> tuple[Child, ...]:
    """The bridges with these devices beneath them, then the devices of which no bridge is known."""
    return children([(way(device.bridge, parents), device) for device in devices], 0)


def way(bridge: str | None, parents: Mapping[str, str | None]) -> tuple[str, ...]:
    """The bridges from the host bridge down to this one. An ancestor that is missing or comes twice ends it."""
    above: dict[str, None] = {}
    while bridge is not None and bridge in parents and bridge not in above:
        above[bridge] = None
        bridge = parents[bridge]
    return tuple(reversed(above))


def children(ways: Ways, level: int) -> tuple[Child, ...]:
    branches: dict[str, Ways] = {}
    direct = []
    for bridges, device in ways:
        if bridges and level < DEEPEST:
            branches.setdefault(bridges[0], []).append((bridges, device))
        else:
            direct.append(device)
    found = [branch(inside, level) for inside in branches.values()]
    return tuple(one for one in found if isinstance(one, Bridge)) + tuple(
        sorted([*direct, *(one for one in found if isinstance(one, Device))], key=lambda device: device.order)
    )


def branch(ways: Ways, level: int) -> Child:
    """All these devices are beneath one bridge: it, or the last that they share, or the device if it is alone there."""
    if level and len(ways) == 1:
        return ways[0][1]
    shared = 1
    while level and len({bridges[shared : shared + 1] for bridges, _ in ways}) == 1 and len(ways[0][0]) > shared:
        shared += 1
    inside = children([(bridges[shared:], device) for bridges, device in ways], level + 1)
    return Bridge(ways[0][0][shared - 1], level == 0, inside)


def devices_in(children: Iterable[Child]) -> list[Device]:
    """Every device beneath these, in the order of the drawing."""
    found: list[Device] = []
    for child in children:
        found += devices_in(child.children) if isinstance(child, Bridge) else [child]
    return found


def levels(children: Iterable[Child]) -> int:
    """How many bridges stand one below the other."""
    return max((1 + levels(child.children) for child in children if isinstance(child, Bridge)), default=0)
