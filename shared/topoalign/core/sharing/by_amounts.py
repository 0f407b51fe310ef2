"""What a decision about a pod asks of GPUs that are offered by amounts: in units, or in slots."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from topoalign.core.demand.pod_demand import ContainerDemand, PodDemand
from topoalign.core.demand.units import share_of, unit_of
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.bitmask import Mask
from topoalign.core.model.topology.by_amounts import offers_in_slots
from topoalign.core.model.topology.device_sets import DeviceSet
from topoalign.core.placement.devices import Choice
from topoalign.core.sharing import choosers
from topoalign.core.sharing.units import UnitChooser, check_units
from topoalign.core.state.fold import NodeState


class Chooser(Protocol):
    """Chooses which units or slots of one resource a container gets."""

    def room(self) -> DeviceSet:
        """Those that may be chosen: of GPUs with enough left. Raises ShareDoesNotFit where there are too few."""

    def check_takeover(self, reusable: Collection[DeviceID], amount: int) -> None:
        """
        Raises ShareSplit where a kubelet picks at random `amount` of these, which init containers left, and may pick wrong.
        """

    def prefer(self, choice: Choice, near: Sequence[DeviceID]) -> tuple[DeviceID, ...]:
        """
        What the container gets, of those that may be chosen; () where no GPUs have enough. `near`: the GPUs that it has.
        """


def chooser_of(
    state: NodeState, container: ContainerDemand, resource: ResourceName, compat: str, affinity: Mask | None
) -> Chooser | None:
    """
    Chooses for this container; None: the resource is not offered by amounts, or no amount of it is asked for. `compat`: as
    in the rules of the node. `affinity`: the NUMA nodes that the container is aligned to.
    """
    hardware = state.hardware
    share = share_of(hardware, container.devices, container.cards) if unit_of(hardware, resource) is not None else None
    if share is not None:
        return UnitChooser(state, container, share, resource, compat)
    chooser = choosers.slot_chooser_of(state, container, affinity) if offers_in_slots(hardware) else None
    return chooser if chooser is not None and chooser.resource == resource else None


def check_shares(
    state: NodeState,
    demand: PodDemand,
    container: ContainerDemand,
    devices: Mapping[ResourceName, Sequence[DeviceID]],
) -> None:
    """Raises ShareSplit and WholeGpuInUse where the container cannot have these devices together; others are all right."""
    share = share_of(state.hardware, container.devices, container.cards)
    if share is not None:
        check_units(state, demand, devices, share)
    chooser = choosers.slot_chooser_of(state, container) if offers_in_slots(state.hardware) else None
    if chooser is not None:
        chooser.check_given(devices.get(chooser.resource, ()))
