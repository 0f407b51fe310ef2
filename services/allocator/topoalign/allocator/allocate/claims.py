"""
Judges what a container claims by an Allocate. A container may claim devices in several ways at once; each is a `Claim`.

For each container `grants` asks every claim, in this order:

- `check`: can a container have these devices at all, by the hardware and the reservations?
- `conflicts`: which records may exclude the container? A poll of the kubelet must cover them.
- `evict`: which of these records are stale and are released? Refuses the container if another one still has the devices.
- `complete`: what does the claim add to the allocation?

`WholeDevices` claims the named devices themselves. `UnitClaim` and `SlotClaim` claim a share of a GPU, `JointClaim` the NICs
that are reserved with the GPUs, and `VisibleGpus` that the container sees its GPUs. A new way to share is one more claim.
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
"""Devices of one Allocate call: more than any node lists."""


class NodeView:
    """What claims are judged by: the state of the node, its reservations, the time, and what is known of containers."""

    def __init__(
        self,
        state: Callable[[], NodeState],
        clock: Clock,
        reserved: Callable[[], NodeReservations],
        liveness: LivenessCheck,
        compat: str = "",
    ) -> None:
        """`compat`: as in the rules of the node."""
        self._state = state
        self._clock = clock
        self._reserved = reserved
        self.liveness = liveness
        self.compat = compat

    @property
    def state(self) -> NodeState:
        """The state of the node; while calls are judged, with the grants of the calls before."""
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
    """The changes of the record by a call so far."""

    granted: list[Allocation]
    gone: dict[AllocationID, Allocation]
    """Records that are released."""
    ended: set[AllocationID]
    """Those of `gone` of which nothing remains."""
    deviations: dict[AllocationID, tuple[DeviceID, ...]]
    """As for `Ledger.grant`: the devices that were preferred or reserved, if they differ."""


class AskedContainer(NamedTuple):
    """One container of an Allocate call while its claims are judged."""

    resource: ResourceName
    devices: Collection[DeviceID]
    ids: frozenset[DeviceID]
    """The same devices."""
    made: Mapping[DeviceID, CreatedInstance]
    """Slot -> the MIG instance that was created for it."""
    poll: Poll | None
    new: NewRecords
    stale: dict[AllocationID, Allocation]
    """Records that are released for this container. Their containers may keep what remains of them."""

    @property
    def listing(self) -> KubeletListing | None:
        """The kubelet's answer; None: it was not polled."""
        return self.poll.listing if self.poll is not None else None

    @property
    def known_poll(self) -> Poll:
        """The poll, which exists if the container has conflicts: none of them is known without it."""
        assert self.poll is not None, "a record is known to the poll"
        return self.poll

    def release(self, records: Iterable[Allocation]) -> None:
        """Releases these records for the container."""
        self.stale.update((each.id, each) for each in records)
        self.new.gone.update(self.stale)


class Claim:
    """One way in which a container has devices. By default it claims nothing."""

    holds_devices = False
    """Whether its conflicts are records of the very devices, so that one of them may be that of a repeated call."""

    def __init__(self, view: NodeView) -> None:
        self.view = view

    def applies(self, resource: ResourceName) -> bool:
        """Whether devices of this resource are claimed; the other methods are called for such a resource only."""
        return True

    def check(self, resource: ResourceName, devices: Collection[DeviceID]) -> None:
        """Raises NoFit or BadRequest for devices that no container can have together."""

    def conflicts(self, asked: AskedContainer) -> Sequence[Allocation]:
        """Returns the records that may exclude the container: a poll must show what their containers have."""
        return ()

    def evict(self, asked: AskedContainer, conflicts: Sequence[Allocation]) -> None:
        """Releases those of `conflicts` that are stale. Raises NoFit if another one excludes the container."""

    def complete(self, asked: AskedContainer, allocation: Allocation) -> Allocation:
        """Adds to the new allocation what this claim gives. Raises NoFit if that cannot be allocated."""
        return allocation

    def granted(self, resource: ResourceName, answers: Sequence[Allocation], poll: Poll | None) -> None:
        """Notes the answers to a call. `poll`: the poll of the kubelet before it, if any."""


class WholeDevices(Claim):
    """Claims the devices that the kubelet names, and with them all that overlaps them."""

    holds_devices = True

    def conflicts(self, asked: AskedContainer) -> Sequence[Allocation]:
        """Returns the records that hold any of these devices."""
        state = self.view.state
        owned = state.ownership
        if not is_any_held(state.hardware, owned, asked.resource, asked.devices):
            return ()
        return [state.allocations[name] for name in sorted(owned.overlapping(map(owned.holding, asked.devices)))]

    def evict(self, asked: AskedContainer, conflicts: Sequence[Allocation]) -> None:
        """Releases stale records. Raises DeviceInUse if a container has the devices."""
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
        """Raises InvalidField for more devices of a resource than its offer allows one container."""
        offers = self.view.state.hardware.offers_of.get(asked.resource, ())
        most = min((offer.most for offer in offers if offer.most is not None), default=None)
        if most is not None and len(asked.devices) > most:
            raise InvalidField(
                "devices_ids",
                f"{len(asked.devices)} of {asked.resource}, of which a container may have {most}",
                f"let the pod ask for {most}: more shares are no more of a GPU (failRequestsGreaterThanOne)",
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
        raise HardwareUnknown(state.node, "no facts of discovery have been received")
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
    """Yields resource -> the co-allocated devices of an allocation, under the ids that the container sees."""
    for resource, ids in allocation.devices.items():
        if co_allocated := [device for device in ids if device in allocation.co_allocated]:
            functions = allocation.virtual_functions
            yield resource, [each for device in co_allocated for each in reported_ids(device, functions)]


def reported_ids(device: DeviceID, functions: Mapping[DeviceID, tuple[str, ...]]) -> tuple[DeviceID, ...]:
    """Returns the ids under which a container sees a device: for a NIC with virtual functions, the functions' ids."""
    return tuple(map(DeviceID, functions.get(device, (device,))))
