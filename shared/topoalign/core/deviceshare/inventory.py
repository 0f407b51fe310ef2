"""
Describes the devices of a node for joint allocation: where they are, what they have, and what of it is used.

It is built from a node's state (`node_inventory`). The types have the usual names of the field; encoded they are
named as in Koordinator's Device object (`scheduling.koordinator.sh/v1alpha1`), so that such an object is decoded as it is.
"""

from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cached_property
from operator import attrgetter

import msgspec

from topoalign.core.deviceshare.koordinator_names import DeviceType

ANYWHERE = -1
"""The NUMA node of a device whose NUMA node is not known."""


class DeviceLocation(msgspec.Struct, frozen=True, rename={"node": "nodeID", "pcie": "pcieID"}):
    """Where a device is. Ids are compared, never parsed; an empty one is not known."""

    node: int = ANYWHERE
    pcie: str = ""
    """Root complex: what Koordinator takes for a device's PCIe."""
    switch: str = ""
    """The switches below one root port: devices there reach one another without the host bridge (PIX, PXB)."""


NOWHERE = DeviceLocation()

ScopeOf = Callable[[DeviceLocation], str]
SWITCHES: ScopeOf = attrgetter("switch")
ROOT_COMPLEX: ScopeOf = attrgetter("pcie")
"""What devices have in common below PCIe. Both are empty where they are unknown."""


class InventoryFunction(msgspec.Struct, frozen=True, rename={"bus": "busID"}):
    """An SR-IOV virtual function of a NIC."""

    bus: str
    """PCI address."""
    minor: int = -1


class FunctionGroup(msgspec.Struct, frozen=True, rename={"functions": "vfs"}):
    """Virtual functions of a device that have the same labels."""

    labels: dict[str, str] = {}
    functions: tuple[InventoryFunction, ...] = ()


class InventoryDevice(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    dict=True,
    rename={"kind": "type", "healthy": "health", "place": "topology", "groups": "vfGroups"},
):
    """One device, with where it is, what it has and what is used of it."""

    kind: DeviceType
    minor: int
    """Its identity among the devices of its type."""
    id: str = ""
    healthy: bool = True
    labels: dict[str, str] = {}
    place: DeviceLocation | None = None
    resources: dict[str, int] = {}
    groups: tuple[FunctionGroup, ...] = ()
    used: dict[str, int] = {}
    used_functions: frozenset[str] = frozenset()
    """PCI addresses."""
    left: bool = False
    """An init container of the same pod had it, so it is taken before others that are as good."""
    left_functions: frozenset[str] = frozenset()
    """PCI addresses of functions that an init container had."""

    @property
    def location(self) -> DeviceLocation:
        """Where the device is; `NOWHERE` if that is not known."""
        return NOWHERE if self.place is None else self.place

    @property
    def total(self) -> dict[str, int]:
        """Resource -> what the device has; nothing while it is unhealthy."""
        return self.resources if self.healthy else {}

    @cached_property
    def free(self) -> dict[str, int]:
        """Resource -> what is not used of the device; nothing while it is unhealthy."""
        return {name: max(0, amount - self.used.get(name, 0)) for name, amount in self.total.items()}

    @property
    def busy(self) -> bool:
        """Whether anything of the device is used."""
        return any(self.used.values()) or bool(self.used_functions)


class Partition(msgspec.Struct, frozen=True, rename={"score": "allocationScore", "bandwidth": "ringBusBandwidth"}):
    """A set of GPUs that a fabric manager can isolate."""

    minors: tuple[int, ...]
    score: int = 1
    bandwidth: Fraction | None = None


Table = Mapping[int, tuple[Partition, ...]]
"""Number of GPUs -> partitions of that size, in the order in which they are listed."""

HOPPERS = ("H100", "H800", "H20")
HOPPER_TABLE: Table = {
    size: tuple(Partition(tuple(range(first, first + size))) for first in range(0, 8, size)) for size in (1, 2, 4, 8)
}
"""Koordinator's own for nodes with eight of these, where the Device has none."""


class NodeInventory(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """All devices of a node, with its partition table."""

    devices: tuple[InventoryDevice, ...] = ()
    table: Table | None = None

    @cached_property
    def by_type(self) -> Mapping[DeviceType, tuple[InventoryDevice, ...]]:
        """Type -> its devices, by minor."""
        ordered = sorted(self.devices, key=lambda device: device.minor)
        return {kind: tuple(device for device in ordered if device.kind is kind) for kind in DeviceType}
