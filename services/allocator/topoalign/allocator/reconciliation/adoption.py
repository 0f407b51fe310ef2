"""Adds allocations that the record lacks: of containers that the kubelet reports, and of displaced ones that still run."""

from collections.abc import Collection, Iterable, Sequence

import msgspec

from topoalign.allocator.hardware_watch import is_confirmed
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.ports import KubeletListing, ResourceEntry
from topoalign.allocator.reconciliation.liveness import is_before, kubelet_places, reported_places, still_displaced
from topoalign.allocator.reconciliation.usage_publisher import is_recorded_here
from topoalign.core.model.events import Allocation, Displaced, Owner
from topoalign.core.model.holdings import HoldingSet
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.device_sets import NO_DEVICES, DeviceSet
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState


def in_offered_order(hardware: Topology, resource: ResourceName, devices: Iterable[DeviceID]) -> tuple[DeviceID, ...]:
    """Sorts devices as the resource offers them and the container sees them; others come last, by name."""
    offered = hardware.devices.get(resource, NO_DEVICES)
    if isinstance(devices, DeviceSet) and devices.devices is offered:
        return tuple(devices)
    places = offered.places
    named = tuple(devices)
    if all(map(places.__contains__, named)):  # most often, and a share may be hundreds of units
        return tuple(sorted(named, key=places.__getitem__))
    return tuple(sorted(named, key=lambda device: (places.get(device, len(places)), device)))


def adopt_unrecorded(
    ledger: Ledger, listing: KubeletListing, contradicted: Sequence[Allocation], late: Collection[str]
) -> list[Allocation]:
    """
    Creates allocations for containers that the kubelet reports with devices of ours that no record holds. The
    checkpoint, which has init containers, counts for devices of `contradicted` records, for the pods `late` (UIDs), and
    for all pods while the record is unconfirmed.
    """
    state = without_allocations(ledger.state, contradicted)
    found: list[Allocation] = []
    ownership = state.ownership
    taken = HoldingSet()

    def is_free(device: DeviceID) -> bool:
        return not ownership.is_held(device) and not taken.overlaps(ownership.holding(device))

    def take_in(owner: Owner | None, resource: ResourceName, devices: tuple[DeviceID, ...], pod_uid: str) -> None:
        displaced = of_devices(state, [former for each in contradicted for former in each.displaced], devices)
        found.append(
            Allocation(
                id=ledger.next_id(len(found)),
                owner=owner,
                devices={resource: devices},
                boot=ledger.boot,
                machine=ledger.machine,
                cards=ownership.cards_of(devices),
                pod_uid=pod_uid,
                displaced=displaced,
            )
        )
        taken.update(map(ownership.holding, devices))

    for holding in listing.holdings:
        ours = recorded_in_order(state, holding.resource, holding.devices)
        if ours and all(map(is_free, ours)):
            take_in(holding.owner, holding.resource, ours, holding.pod_uid)
    left = {place for each in contradicted for place in kubelet_places(each)} - reported_places(listing)
    unread = tuple(ResourceEntry(resource, frozenset({device})) for resource, device in sorted(left))
    is_unconfirmed = ledger.unconfirmed is not None and is_confirmed(ledger.state.health)
    for part in listing.parts if listing.checkpoint is not None else unread:
        whole = is_unconfirmed or part.pod_uid in late
        held = frozenset(d for d in part.devices if whole or (part.resource, d) in left)
        if ours := tuple(filter(is_free, recorded_in_order(state, part.resource, held))):
            take_in(None, part.resource, ours, part.pod_uid)
    return found


def return_displaced(
    ledger: Ledger, ended: Sequence[Allocation], listing: KubeletListing | None, granted: Sequence[Allocation] = ()
) -> list[Allocation]:
    """
    Creates allocations for containers that the `ended` ones displaced and that still run, for devices that no other
    has. Beside them others are `granted` already. If several had a device, the last one gets it and displaces the
    others.
    """
    found: list[Allocation] = []
    now = [each for each in ended if each.displaced and not is_before(each, ledger.boot)]
    if not now:
        return found
    state = without_allocations(ledger.state, ended)
    for each in granted:
        state = state.holding(each)
    formers = [former for each in now for former in still_displaced(each.displaced, listing)]
    for former in formers:
        devices = {
            resource: free
            for resource, ids in former.devices.items()
            if (free := tuple(device for device in ids if not state.ownership.is_held(device)))
        }
        if devices:
            back = {device for ids in devices.values() for device in ids}
            found.append(
                Allocation(
                    id=ledger.next_id(len(granted) + len(found)),
                    owner=former.owner,
                    devices=devices,
                    boot=ledger.boot,
                    machine=ledger.machine,
                    cards=state.ownership.cards_of(back),
                    pod_uid=former.pod_uid,
                    slots={slot: amount for slot, amount in former.slots.items() if slot in back},
                    instances={slot: uuid for slot, uuid in former.instances.items() if slot in back},
                )
            )
            state = state.holding(found[-1])
    returned: list[Allocation] = []
    for each in found:
        own = each.owner, each.pod_uid
        others = {(it.owner, it.pod_uid): it for it in of_devices(state, formers, each.device_ids)}
        displaced = tuple(other for name, other in others.items() if name != own)
        returned.append(msgspec.structs.replace(each, displaced=displaced))
    return returned


def without_allocations(state: NodeState, allocations: Sequence[Allocation]) -> NodeState:
    """Returns the state as if these allocations were not live."""
    for each in allocations:
        state = state.without(each.id)
    return state


def of_devices(
    state: NodeState, displaced: Sequence[Displaced], devices: Collection[DeviceID]
) -> tuple[Displaced, ...]:
    """Returns the displaced containers with a device that overlaps one of these."""
    wanted = state.ownership.set_of(devices)
    holding = state.ownership.holding
    return tuple(
        each for each in displaced if any(wanted.overlaps(holding(d)) for ids in each.devices.values() for d in ids)
    )


def recorded_in_order(state: NodeState, resource: ResourceName, devices: frozenset[DeviceID]) -> tuple[DeviceID, ...]:
    """Returns the devices that this allocator records (`is_recorded_here`), in the hardware's order."""
    hardware = state.hardware
    return in_offered_order(
        hardware, resource, (device for device in devices if is_recorded_here(hardware, resource, device))
    )
