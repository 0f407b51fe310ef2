"""
Judges the kubelet's Allocate calls by the record, and records what is granted.

Calls that are ready together are judged in order, each by the state after the grants before it, and recorded in one entry of
the journal. Nothing here pauses between judging and recording.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import anyio
from anyio.lowlevel import checkpoint

from topoalign.allocator.allocate.co_allocation import ReservedCoAllocations, overlapping_co_allocated
from topoalign.allocator.allocate.pre_start import ShareStarts
from topoalign.allocator.allocate.slots import SlotGrants
from topoalign.allocator.allocate.units import ShareExclusion, Shares
from topoalign.allocator.allocate.visible_gpus import VisibleGpus
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.mig.instances import CreatedInstance
from topoalign.allocator.ports import AskedDevices, KubeletListing, Place, PodResources, Poll
from topoalign.allocator.reconciliation.adoption import in_offered_order, return_displaced
from topoalign.allocator.reconciliation.displacement import (
    displaced_by,
    displaced_pod_name,
    log_displaced,
    log_ended,
    overlapping_devices,
    remainders,
)
from topoalign.allocator.reconciliation.evidence import Grant, Rest
from topoalign.allocator.reconciliation.liveness import kubelet_places, reported_places
from topoalign.allocator.reconciliation.reconciliation import Reconciliation
from topoalign.core.model.errors import (
    DeviceInUse,
    DeviceUnusable,
    HardwareUnknown,
    InvalidField,
    StateFault,
    UnknownDevice,
    quoted,
)
from topoalign.core.model.events import Allocation, Displaced
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.model.reservations import ReservedContainer
from topoalign.core.model.topology.by_amounts import is_by_amounts
from topoalign.core.model.topology.device_sets import NO_DEVICES, DeviceSet
from topoalign.core.placement.sparing import is_any_held
from topoalign.core.ports import Clock
from topoalign.core.sharing.reserved_shares import ShareQuestion
from topoalign.core.state.fold import NodeState
from topoalign.core.state.node_reservations import NodeReservations

# The kubelet may take other devices than were preferred, and an Allocate does not name the preference that it follows. It is
# the last one for its resource, if that was given a moment ago and for a set of this size.


FOLLOWED_SECONDS = 10.0
"""How long after a preference an Allocate may follow from it; the kubelet needs milliseconds."""


class Preference(NamedTuple):
    """One answer to GetPreferredAllocation: what was available, what was chosen, and when (monotonic seconds)."""

    available: Collection[DeviceID]
    chosen: tuple[DeviceID, ...]
    at: float


class Preferences:
    """Remembers the newest preference for each resource, and compares it with what the kubelet then allocates."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._newest: dict[ResourceName, Preference] = {}

    def remember(self, resource: ResourceName, available: Collection[DeviceID], chosen: tuple[DeviceID, ...]) -> None:
        """Remembers that `chosen` was preferred among the `available` devices; it replaces the former preference."""
        self._newest[resource] = Preference(available, chosen, self._clock.monotonic())

    def deviations(
        self, resource: ResourceName, granted: Sequence[Allocation]
    ) -> dict[AllocationID, tuple[DeviceID, ...]]:
        """
        Returns allocation -> the devices that were preferred instead; empty if the kubelet followed the preference.

        Removes the last preference for the resource. It counts if it is at most `FOLLOWED_SECONDS` old, one
        container was granted, and its devices are as many as were preferred and were all available.
        """
        given = self._newest.pop(resource, None)
        if given is None or len(granted) != 1 or self._clock.monotonic() - given.at > FOLLOWED_SECONDS:
            return {}
        taken = {device for ids in granted[0].from_kubelet.values() for device in ids}
        if taken == {*given.chosen} or len(taken) != len(given.chosen):
            return {}
        if not all(device in given.available for device in taken):
            return {}
        return {granted[0].id: given.chosen}


# Group commit: one write to the journal and one sync for all Allocate calls that are ready.
#
# A call that is ready joins a queue. The first call in the queue waits as long as each iteration of the event loop brings
# another one; then all calls in the queue are judged and recorded together. While the disk syncs, the loop is blocked and
# further calls wait in their sockets, so the groups grow with the load. A single call waits for one iteration. A few
# requests are read in each iteration (`kubelet.grpc.turns`), so a group waits for some iterations without a new call.
#
# A call that is cancelled before it is judged leaves the queue, and nothing is recorded for it. A call that is cancelled
# later is recorded. The first call of the queue records the others even if it is cancelled itself.


class AllocateCall:
    """One Allocate on its way into the record."""

    def __init__(
        self,
        resource: ResourceName,
        containers: AskedDevices,
        checked: int,
        made: Mapping[DeviceID, CreatedInstance] = {},
    ) -> None:
        self.resource = resource
        self.containers = containers
        self.made = made
        """Slot -> the MIG instance that was created for it."""
        self.checked = checked
        """The version of the ledger under which its devices were checked."""
        self.poll: Poll | None = None
        """The poll of the kubelet for this call; None: there was none."""
        self.grant: Grant | None = None
        """The moment before the poll; None: the moment of the record."""
        self.answers: Sequence[Allocation] | None = None
        """One allocation for each container, recorded; None: there is no answer yet."""
        self.error: Exception | None = None
        """Why it is refused."""

    def result(self) -> tuple[Allocation, ...] | None:
        """Returns the answers; None: the kubelet must be polled first. Raises the error of a refused call."""
        if self.error is not None:
            raise self.error
        return None if self.answers is None else tuple(self.answers)


MOST_CALLS = 256
"""Calls that are recorded together."""
QUIET_TURNS = 2
"""Iterations of the event loop without a new call after which a group is complete."""


class GroupCommit:
    """Queues calls that are ready, and records them in groups."""

    def __init__(self, record: Callable[[Sequence[AllocateCall]], None]) -> None:
        """`record` judges and records calls in their order, without a pause, and gives each its answers or its error."""
        self._record = record
        self._queue: list[AllocateCall] = []
        self._recorded = anyio.Event()
        """Set once the calls that are queued now are recorded."""

    async def join(self, call: AllocateCall) -> tuple[Allocation, ...] | None:
        """Records the call with all others that are ready. Returns and raises what `AllocateCall.result` does."""
        is_first = not self._queue
        self._queue.append(call)
        try:
            await (self._gather() if is_first else self._recorded.wait())
        except BaseException:
            if call in self._queue:
                self._queue.remove(call)
            raise
        finally:
            if is_first:
                self._flush()
        return call.result()

    async def _gather(self) -> None:
        """Waits until no further call joins."""
        quiet = 0
        count = 1
        while quiet < (1 if count == 1 else QUIET_TURNS) and count < MOST_CALLS:
            await checkpoint()
            quiet = quiet + 1 if len(self._queue) == count else 0
            count = len(self._queue)

    def _flush(self) -> None:
        """Records all queued calls, and wakes their callers."""
        calls = self._queue
        recorded = self._recorded
        self._queue = []
        self._recorded = anyio.Event()
        try:
            self._record(calls)
        finally:
            recorded.set()


MOST_DEVICES = 20_000
"""Devices of one Allocate call: more than any node lists."""


def check_allocate(state: NodeState, resource: ResourceName, containers: AskedDevices) -> list[DeviceSet]:
    """
    Checks whether the devices of an Allocate call can be allocated at all: they must be listed under the resource, healthy
    and not cordoned. Returns them as one set per container. Raises InvalidField, HardwareUnknown, UnknownDevice and
    DeviceUnusable.
    """
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


def check_container_limit(state: NodeState, resource: ResourceName, amount: int) -> None:
    """Raises InvalidField for more devices of a resource than its offer allows one container."""
    offers = state.hardware.offers_of.get(resource, ())
    most = min((offer.most for offer in offers if offer.most is not None), default=None)
    if most is not None and amount > most:
        raise InvalidField(
            "devices_ids",
            f"{amount} of {resource}, of which a container may have {most}",
            f"let the pod ask for {most}: more shares are no more of a GPU (failRequestsGreaterThanOne)",
        )


class Judgement(NamedTuple):
    """The result of one Allocate call."""

    answers: Sequence[Allocation]
    """One for each container."""
    granted: Sequence[Allocation]
    """All new allocations, including those that are no answer."""
    rests: Sequence[Rest]


class Grants:
    """Judges and records Allocate calls."""

    def __init__(  # noqa: PLR0913  # one parameter for each collaborator
        self,
        ledger: Ledger,
        clock: Clock,
        pod_resources: PodResources,
        reconciliation: Reconciliation,
        preferences: Preferences,
        co_allocated: ReservedCoAllocations,
        reserved: Callable[[], NodeReservations],
        expect: Callable[[Sequence[Allocation]], None],
        compat: str,
        visible: VisibleGpus,
    ) -> None:
        """
        `reserved`: the current reservations of the node. `expect` is called with the answers of each call after they are
        recorded, also if the caller no longer waits. `compat`: as in the rules of the node.
        """
        self._ledger = ledger
        self._clock = clock
        self._pod_resources = pod_resources
        self._reconciliation = reconciliation
        self._preferences = preferences
        self._expect = expect
        self.co_allocated = co_allocated
        self.visible = visible
        self.shares = Shares(lambda: ledger.state, clock, reserved, reconciliation.liveness, compat)
        self.exclusion = ShareExclusion(lambda: ledger.state, reconciliation.liveness, self.shares)
        self.share_starts = ShareStarts(ledger, reconciliation.liveness, reserved)
        self.slots = SlotGrants(lambda: ledger.state, clock, reserved, reconciliation.liveness, compat)

    @property
    def state(self) -> NodeState:
        """The state of the node; while calls are judged, with the grants of the calls before."""
        return self._ledger.state

    def prefer_shares(
        self, live: NodeState, question: ShareQuestion, displaced: Collection[DeviceID], poll: Poll | None
    ) -> tuple[DeviceID, ...] | None:
        """Returns the units or slots that a container should get. None: the resource has neither."""
        if not is_by_amounts(live.hardware):
            return None
        match live.hardware.kind_of(question.resource):
            case "unit":
                return self.shares.prefer(live, question, displaced, poll)
            case "slot":
                return self.slots.prefer(live, question, displaced)
            case _:
                return None

    def check(self, resource: ResourceName, containers: AskedDevices) -> AskedDevices:
        """Checks a call as `check_allocate`, `Shares.check` and `SlotGrants.check`, by the current state."""
        asked = check_allocate(self.state, resource, containers)
        if is_by_amounts(self.state.hardware):
            self.shares.check(resource, asked)
            self.slots.check(resource, asked)
        return asked

    def is_any_held(self, resource: ResourceName, devices: Collection[DeviceID]) -> bool:
        """Whether a record holds any of these devices of a resource, which must be distinct."""
        return is_any_held(self.state.hardware, self.state.ownership, resource, devices)

    def held_with(self, resource: ResourceName, devices: Collection[DeviceID]) -> bool:
        """
        Whether records may conflict with a grant of these devices: a record holds a device that is reserved with them, a
        container may have a GPU as a whole of which these are units, or a GPU has not enough left for these slots.
        """
        if self.co_allocated.held_of(self.co_allocated.waiting(resource, devices)):
            return True
        return bool(self._conflicting(resource, devices))

    def _conflicting(
        self, resource: ResourceName, devices: Collection[DeviceID], granted: Sequence[Allocation] = ()
    ) -> Sequence[Allocation]:
        """Returns the records that do not allow a grant of these units or slots, by the record alone."""
        if not is_by_amounts(self.state.hardware):
            return ()
        return [*self.exclusion.conflicting(resource, devices), *self.slots.conflicting(resource, devices, granted)]

    def record(self, calls: Sequence[AllocateCall]) -> None:
        """
        Judges calls in order, each by the state after the calls before it, and records all with one sync. A refused call
        does not affect the others. If the disk fails, all are refused.
        """
        grant = Grant(self._pod_resources.written(), self._clock.monotonic())
        judged: list[tuple[AllocateCall, Judgement]] = []
        try:
            with self._ledger.transaction():
                for call in calls:
                    try:
                        if (judgement := self.judge(call)) is not None:
                            judged.append((call, judgement))
                            self.visible.granted(call.resource, judgement.answers)
                            if self.state.hardware.has_units:
                                self.shares.granted(call.resource, judgement.answers, call.poll)
                    except Exception as error:  # raised to the caller of this call
                        call.error = error
        except StateFault as fault:
            for call, _ in judged:
                call.error = fault
            return
        for call, (answers, granted, rests) in judged:
            call.answers = answers
            self._expect(answers)
            self._reconciliation.liveness.inherit(rests)
            log_ended(self._ledger, rests)
            log_displaced(answers)
            self._reconciliation.liveness.granted(granted, answers, call.grant or grant)
        self.co_allocated.observe()

    def judge(self, call: AllocateCall) -> Judgement | None:
        """
        Grants the devices of a call, or finds that the call is a repetition. Returns None if the kubelet must be polled
        first about a record: there was no poll, or the record is newer. Raises the error of a refused call.
        """
        resource = call.resource
        containers = call.containers
        if self._ledger.version != call.checked:
            self.check(resource, containers)  # the hardware may have changed while this waited
        listing, known = (call.poll.listing, call.poll.live) if call.poll is not None else (None, frozenset())
        shown = reported_places(listing)
        answers = list[Allocation]()
        new = NewRecords([], {}, {})
        in_units = self.state.hardware.has_units
        ended: dict[AllocationID, Allocation] = {}
        for devices in containers:
            asked = frozenset(devices)
            waiting = self.co_allocated.waiting(resource, devices)
            records = self._overlapping(resource, devices, waiting)
            if not known.issuperset(record.id for record in records):
                return None
            if len(records) == 1 and is_repeated(records[0], asked, shown, call.made):
                assert listing is not None
                self._reconciliation.seen(records[0].id, listing)
                answers.append(records[0])
                continue
            if call.poll is None and self.visible.must_ask(resource, asked):
                return None
            self.slots.check_reserved(resource, asked)
            conflicts = self._conflicting(resource, asked, new.granted)
            if not known.issuperset(record.id for record in conflicts):
                return None
            stale = dict(self._stale_records(records, asked, call.poll))
            if in_units:
                self.shares.check_half(resource, asked, call.poll)
                stale |= self.exclusion.make_room(resource, asked, conflicts, stale, call.poll)
            self.visible.check(resource, asked, call.poll)
            ended |= (room := self.slots.make_room(resource, asked, conflicts, stale, new.granted, call.poll))
            new.gone.update(stale | room)
            displaced = displaced_by(self._reconciliation.liveness, self._ledger, [*stale.values()], asked, listing)
            answers.append(self._make_allocation(resource, devices, waiting, new, displaced, call.made, listing))
        granted, gone, deviations = new
        deviations = {**self._preferences.deviations(resource, granted), **deviations}
        reasons = {former.allocation: "displaced" for each in granted for former in each.displaced}
        replaced = [each for each in gone.values() if each.id not in ended]  # nothing remains of the others
        rests = remainders(self._ledger, replaced, containers, listing, granted)
        granted += [rest.allocation for rest in rests]
        granted += return_displaced(self._ledger, [*gone.values()], listing, granted)
        self._ledger.grant(granted, instead_of=list(gone), reasons=reasons, preferred=deviations)
        self._ledger.release_log.left_over({rest.allocation.id: rest.former for rest in rests})
        return Judgement(answers, granted, rests)

    def _overlapping(
        self, resource: ResourceName, asked: Collection[DeviceID], waiting: ReservedContainer | None
    ) -> list[Allocation]:
        """Returns the records that hold any of these devices, or of the devices reserved with them."""
        owned = self.state.ownership
        names = {*self.co_allocated.held_of(waiting)}
        if self.is_any_held(resource, asked):
            names.update(owned.overlapping(map(owned.holding, asked)))
        return [self.state.allocations[name] for name in sorted(names)]

    def _stale_records(
        self, records: Sequence[Allocation], asked: Collection[DeviceID], poll: Poll | None
    ) -> Iterator[tuple[AllocationID, Allocation]]:
        """
        Yields the stale ones of these records, by id: the kubelet allocates their devices and reports them with no
        container, or their containers have ended. Raises DeviceInUse if a container has the devices.
        """
        owned = self.state.ownership
        has_ended = self._reconciliation.liveness.has_ended
        for record in records:
            assert poll is not None, "a record is known to the poll"
            asks = overlapping_devices(owned, record, asked)
            if in_use := [d for _, d in reported_places(poll.listing) & {*asks}]:
                raise DeviceInUse(sorted(in_use), record.id)
            if asks or has_ended(record, poll.listing, poll.at):
                yield record.id, record
            elif co_allocated := overlapping_co_allocated(owned, record, asked):
                raise DeviceInUse(sorted(co_allocated), record.id)

    def _make_allocation(
        self,
        resource: ResourceName,
        asked: Collection[DeviceID],
        waiting: ReservedContainer | None,
        new: "NewRecords",
        displaced: tuple[Displaced, ...],
        made: Mapping[DeviceID, CreatedInstance],
        listing: KubeletListing | None,
    ) -> Allocation:
        """Makes an allocation and adds it to `new`. Raises InvalidField for more devices than a container may have."""
        check_container_limit(self.state, resource, len(asked))
        owned = self.state.ownership
        ordered = in_offered_order(self.state.hardware, resource, asked)
        amounts = self.slots.amounts(resource, ordered)
        instead: tuple[DeviceID, ...] = ()
        if waiting is not None:
            co_allocated = self.co_allocated.available(waiting, new.gone)
        else:
            co_allocated, instead = self.co_allocated.choose_for_unreserved(resource, asked, new.gone)
        new.granted.append(
            Allocation(
                id=self._ledger.next_id(len(new.granted)),
                devices={resource: ordered, **co_allocated.devices},
                virtual_functions=dict(co_allocated.functions),
                boot=self._ledger.boot,
                machine=self._ledger.machine,
                cards=owned.cards_of(asked),
                displaced=displaced,
                co_allocated=co_allocated.ids,
                slots={**amounts, **{s: made[s].amount for s in ordered if s in made}},
                instances={slot: made[slot].uuid for slot in ordered if slot in made},
                reserved_for=self.slots.reserved_for(resource, amounts),
                denied=displaced_pod_name(new.gone.values(), resource, ordered, listing)
                or self.slots.displaced_pod_of(resource, ordered),
            )
        )
        if co_allocated.lacking:
            instead = (*new.granted[-1].device_ids, *co_allocated.lacking)
        if instead:
            new.deviations[new.granted[-1].id] = instead
        return new.granted[-1]


class NewRecords(NamedTuple):
    """The changes of the record by a call so far."""

    granted: list[Allocation]
    gone: dict[AllocationID, Allocation]
    """Stale records that are released."""
    deviations: dict[AllocationID, tuple[DeviceID, ...]]
    """As for `Ledger.grant`: the devices that were preferred or reserved, if they differ."""


def is_repeated(
    record: Allocation, asked: Collection[DeviceID], shown: Collection[Place], made: Mapping[DeviceID, CreatedInstance]
) -> bool:
    """Whether the call repeats one whose devices the kubelet reports with a container, and whose instances exist."""
    is_same = all_given(record) == asked and all(place in shown for place in kubelet_places(record))
    return is_same and all(record.instances.get(slot) == each.uuid for slot, each in made.items() if slot in asked)


def all_given(record: Allocation) -> frozenset[DeviceID]:
    """Returns the devices of a record that the kubelet allocated."""
    return frozenset(device for ids in record.from_kubelet.values() for device in ids)
