"""
Checks the kubelet's Allocate calls against the ledger and records the new allocations.

Calls that are ready at the same time are checked in order. Each check uses the state after the earlier grants. One
journal entry records all calls. There is no await between the checks and the record.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import anyio
import msgspec
from anyio.lowlevel import checkpoint

from topoalign.allocator.allocate.claims import (
    AskedContainer,
    Claim,
    NewRecords,
    NodeView,
    WholeDevices,
    check_allocate,
)
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.mig.instances import CreatedInstance
from topoalign.allocator.ports import AskedDevices, Place, PodResources, Poll
from topoalign.allocator.reconciliation.displacement import (
    displaced_by,
    in_offered_order,
    log_displaced,
    log_ended,
    remainders,
    return_displaced,
)
from topoalign.allocator.reconciliation.liveness import Grant, Rest, kubelet_places, reported_places
from topoalign.allocator.reconciliation.reconciliation import Reconciliation
from topoalign.core.model.errors import (
    StateFault,
)
from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.ports import Clock

# An Allocate call does not refer to a GetPreferredAllocation call and may have other devices. It is matched with the
# last preference for its resource if that had the same number of devices and is at most FOLLOWED_SECONDS old.


FOLLOWED_SECONDS = 10.0
"""Maximum time from a preference to its Allocate call. The kubelet needs milliseconds."""


class Preference(NamedTuple):
    """One answer to GetPreferredAllocation: the available and the chosen devices, and the time (monotonic seconds)."""

    available: Collection[DeviceID]
    chosen: tuple[DeviceID, ...]
    at: float


class Preferences:
    """Stores the newest preference for each resource and compares it with the devices that the kubelet allocates."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._newest: dict[ResourceName, Preference] = {}

    def remember(self, resource: ResourceName, available: Collection[DeviceID], chosen: tuple[DeviceID, ...]) -> None:
        """Stores the newest preference: the devices `chosen` from the `available` ones."""
        self._newest[resource] = Preference(available, chosen, self._clock.monotonic())

    def deviations(
        self, resource: ResourceName, granted: Sequence[Allocation]
    ) -> dict[AllocationID, tuple[DeviceID, ...]]:
        """Returns allocation -> the preferred devices, if the kubelet allocated others. Deletes the preference."""
        given = self._newest.pop(resource, None)
        if given is None or len(granted) != 1 or self._clock.monotonic() - given.at > FOLLOWED_SECONDS:
            return {}
        taken = {device for ids in granted[0].from_kubelet.values() for device in ids}
        is_other = taken != {*given.chosen} and len(taken) == len(given.chosen)
        return {granted[0].id: given.chosen} if is_other and taken.issubset(given.available) else {}


# Group commit: all Allocate calls that are ready share one journal write and one sync. A call that is ready joins a
# queue. The first call in the queue waits while iterations of the event loop add more calls. Then all calls in the
# queue are checked and recorded together. During the sync, the event loop is blocked and new calls wait in their
# sockets, so the groups grow with the load. A single call waits for one iteration. Each iteration reads only a few
# requests (`kubelet.grpc.turns`), so a group is complete after QUIET_TURNS iterations without a new call.
#
# If a call is cancelled before it is checked, it leaves the queue and nothing is recorded for it. If it is cancelled
# later, it is still recorded. The first call in the queue records the others even if it is cancelled.


class AllocateCall(msgspec.Struct, eq=False):
    """One Allocate call and its result."""

    resource: ResourceName
    containers: AskedDevices
    checked: int
    """The version of the ledger when the devices were checked."""
    made: Mapping[DeviceID, CreatedInstance] = {}
    """Slot -> the MIG instance that was created for it."""
    poll: Poll | None = None
    """The poll of the kubelet for this call, if any."""
    grant: Grant | None = None
    """The time and the checkpoint version before the poll. If None, those at the time of recording are used."""
    answers: Sequence[Allocation] | None = None
    """The recorded allocation of each container; None if there is no answer yet."""
    error: Exception | None = None
    """The reason if the call is refused."""

    def result(self) -> tuple[Allocation, ...] | None:
        """Returns the answers, or None if the kubelet must be polled first. Raises the error of a refused call."""
        if self.error is not None:
            raise self.error
        return None if self.answers is None else tuple(self.answers)


MOST_CALLS = 256
"""Maximum number of calls to wait for in one group."""
QUIET_TURNS = 2
"""Number of event loop iterations without a new call after which a group is complete."""


class GroupCommit:
    """Queues calls that are ready and records them in groups."""

    def __init__(self, record: Callable[[Sequence[AllocateCall]], None]) -> None:
        """`record` checks and records calls in order, without an await. It sets each call's answers or error."""
        self._record = record
        self._queue: list[AllocateCall] = []
        self._recorded = anyio.Event()
        """Set when the calls in the queue are recorded."""

    async def join(self, call: AllocateCall) -> tuple[Allocation, ...] | None:
        """Records the call together with all others that are ready. Returns and raises as `AllocateCall.result`."""
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
        quiet = 0
        count = 1
        while quiet < (1 if count == 1 else QUIET_TURNS) and count < MOST_CALLS:
            await checkpoint()
            quiet = quiet + 1 if len(self._queue) == count else 0
            count = len(self._queue)

    def _flush(self) -> None:
        calls = self._queue
        recorded = self._recorded
        self._queue = []
        self._recorded = anyio.Event()
        try:
            self._record(calls)
        finally:
            recorded.set()


class Judgement(NamedTuple):
    """The result of one Allocate call."""

    answers: Sequence[Allocation]
    """One for each container."""
    granted: Sequence[Allocation]
    """All new allocations: for the call, for remainders, and for displaced containers."""
    rests: Sequence[Rest]


class Grants:
    """Checks and records Allocate calls."""

    def __init__(
        self,
        ledger: Ledger,
        view: NodeView,
        pod_resources: PodResources,
        reconciliation: Reconciliation,
        claims: Sequence[Claim],
        preferences: Preferences,
        expect: Callable[[Sequence[Allocation]], None],
    ) -> None:
        """`claims`: in the order of checks, after `WholeDevices`. `expect` gets the answers of each recorded call."""
        self._ledger = ledger
        self._view = view
        self._pod_resources = pod_resources
        self._reconciliation = reconciliation
        self._whole = WholeDevices(view)
        self._claims = (self._whole, *claims)
        self._preferences = preferences
        self._expect = expect

    def check(self, resource: ResourceName, containers: AskedDevices) -> AskedDevices:
        """Checks a call against the current state with `check_allocate` and `Claim.check`."""
        asked = check_allocate(self._view.state, resource, containers)
        for claim in self._claims_of(resource):
            for devices in asked:
                claim.check(resource, devices)
        return asked

    def _claims_of(self, resource: ResourceName) -> list[Claim]:
        return [each for each in self._claims if each.applies(resource)]

    def record(self, calls: Sequence[AllocateCall]) -> None:
        """
        Checks calls in order and records all with one sync. Refuses a call if its check fails, all if the disk fails.
        """
        grant = Grant(self._pod_resources.written(), self._view.now)
        judged: list[tuple[AllocateCall, Judgement]] = []
        try:
            with self._ledger.transaction():
                for call in calls:
                    try:
                        if (judgement := self.judge(call)) is not None:
                            judged.append((call, judgement))
                            for claim in self._claims_of(call.resource):
                                claim.granted(call.resource, judgement.answers, call.poll)
                    except Exception as error:  # `AllocateCall.result` raises it to the caller
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
        # This read updates the reservations with the new allocations before these can end.
        _ = self._view.reserved

    def judge(self, call: AllocateCall) -> Judgement | None:
        """Checks a call. Returns None if the kubelet must be polled first. Raises the error of a refused call."""
        resource = call.resource
        if self._ledger.version != call.checked:
            self.check(resource, call.containers)  # the state may have changed since the last check
        if self._ledger.unconfirmed is not None:
            return None
        listing, known = (call.poll.listing, call.poll.live) if call.poll is not None else (None, frozenset())
        claims = self._claims_of(resource)
        answers = list[Allocation]()
        new = NewRecords([], {}, set(), {})
        for devices in call.containers:
            asked = AskedContainer(resource, devices, frozenset(devices), call.made, call.poll, new, {})
            # Detect a repeated call first. Otherwise it would conflict with the allocation of its first attempt.
            held = self._whole.conflicts(asked)
            if not known.issuperset(each.id for each in held):
                return None
            record = held[0] if len(held) == 1 else None
            if record is not None and listing is not None and is_repeated(record, asked, reported_places(listing)):
                self._reconciliation.seen(record.id, listing)
                answers.append(record)
                continue
            for claim in claims:
                conflicts = claim.conflicts(asked)
                if not known.issuperset(each.id for each in conflicts):
                    return None
                claim.evict(asked, conflicts)
            answers.append(self._make_allocation(asked))
        granted = new.granted
        deviations = {**self._preferences.deviations(resource, granted), **new.deviations}
        reasons = {former.allocation: "displaced" for each in granted for former in each.displaced}
        replaced = [each for each in new.gone.values() if each.id not in new.ended]
        rests = remainders(self._ledger, replaced, call.containers, listing, granted)
        granted += [rest.allocation for rest in rests]
        granted += return_displaced(self._ledger, [*new.gone.values()], listing, granted)
        self._ledger.grant(granted, instead_of=list(new.gone), reasons=reasons, preferred=deviations)
        self._ledger.release_log.origins.update({rest.allocation.id: rest.former for rest in rests})
        return Judgement(answers, granted, rests)

    def _make_allocation(self, asked: AskedContainer) -> Allocation:
        state = self._view.state
        stale = [each for name, each in asked.stale.items() if name not in asked.new.ended]
        allocation = Allocation(
            id=self._ledger.next_id(len(asked.new.granted)),
            devices={asked.resource: in_offered_order(state.hardware, asked.resource, asked.devices)},
            boot=self._ledger.boot,
            machine=self._ledger.machine,
            parents=state.ownership.parents_of(asked.devices),
            displaced=displaced_by(self._reconciliation.liveness, self._ledger, stale, asked.ids, asked.listing),
        )
        for claim in self._claims_of(asked.resource):
            allocation = claim.complete(asked, allocation)
        asked.new.granted.append(allocation)
        return allocation


def is_repeated(record: Allocation, asked: AskedContainer, shown: Collection[Place]) -> bool:
    """Whether a call is a repetition: the kubelet reports exactly these devices, and the MIG instances are the same."""
    places = kubelet_places(record)
    is_same = {device for _, device in places} == asked.ids and all(place in shown for place in places)
    return is_same and all(
        record.instances.get(slot) == each.uuid for slot, each in asked.made.items() if slot in asked.ids
    )
