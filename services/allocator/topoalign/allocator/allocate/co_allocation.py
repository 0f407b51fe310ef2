"""
Chooses the co-allocated devices of a container: NICs, or virtual functions of NICs, that are reserved together with its GPUs
and that it does not request from the kubelet.

Allocate names only the GPUs. The co-allocated devices are those of the container for which exactly these GPUs are reserved.
If another container has some of them, or they are unhealthy, the container gets the others. If it needs all of them, it is
refused, so that its pod is created and scheduled again.

When a pod ends or a GPU becomes unhealthy, the kubelet may allocate other GPUs than the reserved ones. If a container with
co-allocated devices waits for this number of GPUs, its co-allocated devices are chosen anew, near the allocated GPUs, if
possible without devices that are reserved for other pods. Until then, registries bind no other pod with this number of GPUs.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, product
from typing import NamedTuple

import msgspec

from topoalign.allocator.allocate.claims import (
    AskedContainer,
    Claim,
    NodeView,
    reported_co_allocated,
    reported_ids,
)
from topoalign.allocator.reconciliation.displacement import in_offered_order, without_allocations
from topoalign.core.admission.joint import Bounds, place_among
from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.deviceshare.demand import is_joint
from topoalign.core.deviceshare.node_devices import ContainerDevices
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.errors import BadRequest, NoFit, quoted
from topoalign.core.model.ids import GPU, NIC, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.model.requests import AdmissionRules, Mode, Placement, PodRequest
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.core.model.topology.bitmask import node_mask
from topoalign.core.model.topology.device_sets import NO_DEVICES
from topoalign.core.placement.reserved_choice import open_reservations, reserved_with
from topoalign.core.state.fold import NodeState
from topoalign.core.state.node_reservations import reserved_allocations
from topoalign.runtime.recent_dict import RecentDict


def reserved_co_allocated(reserved: ReservedContainer) -> Iterator[tuple[ResourceName, Sequence[DeviceID]]]:
    """Yields resource -> the co-allocated devices of a reservation, under the ids that the container sees."""
    for resource, ids in reserved.co_allocated.items():
        yield resource, [each for device in ids for each in reported_ids(device, reserved.virtual_functions)]


REMEMBERED = 1_000
"""
Maximum number of cached requests of pods with device annotations. A node never has nearly as many pods that are bound but
not admitted.
"""


class CoAllocatedLacking(NoFit):
    """
    Raised when the reserved NICs of a container that must have them are in use or unhealthy.

    Remedy: Create the pod again.
    """

    def __init__(self, gpus: Collection[DeviceID], lacking: Collection[DeviceID]) -> None:
        super().__init__(
            f"with {quoted(sorted(gpus))} the container needs {quoted(sorted(lacking))}, which are in use or unhealthy",
            "create the pod again, so that the scheduler chooses other devices",
        )


class CoAllocated(NamedTuple):
    """The co-allocated devices of one container."""

    devices: Mapping[ResourceName, tuple[DeviceID, ...]] = {}
    functions: Mapping[DeviceID, tuple[str, ...]] = {}
    """NIC -> PCI addresses of its allocated virtual functions; absent if the NIC itself is allocated."""
    lacking: tuple[DeviceID, ...] = ()
    """Reserved devices that cannot be allocated."""


class WaitingContainer(NamedTuple):
    """A container with reserved GPUs and co-allocated devices for which the kubelet has not called Allocate yet."""

    pod: Reservation
    container: ReservedContainer
    is_certain: bool
    """Whether no container has its GPUs, so that its Allocate is certainly still to come."""


class JointClaim(Claim):
    """Claims the co-allocated devices of a container, by the node's reservations."""

    holds_devices = True

    def __init__(self, view: NodeView, placement: Placement) -> None:
        """`placement`: the node's device policy."""
        super().__init__(view)
        self._placement = placement
        self._requests = RecentDict[tuple[Namespace, PodName], PodRequest](REMEMBERED)

    def applies(self, resource: ResourceName) -> bool:
        """Whether the resource is whole GPUs. Other devices have no co-allocated devices."""
        return resource == GPU

    def waiting(self, devices: Collection[DeviceID]) -> ReservedContainer | None:
        """Returns the container that waits for exactly these GPUs and has co-allocated devices."""
        wanted = frozenset(devices)
        reserved = self.view.reserved
        parts = open_reservations(reserved, self.view.now, GPU) if reserved.reservations else ()
        return next((each for _, each, gpus in parts if gpus == wanted and each.co_allocated), None)

    def conflicts(self, asked: AskedContainer) -> Sequence[Allocation]:
        """Returns the records that hold co-allocated devices reserved for this container."""
        waiting = self.waiting(asked.devices)
        if waiting is None:
            return ()
        state = self.view.state
        owned = state.ownership
        ids = [each for _, own in reserved_co_allocated(waiting) for each in own]
        return [state.allocations[name] for name in sorted(owned.overlapping(map(owned.holding, ids)))]

    def evict(self, asked: AskedContainer, conflicts: Sequence[Allocation]) -> None:
        """Releases those of the conflicts that have ended. The new container does not get what running containers hold."""
        has_ended = self.view.liveness.has_ended
        asked.release(each for each in conflicts if has_ended(each, asked.known_poll.listing, asked.known_poll.at))

    def complete(self, asked: AskedContainer, allocation: Allocation) -> Allocation:
        """Adds the co-allocated devices. Raises CoAllocatedLacking."""
        new = asked.new
        instead: tuple[DeviceID, ...] = ()
        if (waiting := self.waiting(asked.devices)) is not None:
            co_allocated = self.available(waiting, new.gone.values())
        else:
            co_allocated, instead = self.choose_for_unreserved(asked.devices, new.gone.values())
        allocation = msgspec.structs.replace(
            allocation,
            devices={**allocation.devices, **co_allocated.devices},
            virtual_functions=dict(co_allocated.functions),
            co_allocated=tuple(device for ids in co_allocated.devices.values() for device in ids),
        )
        if co_allocated.lacking:
            instead = (*allocation.device_ids, *co_allocated.lacking)
        if instead:
            new.deviations[allocation.id] = instead
        return allocation

    def available(self, waiting: ReservedContainer, gone: Iterable[Allocation]) -> CoAllocated:
        """Returns the reserved co-allocated devices that are free once `gone` has ended. Raises CoAllocatedLacking."""
        state = without_allocations(self.view.state, gone)
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
            raise CoAllocatedLacking(waiting.devices.get(GPU, ()), lacking)
        return CoAllocated(devices, functions, tuple(lacking))

    def remember(self, pod: PodRequest) -> None:
        """Caches the request of a pod for which a registry is about to reserve devices."""
        if is_joint(pod.annotations):
            self._requests[pod.namespace, pod.name] = pod

    def preferred(
        self, available: Collection[DeviceID], must_include: Sequence[DeviceID], size: int
    ) -> tuple[DeviceID, ...]:
        """Returns GPUs for a container that waits for this number and cannot get its reserved ones; else ()."""
        if not self.view.reserved.reservations:  # the usual case; there may be thousands of available shares
            return ()
        others = tuple(device for device in available if device not in must_include)
        found = self._replacement(Bounds(size, tuple(must_include), others), ())
        return found[1].devices.get(GPU, ()) if found is not None and found[1] is not None else ()

    def choose_for_unreserved(
        self, devices: Collection[DeviceID], gone: Iterable[Allocation]
    ) -> tuple[CoAllocated, tuple[DeviceID, ...]]:
        """
        Chooses co-allocated devices for GPUs that are not reserved, as if `gone` had ended. Returns them and the reserved
        devices that they replace; both are empty if no container waits for this number. Raises CoAllocatedLacking.
        """
        to_come = open_reservations(self.view.reserved, self.view.now, GPU)
        if any(gpus == frozenset(devices) for _, _, gpus in to_come):
            return CoAllocated(), ()
        found = self._replacement(Bounds(len(devices), tuple(devices), ()), gone)
        if found is None:
            return CoAllocated(), ()
        (_, waiting, is_certain), given = found
        reserved = tuple(
            each for part in (waiting.devices, waiting.co_allocated) for ids in part.values() for each in ids
        )
        if given is None:
            if waiting.needs_co_allocated and is_certain:
                raise CoAllocatedLacking(devices, [each for ids in waiting.co_allocated.values() for each in ids])
            return CoAllocated(), reserved if is_certain else ()
        co_allocated: dict[ResourceName, tuple[DeviceID, ...]] = {}
        for name, ids in given.devices.items():
            if name != GPU and (some := tuple(each for each in ids if each in given.co_allocated)):
                co_allocated[name] = some
        return CoAllocated(co_allocated, given.functions), reserved

    def _replacement(
        self, gpus: Bounds, gone: Iterable[Allocation]
    ) -> tuple[WaitingContainer, ContainerDevices | None] | None:
        """Chooses devices for a container that waits for this number of GPUs; None: no container waits for it."""
        reserved = self.view.reserved
        waiting = self._waiting_for(gpus.amount) if reserved.reservations else []
        held = reserved.held(self.view.now) if waiting else ()
        for each, with_planned in product(waiting, (True, False)):
            request = self._requests.get((each.pod.namespace, each.pod.pod))
            state = without_allocations(self.view.state, gone)
            others = [pod for pod in held if pod.pod_uid != each.pod.pod_uid and (with_planned or not pod.planned)]
            for allocation in chain.from_iterable(map(reserved_allocations, others)):
                without_gpus = {name: ids for name, ids in allocation.devices.items() if name != GPU}
                state = state.holding(msgspec.structs.replace(allocation, devices=without_gpus, slots={}))
            if request is not None:
                given = place_joint_devices(state, request, each.container, gpus, self._placement)
                if given is not None:
                    return each, given
        return (waiting[0], None) if waiting else None

    def _waiting_for(self, amount: int) -> list[WaitingContainer]:
        """
        Returns the containers that wait for this number of GPUs and have co-allocated devices. Last come those whose
        reserved GPUs are already held, for example by a pod of another scheduler.
        """
        reserved = self.view.reserved
        now = self.view.now
        bound = {
            (each.pod_uid, each.owner.container)
            for each in self.view.state.allocations.values()
            if each.owner is not None and GPU in each.devices
        }
        certain = {(uid, each.container) for uid, each, _ in open_reservations(reserved, now, GPU)}
        found = [
            WaitingContainer(pod, each, (pod.pod_uid, each.container) in certain)
            for pod in reserved.reservations
            if reserved.until[pod.pod_uid] > now
            for each in pod.containers
            if each.co_allocated
            and len(each.devices.get(GPU, ())) == amount
            and (pod.pod_uid, each.container) not in bound
            and (not pod.planned or (pod.pod_uid, each.container) in certain)
        ]
        return sorted(found, key=lambda each: not each.is_certain)

    def named(
        self, resource: ResourceName, allocation: Allocation, others: Mapping[ResourceName, Sequence[DeviceID]]
    ) -> dict[ResourceName, tuple[DeviceID, ...]]:
        """
        Returns resource -> all devices that the container has or will have, under the ids that it sees, in the hardware's
        order. `others`: from `VisibleGpus.devices_of_container`. Every answer names all devices, because the kubelet passes
        on the value of a variable from only one answer.
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
        if reserved is None:  # the reservation has ended, and the kubelet repeats its call
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


def place_joint_devices(
    state: NodeState, request: PodRequest, reserved: ReservedContainer, gpus: Bounds, placement: Placement
) -> ContainerDevices | None:
    """Chooses the devices of a container of this pod for these GPUs and the NICs that are reserved for it."""
    rules = AdmissionRules(mode=Mode.KUBELET, placement=placement)
    bounds = {GPU: gpus}
    if nics := reserved.devices.get(NIC):
        bounds[NIC] = Bounds(len(nics), nics, ())
    numa_nodes = {node for gpu in gpus.allowed for node in state.hardware.devices.get(GPU, NO_DEVICES).get(gpu) or ()}
    try:
        container = next(each for each in read_pod(request, rules).containers if each.container == reserved.container)
        return place_among(state, container, rules, bounds, (node_mask(numa_nodes), None) if numa_nodes else (None,))
    except (BadRequest, NoFit, StopIteration):
        return None


def free_functions(state: NodeState, nic: DeviceID, wanted: Sequence[str]) -> tuple[str, ...]:
    """Returns as many free virtual functions of a NIC as `wanted`, these first; () if there are too few."""
    device = state.hardware.nic_by_id.get(nic)
    owned = state.ownership
    present = [each.pci for each in device.virtual_functions] if device is not None else []
    free = [
        each for each in dict.fromkeys((*wanted, *present)) if each in present and not owned.is_held(DeviceID(each))
    ]
    return tuple(free[: len(wanted)]) if len(free) >= len(wanted) else ()
