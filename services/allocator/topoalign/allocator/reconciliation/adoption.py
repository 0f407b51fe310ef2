"""Finds allocations that no record has: of containers that the kubelet shows, and of displaced ones that run on."""

from collections.abc import Collection, Iterable, Sequence

import msgspec

from topoalign.allocator.hardware_watch import is_confirmed
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.ports import KubeletListing, ResourceEntry
from topoalign.allocator.reconciliation.liveness import is_before, kubelet_places, shown_of, still_displaced
from topoalign.allocator.reconciliation.usage import is_recorded_here
from topoalign.core.model.events import Allocation, Displaced, Owner
from topoalign.core.model.holdings import HoldingSet
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.device_sets import NO_DEVICES, DeviceSet
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState

# Sorts devices in the hardware's order: a container sees them in it, in whatever order the kubelet named them.


def in_offered_order(hardware: Topology, resource: ResourceName, devices: Iterable[DeviceID]) -> tuple[DeviceID, ...]:
    """The devices in the order in which the resource offers them; those that it does not offer come last, by name."""
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
    Makes allocations for containers that the kubelet shows with devices of ours which no record holds: they were there
    before this allocator, or were released too early.

    Of contradicted records also what an init container may still have, which is shown nowhere: what
    the kubelet's checkpoint has of them, or all where it cannot be read. Of the pods `late` (UIDs), what the
    checkpoint has given to containers not shown; of all while the record is unconfirmed, once the hardware is confirmed.
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
        ours = ordered(state, holding.resource, holding.devices)
        if ours and all(map(is_free, ours)):
            take_in(holding.owner, holding.resource, ours, holding.pod_uid)
    left = {place for each in contradicted for place in kubelet_places(each)} - shown_of(listing)
    unread = tuple(ResourceEntry(resource, frozenset({device})) for resource, device in sorted(left))
    is_doubted = ledger.unconfirmed is not None and is_confirmed(ledger.state.health)
    for part in listing.parts if listing.checkpoint is not None else unread:
        whole = is_doubted or part.pod_uid in late
        held = frozenset(d for d in part.devices if whole or (part.resource, d) in left)
        if ours := tuple(filter(is_free, ordered(state, part.resource, held))):
            take_in(None, part.resource, ours, part.pod_uid)
    return found


def returned(
    ledger: Ledger, ended: Sequence[Allocation], listing: KubeletListing | None, granted: Sequence[Allocation] = ()
) -> list[Allocation]:
    """
    Makes allocations for containers that the `ended` ones displaced and that run on, as far as nobody else has their
    devices. They are to be granted in the place of the ended ones, after those that are `granted` there already. Of several
    that had a device, the last one that did has it again, and has displaced the others, as before.
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
    return [msgspec.structs.replace(each, displaced=others_of(state, each, formers)) for each in found]


def others_of(state: NodeState, returning: Allocation, displaced: Sequence[Displaced]) -> tuple[Displaced, ...]:
    """Those of the displaced that have some of the devices of one that has returned, each once, without itself."""
    found = {(each.owner, each.pod_uid): each for each in of_devices(state, displaced, returning.device_ids)}
    return tuple(each for name, each in found.items() if name != (returning.owner, returning.pod_uid))


def without_allocations(state: NodeState, allocations: Sequence[Allocation]) -> NodeState:
    """The state as if these allocations were not live."""
    for each in allocations:
        state = state.without(each.id)
    return state


def of_devices(
    state: NodeState, displaced: Sequence[Displaced], devices: Collection[DeviceID]
) -> tuple[Displaced, ...]:
    """Those of the displaced that have one of these devices, a part of one, or what one is a part of."""
    wanted = state.ownership.set_of(devices)
    holding = state.ownership.holding
    return tuple(
        each for each in displaced if any(wanted.overlaps(holding(d)) for ids in each.devices.values() for d in ids)
    )


def ordered(state: NodeState, resource: ResourceName, devices: frozenset[DeviceID]) -> tuple[DeviceID, ...]:
    """Those of the devices that this allocator keeps the record of (`is_recorded_here`), in the hardware's order."""
    hardware = state.hardware
    return in_offered_order(
        hardware, resource, (device for device in devices if is_recorded_here(hardware, resource, device))
    )
