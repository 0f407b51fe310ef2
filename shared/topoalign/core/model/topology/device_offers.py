"""Describes which of a node's hardware the device plugin offers to the kubelet. `holdings` parses the ids."""

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
"""The same, and NVIDIA's MPS."""

CORES = 100
"""Units of computing time of a GPU."""
MEMORY_BLOCK = 256 * MIB
"""Bytes of a unit of memory. What a GPU has beyond its last whole block is not given out."""


class Slots(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Resources that containers with slots may ask for; no plugin lists them, and a value is for each GPU."""

    memory: ResourceName = ResourceName("nvidia.com/gpumem")
    """MiB of each GPU."""
    percentage: ResourceName = ResourceName("nvidia.com/gpumem-percentage")
    """Memory as hundredths of each GPU's."""
    cores: ResourceName = ResourceName("nvidia.com/gpucores")
    """Hundredths of each GPU's computing time."""
    priority: ResourceName = ResourceName("nvidia.com/priority")
    """0 high, 1 low."""
    memory_scaling: Annotated[float, msgspec.Meta(ge=0.1, le=100)] = 1.0
    """How much memory is given of each GPU, as a multiple of what it has."""
    core_scaling: Annotated[float, msgspec.Meta(ge=1, le=100)] = 1.0
    """How much computing time is given of each GPU, as a multiple of 100."""
    numa_topology: bool = False
    """Whether slots are listed with the NUMA nodes of their GPUs, by which the Topology Manager then counts them."""
    instances: bool = False
    """Each slot becomes a MIG instance of its own: what a container holds of a GPU is one of the GPU's profiles."""

    @property
    def resources(self) -> tuple[ResourceName, ...]:
        """All of them."""
        return self.memory, self.percentage, self.cores, self.priority


class Offer(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Devices of this node that are offered to the kubelet under one resource, whole or shared."""

    resource: ResourceName
    """Name of the extended resource, `nvidia.com/gpu`."""
    devices: tuple[DeviceID, ...]
    """What is handed out: uuids of GPUs or of MIG instances, names of NICs, PCI addresses of virtual functions."""
    replicas: int = 1
    """Above 1 each device is shared, and handed out as `<device>::0` to `<device>::<replicas - 1>`."""
    sharing: Literal["time-slicing", "mps"] = "time-slicing"
    """How shares are kept apart: in time, without limits, or by NVIDIA's MPS, each limited to its part."""
    unit: UnitKind | None = None
    """What the `replicas` are units of: hundredths of its time, or blocks of 256 MiB of memory. None: no units."""
    limiter: Limiter | None = None
    """
    The library that limits containers to the amounts that they hold: none, Gaia's for units (`vcuda`), HAMi's for slots
    (`hami-core`). None: there are no amounts, or MPS (in `sharing`) or the hardware limits them, as with MIG instances.
    """
    slots: Slots | None = None
    """The shares are slots, by which containers hold amounts of a GPU, an equal part if unknown. None: no slots."""
    most: int | None = None
    """The largest number that a container may ask for. None: as many as there are."""
    packing: Literal["distributed", "packed"] = "distributed"
    """Of shares and MIG instances: from the GPUs of which the fewest, or the most, are held already."""

    @property
    def shared(self) -> bool:
        """Whether a device is offered in shares or in units."""
        return self.replicas > 1 or self.unit is not None

    @property
    def by_amounts(self) -> bool:
        """Whether containers get amounts of the devices: units of them, or slots with amounts."""
        return self.unit is not None or self.slots is not None

    @property
    def limited_by(self) -> LimitedBy | None:
        """What limits containers to their amounts, MPS included, which an event gives in `sharing`."""
        # as a value of `limiter` it would make the event unreadable for earlier versions
        return "mps" if self.by_amounts and self.sharing == "mps" else self.limiter

    @property
    def has_numa_topology(self) -> bool:
        """Whether the devices are listed to the kubelet with NUMA nodes; slots are not, unless `numa_topology` is set."""
        return self.slots is None or self.slots.numa_topology

    def handed_out(self, base: DeviceID) -> Iterator[DeviceID]:
        """The ids under which one of the devices is handed out."""
        return handed_out(base, self.replicas, self.unit)
