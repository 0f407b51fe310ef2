"""
Creates allocations that the ledger needs in addition to those of the kubelet's calls:

- for containers that are not in the ledger;
- for the remaining devices of an allocation, if the kubelet has allocated some of its devices again;
- for displaced containers that still run.

The log lists each container whose devices another one may use.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
import structlog

from topoalign.allocator.hardware_watch import is_confirmed
from topoalign.allocator.ledger.ledger import Ledger, container_title
from topoalign.allocator.ports import KubeletListing, Place, ResourceEntry
from topoalign.allocator.reconciliation.liveness import (
    LivenessCheck,
    Rest,
    is_before,
    kubelet_places,
    reported_places,
    still_displaced,
)
from topoalign.allocator.reconciliation.usage_publisher import is_recorded_here
from topoalign.core.model.events import Allocation, Displaced, Owner
from topoalign.core.model.holdings import HoldingSet
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.model.topology.device_sets import NO_DEVICES, DeviceSet
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState
from topoalign.core.state.ownership import Ownership

UNNAMED = AllocationID("")
"""The ID of an allocation until `Ledger.named` sets it."""


def in_offered_order(hardware: Topology, resource: ResourceName, devices: Iterable[DeviceID]) -> tuple[DeviceID, ...]:
    """Sorts devices in the order in which they are offered and the container sees them. Others come last, by ID."""
    offered = hardware.devices.get(resource, NO_DEVICES)
    if isinstance(devices, DeviceSet) and devices.devices is offered:
        return tuple(devices)
    places = offered.places
    named = tuple(devices)
    if all(map(places.__contains__, named)):  # the usual case; a share may have hundreds of units
        return tuple(sorted(named, key=places.__getitem__))
    return tuple(sorted(named, key=lambda device: (places.get(device, len(places)), device)))


def adopt_unrecorded(
    ledger: Ledger, listing: KubeletListing, contradicted: Sequence[Allocation], late: Collection[str]
) -> list[Allocation]:
    """
    Creates allocations for containers that the kubelet reports with devices of this allocator that no allocation holds.
    The checkpoint also has init containers. Its entries are used for devices of `contradicted` allocations, for the
    pods in `late` (UIDs), and, while the ledger is unconfirmed, for all pods. If the checkpoint cannot be read,
    unreported devices of `contradicted` allocations stay allocated.
    """
    state = without_allocations(ledger.state, contradicted)
    found: list[Allocation] = []
    ownership = state.ownership
    taken = HoldingSet()

    def is_free(device: DeviceID) -> bool:
        return not ownership.is_held(device) and not taken.overlaps(ownership.holding(device))

    def take_in(owner: Owner | None, resource: ResourceName, devices: tuple[DeviceID, ...], pod_uid: str) -> None:
        displaced = of_devices(state, [former for each in contradicted for former in each.displaced], devices)
        allocation = Allocation(
            id=UNNAMED,
            owner=owner,
            devices={resource: devices},
            parents=ownership.parents_of(devices),
            pod_uid=pod_uid,
            displaced=displaced,
        )
        found.append(ledger.named(allocation, len(found)))
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
    Creates allocations for containers that `ended` allocations displaced and that may still run. They get back the
    devices that no allocation holds, neither a live one nor one in `granted`. If several displaced containers had a
    device, the last of them gets it and displaces the others.
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
            allocation = Allocation(
                id=UNNAMED,
                owner=former.owner,
                devices=devices,
                parents=state.ownership.parents_of(back),
                pod_uid=former.pod_uid,
                slots={slot: amount for slot, amount in former.slots.items() if slot in back},
                instances={slot: uuid for slot, uuid in former.instances.items() if slot in back},
            )
            found.append(ledger.named(allocation, len(granted) + len(found)))
            state = state.holding(found[-1])
    returned: list[Allocation] = []
    for each in found:
        own = each.owner, each.pod_uid
        others = {(it.owner, it.pod_uid): it for it in of_devices(state, formers, each.device_ids)}
        displaced = tuple(other for name, other in others.items() if name != own)
        returned.append(msgspec.structs.replace(each, displaced=displaced))
    return returned


def without_allocations(state: NodeState, allocations: Iterable[Allocation]) -> NodeState:
    """Returns the state without these allocations."""
    for each in allocations:
        state = state.without(each.id)
    return state


def of_devices(
    state: NodeState, displaced: Sequence[Displaced], devices: Collection[DeviceID]
) -> tuple[Displaced, ...]:
    """Returns the displaced containers that had a device that overlaps one of `devices`."""
    wanted = state.ownership.set_of(devices)
    return tuple(each for each in displaced if any(map(wanted.overlaps, map(state.ownership.holding, each.device_ids))))


def recorded_in_order(state: NodeState, resource: ResourceName, devices: frozenset[DeviceID]) -> tuple[DeviceID, ...]:
    """Returns the devices that this allocator records (`is_recorded_here`), in the hardware's order."""
    hardware = state.hardware
    return in_offered_order(
        hardware, resource, (device for device in devices if is_recorded_here(hardware, resource, device))
    )


log = structlog.get_logger("topoalign.allocator.reconciliation.displacement")


def overlapping_devices(ownership: Ownership, record: Allocation, devices: Iterable[DeviceID]) -> list[Place]:
    """Returns an allocation's devices that overlap `devices`: the same, their parts, or those that contain them."""
    wanted = ownership.set_of(devices)
    return [
        (resource, device) for resource, device in kubelet_places(record) if wanted.overlaps(ownership.holding(device))
    ]


def displaced_by(
    liveness: LivenessCheck,
    ledger: Ledger,
    records: Sequence[Allocation],
    asked: Collection[DeviceID],
    listing: KubeletListing | None,
) -> tuple[Displaced, ...]:
    """Returns the containers that may still run although their devices in `asked` are allocated to another one."""
    found: list[Displaced] = []
    for record in records:
        if listing is not None and record.owner is not None and liveness.is_displaced(record, listing):
            both = with_devices(record, group_by_resource(overlapping_devices(ledger.state.ownership, record, asked)))
            found.append(
                Displaced(
                    allocation=record.id,
                    owner=record.owner,
                    pod_uid=record.pod_uid,
                    devices=both.devices,
                    slots=both.slots,
                    instances=both.instances,
                )
            )
        if not is_before(record, ledger.boot):
            found += still_displaced(of_devices(ledger.state, record.displaced, asked), listing)
    return tuple(found)


def log_displaced(granted: Iterable[Allocation]) -> None:
    """Logs each allocation that has devices of another container that may still run."""
    for each in granted:
        if each.displaced:
            log.error(
                "the kubelet allocates devices to a new container, but the former container may still run",
                allocation=each.id,
                devices=sorted(devices_displaced_by([each])),
                held_by=[f"{container_title(former.owner)} ({former.allocation})" for former in each.displaced],
            )


def log_forgotten(forgotten: Iterable[Allocation]) -> None:
    """Logs that the kubelet may allocate the devices of these containers to other containers."""
    if found := [*forgotten]:
        log.error(
            "the kubelet has lost the devices of these containers, and may allocate them to others: drain the node",
            containers=[container_title(each.owner) for each in found],
            devices=sorted(device for each in found for device in each.device_ids),
        )


def devices_displaced_by(records: Collection[Allocation]) -> frozenset[DeviceID]:
    """Returns the devices of all containers that these allocations displaced and that may still run."""
    return frozenset().union(*(former.device_ids for record in records for former in record.displaced))


def remainders(
    ledger: Ledger,
    replaced: Collection[Allocation],
    containers: Sequence[Collection[DeviceID]],
    listing: KubeletListing | None,
    granted: Sequence[Allocation],
) -> list[Rest]:
    """
    Creates an allocation for the remaining devices of each replaced one. Devices remain if their container may still
    run, or if the kubelet has them allocated, for example to an init container whose devices no app container reuses.
    """
    asked = {device for devices in containers for device in devices}
    held = reported_places(listing) | ((listing.checkpoint or frozenset()) if listing is not None else frozenset())
    unread = listing is not None and listing.checkpoint is None  # unreported devices may then be held, too
    displaced = {former.allocation for each in granted for former in each.displaced}
    new = {device for each in granted for device in each.co_allocated}
    rests: list[Rest] = []
    for record in replaced:
        whole = unread or record.id in displaced
        given = overlapping_devices(ledger.state.ownership, record, asked)
        kept = [place for place in kubelet_places(record) if (whole or place in held) and place not in given]
        co_allocated = list[Place]()
        if kept or whole:  # co-allocated devices stay with the remaining devices
            left = {each for each in record.co_allocated if each not in new}
            co_allocated = [(name, each) for name, ids in record.devices.items() for each in ids if each in left]
        if kept or co_allocated:
            rest = msgspec.structs.replace(
                with_devices(record, group_by_resource([*kept, *co_allocated])),
                id=ledger.next_id(len(granted) + len(rests)),
                displaced=of_devices(ledger.state, record.displaced, [device for _, device in kept]),
            )
            rests.append(Rest(rest, record.id))
    return rests


def log_ended(ledger: Ledger, rests: Sequence[Rest]) -> None:
    """Marks the remainders of ended allocations as ended, so that their GPUs count as free."""
    kubelet = ledger.state.usage.kubelet if ledger.state.usage is not None else None
    if kubelet is None:
        return
    over = tuple(rest.allocation.id for rest in rests if rest.former in kubelet.ended)
    if over:
        ledger.observe(kubelet=msgspec.structs.replace(kubelet, ended=kubelet.ended + over))


def group_by_resource(devices: Sequence[Place]) -> dict[ResourceName, tuple[DeviceID, ...]]:
    """Groups devices by resource and keeps their order."""
    held: dict[ResourceName, tuple[DeviceID, ...]] = {}
    for resource, device in devices:
        held[resource] = (*held.get(resource, ()), device)
    return held


def displaced_pod_name(
    gone: Iterable[Allocation], resource: ResourceName, slots: Collection[DeviceID], listing: KubeletListing | None
) -> str:
    """
    Returns the UID of a pod whose init container had slots that were reserved for other pods, if a later container of
    the pod reuses some of them. Empty if the checkpoint has no such pod.
    """
    if listing is None:
        return ""
    for each in [record for record in gone if record.reserved_for]:
        for slot in each.device_ids.intersection(slots):
            for entry in listing.parts_by_place.get((resource, slot), ()):
                if entry.pod_uid and entry.pod_uid not in each.reserved_for:
                    return entry.pod_uid
    return ""


def kept_of(record: Allocation, listing: KubeletListing) -> Allocation:
    """Returns an allocation with only those devices that the kubelet still has allocated."""
    if listing.checkpoint is None:
        return record
    held = reported_places(listing) | listing.checkpoint
    return with_devices(
        record, {name: tuple(each for each in ids if (name, each) in held) for name, ids in record.devices.items()}
    )


def with_devices(record: Allocation, devices: Mapping[ResourceName, tuple[DeviceID, ...]]) -> Allocation:
    """Returns an allocation with only these devices."""
    kept = {each for ids in devices.values() for each in ids}
    return msgspec.structs.replace(
        record,
        devices=dict(devices),
        co_allocated=tuple(each for each in record.co_allocated if each in kept),
        virtual_functions={nic: some for nic, some in record.virtual_functions.items() if nic in kept},
        slots={slot: amount for slot, amount in record.slots.items() if slot in kept},
        instances={slot: uuid for slot, uuid in record.instances.items() if slot in kept},
    )
