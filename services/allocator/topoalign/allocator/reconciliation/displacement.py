"""
Handles records that are released because the kubelet has allocated their devices again: what remains of them, and which
containers may still run. The log names each container whose devices another one may use.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
import structlog

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.ledger.release_log import container_title
from topoalign.allocator.ports import KubeletListing, Place
from topoalign.allocator.reconciliation.adoption import of_devices
from topoalign.allocator.reconciliation.liveness import (
    LivenessCheck,
    Rest,
    has_other_devices,
    is_before,
    kubelet_places,
    reported_places,
    still_displaced,
)
from topoalign.core.model.events import Allocation, Displaced
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.state.ownership import Ownership

log = structlog.get_logger("topoalign.allocator.reconciliation.displacement")


def overlapping_devices(ownership: Ownership, record: Allocation, devices: Iterable[DeviceID]) -> list[Place]:
    """Returns the devices of a record that overlap these: the same ones, parts of them, or devices that contain them."""
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
    """
    Returns the containers that may still run although the devices `asked` are allocated to another one: those of the
    released `records`, and those that these had displaced.
    """
    found: list[Displaced] = []
    for record in records:
        if listing is not None and record.owner is not None and liveness.is_displaced(record, listing):
            both = overlapping_devices(ledger.state.ownership, record, asked)
            found.append(
                Displaced(
                    allocation=record.id,
                    owner=record.owner,
                    pod_uid=record.pod_uid,
                    devices=group_by_resource(both),
                    slots={device: record.slots[device] for _, device in both if device in record.slots},
                    instances={device: record.instances[device] for _, device in both if device in record.instances},
                )
            )
        if not is_before(record, ledger.boot):
            found += still_displaced(of_devices(ledger.state, record.displaced, asked), listing)
    return tuple(found)


def log_displaced(granted: Iterable[Allocation]) -> None:
    """Logs each allocation with devices of a container that may still run."""
    for each in granted:
        if each.displaced:
            log.error(
                "the kubelet allocates devices to a new container, and the one that has them was not seen to end",
                allocation=each.id,
                devices=sorted({d for former in each.displaced for ids in former.devices.values() for d in ids}),
                held_by=[f"{container_title(former.owner)} ({former.allocation})" for former in each.displaced],
            )


def log_readmitted(gone: Iterable[Allocation], listing: KubeletListing) -> None:
    """Logs each container whose record is released because the kubelet has allocated it other devices."""
    for each in gone:
        if has_other_devices(each.owner, each.pod_uid, each.from_kubelet, listing):
            log.error(
                "a container was admitted once more, with other devices: see that it does not use its former ones",
                container=container_title(each.owner),
                devices=sorted(each.device_ids),
            )


def log_forgotten(forgotten: Iterable[Allocation]) -> None:
    """Logs that the kubelet may allocate the devices of these containers to others, if there are any."""
    if found := [*forgotten]:
        log.error(
            "the kubelet has lost which devices these containers have, and may allocate them to others: drain the node",
            containers=[container_title(each.owner) for each in found],
            devices=sorted(device for each in found for device in each.device_ids),
        )


def devices_displaced_by(records: Collection[Allocation]) -> frozenset[DeviceID]:
    """Returns the devices of all containers that these records displaced. Such a container may outlive the record."""
    return frozenset(
        d for record in records for former in record.displaced for ids in former.devices.values() for d in ids
    )


def remainders(
    ledger: Ledger,
    replaced: Collection[Allocation],
    containers: Sequence[Collection[DeviceID]],
    listing: KubeletListing | None,
    granted: Sequence[Allocation],
) -> list[Rest]:
    """
    Creates an allocation of the remaining devices of each replaced record: of those that the kubelet still has
    allocated, such as an init container's that no app container reuses, and of all others of a container that may still
    run.
    """
    asked = {device for devices in containers for device in devices}
    held = reported_places(listing) | ((listing.checkpoint or frozenset()) if listing is not None else frozenset())
    unread = listing is not None and listing.checkpoint is None  # then unreported devices may be held as well
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
    """
    Marks the remainders of ended containers as ended, before the kubelet's files are read again. Else their GPUs would
    seem to have nothing left.
    """
    kubelet = ledger.state.usage.kubelet if ledger.state.usage is not None else None
    if kubelet is None:
        return
    over = tuple(rest.allocation.id for rest in rests if rest.former in kubelet.ended)
    if over:
        ledger.observe(kubelet=msgspec.structs.replace(kubelet, ended=kubelet.ended + over))


def group_by_resource(devices: Sequence[Place]) -> dict[ResourceName, tuple[DeviceID, ...]]:
    """Groups devices by resource, in their order."""
    held: dict[ResourceName, tuple[DeviceID, ...]] = {}
    for resource, device in devices:
        held[resource] = (*held.get(resource, ()), device)
    return held


def displaced_pod_name(
    gone: Iterable[Allocation], resource: ResourceName, slots: Collection[DeviceID], listing: KubeletListing | None
) -> str:
    """
    Returns the UID of the pod whose init container, with a released record, has slots that were reserved for other
    pods: a later container of the pod reuses some of them. Empty: there is none by the checkpoint.
    """
    for each in gone if listing is not None else ():
        here = each.device_ids.intersection(slots) if each.reserved_for else ()
        entries = (
            [each for slot in here for each in listing.parts_by_place.get((resource, slot), ())] if listing else []
        )
        for entry in entries:
            if entry.pod_uid and entry.pod_uid not in each.reserved_for:
                return entry.pod_uid
    return ""


def kept_of(record: Allocation, listing: KubeletListing) -> Allocation:
    """Returns a record with the devices that remain after its release: those still in the kubelet's record."""
    if listing.checkpoint is None:
        return record
    held = reported_places(listing) | listing.checkpoint
    return with_devices(
        record, {name: tuple(each for each in ids if (name, each) in held) for name, ids in record.devices.items()}
    )


def with_devices(record: Allocation, devices: Mapping[ResourceName, tuple[DeviceID, ...]]) -> Allocation:
    """Returns a record with some of its devices, and with what is recorded of these."""
    kept = {each for ids in devices.values() for each in ids}
    return msgspec.structs.replace(
        record,
        devices=dict(devices),
        co_allocated=tuple(each for each in record.co_allocated if each in kept),
        virtual_functions={nic: some for nic, some in record.virtual_functions.items() if nic in kept},
        slots={slot: amount for slot, amount in record.slots.items() if slot in kept},
        instances={slot: uuid for slot, uuid in record.instances.items() if slot in kept},
    )
