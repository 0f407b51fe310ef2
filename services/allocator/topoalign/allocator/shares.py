"""
Shares of GPUs that are offered in units, over the kubelet's protocol.

A kubelet asks for a container's computing time and for its memory one after the other, in any order, and does not say for
which container. Both have to be of one GPU.

- GetPreferredAllocation: what is reserved for such a question, else units of the GPU of the newest grant if that lacks its
  other half, else of the GPU of which least is left (`core.sharing.units`).
- Allocate: units of several GPUs are refused, but for whole GPUs and their memory.
- PreStartContainer: the kubelet's checkpoint has by then what each container was given. One whose halves are of two GPUs,
  or that would share a GPU which another pod has whole, does not start. So no container runs with the share of another.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.ports import Listing, Part
from topoalign.core.demand.units import InvalidShare, Share, check_share, share_of, unit_of
from topoalign.core.hints.devices import DeviceProvider
from topoalign.core.model.decisions import Explanation, Refusal
from topoalign.core.model.errors import NoFit, Unavailable
from topoalign.core.model.events import Owner
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.requests import PodRequest
from topoalign.core.model.topology.offers import CORES
from topoalign.core.placement.reserved import parts_of
from topoalign.core.placement.sparing import prefer_sparing
from topoalign.core.sharing.refusals import ShareSplit
from topoalign.core.sharing.units import SHARE, check_gpus, choose_gpus, units_on
from topoalign.core.state.fold import NodeState
from topoalign.core.state.reservations import NodeReservations
from topoalign.core.state.unit_amounts import UnitsLeft

Devices = Mapping[ResourceName, Sequence[DeviceID]]


def open_half(state: NodeState, resource: ResourceName) -> tuple[DeviceID, ...]:
    """
    The GPUs of the newest grant of units, if it has none of this resource; () where it does. A kubelet admits one pod after
    the other, so that grant is of the same container, or of one that asked for one half alone.
    """
    for allocation in reversed(tuple(state.allocations.values())):
        if allocation.amounts:
            return () if resource in allocation.devices else tuple(allocation.amounts)
    return ()


def prefer_free(
    state: NodeState,
    resource: ResourceName,
    available: Collection[DeviceID],
    must_include: Sequence[DeviceID],
    size: int,
    placement: str,
    kept: Collection[DeviceID],
) -> tuple[DeviceID, ...]:
    """As `prefer_sparing`, and of units those of one share."""
    if unit_of(state.hardware, resource) is not None:
        return prefer_share(state, resource, available, must_include, size, kept)
    return prefer_sparing(state.hardware, state.ownership, resource, available, must_include, size, placement, kept)


def prefer_share(
    state: NodeState,
    resource: ResourceName,
    available: Collection[DeviceID],
    must_include: Sequence[DeviceID],
    size: int,
    kept: Collection[DeviceID] = (),
) -> tuple[DeviceID, ...]:
    """The units that a container should get; () where no GPU has enough of them. `kept`: what counts as held besides."""
    topology, owned = state.hardware, state.ownership
    spared = frozenset(kept)
    spare = [unit for unit in available if unit not in spared and not owned.is_held(unit)]
    if not max(1, len(must_include)) <= size <= len(available) or not {*must_include} <= {*available}:
        return ()
    fitting = Counter(map(topology.card_of, spare))
    share = Share(size, 0) if unit_of(topology, resource) == "cores" else Share(0, size)
    gpus = tuple(dict.fromkeys(map(topology.card_of, must_include))) or open_half(state, resource)
    if sum(fitting[gpu] for gpu in gpus) + len(must_include) < size:
        left = {
            gpu: counted(units, share, fitting[gpu])
            for gpu, units in owned.units_left.items()
            if share.whole or not share.cores or units.blocks
        }
        gpus = choose_gpus(topology, left, share, fitting)
    return units_on(topology, spare, must_include, size, gpus) if gpus else ()


def counted(left: UnitsLeft, share: Share, spare: int) -> UnitsLeft:
    """What is left of a GPU, as far as the kubelet may take it."""
    if share.cores:
        unused = left.unused and spare >= CORES
        return msgspec.structs.replace(left, cores=min(left.cores, spare), unused=unused)
    return msgspec.structs.replace(left, blocks=min(left.blocks, spare))


def check_units(
    state: NodeState,
    resource: ResourceName,
    containers: Iterable[Sequence[DeviceID]],
    reserved: NodeReservations,
    now: float,
) -> None:
    """
    Raises InvalidShare and ShareSplit for units that are no container's share. Of a resource without units all is right.
    """
    topology, kind = state.hardware, unit_of(state.hardware, resource)
    for units in containers if kind is not None else ():
        counts = Counter(map(topology.card_of, units))
        if kind == "cores":
            share = Share(len(units), 0)
            if share.cores > CORES:
                check_share(share)
            check_gpus(topology, share, {resource: units})
            if share.whole and (others := sharers_of(state, resource, counts)):
                raise ShareSplit(SHARE, f"{others} of the GPUs are used by others")
            continue
        together = (devices for *_, devices in parts_of(reserved, now, resource))
        if not counts.keys() <= whole_gpus(state) and frozenset(units) not in together:
            check_gpus(topology, Share(0, len(units)), {resource: units})


def sharers_of(state: NodeState, resource: ResourceName, gpus: Collection[DeviceID]) -> int:
    """How many of these GPUs somebody else has a part of. The newest grant may be the other half of the same container."""
    half = open_half(state, resource)
    return sum(1 for gpu in gpus if gpu not in half and not state.ownership.units_left[gpu].unused)


def whole_gpus(state: NodeState) -> frozenset[DeviceID]:
    """The GPUs of which one allocation has all computing time."""
    live = state.allocations.values()
    return frozenset(gpu for each in live for gpu, amount in each.amounts.items() if amount.cores >= CORES)


def check_halves(ledger: Ledger, listing: Listing, resource: ResourceName, units: Sequence[DeviceID]) -> None:
    """
    Refuses to start a container with these units, and records that, if they are no share of one GPU. Raises ShareSplit and
    InvalidShare, and Unavailable where the kubelet does not tell what the container has besides.
    """
    asked = frozenset(units)
    mine = next((part for part in listing.parts if part.resource == resource and part.devices == asked), None)
    if mine is None:
        raise Unavailable(
            f"the kubelet's checkpoint does not have the {len(asked)} {resource} of the container yet",
            "the kubelet starts the container again; see whether its device plugin directory can be read",
        )
    try:
        check_container(ledger.state, listing, mine)
    except NoFit as misfit:
        for shown in listing.holdings:
            if shown.resource == resource and shown.devices == asked:
                record_refusal(ledger, shown.owner, misfit)
        raise


def check_container(state: NodeState, listing: Listing, mine: Part) -> None:
    """Raises ShareSplit and InvalidShare for a container that has this entry of the checkpoint, and others."""
    topology = state.hardware
    theirs = {
        part.resource: tuple(part.devices)
        for part in listing.parts
        if (part.pod_uid, part.container) == (mine.pod_uid, mine.container)
    }
    share = share_of(topology, {name: len(devices) for name, devices in theirs.items()})
    if share is None:
        raise InvalidShare(f"{mine.resource} is not offered in units any more", "let the pod be made anew")
    check_share(share)
    check_gpus(topology, share, theirs)
    gpus = frozenset(map(topology.card_of, mine.devices))
    for each in state.allocations.values():
        whole = gpus.intersection(gpu for gpu, amount in each.amounts.items() if amount.cores >= CORES)
        if whole and each.owner is not None and each.pod_uid != mine.pod_uid:
            raise ShareSplit(SHARE, f"another pod has all computing time of {len(whole)} of its GPUs")


def record_refusal(ledger: Ledger, owner: Owner, misfit: NoFit) -> None:
    """Records that a container was not started, and why."""
    refusal = Refusal(
        reason="PreStartContainer",
        code=misfit.code,
        finding=misfit.finding,
        remedy=misfit.remedy,
        container=owner.container,
        provider=DeviceProvider.name,
        explanation=Explanation(),
    )
    ledger.refuse(PodRequest(namespace=owner.namespace, name=owner.pod, containers=()), refusal)
