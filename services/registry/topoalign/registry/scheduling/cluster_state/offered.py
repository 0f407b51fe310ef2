"""
Collects the resources that the nodes of the cluster offer: resource names, and the settings of units and slots.

Every node with known hardware counts until it is deleted, even if the scheduler cannot use it now. So all registries
make the same decision for a pod, regardless of when they were started.
"""

from collections import Counter
from collections.abc import Set
from typing import NamedTuple

from topoalign.core.demand.shares import SlotResources, UnitResources, unit_resource_names
from topoalign.core.model.events import UsageObserved
from topoalign.core.model.ids import DeviceID, NodeName, ResourceName
from topoalign.core.model.requests import PodRequest
from topoalign.core.model.topology.model import Topology
from topoalign.core.sharing.pod_checks import offers_of_machines
from topoalign.core.sharing.quota_amounts import UNKNOWN_SIZES, GpuSizes, gpu_sizes
from topoalign.core.sharing.slot_defaults import FilledIn, slot_defaults


class Offered(NamedTuple):
    """The resources of one node, with the fields of `OfferedResources`."""

    names: frozenset[ResourceName]
    units: frozenset[UnitResources]
    slots: frozenset[SlotResources]
    not_in_slots: frozenset[ResourceName]
    compats: frozenset[str]
    sizes: GpuSizes


class OfferedResources:
    """The resources that at least one node of the cluster offers."""

    def __init__(self) -> None:
        self.names: frozenset[ResourceName] = frozenset()
        """All resource names, including those for amounts of GPUs in slots."""
        self.units: frozenset[UnitResources] = frozenset()
        """The settings with which GPUs are offered in units."""
        self.slots: frozenset[SlotResources] = frozenset()
        """The settings with which GPUs are offered in slots."""
        self.not_in_slots: frozenset[ResourceName] = frozenset()
        """Resources that a node offers other than in slots. Another node may offer the same resource in slots."""
        self.compats: frozenset[str] = frozenset()
        """The compat modes of nodes with slots, as in `KubeletRules`; empty: topoalign's own."""
        self.sizes_version = 0
        """Increases if `sizes_on` may have changed for a node."""
        self._nodes: dict[NodeName, tuple[Topology, str, Offered]] = {}
        self._sizes: dict[GpuSizes, GpuSizes] = {}
        """One object for equal sizes, so that equal nodes share it."""
        self._counts = Counter[Offered]()
        """Offer -> the number of nodes with it."""
        self._gpus = Counter[DeviceID]()
        """GPU -> the number of nodes that report it."""

    @property
    def gpus(self) -> Set[DeviceID]:
        """The UUIDs of all GPUs, whether they are offered whole, in units or in slots."""
        return self._gpus.keys()

    def note(self, node: NodeName, hardware: Topology, usage: UsageObserved | None = None) -> None:
        """Records the hardware and the usage of a node."""
        before = self._nodes.get(node)
        compat = "" if usage is None or usage.kubelet is None else usage.kubelet.rules.compat
        if before is not None and before[0] is hardware and before[1] == compat:  # true for nearly every fact of a node
            return
        offers = offers_of_machines((hardware.without_tables(),))
        sizes = gpu_sizes(hardware.without_tables())
        now = Offered(
            names=offers.names,
            units=frozenset(offers.units),
            slots=frozenset(offers.slots),
            not_in_slots=frozenset(offers.otherwise),
            compats=frozenset({compat} if offers.slots else ()),
            sizes=self._sizes.setdefault(sizes, sizes),
        )
        self.drop(node)
        self.sizes_version += 1
        self._nodes[node] = hardware, compat, now
        self._gpus.update(gpu.id for gpu in hardware.gpus)
        self._count(now, 1)

    def names_on(self, node: NodeName) -> frozenset[ResourceName]:
        """The `names` of one node; empty: its hardware is unknown."""
        known = self._nodes.get(node)
        return frozenset() if known is None else known[2].names

    def sizes_on(self, node: NodeName | None) -> GpuSizes:
        """The sizes of a node's GPUs: the same object for equal nodes, `UNKNOWN_SIZES` for an unknown node or None."""
        known = None if node is None else self._nodes.get(node)
        return UNKNOWN_SIZES if known is None else known[2].sizes

    def drop(self, node: NodeName) -> None:
        """Removes a node."""
        before = self._nodes.pop(node, None)
        if before is None:
            return
        hardware, _, offered = before
        self.sizes_version += 1
        for gpu in hardware.gpus:
            self._gpus[gpu.id] -= 1
            if not self._gpus[gpu.id]:
                del self._gpus[gpu.id]
        self._count(offered, -1)

    def _count(self, offered: Offered, nodes: int) -> None:
        kinds = len(self._counts)
        self._counts[offered] += nodes
        if not self._counts[offered]:
            del self._counts[offered]
        if len(self._counts) != kinds:
            self.names = frozenset[ResourceName]().union(*(each.names for each in self._counts))
            self.units = frozenset[UnitResources]().union(*(each.units for each in self._counts))
            self.slots = frozenset[SlotResources]().union(*(each.slots for each in self._counts))
            self.not_in_slots = frozenset[ResourceName]().union(*(each.not_in_slots for each in self._counts))
            self.compats = frozenset[str]().union(*(each.compats for each in self._counts))

    def left_out(self, pod: PodRequest) -> list[FilledIn]:
        """The resources that a pod with slots does not request and that are added to it (`slot_defaults`)."""
        return slot_defaults(pod, self.slots, self.not_in_slots, unit_resource_names(self.units))
