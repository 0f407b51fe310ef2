"""
Answers the kubelet's device calls and maintains the ledger of its allocations.

Allocate does not identify the container. So an allocation is identified by its set of devices. Its owner is read later
from PodResources, which also shows which containers have ended. If a live allocation has devices of an Allocate call:

- If no container has the devices anymore, the allocation is stale and is released.
- If the kubelet reports exactly this set for a container, the call is a repeat and gets the same answer.
- Otherwise the call is refused, because two containers would get the same device.

A kubelet that has lost its checkpoint may allocate devices of running containers to other containers. Preferences avoid
these devices. If the kubelet still allocates them, the call is granted, because the kubelet's new checkpoint has the
devices. The new allocation lists the displaced containers. While the ledger is unconfirmed, every Allocate call first
waits for a poll of the kubelet.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import anyio

from topoalign.allocator.allocate.claims import NodeView
from topoalign.allocator.allocate.co_allocation import JointClaim
from topoalign.allocator.allocate.grants import AllocateCall, Grants, GroupCommit, Preferences
from topoalign.allocator.allocate.pre_start import ShareStarts, SlotStarts
from topoalign.allocator.allocate.slots import SlotClaim
from topoalign.allocator.allocate.units import UnitClaim, first_unit_kind
from topoalign.allocator.allocate.visible_gpus import VisibleGpus
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.mig.calls import InstanceCalls
from topoalign.allocator.mig.instances import Instances
from topoalign.allocator.ports import (
    AskedDevices,
    PodResources,
    Poll,
    Reservations,
    Starting,
)
from topoalign.allocator.reconciliation.displacement import devices_displaced_by, without_allocations
from topoalign.allocator.reconciliation.liveness import Grant
from topoalign.allocator.reconciliation.owner_polls import OwnerPolls
from topoalign.allocator.reconciliation.reconciliation import Reconciliation
from topoalign.allocator.settings import AllocatorSettings
from topoalign.core.model.errors import StateFault, Unavailable
from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.device_sets import NO_DEVICES
from topoalign.core.placement.reserved_choice import prefer_reserved, reserved_devices
from topoalign.core.placement.sparing import prefer_sparing
from topoalign.core.ports import Clock
from topoalign.core.sharing.reserved_shares import ShareQuestion
from topoalign.core.state.fold import NodeState

GRANT_SECONDS = 4.0
"""Maximum time from a call to the answer of a slow kubelet. It is shorter than the default `drain_seconds`."""
AGAIN_SECONDS = 0.5
"""Minimum time from the start of one attempt to the start of the next."""


async def poll_for_grant(poll: Callable[[float | None], Awaitable[Poll]], clock: Clock, arrived: float) -> Poll:
    """Polls a slow kubelet until `GRANT_SECONDS` after the call `arrived`. Raises Unavailable."""
    # If a pod is refused here, the kubelet does not try again. The kubelet waits without a limit for Allocate, and 30 s
    # for PreStartContainer. The first attempt is short, because the connection may be broken. Each later attempt can
    # take all the remaining time. Otherwise a kubelet that needs two seconds would answer none of four attempts of one
    # second.
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


class SharedPoll:
    """Polls the kubelet once for all callers that wait when the poll begins. Many containers may start at once."""

    def __init__(self, poll: Callable[[float | None], Awaitable[Poll]]) -> None:
        """`poll` takes a time limit in seconds, or None for the default. It raises Unavailable."""
        self._poll = poll
        self._turn = anyio.Lock()
        self._begun = 0
        """Number of polls that have started."""
        self._ended = 0
        """Number of the last poll that ended. A cancelled poll does not count."""
        self._result: Poll | Unavailable | None = None

    async def __call__(self, seconds: float | None = None) -> Poll:
        """Polls, or waits for the poll of another caller. Raises Unavailable."""
        begun = self._begun
        async with self._turn:
            if self._ended <= begun:
                self._begun += 1
                try:
                    self._result = await self._poll(seconds)
                except Unavailable as failure:
                    self._result = failure
                self._ended = self._begun
            if isinstance(self._result, Poll):
                return self._result
            assert self._result is not None, "a poll has an answer or fails"
            raise self._result


FRESH_SECONDS = 5.0
"""Maximum age of an answer of the kubelet. If it is older, this process was suspended during the poll."""
POLL_ATTEMPTS = 3
"""Maximum number of requests to PodResources for a fresh answer."""


class DeviceAllocations:
    """Implements `AllocatorPort`: prefers devices, records what the kubelet allocates, and reconciles."""

    def __init__(  # one parameter per collaborator
        self,
        ledger: Ledger,
        pod_resources: PodResources,
        settings: AllocatorSettings,
        *,
        unbound_seconds: float,
        ensure_fresh: Callable[[], Awaitable[None]],
        reservations: Reservations,
        starting: Starting,
        instances: Instances | None = None,
        by_variable_alone: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        `unbound_seconds` replaces `gone_seconds` for a container that was never reported and is not in the checkpoint,
        unless its pod is deleted. `ensure_fresh` is called before each grant. Afterwards the health of the devices is
        confirmed or unknown. `starting` prepares the limiter of a starting container with vcuda units. `instances`
        creates MIG instances for slots; if None, no instances are created. `by_variable_alone`: whether GPUs are passed
        only in NVIDIA_VISIBLE_DEVICES (`deviceListStrategy: envvar`).
        """
        self._ledger = ledger
        clock = ledger.clock
        self._clock = clock
        self._pod_resources = pod_resources
        self._placement = settings.placement
        self._ensure_fresh = ensure_fresh
        self._reservations = reservations
        self._starting = starting
        self._reconciliation = Reconciliation(
            ledger,
            clock,
            gone_seconds=settings.gone_seconds,
            unbound_seconds=unbound_seconds,
            settle_seconds=settings.settle_seconds,
        )
        self._preferences = Preferences(clock)
        self.owner_polls = OwnerPolls(clock, lambda: ledger.state, self.reconcile)
        liveness = self._reconciliation.liveness
        view = NodeView(lambda: ledger.state, clock, reservations.current, liveness, settings.compat)
        self._co_allocated = JointClaim(view)
        self._units = UnitClaim(view)
        self._slots = SlotClaim(view)
        self._visible = VisibleGpus(view, by_variable_alone)
        claims = self._co_allocated, self._units, self._slots, self._visible
        expect = self.owner_polls.expect
        self._grants = Grants(ledger, view, pod_resources, self._reconciliation, claims, self._preferences, expect)
        self._share_starts = ShareStarts(ledger, view)
        self._slot_starts = SlotStarts(ledger, self._slots)
        self._instance_calls = InstanceCalls(ledger, clock, instances, reservations.current, self._is_displaced)
        self._commits = GroupCommit(self._grants.record)
        self._poll_and_compare = SharedPoll(self._compare)
        self._shared_poll = SharedPoll(self._poll)
        self.polled: Poll | None = None
        """The last poll that was compared with the ledger; None if there was none yet or the last one failed."""

    @property
    def state(self) -> NodeState:
        """The current state of the node: hardware, health and allocations."""
        return self._ledger.state

    @property
    def version(self) -> int:
        """Increases with every change of `state`."""
        return self._ledger.version

    @property
    def faults(self) -> Mapping[DeviceID, str]:
        """As `AllocatorPort.faults`."""
        return self._instance_calls.faults

    async def wait_past(self, version: int) -> None:
        """Waits until `self.version` is greater than `version`. Any number of callers can wait."""
        await self._ledger.wait_past(version)

    async def prefer(
        self, resource: ResourceName, available: Sequence[DeviceID], must_include: Sequence[DeviceID], size: int
    ) -> tuple[DeviceID, ...]:
        """As `AllocatorPort.prefer`. If a poll shows that a container has ended, its devices count as free."""
        await self._reservations.until_read()
        at = self._clock.monotonic()
        poll = None
        if self.state.allocations:
            with suppress(Unavailable):
                if self.state.hardware.kind_of(resource) in ("unit", "slot"):
                    # Retry as long as Allocate does. Without a poll, the preference may be a GPU that does not have
                    # enough free. The kubelet would allocate it, and Allocate would refuse it.
                    poll = await poll_for_grant(self._shared_poll, self._clock, at)
                else:
                    poll = await self._shared_poll()
        ended = self._ended_by(poll)
        if ended:
            free = {*available} - {*must_include}
            ended = [each for each in ended if self._reconciliation.liveness.is_dropped(each, at, free)]
        hardware = self.state.hardware
        offered = hardware.devices.get(resource, NO_DEVICES).listed(available)
        live = without_allocations(self.state, ended) if ended else self.state
        displaced = devices_displaced_by(ended)
        kind = hardware.kind_of(resource)
        if kind in ("unit", "slot"):
            question = ShareQuestion(resource, offered, must_include, size)
            if kind == "unit":
                shares = self._units.prefer(live, question, displaced, poll)
            else:
                shares = self._slots.prefer(live, question, displaced)
            self._preferences.remember(resource, offered, shares)
            return shares
        reserved = self._reservations.current()
        now = self._clock.monotonic()
        chosen = prefer_reserved(hardware, reserved, now, resource, offered, must_include, size)
        if not chosen:
            kept = {*displaced, *reserved_devices(reserved, now, resource)}
            owned = live.ownership
            placement = self._placement
            chosen = prefer_sparing(hardware, owned, resource, offered, must_include, size, placement, kept)
        self._preferences.remember(resource, offered, chosen)
        return chosen

    async def ended(self) -> list[Allocation]:
        """Returns the live allocations whose containers have ended (`LivenessCheck.has_ended`). Raises Unavailable."""
        if not self.state.allocations:
            return []
        # Do not share this poll. Its time limit is short: if an Allocate call shared it and the kubelet is slow, the
        # call would be refused.
        return self._ended_by(await self._poll())

    def _ended_by(self, poll: Poll | None) -> list[Allocation]:
        if poll is None:
            return []
        live = [each for each in self.state.allocations.values() if each.id in poll.live]
        has_ended = self._reconciliation.liveness.has_ended
        return [each for each in live if has_ended(each, poll.listing, poll.at)]

    async def allocate(self, resource: ResourceName, containers: AskedDevices) -> tuple[Allocation, ...]:
        """As `AllocatorPort.allocate`. Also raises HardwareUnknown, DeviceUnusable, Unavailable and a claim's NoFit."""
        arrived = self._clock.monotonic()
        await self._reservations.until_read()
        await self._ensure_fresh()
        asked = self._grants.check(resource, containers)
        async with self._instance_calls.instances_for(containers, partial(self._slots.amounts, resource)) as made:
            call = AllocateCall(resource, asked, self._ledger.version, made)
            answers = await self._commits.join(call)
            while answers is None:  # only PodResources shows whether a conflicting allocation is stale
                call.grant = Grant(self._pod_resources.written(), self._clock.monotonic())
                call.poll = await poll_for_grant(self._shared_poll, self._clock, arrived)
                if self._ledger.unconfirmed is not None:
                    self._confirm_record(call.poll)
                self._grants.record([call])
                answers = call.result()
            return answers

    def _confirm_record(self, poll: Poll) -> None:
        """After a damaged journal, confirms the ledger with a poll. Raises StateFault if the poll may be incomplete."""
        self._reconciliation.compare(poll)
        if self._ledger.unconfirmed is not None:
            raise StateFault(
                f"the record is unconfirmed ({self._ledger.unconfirmed}), and the kubelet does not report all devices yet",
                "this passes once its checkpoint can be read, or it has listed its pods for a while; see /readyz",
            )

    async def _is_displaced(self, record: Allocation) -> bool:
        poll = await poll_for_grant(self._poll, self._clock, self._clock.monotonic())
        return self._reconciliation.liveness.is_displaced(record, poll.listing)

    def named(self, resource: ResourceName, allocation: Allocation) -> dict[ResourceName, tuple[DeviceID, ...]]:
        """As `AllocatorPort.named`."""
        return self._co_allocated.named(resource, allocation, self._visible.devices_of_container(resource, allocation))

    async def start_container(self, resource: ResourceName, devices: Sequence[DeviceID]) -> None:
        """As `AllocatorPort.start_container`."""
        poll = await poll_for_grant(self._poll_and_compare, self._clock, self._clock.monotonic())
        if first_unit_kind(devices) is not None:
            self._share_starts.check(resource, devices, poll)
            await self._starting(resource, devices, poll)
        else:
            self._slot_starts.check(devices, poll.listing)

    async def reconcile(self) -> None:
        """Compares the ledger with PodResources: binds owners and releases ended allocations. Raises Unavailable."""
        await self._poll_and_compare()

    async def _compare(self, seconds: float | None = None) -> Poll:
        try:
            poll = self.polled = await self._poll(seconds)
            self._reconciliation.compare(poll)
            self._slot_starts.observe()
        except Unavailable:
            self.polled = None
            raise
        return poll

    async def _poll(self, seconds: float | None = None) -> Poll:
        """Polls PodResources. If this process was suspended during a poll, polls again. Raises Unavailable."""
        for _ in range(POLL_ATTEMPTS):
            live = frozenset(self.state.allocations)
            at = self._clock.monotonic()
            listing = await self._pod_resources.listing(seconds)
            if self._clock.monotonic() - at <= FRESH_SECONDS:
                poll = Poll(listing, live, at)
                self._reconciliation.note(poll)
                return poll
        raise Unavailable("PodResources answers so late that its answer is out of date", "check the load of the node")
