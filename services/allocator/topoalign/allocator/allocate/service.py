"""
The kubelet's way in: it has chosen, and this keeps the record.

Allocate does not say for whom. An allocation is therefore known by its set of devices, and its owner is read afterwards
from the kubelet's own list, PodResources. That list also tells what has ended: nobody calls a device plugin when a
container goes (`reconciling`).

Allocate over devices that a live record holds is judged by that list too. If nobody shows them any more, the record has
outlived its container and makes way; if exactly this set is shown as held, the kubelet repeats itself and gets the same
answer; anything else is refused, because two containers would get one device. So it is with a part of what a record holds
as a whole, and with the whole of a part.

A kubelet that has lost its checkpoint shows containers without their devices and gives those to others. Preferences avoid
what the record holds, whatever the kubelet believes to be free. Where it insists, it is given what it asks for, because the
next kubelet to read its checkpoint stands by it; the new allocation names whom it displaced, until one of the two is gone.

While the record is unconfirmed, after a journal that was damaged, every Allocate waits for the kubelet's own record first.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import anyio

from topoalign.allocator.allocate.grants import AllocateCall, Grants, GroupCommit, Preferences
from topoalign.allocator.allocate.joint_devices import ReservedCoAllocations
from topoalign.allocator.allocate.pre_start import SlotStarts
from topoalign.allocator.allocate.units import kind_of
from topoalign.allocator.allocate.visible_gpus import VisibleGpus
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.mig.calls import InstanceCalls
from topoalign.allocator.mig.instances import Instances
from topoalign.allocator.ports import AskedDevices, PodResources, Poll, Starting, nothing_to_ask, nothing_to_prepare
from topoalign.allocator.reconciliation.adoption import without
from topoalign.allocator.reconciliation.displacement import devices_displaced_by
from topoalign.allocator.reconciliation.memory import Grant
from topoalign.allocator.reconciliation.owner_polls import OwnerPolls
from topoalign.allocator.reconciliation.reconciliation import Reconciliation
from topoalign.core.model.errors import StateFault, Unavailable
from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import GPU, DeviceID, ResourceName
from topoalign.core.model.requests import Placement, PodRequest
from topoalign.core.model.topology.device_sets import NO_DEVICES
from topoalign.core.placement.reserved_choice import prefer_reserved, reserved_devices
from topoalign.core.placement.sparing import prefer_sparing
from topoalign.core.ports import Clock
from topoalign.core.sharing.reserved_shares import ShareQuestion
from topoalign.core.state.fold import NodeState
from topoalign.core.state.node_reservations import NodeReservations

# The record of a damaged journal is confirmed by what the kubelet knows.


def confirm_record(ledger: Ledger, reconciliation: Reconciliation, poll: Poll) -> None:
    """Takes in what the kubelet knows before anything is given out. Raises StateFault if that may not be all."""
    reconciliation.compare(poll)
    if ledger.unconfirmed is not None:
        raise StateFault(
            f"the record is unconfirmed ({ledger.unconfirmed}), and the kubelet cannot tell yet what is held",
            "this passes once its checkpoint can be read, or it has listed its pods for a while; see /readyz",
        )


# The poll of a kubelet that is slow, for a call that waits for it and would fail the pod without an answer.


GRANT_SECONDS = 4.0
"""How long after its arrival a call waits for a slow kubelet: well within the time to drain."""
AGAIN_SECONDS = 0.5
"""Between the beginnings of two tries."""


async def poll_for_grant(poll: Callable[[float | None], Awaitable[Poll]], clock: Clock, arrived: float) -> Poll:
    """
    Polls until the kubelet answers, for `GRANT_SECONDS`: it sets Allocate no time limit and PreStartContainer one of 30 s,
    and a pod that is refused here stays refused. A connection may have gone silently, so the first try is short; each other
    one has all the time that is left, because a kubelet that needs two seconds answers none of four tries of one. `poll`:
    with so many seconds, None: as many as it has always; `arrived`: monotonic seconds of the call. Raises Unavailable.
    """
    until = arrived + GRANT_SECONDS
    seconds: float | None = None
    while True:
        again_at = clock.monotonic() + AGAIN_SECONDS
        try:
            return await poll(seconds)
        except Unavailable:
            if max(again_at, clock.monotonic()) >= until:
                raise
        await clock.sleep(again_at - clock.monotonic())
        seconds = until - clock.monotonic()


FRESH_SECONDS = 5.0
"""How old an answer of the kubelet may be: where it is older, this process was stopped in between."""
POLL_ATTEMPTS = 3
"""How often PodResources is asked for a fresh answer before the poll fails."""
PREFER_SECONDS = 1.0
"""
How long a preference among whole devices waits for the kubelet's list; without it, all that the record has counts as held.
"""


class DeviceAllocations:
    """Answers the kubelet front (`AllocatorPort`): prefers devices, records what the kubelet allocates, and reconciles."""

    def __init__(  # noqa: PLR0913  # one parameter for each collaborator
        self,
        ledger: Ledger,
        clock: Clock,
        pod_resources: PodResources,
        *,
        placement: str = "best-effort",
        compat: str = "",
        gone_seconds: float = 5.0,
        unbound_seconds: float = 30.0,
        settle_seconds: float = 120.0,
        ensure_fresh: Callable[[], Awaitable[None]] = nothing_to_ask,
        reserved: Callable[[], NodeReservations] = NodeReservations,
        until_reserved: Callable[[], Awaitable[None]] = nothing_to_ask,
        starting: Starting = nothing_to_prepare,
        instances: Instances | None = None,
        by_variable_alone: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        `ensure_fresh` is called before anything is given out: afterwards the health of the devices is confirmed, or is
        known to be unknown. `reserved`: what is reserved on the node now; `until_reserved` waits until that is known.
        `starting` prepares what limits a container with units that may start. `instances` makes MIG instances of slots;
        None: none are made. `by_variable_alone`: whether containers see what NVIDIA_VISIBLE_DEVICES names, and nothing
        else. `placement` and `compat` are the node's rules, the seconds are those of `Reconciliation`.
        """
        self._ledger = ledger
        self._clock = clock
        self._pod_resources = pod_resources
        self._placement = placement
        self._ensure_fresh = ensure_fresh
        self._reserved = reserved
        self._until_reserved = until_reserved
        self._starting = starting
        self._reconciliation = Reconciliation(
            ledger,
            clock,
            gone_seconds=gone_seconds,
            unbound_seconds=unbound_seconds,
            settle_seconds=settle_seconds,
        )
        self._preferences = Preferences(clock)
        self._turn = anyio.Lock(fast_acquire=True)
        """Of the calls for which the kubelet has to be asked: one at a time."""
        self.owner_polls = OwnerPolls(clock, lambda: ledger.state, self.reconcile)
        self._co_allocated = ReservedCoAllocations(lambda: ledger.state, clock, reserved, Placement(placement))
        parts = self._reconciliation, self._preferences, self._co_allocated
        liveness = self._reconciliation.liveness
        expect = self.owner_polls.expect
        self._visible = VisibleGpus(lambda: ledger.state, clock, reserved, liveness, by_variable_alone)
        self._grants = Grants(ledger, clock, pod_resources, *parts, reserved, expect, compat, self._visible)
        self._slot_starts = SlotStarts(ledger, clock, reserved, self._grants.slots)
        self._making = InstanceCalls(ledger, clock, instances, reserved, self._is_displaced)
        self._commits = GroupCommit(self._grants.record)
        self._polling = anyio.Lock()
        self._begun = self._ended = 0
        """Polls of PodResources: how many began, and which was the last to come to an end."""
        self._compared: Poll | Unavailable | None = None  # what became of that one
        self._sharing = anyio.Lock()
        self._asked = 0
        self._shared: Poll | None = None
        """The poll for preferences that began last; None while it is under way, and if it failed."""

    @property
    def state(self) -> NodeState:
        """What is known of the node now: hardware, health and allocations."""
        return self._ledger.state

    @property
    def version(self) -> int:
        """Counts up with every change of `state`."""
        return self._ledger.version

    @property
    def faults(self) -> Mapping[DeviceID, str]:
        """As `AllocatorPort.faults`."""
        return self._making.faults

    @property
    def polled(self) -> Poll | None:
        """What the kubelet answered when the record was last compared; None: not yet, or it did not answer."""
        return self._compared if isinstance(self._compared, Poll) else None

    def lists(self, target: str) -> bool | None:
        """Whether the kubelet lists a pod of this name, as of the last poll (`Reconciliation.lists`)."""
        return self._reconciliation.lists(target)

    async def wait_past(self, version: int) -> None:
        """Waits until `version` is greater than this one. Any number of callers may wait."""
        await self._ledger.wait_past(version)

    async def prefer(
        self, resource: ResourceName, available: Sequence[DeviceID], must_include: Sequence[DeviceID], size: int
    ) -> tuple[DeviceID, ...]:
        """
        As `AllocatorPort.prefer`. Devices of containers that have ended count as free; the kubelet is asked which those are.
        What a reservation keeps for such a question is the answer; else what is reserved is spared.
        """
        await self._until_reserved()
        at = self._clock.monotonic()
        poll = await self._poll_to_prefer(resource)
        ended = self._ended_by(poll)
        ended = self._reconciliation.liveness.dropped(ended, available, must_include, at) if ended else ended
        hardware = self.state.hardware
        offered = hardware.devices.get(resource, NO_DEVICES).listed(available)
        live = without(self.state, ended) if ended else self.state
        displaced = devices_displaced_by(ended)
        question = ShareQuestion(resource, offered, must_include, size)
        shares = self._grants.prefer_shares(live, question, displaced, poll)
        if shares is not None:
            self._preferences.give(resource, offered, shares)
            return shares
        reserved = self._reserved()
        now = self._clock.monotonic()
        chosen = prefer_reserved(hardware, reserved, now, resource, offered, must_include, size)
        if not chosen and resource == GPU:
            chosen = self._co_allocated.preferred(offered, must_include, size)
        if not chosen:
            kept = {*displaced, *reserved_devices(reserved, now, resource)}
            owned = live.ownership
            placement = self._placement
            chosen = prefer_sparing(hardware, owned, resource, offered, must_include, size, placement, kept)
        self._preferences.give(resource, offered, chosen)
        return chosen

    async def ended(self) -> list[Allocation]:
        """Live allocations that have ended (`Liveness.has_ended`). Raises Unavailable while the kubelet is away."""
        if not self.state.allocations:
            return []
        poll = await self._poll_quickly(self._poll)
        if poll is None:
            raise Unavailable(
                "PodResources did not answer in time", "see whether the kubelet runs, and is not too busy"
            )
        return self._ended_by(poll)

    def _ended_by(self, poll: Poll | None) -> list[Allocation]:
        if poll is None:
            return []
        live = [each for each in self.state.allocations.values() if each.id in poll.live]
        has_ended = self._reconciliation.liveness.has_ended
        return [each for each in live if has_ended(each, poll.listing, poll.at)]

    async def _poll_to_prefer(self, resource: ResourceName) -> Poll | None:
        """
        None: no allocation is live, or the kubelet does not answer. Units and slots wait for it as Allocate does: of GPUs
        that only seem to have room, or of several, the kubelet would take what Allocate has to refuse.
        """
        if not self.state.allocations or self.state.hardware.kind_of(resource) not in ("unit", "slot"):
            return await self._poll_quickly(self._shared_poll)
        with suppress(Unavailable):
            return await poll_for_grant(self._shared_poll, self._clock, self._clock.monotonic())
        return None

    async def _poll_quickly(self, poll: Callable[[], Awaitable[Poll]]) -> Poll | None:
        """The poll; None: no allocation is live, or it fails or takes longer than `PREFER_SECONDS`."""
        if self.state.allocations:
            with anyio.move_on_after(PREFER_SECONDS), suppress(Unavailable):
                return await poll()
        return None

    async def _shared_poll(self, seconds: float | None = None) -> Poll:
        """As `_poll`. One poll serves all who asked before it began."""
        asked = self._asked
        async with self._sharing:
            if self._asked == asked:
                self._asked = asked + 1
                self._shared = None
                self._shared = await self._poll(seconds)
            if self._shared is None:
                raise Unavailable("the kubelet did not answer the poll of another call", "ask again")
            return self._shared

    async def allocate(self, resource: ResourceName, containers: AskedDevices) -> tuple[Allocation, ...]:
        """
        As `AllocatorPort.allocate`. The same devices again, while PodResources shows them as held, give the same allocation.

        Raises also HardwareUnknown, DeviceUnusable, and Unavailable if the kubelet must be asked and does not answer.
        """
        arrived = self._clock.monotonic()
        await self._until_reserved()
        await self._ensure_fresh()
        asked = self._grants.check(resource, containers)
        async with self._making.instances_for(containers, partial(self._grants.slots.amounts, resource)) as made:
            return await self._recorded(AllocateCall(resource, asked, self._ledger.version, made), arrived)

    async def _recorded(self, call: AllocateCall, arrived: float) -> tuple[Allocation, ...]:
        """The answers to a call that arrived at this monotonic second, recorded. Raises as `allocate`."""
        while True:
            call.poll = call.grant = None
            if self._must_ask(call):
                async with self._turn:
                    if self._must_ask(call):
                        await self._ask_for(call, arrived)
                    self._grants.record([call])
                    answers = call.result()
            else:
                answers = await self._commits.join(call)
            if answers is not None:
                return answers

    def _must_ask(self, call: AllocateCall) -> bool:
        """Whether the kubelet has to tell what is held before this call can be judged."""
        asked = self._grants.is_any_held, self._grants.held_beside, self._visible.must_ask
        held = any(each(call.resource, devices) for devices in call.containers for each in asked)
        return held or self._ledger.unconfirmed is not None

    async def _ask_for(self, call: AllocateCall, arrived: float) -> None:
        """Polls the kubelet for a call that arrived at this monotonic second. Raises Unavailable, StateFault."""
        grant = Grant(self._pod_resources.written(), self._clock.monotonic())
        poll = await poll_for_grant(self._poll, self._clock, arrived)
        if self._ledger.unconfirmed is not None:
            confirm_record(self._ledger, self._reconciliation, poll)
        call.poll = poll
        call.grant = grant

    async def _is_displaced(self, record: Allocation) -> bool:
        """As `Liveness.is_displaced`, by what the kubelet says now. Raises Unavailable."""
        poll = await poll_for_grant(self._poll, self._clock, self._clock.monotonic())
        return self._reconciliation.liveness.is_displaced(record, poll.listing)

    def remember(self, pod: PodRequest) -> None:
        """A registry is about to reserve something for this pod, and asked what it would get."""
        self._co_allocated.remember(pod)

    def named(self, resource: ResourceName, allocation: Allocation) -> dict[ResourceName, tuple[DeviceID, ...]]:
        """As `AllocatorPort.named`."""
        return self._co_allocated.named(resource, allocation, self._visible.beside(resource, allocation))

    async def start_container(self, resource: ResourceName, devices: Sequence[DeviceID]) -> None:
        """As `AllocatorPort.start_container`."""
        arrived = self._clock.monotonic()
        owned = self.state.ownership
        live = self.state.allocations
        in_units = kind_of(devices) is not None
        holders = [live[name] for name in owned.overlapping(map(owned.holding, devices))]
        is_known = bool(devices) and all(map(owned.is_held, devices)) and all(map(is_known_holder, holders))
        is_needed = in_units or not is_known
        poll = await poll_for_grant(self._reconciled, self._clock, arrived) if is_needed else None
        if in_units and poll is not None:
            self._grants.share_starts.check(resource, devices, poll)
            await self._starting(resource, devices, poll)
        elif not in_units:
            self._slot_starts.check(devices, poll.listing if poll is not None else None)

    async def reconcile(self) -> None:
        """Compares the record with PodResources: binds owners, releases what is gone. Raises Unavailable."""
        await self._reconciled()

    async def _reconciled(self, seconds: float | None = None) -> Poll:
        """
        As `reconcile`, with the answer. One poll serves all who asked before it began: many may start at once. `seconds` as
        in `PodResources.listing`.
        """
        begun = self._begun
        async with self._polling:
            if self._ended <= begun:
                self._begun += 1
                try:
                    self._compared = poll = await self._poll(seconds)
                    self._reconciliation.compare(poll)
                    self._slot_starts.observe()
                except Unavailable as failure:
                    self._compared = failure
                self._ended = self._begun
            if isinstance(self._compared, Poll):
                return self._compared
            assert self._compared is not None, "a poll has an answer or fails"
            raise Unavailable(self._compared.finding, self._compared.remedy)

    async def _poll(self, seconds: float | None = None) -> Poll:
        """
        Asks PodResources, as `listing`; again where this process was stopped meanwhile: its answer is old then. Raises
        Unavailable.
        """
        for _ in range(POLL_ATTEMPTS):
            live = frozenset(self.state.allocations)
            at = self._clock.monotonic()
            listing = await self._pod_resources.listing(seconds)
            if self._clock.monotonic() - at <= FRESH_SECONDS:
                poll = Poll(listing, live, at)
                self._reconciliation.note(poll)
                return poll
        raise Unavailable(
            "PodResources answers too late for its answer to be true any more", "see what keeps this node so busy"
        )


def is_known_holder(record: Allocation) -> bool:
    """Whether it is known whose it is, and of slots whether they were meant for this pod: its UID tells."""
    return record.owner is not None and not record.reserved_for and (not record.denied or record.pod_uid != "")
