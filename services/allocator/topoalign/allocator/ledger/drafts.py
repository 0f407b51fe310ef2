"""What the ledger is given to record: facts that lack their place in the journal."""

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypedDict

import msgspec

from topoalign.core.model.allocations import Allocation
from topoalign.core.model.decisions import Refusal
from topoalign.core.model.events import (
    AllocationDeviated,
    AllocationRefused,
    AllocationReleased,
    AllocationsSnapshot,
    ContainerUsage,
    Displaced,
    KubeletObserved,
    LedgerEvent,
    MemoryExcess,
    Owner,
    UsageObserved,
)
from topoalign.core.model.ids import AllocationID, DeviceID, NodeName
from topoalign.core.model.requests import PodRequest
from topoalign.core.state.fold import NodeState


class Draft(Protocol):
    """A fact without its place in the journal: called with node, epoch and seq, it returns the event."""

    def __call__(self, *, node: NodeName, epoch: int, seq: int) -> LedgerEvent: ...


class Binding(NamedTuple):
    """Who holds an allocation, as in `AllocationBound`."""

    allocation: AllocationID
    owner: Owner
    pod_uid: str = ""
    displaced: tuple[Displaced, ...] = ()
    as_reserved: bool = False


class Observed(TypedDict, total=False):
    """What was read of the kubelet and measured, as in `UsageObserved`; what was not read is left out."""

    containers: tuple[ContainerUsage, ...]
    kubelet: KubeletObserved
    exceeding: tuple[MemoryExcess, ...]


def unobserved(node: NodeName, epoch: int) -> UsageObserved:
    """The `UsageObserved` from before the first reading of the kubelet: revision 0, and no container known."""
    return UsageObserved(node=node, epoch=epoch, revision=0, containers=(), containers_known=False)


def observed(had: UsageObserved, seen: Observed, live: Container[AllocationID]) -> UsageObserved:
    """
    The next revision after this was `seen`; the same one where it is no news. A container is above its memory no longer when
    its allocations are not `live` any more, whether anybody measures or not.
    """
    now = msgspec.structs.replace(had, **seen, containers_known=had.containers_known or "containers" in seen)
    exceeding = tuple(each for each in now.exceeding if any(name in live for name in each.allocations))
    now = msgspec.structs.replace(now, exceeding=exceeding)
    return had if now == had else msgspec.structs.replace(now, revision=had.revision + 1)


def deviation(allocation: Allocation, preferred: Sequence[DeviceID]) -> Draft:
    """The draft of `AllocationDeviated`: the kubelet took the devices of this allocation instead of the `preferred` ones."""
    allocated = tuple(device for devices in allocation.devices.values() for device in devices)
    return partial(AllocationDeviated, allocation=allocation.id, preferred=tuple(preferred), allocated=allocated)


def releases(allocations: Iterable[AllocationID], reasons: Mapping[AllocationID, str], otherwise: str) -> list[Draft]:
    """The drafts of `AllocationReleased` for these allocations, each for its reason or, without one, for `otherwise`."""
    return [partial(AllocationReleased, allocation=name, reason=reasons.get(name, otherwise)) for name in allocations]


def refused(pod: PodRequest, refusal: Refusal) -> Draft:
    """The draft of `AllocationRefused` for this pod."""
    return partial(
        AllocationRefused,
        namespace=pod.namespace,
        pod=pod.name,
        container=refusal.container,
        reason=refusal.reason,
        code=refusal.code,
        finding=refusal.finding,
        remedy=refusal.remedy,
    )


def snapshot(state: NodeState) -> Draft:
    """The draft of `AllocationsSnapshot` of all that is live in this state."""
    live = tuple(state.allocations.values())
    return partial(AllocationsSnapshot, allocations=live, memory=dict(state.memory), digest=state.digest)
