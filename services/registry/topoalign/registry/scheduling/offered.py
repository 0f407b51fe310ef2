"""What the nodes of the cluster offer, all together: by which names devices are asked for, and in which units and slots."""

from topoalign.core.demand.slots import SlotResources, amount_resources, resources_in_slots, slot_resources
from topoalign.core.demand.units import UnitResources, unit_resources
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.requests import PodRequest
from topoalign.core.model.topology.model import Topology
from topoalign.core.sharing.slot_defaults import FilledIn, slot_defaults


class OfferedResources:
    """What some node of the cluster offers, or did."""

    def __init__(self) -> None:
        self.names: frozenset[ResourceName] = frozenset()
        """All resources, and those by which amounts of GPUs in slots are asked for."""
        self.units: frozenset[UnitResources] = frozenset()
        """The ways in which GPUs are offered in units."""
        self.slots: frozenset[SlotResources] = frozenset()
        """Those in which they are offered in slots."""
        self.not_in_slots: frozenset[ResourceName] = frozenset()
        """Resources that some node offers in another way than in slots; another node may offer the same in slots."""

    def note(self, hardware: Topology) -> None:
        """A node has this hardware now."""
        self.names |= hardware.offers_of.keys() | amount_resources(hardware)
        self.slots |= frozenset(slot_resources(hardware))
        self.not_in_slots |= hardware.offers_of.keys() - resources_in_slots(hardware).keys()
        if (units := unit_resources(hardware)) is not None:
            self.units |= {units}

    def left_out(self, pod: PodRequest) -> list[FilledIn]:
        """What a pod leaves out that asks for slots (`slot_defaults`)."""
        return slot_defaults(pod, self.slots, self.not_in_slots)
