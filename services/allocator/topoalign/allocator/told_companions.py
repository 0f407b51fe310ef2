"""Under which ids a container is told of what comes together with its GPUs."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from topoalign.core.model.allocations import Allocation
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.reservations import ReservedContainer
from topoalign.core.state.ownership import Ownership


def companions_told(allocation: Allocation) -> Iterator[tuple[ResourceName, Sequence[DeviceID]]]:
    """Resource -> the companions of an allocation, under the ids by which a container is told of them."""
    for resource, ids in allocation.devices.items():
        beside = [device for device in ids if device in allocation.companions]
        if beside:
            yield resource, [each for device in beside for each in told_ids(device, allocation.virtual_functions)]


def reserved_told(reserved: ReservedContainer) -> Iterator[tuple[ResourceName, Sequence[DeviceID]]]:
    """The same of what is reserved for a container."""
    for resource, ids in reserved.companions.items():
        yield resource, [each for device in ids for each in told_ids(device, reserved.virtual_functions)]


def told_ids(device: DeviceID, functions: Mapping[DeviceID, tuple[str, ...]]) -> tuple[DeviceID, ...]:
    """The ids by which a container is told of a device: of a NIC of which it has virtual functions, theirs."""
    return tuple(map(DeviceID, functions.get(device, (device,))))


def touching_companions(owned: Ownership, record: Allocation, asked: Collection[DeviceID]) -> list[DeviceID]:
    """The companions of a record that overlap what is asked for, under the ids by which its container is told of them."""
    wanted = owned.set_of(asked)
    return [each for _, ids in companions_told(record) for each in ids if wanted.overlaps(owned.holding(each))]
