"""
Describes the devices of a node for joint allocation: their locations, their resources, and what of these is in use.

The inventory is built from a node's state (`node_inventory`). Its fields have common names in code, and when encoded
those of Koordinator's Device object (`scheduling.koordinator.sh/v1alpha1`), so such an object can be decoded unchanged.
"""

from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cached_property
from operator import attrgetter

import msgspec

from topoalign.core.deviceshare.koordinator_names import DeviceType

ANYWHERE = -1
"""The value for an unknown NUMA node."""


class DeviceLocation(msgspec.Struct, frozen=True, rename={"node": "nodeID", "pcie": "pcieID"}):
    """The location of a device. Ids are compared, never parsed. An empty id is unknown."""

    node: int = ANYWHERE
    pcie: str = ""
    """The root complex. Koordinator uses it as a device's PCIe id."""
    switch: str = ""
    """The switches below one root port. Devices there reach each other without crossing the host bridge (PIX, PXB)."""


NOWHERE = DeviceLocation()

ScopeOf = Callable[[DeviceLocation], str]
SWITCHES: ScopeOf = attrgetter("switch")
ROOT_COMPLEX: ScopeOf = attrgetter("pcie")
"""The PCIe scopes that devices can share. An unknown scope is empty."""


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
    """One device, with its location, its resources, and what of these is in use."""

    kind: DeviceType
    minor: int
    """Identifies the device among the devices of its type."""
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
    """Whether an init container of the same pod held it. Such a device is preferred over other suitable devices."""
    left_functions: frozenset[str] = frozenset()
    """PCI addresses of functions that an init container of the same pod held."""

    @property
    def location(self) -> DeviceLocation:
        """The location of the device, or `NOWHERE` if it is unknown."""
        return NOWHERE if self.place is None else self.place

    @property
    def total(self) -> dict[str, int]:
        """Resource -> the amount that the device has. Empty while the device is unhealthy."""
        return self.resources if self.healthy else {}

    @cached_property
    def free(self) -> dict[str, int]:
        """Resource -> the free amount. Empty while the device is unhealthy."""
        return {name: max(0, amount - self.used.get(name, 0)) for name, amount in self.total.items()}

    @property
    def busy(self) -> bool:
        """Whether any part of the device is in use."""
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
"""Koordinator's built-in table for nodes with eight of these GPUs, if the Device object has no table."""


class NodeInventory(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """All devices of a node, with its partition table."""

    devices: tuple[InventoryDevice, ...] = ()
    table: Table | None = None

    @cached_property
    def by_type(self) -> Mapping[DeviceType, tuple[InventoryDevice, ...]]:
        """Type -> its devices, by minor."""
        ordered = sorted(self.devices, key=lambda device: device.minor)
        return {kind: tuple(device for device in ordered if device.kind is kind) for kind in DeviceType}
