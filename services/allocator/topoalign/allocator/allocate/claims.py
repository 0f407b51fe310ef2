"""
Checks Allocate calls. A container can claim devices in several ways at once. Each way is a `Claim`.

For each container, `grants` calls these methods of every claim, in this order:

- `check`: checks whether the hardware and the reservations allow these devices together.
- `conflicts`: returns the allocations that may conflict with the container. If the last poll of the kubelet does not
  cover one of them, the kubelet is polled before `evict`.
- `evict`: releases the conflicting allocations whose containers have ended. Refuses the call if another container still
  has the devices.
- `complete`: adds the data of the claim to the new allocation.

`WholeDevices` claims a call's devices. `UnitClaim` and `SlotClaim` claim GPU shares. `JointClaim` claims the NICs
reserved with the GPUs. `VisibleGpus` checks that the container sees all its GPUs. A new sharing mode needs a `Claim`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from topoalign.allocator.mig.instances import CreatedInstance
from topoalign.allocator.ports import AskedDevices, KubeletListing, Poll
from topoalign.allocator.reconciliation.displacement import overlapping_devices
from topoalign.allocator.reconciliation.liveness import LivenessCheck, reported_places
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.errors import (
    DeviceInUse,
    DeviceUnusable,
    HardwareUnknown,
    InvalidField,
    UnknownDevice,
    quoted,
)
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.model.topology.device_sets import NO_DEVICES, DeviceSet
from topoalign.core.placement.sparing import is_any_held
from topoalign.core.ports import Clock
from topoalign.core.state.fold import NodeState
from topoalign.core.state.node_reservations import NodeReservations

MOST_DEVICES = 20_000
"""Maximum number of devices in one Allocate call. No node lists that many."""


class NodeView:
    """The data that claims need: the node's state and reservations, the time, and a check for ended containers."""

    def __init__(
        self,
        state: Callable[[], NodeState],
        clock: Clock,
        reserved: Callable[[], NodeReservations],
        liveness: LivenessCheck,
        compat: str = "",
    ) -> None:
        """`compat`: `KubeletRules.compat` of the node."""
        self._state = state
        self._clock = clock
        self._reserved = reserved
        self.liveness = liveness
        self.compat = compat

    @property
    def state(self) -> NodeState:
        """The state of the node. While a group of calls is checked, it includes the grants of the earlier calls."""
        return self._state()

    @property
    def reserved(self) -> NodeReservations:
        """The current reservations of the node."""
        return self._reserved()

    @property
    def now(self) -> float:
        """Monotonic seconds."""
        return self._clock.monotonic()


class NewRecords(NamedTuple):
    """The changes that one call has made to the ledger so far."""

    granted: list[Allocation]
    gone: dict[AllocationID, Allocation]
    """The allocations to release."""
    ended: set[AllocationID]
    """The allocations in `gone` that leave no remainder."""
    deviations: dict[AllocationID, tuple[DeviceID, ...]]
    """Allocation -> preferred or reserved devices, if the kubelet allocated others (`preferred` of `Ledger.grant`)."""


class AskedContainer(NamedTuple):
    """One container of an Allocate call while its claims are checked."""

    resource: ResourceName
    devices: Collection[DeviceID]
    ids: frozenset[DeviceID]
    """The same devices."""
    made: Mapping[DeviceID, CreatedInstance]
    """Slot -> the MIG instance that was created for it."""
    poll: Poll | None
    new: NewRecords
    stale: dict[AllocationID, Allocation]
    """The allocations to release for this container. Some of their devices may stay allocated (`remainders`)."""

    @property
    def listing(self) -> KubeletListing | None:
        """The kubelet's answer; None if it was not polled."""
        return self.poll.listing if self.poll is not None else None

    @property
    def known_poll(self) -> Poll:
        """The poll. It exists if `evict` is called with conflicts."""
        assert self.poll is not None, "a record is known to the poll"
        return self.poll

    def release(self, records: Iterable[Allocation]) -> None:
        """Marks these allocations as released for the container."""
        self.stale.update((each.id, each) for each in records)
        self.new.gone.update(self.stale)


class Claim:
    """One way to claim devices. This base class claims nothing."""

    def __init__(self, view: NodeView) -> None:
        self.view = view

    def applies(self, resource: ResourceName) -> bool:
        """Whether this claim handles devices of the resource. If not, the other methods are not called."""
        return True

    def check(self, resource: ResourceName, devices: Collection[DeviceID]) -> None:
        """Raises NoFit or BadRequest if no container can have these devices together."""

    def conflicts(self, asked: AskedContainer) -> Sequence[Allocation]:
        """Returns the allocations that may conflict with the container. A poll must show whether they have ended."""
        return ()

    def evict(self, asked: AskedContainer, conflicts: Sequence[Allocation]) -> None:
        """Releases stale allocations in `conflicts`. Raises NoFit if any other conflicts with the container."""

    def complete(self, asked: AskedContainer, allocation: Allocation) -> Allocation:
        """Adds the data of this claim to the allocation. Raises NoFit if the claim cannot be satisfied."""
        return allocation

    def granted(self, resource: ResourceName, answers: Sequence[Allocation], poll: Poll | None) -> None:
        """Notes the answers to a call. `poll`: the poll of the kubelet for this call, if any."""


class WholeDevices(Claim):
    """Claims the devices in the kubelet's call and all devices that overlap them."""

    def conflicts(self, asked: AskedContainer) -> Sequence[Allocation]:
        """Returns the allocations that hold any of these devices."""
        state = self.view.state
        owned = state.ownership
        if not is_any_held(state.hardware, owned, asked.resource, asked.devices):
            return ()
        return [state.allocations[name] for name in sorted(owned.overlapping(map(owned.holding, asked.devices)))]

    def evict(self, asked: AskedContainer, conflicts: Sequence[Allocation]) -> None:
        """Releases stale allocations. Raises DeviceInUse if a container still has the devices."""
        owned = self.view.state.ownership
        for record in conflicts:
            poll = asked.known_poll
            given = overlapping_devices(owned, record, asked.ids)
            if in_use := [device for _, device in reported_places(poll.listing) & {*given}]:
                raise DeviceInUse(sorted(in_use), record.id)
            if given or self.view.liveness.has_ended(record, poll.listing, poll.at):
                asked.release([record])
                continue
            wanted = owned.set_of(asked.ids)
            ids = [each for _, some in reported_co_allocated(record) for each in some]
            if in_use := [each for each in ids if wanted.overlaps(owned.holding(each))]:
                raise DeviceInUse(sorted(in_use), record.id)

    def complete(self, asked: AskedContainer, allocation: Allocation) -> Allocation:
        """Raises InvalidField if a container requests more devices of a resource than its offer allows."""
        offers = self.view.state.hardware.offers_of.get(asked.resource, ())
        most = min((offer.most for offer in offers if offer.most is not None), default=None)
        if most is not None and len(asked.devices) > most:
            raise InvalidField(
                "devices_ids",
                f"{len(asked.devices)} of {asked.resource}; a container may have at most {most}",
                f"request {most} in the pod: more shares give no more of a GPU (failRequestsGreaterThanOne)",
            )
        return allocation


def check_allocate(state: NodeState, resource: ResourceName, containers: AskedDevices) -> list[DeviceSet]:
    """Checks the devices of a call. Raises InvalidField, HardwareUnknown, UnknownDevice and DeviceUnusable."""
    asked = [device for devices in containers for device in devices]
    if not containers or not all(containers):
        raise InvalidField("devices_ids", "empty", "the kubelet asks for at least one device")
    if len(asked) > MOST_DEVICES:
        raise InvalidField("devices_ids", f"{len(asked)} devices", f"no node has more than {MOST_DEVICES}")
    if len({*asked}) < len(asked):
        repeated = [device for device, times in Counter(asked).items() if times > 1]
        raise InvalidField("devices_ids", f"named more than once: {quoted(repeated)}", "name each device once")
    if state.topology is None or state.health is None:
        raise HardwareUnknown(state.node, "discovery has not published it")
    known = state.hardware.devices.get(resource, NO_DEVICES)
    sets = [*map(known.some, containers)]
    if sum(map(len, sets)) < len(asked):
        raise UnknownDevice([device for device in asked if device not in known])
    usable = state.ownership.handed_out.usable(resource)
    if any(each - usable for each in sets):
        device = next(device for device in asked if device not in usable)
        health = state.health_of(device)
        raise DeviceUnusable(device, "cordoned" if health.cordoned else health.state, health.reason)
    return sets


def reported_co_allocated(allocation: Allocation) -> Iterable[tuple[ResourceName, Sequence[DeviceID]]]:
    """Yields each resource with its co-allocated devices of an allocation, by the IDs that the container sees."""
    for resource, ids in allocation.devices.items():
        if co_allocated := [device for device in ids if device in allocation.co_allocated]:
            functions = allocation.virtual_functions
            yield resource, [each for device in co_allocated for each in reported_ids(device, functions)]


def reported_ids(device: DeviceID, functions: Mapping[DeviceID, tuple[str, ...]]) -> tuple[DeviceID, ...]:
    """Returns the IDs by which a container sees a device. For a NIC with virtual functions, these are their IDs."""
    return tuple(map(DeviceID, functions.get(device, (device,))))
