"""
What comes together with the GPUs of a container: NICs, or virtual functions of them, that are reserved for the container and
that it does not ask the kubelet for.

Allocate says no more than which GPUs. So the companions are those of the container for which just these GPUs are reserved. A
NIC that somebody else has got meanwhile, or that is not healthy, is lacking; of a virtual function another one of its NIC
does as well. A container that needs its companions is refused where some are lacking, so that it fails where everybody sees
it: its pod is made anew, and scheduled again. Any other container gets those that are left.

GPUs that are reserved for nobody have no companions. But the kubelet may take others than those that are reserved: its
alignment changes when a pod ends, or a GPU becomes ill. So while a container waits for as many GPUs, and for companions,
those that it would be given with these GPUs come with them: chosen as its pod asks, if it was known since this process
started, and if possible beside what is planned. Where there are none, and it needs them, it is refused. Registries bind no
other pod beside it that asks for as many.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, product
from typing import NamedTuple

import msgspec

from topoalign.allocator.reconciliation.adoption import in_order
from topoalign.core.admission.joint import Bounds, place_among
from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.deviceshare.demand import is_joint
from topoalign.core.deviceshare.node_devices import ContainerDevices
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.errors import BadRequest, NoFit, quoted
from topoalign.core.model.ids import GPU, NIC, AllocationID, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.model.requests import AdmissionRules, Mode, Placement, PodRequest
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.core.model.topology.bitmask import node_mask
from topoalign.core.model.topology.device_sets import NO_DEVICES
from topoalign.core.placement.reserved_choice import open_reservations, reserved_with
from topoalign.core.ports import Clock
from topoalign.core.state.fold import NodeState
from topoalign.core.state.node_reservations import NodeReservations, reserved_allocations
from topoalign.core.state.ownership import Ownership

# Under which ids a container is told of what comes together with its GPUs.


def reported_co_allocated(allocation: Allocation) -> Iterator[tuple[ResourceName, Sequence[DeviceID]]]:
    """Resource -> the companions of an allocation, under the ids by which a container is told of them."""
    for resource, ids in allocation.devices.items():
        beside = [device for device in ids if device in allocation.co_allocated]
        if beside:
            yield resource, [each for device in beside for each in reported_ids(device, allocation.virtual_functions)]


def reserved_co_allocated(reserved: ReservedContainer) -> Iterator[tuple[ResourceName, Sequence[DeviceID]]]:
    """The same of what is reserved for a container."""
    for resource, ids in reserved.co_allocated.items():
        yield resource, [each for device in ids for each in reported_ids(device, reserved.virtual_functions)]


def reported_ids(device: DeviceID, functions: Mapping[DeviceID, tuple[str, ...]]) -> tuple[DeviceID, ...]:
    """The ids by which a container is told of a device: of a NIC of which it has virtual functions, theirs."""
    return tuple(map(DeviceID, functions.get(device, (device,))))


def overlapping_co_allocated(owned: Ownership, record: Allocation, asked: Collection[DeviceID]) -> list[DeviceID]:
    """The companions of a record that overlap what is asked for, under the ids by which its container is told of them."""
    wanted = owned.set_of(asked)
    return [each for _, ids in reported_co_allocated(record) for each in ids if wanted.overlaps(owned.holding(each))]


REMEMBERED = 1_000
"""Pods with annotations about devices whose requests are kept: far more than are bound to a node and not admitted yet."""


class CoAllocatedLacking(NoFit):
    """Raised for GPUs whose container must not start without NICs that cannot be given."""

    code = "CoAllocatedLacking"

    def __init__(self, gpus: Collection[DeviceID], lacking: Collection[DeviceID]) -> None:
        super().__init__(
            f"with {quoted(sorted(gpus))} the container needs {quoted(sorted(lacking))}, which cannot be given any more",
            "let the pod be made anew: the scheduler chooses again",
        )


class CoAllocated(NamedTuple):
    """What comes with the GPUs of one container."""

    devices: Mapping[ResourceName, tuple[DeviceID, ...]] = {}
    functions: Mapping[DeviceID, tuple[str, ...]] = {}
    """NIC -> PCI addresses of the virtual functions of it that are meant; absent where the NIC itself is."""
    lacking: tuple[DeviceID, ...] = ()
    """What was reserved as well and cannot be given."""

    @property
    def ids(self) -> tuple[DeviceID, ...]:
        """The ids of all devices."""
        return tuple(device for ids in self.devices.values() for device in ids)


class Waiting(NamedTuple):
    """A container that waits for GPUs and for companions."""

    pod: Reservation
    container: ReservedContainer
    is_certain: bool
    """Whether its GPUs were given to nobody, so that the kubelet is still to come for it."""


class Instead(NamedTuple):
    """What a container that waits gets if the kubelet takes other GPUs than are reserved for it."""

    container: ReservedContainer
    given: ContainerDevices | None
    """None: nothing can be found."""
    is_certain: bool
    """As in `Waiting`."""


class ReservedCoAllocations:
    """The companions that are reserved on the node."""

    def __init__(
        self,
        state: Callable[[], NodeState],
        clock: Clock,
        reserved: Callable[[], NodeReservations],
        placement: Placement,
    ) -> None:
        """`reserved`: what is reserved on the node now; `placement`: the node's device policy."""
        self._state = state
        self._clock = clock
        self._reserved = reserved
        self._placement = placement
        self._requests: OrderedDict[tuple[Namespace, PodName], PodRequest] = OrderedDict()

    def waiting(self, resource: ResourceName, devices: Collection[DeviceID]) -> ReservedContainer | None:
        """The container for which just these GPUs are reserved and not given yet, if something comes with them."""
        if resource != GPU:
            return None
        wanted = frozenset(devices)
        reserved = self._reserved()
        parts = open_reservations(reserved, self._clock.monotonic(), resource) if reserved.reservations else ()
        return next((each for _, each, gpus in parts if gpus == wanted and each.co_allocated), None)

    def held_of(self, waiting: ReservedContainer | None) -> list[AllocationID]:
        """Allocations that hold something of what is to come with the GPUs of this container."""
        if waiting is None:
            return []
        owned = self._state().ownership
        ids = [each for _, told in reserved_co_allocated(waiting) for each in told]
        return owned.overlapping(map(owned.holding, ids))

    def left(self, waiting: ReservedContainer, gone: Collection[AllocationID]) -> CoAllocated:
        """
        What can be given of what is to come with the GPUs of this container, once these allocations have ended. Raises
        CompanionsLacking.
        """
        state = self._state()
        for name in gone:
            state = state.without(name)
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
        """A registry is about to reserve something for this pod."""
        if is_joint(pod.annotations):
            self._requests[pod.namespace, pod.name] = pod
            self._requests.move_to_end((pod.namespace, pod.name))
            while len(self._requests) > REMEMBERED:
                self._requests.popitem(last=False)

    def observe(self) -> None:
        """Something was granted: what is shown of reservations is noted before it can end."""
        self._reserved()

    def preferred(
        self, available: Collection[DeviceID], must_include: Sequence[DeviceID], size: int
    ) -> tuple[DeviceID, ...]:
        """The GPUs to prefer for a container that waits for as many and cannot have its own any more; () for nobody."""
        if not self._reserved().reservations:  # most often, and thousands of shares may be available
            return ()
        others = tuple(device for device in available if device not in must_include)
        found = self._instead(Bounds(size, tuple(must_include), others), ())
        return found.given.devices.get(GPU, ()) if found is not None and found.given is not None else ()

    def adopted(
        self, resource: ResourceName, devices: Collection[DeviceID], gone: Collection[AllocationID]
    ) -> tuple[CoAllocated, tuple[DeviceID, ...]]:
        """
        What comes with GPUs that are reserved for nobody, once these allocations have ended, and what was reserved instead
        of all that: nothing, or what a container gets beside them that waits for as many. Raises CompanionsLacking.
        """
        to_come = open_reservations(self._reserved(), self._clock.monotonic(), resource)
        is_own = any(gpus == frozenset(devices) for _, _, gpus in to_come)
        found = (
            self._instead(Bounds(len(devices), tuple(devices), ()), gone) if resource == GPU and not is_own else None
        )
        if found is None:
            return CoAllocated(), ()
        waiting, given, is_certain = found
        reserved = tuple(
            each for part in (waiting.devices, waiting.co_allocated) for ids in part.values() for each in ids
        )
        if given is None:
            if waiting.needs_co_allocated and is_certain:
                raise CoAllocatedLacking(devices, [each for ids in waiting.co_allocated.values() for each in ids])
            return CoAllocated(), reserved if is_certain else ()
        beside = {
            name: tuple(each for each in ids if each in given.co_allocated)
            for name, ids in given.devices.items()
            if name != GPU
        }
        return CoAllocated({name: ids for name, ids in beside.items() if ids}, given.functions), reserved

    def _instead(self, gpus: Bounds, gone: Collection[AllocationID]) -> Instead | None:
        """What the kubelet may have come for with these GPUs. None: no container waits for as many and for companions."""
        reserved = self._reserved()
        waiting = self._waiting_for(gpus.amount) if reserved.reservations else []
        held = reserved.held(self._clock.monotonic()) if waiting else ()
        for (pod, container, is_certain), with_planned in product(waiting, (True, False)):
            request = self._requests.get((pod.namespace, pod.pod))
            state = self._state()
            for name in gone:
                state = state.without(name)
            others = [each for each in held if each.pod_uid != pod.pod_uid and (with_planned or not each.planned)]
            for allocation in chain.from_iterable(map(reserved_allocations, others)):
                state = state.holding(without_gpus(allocation))
            if request is not None and (given := placed(state, request, container, gpus, self._placement)) is not None:
                return Instead(container, given, is_certain)
        return Instead(waiting[0].container, None, waiting[0].is_certain) if waiting else None

    def _waiting_for(self, amount: int) -> list[Waiting]:
        """
        The containers that wait for so many GPUs and for companions, those first whose GPUs were given to nobody. Where they
        were, a pod of another scheduler may have come before its own, until the owner is known. Of what is planned for
        a gang only that for which the kubelet can have come.
        """
        reserved = self._reserved()
        now = self._clock.monotonic()
        bound = {
            (each.pod_uid, each.owner.container)
            for each in self._state().allocations.values()
            if each.owner is not None and GPU in each.devices
        }
        certain = {(uid, each.container) for uid, each, _ in open_reservations(reserved, now, GPU)}
        found = [
            Waiting(pod, each, (pod.pod_uid, each.container) in certain)
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
        self, resource: ResourceName, allocation: Allocation, beside: Mapping[ResourceName, Sequence[DeviceID]]
    ) -> dict[ResourceName, tuple[DeviceID, ...]]:
        """
        Resource of companions -> all that the container of this allocation has of it or is to have, under the ids by which
        it is told, in the hardware's order. All are in each plugin's answer: of a variable in two the kubelet passes on one.
        With them `beside`, what it has by other resources of the kind of this one (`VisibleGpus.beside`).
        """
        state = self._state()
        found = dict[ResourceName, list[DeviceID]]()
        for name, ids in (*self._co_allocated(resource, allocation), *beside.items()):
            found.setdefault(name, []).extend(ids)
        if resource in found or beside:
            own = allocation.from_kubelet.get(resource, ())
            found.setdefault(resource, []).extend(allocation.instances.get(each, each) for each in own)
        return {name: in_order(state.hardware, name, dict.fromkeys(ids)) for name, ids in found.items()}

    def _co_allocated(
        self, resource: ResourceName, allocation: Allocation
    ) -> Iterator[tuple[ResourceName, Sequence[DeviceID]]]:
        """What else the container of an allocation has or is to have of the resources of companions, as far as is known."""
        own = allocation.from_kubelet.get(resource, ())
        reserved = reserved_with(self._reserved(), self._clock.monotonic(), resource, own)
        if reserved is None:  # it is over, and the kubelet asks again
            yield from reported_co_allocated(allocation)
            if (owner := allocation.owner) is not None:
                others = [each for each in self._state().allocations.values() if each.owner == owner]
                yield from (
                    beside for each in others if each.id != allocation.id for beside in reported_co_allocated(each)
                )
            return
        if resource == GPU:
            told = [*reported_co_allocated(allocation)]
            yield from told
            yield from ((name, reserved.devices.get(name, ())) for name, _ in told)
            return
        gpus = {*reserved.devices.get(GPU, ())}
        live = self._state().allocations.values()
        given = next((each for each in live if gpus and gpus == {*each.from_kubelet.get(GPU, ())}), None)
        yield from reported_co_allocated(given) if given is not None else reserved_co_allocated(reserved)


def placed(
    state: NodeState, request: PodRequest, reserved: ReservedContainer, gpus: Bounds, placement: Placement
) -> ContainerDevices | None:
    """What a container of this pod gets where the kubelet takes these GPUs, and the NICs that are reserved for it."""
    rules = AdmissionRules(mode=Mode.KUBELET, placement=placement)
    bounds = {GPU: gpus}
    if nics := reserved.devices.get(NIC):
        bounds[NIC] = Bounds(len(nics), nics, ())
    near = {node for gpu in gpus.allowed for node in state.hardware.devices.get(GPU, NO_DEVICES).get(gpu) or ()}
    try:
        container = next(each for each in read_pod(request, rules).containers if each.container == reserved.container)
        return place_among(state, container, rules, bounds, (node_mask(near), None) if near else (None,))
    except (BadRequest, NoFit, StopIteration):
        return None


def without_gpus(allocation: Allocation) -> Allocation:
    """What an allocation has beside GPUs."""
    devices = {name: ids for name, ids in allocation.devices.items() if name != GPU}
    return msgspec.structs.replace(allocation, devices=devices, slots={})


def free_functions(state: NodeState, nic: DeviceID, wanted: Sequence[str]) -> tuple[str, ...]:
    """As many free virtual functions of a NIC as are wanted, those first; () where there are not as many."""
    card = state.hardware.nic_by_id.get(nic)
    owned = state.ownership
    there = [each.pci for each in card.virtual_functions] if card is not None else []
    free = [each for each in dict.fromkeys((*wanted, *there)) if each in there and not owned.is_held(DeviceID(each))]
    return tuple(free[: len(wanted)]) if len(free) >= len(wanted) else ()
