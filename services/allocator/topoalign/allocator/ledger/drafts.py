"""What the ledger is given to record: facts that lack their place in the journal."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypedDict

from topoalign.core.model.allocations import Allocation
from topoalign.core.model.events import (
    AllocationDeviated,
    ContainerUsage,
    Displaced,
    KubeletObserved,
    LedgerEvent,
    Owner,
    UsageObserved,
)
from topoalign.core.model.ids import AllocationID, DeviceID, NodeName


class Draft(Protocol):
    """A fact without its place in the journal: called with node, epoch and seq, it returns the event."""

    def __call__(self, *, node: NodeName, epoch: int, seq: int) -> LedgerEvent: ...


class Binding(NamedTuple):
    """Who holds an allocation, as in `AllocationBound`."""

    allocation: AllocationID
    owner: Owner
    pod_uid: str = ""
    displaced: tuple[Displaced, ...] = ()


class Observed(TypedDict, total=False):
    """What was read of the kubelet, as in `UsageObserved`; what was not read is left out."""

    containers: tuple[ContainerUsage, ...]
    kubelet: KubeletObserved


def unobserved(node: NodeName, epoch: int) -> UsageObserved:
    """The `UsageObserved` from before the first reading of the kubelet: revision 0, and no container known."""
    return UsageObserved(node=node, epoch=epoch, revision=0, containers=(), containers_known=False)


def deviation(allocation: Allocation, preferred: Sequence[DeviceID]) -> Draft:
    """The draft of `AllocationDeviated`: the kubelet took the devices of this allocation instead of the `preferred` ones."""
    allocated = tuple(device for devices in allocation.devices.values() for device in devices)
    return partial(AllocationDeviated, allocation=allocation.id, preferred=tuple(preferred), allocated=allocated)
