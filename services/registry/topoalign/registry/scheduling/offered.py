"""What the nodes of the cluster offer, all together: by which names devices are asked for, and in which units and slots."""

from topoalign.core.demand.slots import SlotResources, amount_resources, slot_resources
from topoalign.core.demand.units import UnitResources, unit_resources
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.topology.model import Topology


class OfferedResources:
    """What some node of the cluster offers, or did."""

    def __init__(self) -> None:
        self.names: frozenset[ResourceName] = frozenset()
        """All resources, and those by which amounts of GPUs in slots are asked for."""
        self.units: frozenset[UnitResources] = frozenset()
        """The ways in which GPUs are offered in units."""
        self.slots: frozenset[SlotResources] = frozenset()
        """Those in which they are offered in slots."""

    def note(self, hardware: Topology) -> None:
        """A node has this hardware now."""
        self.names |= hardware.offers_of.keys() | amount_resources(hardware)
        self.slots |= frozenset(slot_resources(hardware))
        if (units := unit_resources(hardware)) is not None:
            self.units |= {units}
