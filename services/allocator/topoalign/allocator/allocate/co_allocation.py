"""
Chooses the co-allocated devices of a container. These are NICs, or virtual functions of NICs, that are reserved
together with its GPUs. The container does not request them from the kubelet.

Allocate lists only the GPUs. If exactly these GPUs are reserved for a container, it gets the devices that are reserved
with them. If some of these devices are unhealthy or another container has them, the container gets only the others. If
it needs all of them, the call is refused, so that the pod is created and scheduled again.

If a GPU becomes unhealthy, the kubelet may allocate GPUs that are not reserved. These GPUs have no co-allocated
devices. If a container with a reservation waits for this number of GPUs and must have its co-allocated devices, the
call is refused. Until a container has its GPUs, registries bind no other pod with this number of GPUs.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from topoalign.allocator.allocate.claims import (
    AskedContainer,
    Claim,
    reported_co_allocated,
    reported_ids,
)
from topoalign.allocator.reconciliation.displacement import in_offered_order, without_allocations
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.errors import NoFit, quoted
from topoalign.core.model.ids import GPU, DeviceID, ResourceName
from topoalign.core.model.reservations import ReservedContainer
from topoalign.core.placement.reserved_choice import open_reservations, reserved_with
from topoalign.core.state.fold import NodeState


def reserved_co_allocated(reserved: ReservedContainer) -> Iterator[tuple[ResourceName, Sequence[DeviceID]]]:
    """Yields each resource with its co-allocated devices of a reservation, by the IDs that the container sees."""
    for resource, ids in reserved.co_allocated.items():
        yield resource, [each for device in ids for each in reported_ids(device, reserved.virtual_functions)]


class CoAllocatedLacking(NoFit):
    """
    Raised when a container that must have its reserved NICs cannot get them with the GPUs that the kubelet allocates.

    Remedy: Create the pod again.
    """

    def __init__(self, gpus: Collection[DeviceID], lacking: Collection[DeviceID]) -> None:
        super().__init__(
            f"the container needs {quoted(sorted(lacking))} and cannot get them with {quoted(sorted(gpus))}",
            "create the pod again, so that the scheduler chooses other devices",
        )


class JointClaim(Claim):
    """Claims the co-allocated devices that the node's reservations have for a container."""

    def applies(self, resource: ResourceName) -> bool:
        """Whether the resource is whole GPUs. Only these have co-allocated devices."""
        return resource == GPU

    def waiting(self, devices: Collection[DeviceID]) -> ReservedContainer | None:
        """Returns the container that waits for exactly these GPUs and has co-allocated devices."""
        wanted = frozenset(devices)
        reserved = self.view.reserved
        parts = open_reservations(reserved, self.view.now, GPU) if reserved.reservations else ()
        return next((each for _, each, gpus in parts if gpus == wanted and each.co_allocated), None)

    def conflicts(self, asked: AskedContainer) -> Sequence[Allocation]:
        """Returns the allocations that hold co-allocated devices reserved for this container."""
        waiting = self.waiting(asked.devices)
        if waiting is None:
            return ()
        state = self.view.state
        owned = state.ownership
        ids = [each for _, own in reserved_co_allocated(waiting) for each in own]
        return [state.allocations[name] for name in sorted(owned.overlapping(map(owned.holding, ids)))]

    def evict(self, asked: AskedContainer, conflicts: Sequence[Allocation]) -> None:
        """Releases the allocations that have ended. Running containers keep their devices."""
        has_ended = self.view.liveness.has_ended
        asked.release(each for each in conflicts if has_ended(each, asked.known_poll.listing, asked.known_poll.at))

    def complete(self, asked: AskedContainer, allocation: Allocation) -> Allocation:
        """Adds the reserved co-allocated devices that are free and usable. Raises CoAllocatedLacking."""
        waiting = self.waiting(asked.devices)
        if waiting is None:
            self.check_unreserved(asked.devices)
            return allocation
        state = without_allocations(self.view.state, asked.new.gone.values())
        devices: dict[ResourceName, tuple[DeviceID, ...]] = {}
        functions: dict[DeviceID, tuple[str, ...]] = {}
        lacking: list[DeviceID] = []
        for resource, device in ((name, each) for name, ids in waiting.co_allocated.items() for each in ids):
            wanted = waiting.virtual_functions.get(device, ())
            free = free_functions(state, device, wanted)
            if not state.health_of(device).usable or (not free if wanted else state.ownership.is_held(device)):
                lacking.append(device)
                continue
            devices[resource] = (*devices.get(resource, ()), device)
            if wanted:
                functions[device] = free
        if lacking and waiting.needs_co_allocated:
            raise CoAllocatedLacking(asked.devices, lacking)
        allocation = msgspec.structs.replace(
            allocation,
            devices={**allocation.devices, **devices},
            virtual_functions=functions,
            co_allocated=tuple(device for ids in devices.values() for device in ids),
        )
        if lacking:
            asked.new.deviations[allocation.id] = (*allocation.device_ids, *lacking)
        return allocation

    def check_unreserved(self, gpus: Collection[DeviceID]) -> None:
        """
        Checks GPUs that are not reserved. Raises CoAllocatedLacking if a waiting container has the same number of
        reserved GPUs and must have its co-allocated devices, because the kubelet may have allocated these GPUs for it.
        """
        waiting = [*open_reservations(self.view.reserved, self.view.now, GPU)]
        if any(reserved == frozenset(gpus) for _, _, reserved in waiting):
            return
        for _, container, reserved in waiting:
            if len(reserved) == len(gpus) and container.needs_co_allocated:
                raise CoAllocatedLacking(gpus, [each for ids in container.co_allocated.values() for each in ids])

    def named(
        self, resource: ResourceName, allocation: Allocation, others: Mapping[ResourceName, Sequence[DeviceID]]
    ) -> dict[ResourceName, tuple[DeviceID, ...]]:
        """
        Returns resource -> all devices that the container has or will have. They have the IDs that the container sees,
        and the order of the hardware. `others`: from `VisibleGpus.devices_of_container`. Every answer lists all
        devices, because the kubelet uses the value of an environment variable from only one answer.
        """
        state = self.view.state
        found = dict[ResourceName, list[DeviceID]]()
        for name, ids in (*self._co_allocated(resource, allocation), *others.items()):
            found.setdefault(name, []).extend(ids)
        if resource in found or others:
            own = allocation.from_kubelet.get(resource, ())
            found.setdefault(resource, []).extend(allocation.instances.get(each, each) for each in own)
        return {name: in_offered_order(state.hardware, name, dict.fromkeys(ids)) for name, ids in found.items()}

    def _co_allocated(
        self, resource: ResourceName, allocation: Allocation
    ) -> Iterator[tuple[ResourceName, Sequence[DeviceID]]]:
        own = allocation.from_kubelet.get(resource, ())
        reserved = reserved_with(self.view.reserved, self.view.now, resource, own)
        if reserved is None:  # the reservation has ended, and the kubelet repeats the call
            yield from reported_co_allocated(allocation)
            if (owner := allocation.owner) is not None:
                others = [each for each in self.view.state.allocations.values() if each.owner == owner]
                yield from (
                    own_part for each in others if each.id != allocation.id for own_part in reported_co_allocated(each)
                )
            return
        if resource == GPU:
            co_allocated = [*reported_co_allocated(allocation)]
            yield from co_allocated
            yield from ((name, reserved.devices.get(name, ())) for name, _ in co_allocated)
            return
        gpus = {*reserved.devices.get(GPU, ())}
        live = self.view.state.allocations.values()
        given = next((each for each in live if gpus and gpus == {*each.from_kubelet.get(GPU, ())}), None)
        yield from reported_co_allocated(given) if given is not None else reserved_co_allocated(reserved)


def free_functions(state: NodeState, nic: DeviceID, wanted: Sequence[str]) -> tuple[str, ...]:
    """Returns `len(wanted)` free virtual functions of a NIC, those in `wanted` first; () if too few are free."""
    device = state.hardware.nic_by_id.get(nic)
    owned = state.ownership
    present = [each.pci for each in device.virtual_functions] if device is not None else []
    free = [
        each for each in dict.fromkeys((*wanted, *present)) if each in present and not owned.is_held(DeviceID(each))
    ]
    return tuple(free[: len(wanted)]) if len(free) >= len(wanted) else ()
