"""Describes which devices of a node the device plugin offers to the kubelet, and how. `holdings` parses the ids."""

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec

from topoalign.core.model.byte_sizes import MIB
from topoalign.core.model.holdings import UnitKind, handed_out
from topoalign.core.model.ids import DeviceID, ResourceName

Kind = Literal["gpu", "nic", "part", "unit", "slot", "other"]
"""Whole GPUs, whole NICs, shares and other parts, units of GPUs, slots of GPUs, devices of other plugins."""

Limiter = Literal["none", "vcuda", "hami-core"]
"""Nothing, Gaia's library, HAMi's library."""
LimitedBy = Literal["none", "vcuda", "hami-core", "mps"]
"""The same, or NVIDIA's MPS."""

CORES = 100
"""Number of units of computing time of a GPU."""
MEMORY_BLOCK = 256 * MIB
"""Bytes of a unit of memory. Memory of a GPU beyond its last whole block is not offered."""


class Slots(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Resources that containers with slots can request. No plugin lists them. Their values apply to each GPU."""

    memory: ResourceName = ResourceName("nvidia.com/gpumem")
    """Memory of each GPU, in MiB."""
    percentage: ResourceName = ResourceName("nvidia.com/gpumem-percentage")
    """Memory of each GPU, in percent."""
    cores: ResourceName = ResourceName("nvidia.com/gpucores")
    """Hundredths of each GPU's computing time."""
    priority: ResourceName = ResourceName("nvidia.com/priority")
    """0: high; 1: low."""
    memory_scaling: Annotated[float, msgspec.Meta(ge=0.1, le=100)] = 1.0
    """How much memory of each GPU is offered, as a multiple of its memory."""
    core_scaling: Annotated[float, msgspec.Meta(ge=1, le=100)] = 1.0
    """How much computing time of each GPU is offered, as a multiple of 100."""
    numa_topology: bool = False
    """Whether slots are listed with the NUMA nodes of their GPUs. If so, the Topology Manager aligns them."""
    instances: bool = False
    """Whether a MIG instance is created for each allocated slot. If so, a slot's amount is that of a MIG profile."""

    @property
    def resources(self) -> tuple[ResourceName, ...]:
        """The names of all these resources."""
        return self.memory, self.percentage, self.cores, self.priority


class Offer(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Devices of this node that are offered to the kubelet under one resource, whole or shared."""

    resource: ResourceName
    """Name of the extended resource, `nvidia.com/gpu`."""
    devices: tuple[DeviceID, ...]
    """The devices: uuids of GPUs or of MIG instances, names of NICs, PCI addresses of virtual functions."""
    replicas: int = 1
    """If more than 1, each device is shared, and handed out as `<device>::0` to `<device>::<replicas - 1>`."""
    sharing: Literal["time-slicing", "mps"] = "time-slicing"
    """How a device is shared: by time slicing without limits, or by NVIDIA MPS, which limits each share to its part."""
    unit: UnitKind | None = None
    """The kind of unit that the `replicas` are: hundredths of its time, or 256 MiB blocks of memory. None: no units."""
    limiter: Limiter | None = None
    """
    The library that limits containers to their amounts: none, Gaia's for units (`vcuda`), HAMi's for slots
    (`hami-core`). None: there are no amounts, or they are limited by MPS (`sharing`) or the hardware (MIG instances).
    """
    slots: Slots | None = None
    """
    The resources of slots. With each slot, a container holds an amount of a GPU: an equal part if the amount is
    unknown. None: the shares are not slots.
    """
    most: int | None = None
    """The largest number that a container can request. None: all."""
    packing: Literal["distributed", "packed"] = "distributed"
    """
    Which shares and MIG instances are preferred: those of the GPUs of which the fewest (`distributed`) or the most
    (`packed`) are already held.
    """

    @property
    def shared(self) -> bool:
        """Whether a device is offered in shares or in units."""
        return self.replicas > 1 or self.unit is not None

    @property
    def by_amounts(self) -> bool:
        """Whether containers get amounts of the devices: units, or slots with amounts."""
        return self.unit is not None or self.slots is not None

    @property
    def limited_by(self) -> LimitedBy | None:
        """What limits containers to their amounts. Includes MPS, which is in `sharing` and not in `limiter`."""
        # as a value of `limiter`, MPS would make the event unreadable for earlier versions
        return "mps" if self.by_amounts and self.sharing == "mps" else self.limiter

    @property
    def has_numa_topology(self) -> bool:
        """Whether the devices are listed to the kubelet with NUMA nodes; slots are not, unless `numa_topology` is set."""
        return self.slots is None or self.slots.numa_topology

    def handed_out(self, base: DeviceID) -> Iterator[DeviceID]:
        """The ids under which one of the devices is handed out."""
        return handed_out(base, self.replicas, self.unit)
