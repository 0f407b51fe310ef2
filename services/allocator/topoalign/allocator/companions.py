"""
What comes together with the GPUs of a container: NICs, or virtual functions of them, that are reserved for the container and
that it does not ask the kubelet for.

Allocate says no more than which GPUs. So the companions are those of the container for which just these GPUs are reserved. A
NIC that somebody else has got meanwhile, or that is not healthy, is lacking; of a virtual function another one of its NIC
does as well. A container that needs its companions is refused where some are lacking, so that it fails where everybody sees
it: its pod is made anew, and scheduled again. Any other container gets those that are left.

GPUs that are reserved for nobody have no companions. But where those of a container that needs its companions cannot be
given any more, the kubelet comes with others for it, and does not say so: then no container gets as many GPUs as that one
until its reservation has ended.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from topoalign.allocator.reconciliation.device_order import in_order
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.errors import NoFit, quoted
from topoalign.core.model.ids import GPU, AllocationID, DeviceID, ResourceName
from topoalign.core.model.reservations import ReservedContainer
from topoalign.core.placement.reserved import parts_of, reserved_with
from topoalign.core.ports import Clock
from topoalign.core.state.fold import NodeState
from topoalign.core.state.reservations import NodeReservations


class CompanionsLacking(NoFit):
    """Raised for GPUs whose container must not start without NICs that cannot be given."""

    code = "CompanionsLacking"

    def __init__(self, gpus: Collection[DeviceID], lacking: Collection[DeviceID]) -> None:
        super().__init__(
            f"with {quoted(sorted(gpus))} the container needs {quoted(sorted(lacking))}, which cannot be given any more",
            "let the pod be made anew: the scheduler chooses again",
        )


class Companions(NamedTuple):
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


class ReservedCompanions:
    """The companions that are reserved on the node."""

    def __init__(self, state: Callable[[], NodeState], clock: Clock, reserved: Callable[[], NodeReservations]) -> None:
        """`reserved`: what is reserved on the node now."""
        self._state, self._clock, self._reserved = state, clock, reserved

    def waiting(self, resource: ResourceName, devices: Collection[DeviceID]) -> ReservedContainer | None:
        """The container for which just these GPUs are reserved and not given yet, if something comes with them."""
        if resource != GPU:
            return None
        wanted, reserved = frozenset(devices), self._reserved()
        parts = parts_of(reserved, self._clock.monotonic(), resource) if reserved.reservations else ()
        return next((each for _, each, gpus in parts if gpus == wanted and each.companions), None)

    def held_of(self, waiting: ReservedContainer | None) -> list[AllocationID]:
        """Allocations that hold something of what is to come with the GPUs of this container."""
        if waiting is None:
            return []
        owned = self._state().ownership
        ids = [each for _, told in reserved_told(waiting) for each in told]
        return owned.overlapping(map(owned.holding, ids))

    def left(self, waiting: ReservedContainer, gone: Collection[AllocationID]) -> Companions:
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
        for resource, device in ((name, each) for name, ids in waiting.companions.items() for each in ids):
            wanted = waiting.virtual_functions.get(device, ())
            free = free_functions(state, device, wanted)
            if not state.health_of(device).usable or (not free if wanted else state.ownership.is_held(device)):
                lacking.append(device)
                continue
            devices[resource] = (*devices.get(resource, ()), device)
            if wanted:
                functions[device] = free
        if lacking and waiting.needs_companions:
            raise CompanionsLacking(waiting.devices.get(GPU, ()), lacking)
        return Companions(devices, functions, tuple(lacking))

    def check_met(self, resource: ResourceName, devices: Collection[DeviceID]) -> None:
        """
        For GPUs that are reserved for nobody: raises CompanionsLacking where a container waits that needs companions, and
        as many GPUs, and cannot have its own any more.
        """
        reserved, state = self._reserved(), self._state()
        if resource != GPU or not reserved.reservations:
            return
        for _, each, gpus in parts_of(reserved, self._clock.monotonic(), resource):
            is_met = gpus.isdisjoint(devices) and all(state.health_of(gpu).usable for gpu in gpus)
            if each.needs_companions and len(gpus) == len(devices) and not is_met:
                raise CompanionsLacking(devices, [each for ids in each.companions.values() for each in ids])

    def check_followed(self, resource: ResourceName, preferred: Collection[DeviceID]) -> None:
        """
        For other devices than those that were preferred: raises CompanionsLacking where these are reserved for a container
        that needs its companions.
        """
        waiting = self.waiting(resource, preferred)
        if waiting is not None and waiting.needs_companions:
            raise CompanionsLacking(preferred, [each for ids in waiting.companions.values() for each in ids])

    def named(self, resource: ResourceName, allocation: Allocation) -> dict[ResourceName, tuple[DeviceID, ...]]:
        """
        Resource of companions -> all that the container of this allocation has of it or is to have, under the ids by which
        it is told, in the hardware's order. Each plugin's answer names all of them: of a variable that two answers have, the
        kubelet passes on one.
        """
        state, found = self._state(), dict[ResourceName, list[DeviceID]]()
        for name, ids in self._companions(resource, allocation):
            found.setdefault(name, []).extend(ids)
        if resource in found:
            found[resource] += allocation.from_kubelet.get(resource, ())
        return {name: in_order(state.hardware, name, dict.fromkeys(ids)) for name, ids in found.items()}

    def _companions(
        self, resource: ResourceName, allocation: Allocation
    ) -> Iterator[tuple[ResourceName, Sequence[DeviceID]]]:
        """What else the container of an allocation has or is to have of the resources of companions, as far as is known."""
        own = allocation.from_kubelet.get(resource, ())
        reserved = reserved_with(self._reserved(), self._clock.monotonic(), resource, own)
        if reserved is None:  # it is over, and the kubelet asks again
            owner = allocation.owner
            others = [each for each in self._state().allocations.values() if owner is not None and each.owner == owner]
            yield from companions_told(allocation)
            yield from (beside for each in others if each.id != allocation.id for beside in companions_told(each))
            return
        if resource == GPU:
            told = [*companions_told(allocation)]
            yield from told
            yield from ((name, reserved.devices.get(name, ())) for name, _ in told)
            return
        gpus = {*reserved.devices.get(GPU, ())}
        live = self._state().allocations.values()
        given = next((each for each in live if gpus and gpus == {*each.from_kubelet.get(GPU, ())}), None)
        yield from companions_told(given) if given is not None else reserved_told(reserved)


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


def free_functions(state: NodeState, nic: DeviceID, wanted: Sequence[str]) -> tuple[str, ...]:
    """As many free virtual functions of a NIC as are wanted, those first; () where there are not as many."""
    card, owned = state.hardware.nic_by_id.get(nic), state.ownership
    there = [each.pci for each in card.virtual_functions] if card is not None else []
    free = [each for each in dict.fromkeys((*wanted, *there)) if each in there and not owned.is_held(DeviceID(each))]
    return tuple(free[: len(wanted)]) if len(free) >= len(wanted) else ()
