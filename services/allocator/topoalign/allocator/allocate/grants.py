"""
Judges what the kubelet asks for in Allocate by the record, and records what it is given.

Calls that are ready together are judged in order, each by the state in which those before it have what they were given, and
recorded in one entry of the journal. Nothing here pauses between judging and recording.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import anyio
from anyio.lowlevel import checkpoint

from topoalign.allocator.allocate.joint_devices import ReservedCoAllocations, overlapping_co_allocated
from topoalign.allocator.allocate.pre_start import ShareStarts
from topoalign.allocator.allocate.slots import SlotGrants
from topoalign.allocator.allocate.units import ShareExclusion, Shares
from topoalign.allocator.allocate.visible_gpus import VisibleGpus
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.mig.instances import Made
from topoalign.allocator.ports import AskedDevices, Listing, Place, PodResources, Poll
from topoalign.allocator.reconciliation.adoption import in_order, returned
from topoalign.allocator.reconciliation.displacement import (
    denied_pod,
    displaced_by,
    remainders,
    tell_displaced,
    tell_ended,
    touching,
)
from topoalign.allocator.reconciliation.liveness import places, shown_of
from topoalign.allocator.reconciliation.memory import Grant, Rest
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

# Where the kubelet took other devices than were preferred.
#
# It need not follow GetPreferredAllocation, and an Allocate does not say which preference it follows: that is the last
# one for its resource, if it was given a moment ago and for such a set.


FOLLOWED_SECONDS = 10.0
"""For so long an Allocate may follow from a preference; the kubelet needs milliseconds."""


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

    def give(self, resource: ResourceName, available: Collection[DeviceID], chosen: tuple[DeviceID, ...]) -> None:
        """Remembers that `chosen` was preferred among the `available` devices; it replaces the former preference."""
        self._newest[resource] = Preference(available, chosen, self._clock.monotonic())

    def deviations(
        self, resource: ResourceName, granted: Sequence[Allocation]
    ) -> dict[AllocationID, tuple[DeviceID, ...]]:
        """
        Maps an allocation to the devices that were preferred in its place; empty where the kubelet followed the preference.

        The last preference for the resource is used up by this. It counts if it is at most `FOLLOWED_SECONDS` old, one
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


# Allocate calls that are recorded together: one write to the journal and one sync for all that are ready.
#
# A call that is ready joins a queue. The first in the queue waits as long as each turn of the event loop brings another
# one, and then all of the queue are judged and recorded in one go. While the disk syncs, the loop stands still and
# further calls gather in their sockets, so the groups are as large as the load is. A single caller waits for one turn
# of the loop; requests are taken in a few in each turn (`kubelet.grpc.turns`), so those who are not alone wait for some
# turns without a newcomer.
#
# A caller who gives up before its call is judged leaves the queue, and nothing is recorded for it. One who gives up
# later has its record, and whoever was first in the queue records the others whether or not it has given up itself.


class AllocateCall:
    """One Allocate on its way into the record."""

    def __init__(
        self,
        resource: ResourceName,
        containers: AskedDevices,
        checked: int,
        made: Mapping[DeviceID, Made] = {},
    ) -> None:
        self.resource = resource
        self.containers = containers
        self.made = made
        """`made`: slot -> the MIG instance that was made for it."""
        self.checked = checked
        """The version of the ledger under which its devices were checked."""
        self.poll: Poll | None = None
        """What the kubelet answered when it was asked for this call; None: it was not asked."""
        self.grant: Grant | None = None
        """The moment before that; None: the moment of the record."""
        self.answers: Sequence[Allocation] | None = None
        """One allocation for each container, recorded; None: there is no answer yet."""
        self.error: Exception | None = None
        """Why it is refused."""

    def result(self) -> tuple[Allocation, ...] | None:
        """The answers; None: the kubelet has to be asked first. Raises why the call is refused."""
        if self.error is not None:
            raise self.error
        return None if self.answers is None else tuple(self.answers)


MOST_CALLS = 256
"""Recorded together."""
QUIET_TURNS = 2
"""Turns of the event loop without a newcomer after which a group is whole."""


class GroupCommit:
    """The queue of the calls that are ready."""

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
        """Returns when no more calls come for now."""
        quiet = 0
        count = 1
        while quiet < (1 if count == 1 else QUIET_TURNS) and count < MOST_CALLS:
            await checkpoint()
            quiet = quiet + 1 if len(self._queue) == count else 0
            count = len(self._queue)

    def _flush(self) -> None:
        """Records all that are queued, and wakes them."""
        calls = self._queue
        recorded = self._recorded
        self._queue = []
        self._recorded = anyio.Event()
        try:
            self._record(calls)
        finally:
            recorded.set()


# Whether what a kubelet asks for in Allocate can be given at all, whoever holds it.
#
# Devices have to be listed under the resource, healthy and not cordoned, and no more than a container may have of
# shares.


MOST_DEVICES = 20_000
"""Of one Allocate call: more than any node lists."""


def check_allocate(state: NodeState, resource: ResourceName, containers: AskedDevices) -> list[DeviceSet]:
    """
    The devices of one Allocate call, by containers, as sets. Raises InvalidField, HardwareUnknown, UnknownDevice and
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


def check_amount(state: NodeState, resource: ResourceName, amount: int) -> None:
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
    """What one Allocate is given."""

    answers: Sequence[Allocation]
    """One for each container."""
    granted: Sequence[Allocation]
    """All that are new, with those beside the answers."""
    rests: Sequence[Rest]


class Grants:
    """Grants over the kubelet's protocol."""

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
        `reserved`: what is reserved on the node now. `expect` is told what each call is given once that is recorded, whether
        or not the caller still waits for it. `compat`: as in the rules of the node.
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
        """What is known of the node now; while calls are judged, with what those before were given."""
        return self._ledger.state

    def prefer_shares(
        self, live: NodeState, question: ShareQuestion, displaced: Collection[DeviceID], poll: Poll | None
    ) -> tuple[DeviceID, ...] | None:
        """The units or slots that a container should get (`Shares.prefer`, `SlotGrants.prefer`). None: it is not of such."""
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
        """As `check_allocate`, `Shares.check` and `SlotGrants.check`, by what is known of the node now."""
        asked = check_allocate(self.state, resource, containers)
        if is_by_amounts(self.state.hardware):
            self.shares.check(resource, asked)
            self.slots.check(resource, asked)
        return asked

    def is_any_held(self, resource: ResourceName, devices: Collection[DeviceID]) -> bool:
        """Whether the record has any of these devices of a resource, all different, as held."""
        return is_any_held(self.state.hardware, self.state.ownership, resource, devices)

    def held_beside(self, resource: ResourceName, devices: Collection[DeviceID]) -> bool:
        """
        Whether what is to come with these devices is held, somebody may have a GPU whole of which these are units, or these
        are slots of a GPU that has not enough left.
        """
        if self.co_allocated.held_of(self.co_allocated.waiting(resource, devices)):
            return True
        return bool(self._beside(resource, devices))

    def _beside(
        self, resource: ResourceName, devices: Collection[DeviceID], granted: Sequence[Allocation] = ()
    ) -> Sequence[Allocation]:
        """The records beside which these units or slots may not be given, as far as the record tells."""
        if not is_by_amounts(self.state.hardware):
            return ()
        return [*self.exclusion.beside(resource, devices), *self.slots.beside(resource, devices, granted)]

    def record(self, calls: Sequence[AllocateCall]) -> None:
        """
        Judges calls in order, each by what those before it were given, and records all with one sync. One that is refused
        drops out alone; if the disk refuses, all of them are refused.
        """
        grant = Grant(self._pod_resources.written(), self._clock.monotonic())
        judged: list[tuple[AllocateCall, Judgement]] = []
        try:
            with self._ledger.together():
                for call in calls:
                    try:
                        if (judgement := self.judge(call)) is not None:
                            judged.append((call, judgement))
                            self.visible.granted(call.resource, judgement.answers)
                            if self.state.hardware.has_units:
                                self.shares.granted(call.resource, judgement.answers, call.poll)
                    except Exception as error:  # it is this caller's, who raises it
                        call.error = error
        except StateFault as fault:
            for call, _ in judged:
                call.error = fault
            return
        for call, (answers, granted, rests) in judged:
            call.answers = answers
            self._expect(answers)
            self._reconciliation.liveness.inherit(rests)
            tell_ended(self._ledger, rests)
            tell_displaced(answers)
            self._reconciliation.liveness.granted(granted, answers, call.grant or grant)
        self.co_allocated.observe()

    def judge(self, call: AllocateCall) -> Judgement | None:
        """
        Grants what a call asks for, or finds that it has it already. Returns None where the kubelet has to tell first what
        became of a record: it was not asked, or was before that was granted. Raises why the call is refused.
        """
        resource = call.resource
        containers = call.containers
        if self._ledger.version != call.checked:
            self.check(resource, containers)  # the hardware may have changed while this waited
        listing, known = (call.poll.listing, call.poll.live) if call.poll is not None else (None, frozenset())
        shown = shown_of(listing)
        answers = list[Allocation]()
        new = New([], {}, {})
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
            self.slots.check_told(resource, asked)
            beside = self._beside(resource, asked, new.granted)
            if not known.issuperset(record.id for record in beside):
                return None
            way = dict(self._making_way(records, asked, call.poll))
            if in_units:
                self.shares.check_half(resource, asked, call.poll)
                way |= self.exclusion.making_room(resource, asked, beside, way, call.poll)
            self.visible.check(resource, asked, call.poll)
            ended |= (room := self.slots.making_room(resource, asked, beside, way, new.granted, call.poll))
            new.gone.update(way | room)
            displaced = displaced_by(self._reconciliation.liveness, self._ledger, [*way.values()], asked, listing)
            answers.append(self._granted(resource, devices, waiting, new, displaced, call.made, listing))
        granted, gone, deviations = new
        deviations = {**self._preferences.deviations(resource, granted), **deviations}
        reasons = {former.allocation: "displaced" for each in granted for former in each.displaced}
        replaced = [each for each in gone.values() if each.id not in ended]  # of those nothing stays
        rests = remainders(self._ledger, replaced, containers, listing, granted)
        granted += [rest.allocation for rest in rests]
        granted += returned(self._ledger, [*gone.values()], listing, granted)
        self._ledger.grant(granted, instead_of=list(gone), reasons=reasons, preferred=deviations)
        self._ledger.endings.left_over({rest.allocation.id: rest.former for rest in rests})
        return Judgement(answers, granted, rests)

    def _overlapping(
        self, resource: ResourceName, asked: Collection[DeviceID], waiting: ReservedContainer | None
    ) -> list[Allocation]:
        """The records that hold something of what is asked for, or of what is to come with it."""
        owned = self.state.ownership
        names = {*self.co_allocated.held_of(waiting)}
        if self.is_any_held(resource, asked):
            names.update(owned.overlapping(map(owned.holding, asked)))
        return [self.state.allocations[name] for name in sorted(names)]

    def _making_way(
        self, records: Sequence[Allocation], asked: Collection[DeviceID], poll: Poll | None
    ) -> Iterator[tuple[AllocationID, Allocation]]:
        """
        Those of the records that make way, by id: the kubelet asks for what they hold and shows it nowhere, or their
        containers have ended. Raises DeviceInUse where it asks for what a container has.
        """
        owned = self.state.ownership
        has_ended = self._reconciliation.liveness.has_ended
        for record in records:
            assert poll is not None, "a record is known to the poll"
            asks = touching(owned, record, asked)
            if in_use := [d for _, d in shown_of(poll.listing) & {*asks}]:
                raise DeviceInUse(sorted(in_use), record.id)
            if asks or has_ended(record, poll.listing, poll.at):
                yield record.id, record
            elif beside := overlapping_co_allocated(owned, record, asked):
                raise DeviceInUse(sorted(beside), record.id)

    def _granted(
        self,
        resource: ResourceName,
        asked: Collection[DeviceID],
        waiting: ReservedContainer | None,
        new: "New",
        displaced: tuple[Displaced, ...],
        made: Mapping[DeviceID, Made],
        listing: Listing | None,
    ) -> Allocation:
        """Makes the allocation. Raises InvalidField for more than a container may have, and CompanionsLacking."""
        check_amount(self.state, resource, len(asked))
        owned = self.state.ownership
        ordered = in_order(self.state.hardware, resource, asked)
        amounts = self.slots.amounts(resource, ordered)
        instead: tuple[DeviceID, ...] = ()
        if waiting is not None:
            co_allocated = self.co_allocated.left(waiting, new.gone)
        else:
            co_allocated, instead = self.co_allocated.adopted(resource, asked, new.gone)
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
                denied=denied_pod(new.gone.values(), resource, ordered, listing)
                or self.slots.displaced_pod_of(resource, ordered),
            )
        )
        if co_allocated.lacking:
            instead = (*new.granted[-1].device_ids, *co_allocated.lacking)
        if instead:
            new.deviations[new.granted[-1].id] = instead
        return new.granted[-1]


class New(NamedTuple):
    """What a call leads to so far."""

    granted: list[Allocation]
    gone: dict[AllocationID, Allocation]
    """Records that make way."""
    deviations: dict[AllocationID, tuple[DeviceID, ...]]
    """As `Ledger.grant` takes it: what was preferred or reserved, where that was something else."""


def is_repeated(
    record: Allocation, asked: Collection[DeviceID], shown: Collection[Place], made: Mapping[DeviceID, Made]
) -> bool:
    """Whether a kubelet that asks for these asks again for what it shows with a container, whose instances are there."""
    is_same = all_given(record) == asked and all(place in shown for place in places(record))
    return is_same and all(record.instances.get(slot) == each.uuid for slot, each in made.items() if slot in asked)


def all_given(record: Allocation) -> frozenset[DeviceID]:
    """The devices of a record that the kubelet gave."""
    return frozenset(device for ids in record.from_kubelet.values() for device in ids)
