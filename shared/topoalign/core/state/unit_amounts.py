"""
How much of each GPU is left, where GPUs are offered in units.

Of a GPU of which all computing time or all memory is held nothing is left: a share needs both. Example: one container
holds `GPU-0::c0` to `GPU-0::c99` and 40 blocks, two others each 50 units of computing time of GPU-1 and 10 blocks. Nothing
is left of either, although 280 and 300 blocks were not given out.

Two allocations may name one unit: an init container that has ended, and the container that took it over, which holds it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from typing import NamedTuple

import msgspec

from topoalign.core.model.allocations import Allocation, Owner, amounts_of
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import AllocationID, DeviceID, Namespace, PodName
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.offers import CORES, MEMORY_BLOCK
from topoalign.core.model.topology.views import made_once
from topoalign.core.state.device_health import HandedOut


class UnitsLeft(msgspec.Struct, frozen=True):
    """What is left of one GPU, in units."""

    cores: int
    """Hundredths of its computing time."""
    blocks: int
    """Of its memory."""
    all_blocks: int
    """That it has."""
    sharers: int
    """Allocations that hold some of it. Granted to a kubelet, computing time is one and memory another."""
    unused: bool
    """Whether nobody holds anything of it."""


class HeldOfGpu(msgspec.Struct, frozen=True):
    """What is held of one GPU in units."""

    cores: int = 0
    blocks: int = 0
    sharers: int = 0
    """Allocations."""
    settled: bool = True
    """
    Whether a checkpoint of the kubelet has the containers of all of them: it is written when a container has all that it
    asks for. Before, the kubelet may be about to ask for the other half.
    """


NOTHING = HeldOfGpu()


def held_of_gpus(allocations: Iterable[Allocation]) -> Mapping[DeviceID, HeldOfGpu]:
    """GPU -> what these allocations hold of it in units, for the GPUs of which any is held so. Oldest first."""
    live, found = [*allocations], dict[DeviceID, HeldOfGpu]()
    left = left_by_init_containers(live)
    for allocation in live:
        for gpu, amount in left.get(allocation.id, allocation.amounts).items():
            former = found.get(gpu, NOTHING)
            found[gpu] = HeldOfGpu(
                former.cores + amount.cores,
                former.blocks + amount.memory // MEMORY_BLOCK,
                former.sharers + 1,
                former.settled and bool(allocation.pod_uid),
            )
    return found


def left_by_init_containers(allocations: Sequence[Allocation]) -> Mapping[AllocationID, Mapping[DeviceID, Amount]]:
    """
    Init container's allocation -> what it holds of GPUs in units that no later container of its pod has taken over.
    `allocations`: oldest first.
    """
    found: dict[AllocationID, Mapping[DeviceID, Amount]] = {}
    pods = {pod_of(each) for each in allocations if each.role == "init" and each.amounts} - {None}
    taken = defaultdict[object, set[DeviceID]](set)
    for each in reversed(allocations) if pods else ():
        if (pod := pod_of(each)) not in pods:
            continue
        if each.role == "init":
            found[each.id] = amounts_of(each.device_ids - taken[pod])
        taken[pod] |= each.device_ids
    return found


def pod_of(allocation: Allocation) -> tuple[Namespace, PodName] | None:
    """Namespace and name of the pod that has an allocation; None: it is not known."""
    owner = allocation.owner
    return None if owner is None else (owner.namespace, owner.pod)


class Holder(NamedTuple):
    """Who has units of GPUs."""

    pod: str
    """UID of the pod, else its namespace and name; empty: not known."""
    container: str
    """Its name; of a pod that is not known the id of the allocation."""


def holder_of(owner: Owner, pod_uid: str) -> Holder:
    """A container by its names and the UID of its pod, if that is known."""
    return Holder(pod_uid or f"{owner.namespace}/{owner.pod}", owner.container)


def units_by_holder(allocations: Iterable[Allocation]) -> Mapping[Holder, Set[DeviceID]]:
    """
    Container -> the devices that it has by these allocations, of which it may have several: the kubelet asks for one kind
    after the other, and a later container may have taken some over. One that was displaced has what it had.
    """
    found = defaultdict[Holder, set[DeviceID]](set)
    for each in allocations:
        for holder, devices in holders_in(each):
            found[holder].update(devices)
    return found


def holders_in(allocation: Allocation) -> Iterator[tuple[Holder, Iterable[DeviceID]]]:
    """The containers that have something of an allocation, its own and those that it displaced, and what each has."""
    owner = allocation.owner
    yield Holder("", allocation.id) if owner is None else holder_of(owner, allocation.pod_uid), allocation.device_ids
    for former in allocation.displaced:
        yield holder_of(former.owner, former.pod_uid), chain.from_iterable(former.devices.values())


def excluded(asked: Mapping[DeviceID, Amount], held: Mapping[DeviceID, Amount]) -> list[DeviceID]:
    """The GPUs of which one has all computing time, and the other has something as well. Sorted."""
    return sorted(gpu for gpu in asked.keys() & held.keys() if CORES in (asked[gpu].cores, held[gpu].cores))


def unshareable(allocations: Iterable[Allocation], asked: Mapping[DeviceID, Amount]) -> list[Allocation]:
    """
    The allocations beside which nobody may get these amounts of GPUs: of a GPU of which one container has all computing
    time, nobody else has anything. `asked` itself may be such a claim.
    """
    near = [each for each in allocations if not asked.keys().isdisjoint(each.amounts)]
    barred = {holder for holder, units in units_by_holder(near).items() if excluded(asked, amounts_of(units))}
    return [each for each in near if any(holder in barred for holder, _ in holders_in(each))]


@made_once
def units_offered(topology: Topology) -> Mapping[DeviceID, Mapping[str, int]]:
    """GPU in units -> kind -> how many units it has."""
    offered: dict[DeviceID, dict[str, int]] = {}
    for offer in topology.offered:
        for gpu in offer.devices if offer.unit is not None else ():
            offered.setdefault(gpu, {})[str(offer.unit)] = offer.replicas
    return offered


def spent(topology: Topology, allocations: Iterable[Allocation]) -> frozenset[DeviceID]:
    """
    The GPUs of which all computing time or all memory is held, by containers that a checkpoint of the kubelet has. It shapes
    what is listed and preferred, and is no reason to refuse what a kubelet asks for.
    """
    offered = units_offered(topology)
    if not offered:
        return frozenset()
    return frozenset(
        gpu
        for gpu, held in held_of_gpus(allocations).items()
        if gpu in offered
        and held.settled
        and (held.cores >= offered[gpu].get("cores", 0) or held.blocks >= offered[gpu].get("memory", 0))
    )


def units_left(
    topology: Topology, allocations: Iterable[Allocation], handed_out: HandedOut
) -> Mapping[DeviceID, UnitsLeft]:
    """
    GPU -> what is left of it, in the hardware's order, for those that are offered in units. Nothing is left of one that is
    not healthy, or that somebody holds in another way.
    """
    offered = units_offered(topology)
    if not offered:
        return {}
    held = held_of_gpus(allocations)
    found = {}
    for gpu in topology.gpu_by_id:
        if (units := offered.get(gpu)) is None:
            continue
        taken = held.get(gpu, NOTHING)
        some = handed_out.health_of(gpu).usable
        found[gpu] = UnitsLeft(
            max(0, units.get("cores", 0) - taken.cores) if some else 0,
            max(0, units.get("memory", 0) - taken.blocks) if some else 0,
            units.get("memory", 0),
            taken.sharers,
            some and not taken.sharers,
        )
    return found
