"""
The ledger and the device allocations against the plainest thing that can be said of them: a dictionary of which device is
held with which others.

Hypothesis draws calls, crashes, failing writes, owners and readings of the kubelet's list in any order; after each of them
the invariants I1 to I9 and I12 hold, and what the ledger says is what the dictionary says.
"""

from collections.abc import Coroutine
from contextlib import ExitStack
from itertools import count
from random import Random
from typing import Any

import anyio
from device_allocations_support import start_allocations
from faults_support import THOROUGH
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from simulation.journal import Disk, FaultyJournal
from simulation.kubelet_record import KubeletRecord, owner
from simulation.loop import SimulatedLoop
from simulation.record import held_by
from simulation.replaying import replayed
from simulation.scenario import quietly
from simulation.world import HEALTHY, NODE, WHOLE, SimulatedClock

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.core.model.errors import BadRequest, DeviceInUse, DeviceUnusable, StateFault, TopoalignError, Unavailable
from topoalign.core.model.events import DeviceHealth, DeviceHealthChanged, HealthState, LedgerEvent, TopologyDiscovered
from topoalign.core.model.ids import GPU, DeviceID

GPUS = tuple(WHOLE.devices[GPU])
SETS = st.lists(st.sampled_from(GPUS), min_size=1, max_size=3, unique=True)
COMPACT_AFTER, PENDING_LIMIT = 12, 20
LOST = DeviceHealth(state=HealthState.UNHEALTHY, reason="GPU is lost")


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.quiet = ExitStack()
        self.quiet.enter_context(quietly())
        self.loop = SimulatedLoop(0)
        self.clock = SimulatedClock(self.loop)
        self.disk = Disk()
        self.kubelet = KubeletRecord()
        self.health = dict.fromkeys((d for ids in WHOLE.devices.values() for d in ids), HEALTHY)
        self.numbers = count(1)
        self.held: dict[DeviceID, int] = {}
        """The reference: device -> with which others it is held."""
        self.places: list[tuple[int, int]] = []
        self.start()

    def start(self) -> None:
        self.journal = FaultyJournal(self.disk, Random(1), delivery=self.became_true)

        async def begin() -> None:
            self.ledger = Ledger(
                NODE, self.journal, self.clock, compact_after=COMPACT_AFTER, pending_limit=PENDING_LIMIT
            )
            self.ledger.take_reading(
                TopologyDiscovered(
                    node=NODE, epoch=1, revision=1, boot_id="b", source="described: simulated", topology=WHOLE
                )
            )
            self.device_allocations = start_allocations(self.ledger, self.kubelet)

        self.run(begin())
        self.tell_health()

    def run(self, step: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(step)

    def became_true(self, event: LedgerEvent) -> None:
        self.places.append((event.epoch, event.seq))

    def tell_health(self) -> None:
        event = DeviceHealthChanged(node=NODE, epoch=1, revision=next(self.numbers), devices=dict(self.health))
        self.ledger.take_reading(event)

    def teardown(self) -> None:
        self.loop.close()
        self.quiet.close()

    # what may happen

    @rule(asked=SETS)
    def allocate(self, asked: list[DeviceID]) -> None:
        """The reference knows what must come of it, and nothing else may."""
        if self.kubelet.shown.intersection(asked) - self.held.keys():
            return  # no kubelet gives away what it shows as a stranger's
        before = self.ledger.state
        expected = self.after_allocate(frozenset(asked))
        try:
            self.run(self.device_allocations.allocate(GPU, [asked]))
        except TopoalignError as error:
            assert error.code
            assert error.finding
            assert error.remedy
            assert isinstance(error, expected) if isinstance(expected, type) else isinstance(error, StateFault)
            assert before.allocations == self.ledger.state.allocations
        else:
            assert not isinstance(expected, type), f"{asked} were given, {expected.__name__} was due"
            self.held = expected

    def after_allocate(self, asked: frozenset[DeviceID]) -> dict[DeviceID, int] | type[TopoalignError]:
        if any(not self.health[device].usable for device in asked):
            return DeviceUnusable
        others = {self.held[device] for device in asked if device in self.held}
        sets = {number: {d for d, n in self.held.items() if n == number} for number in others}
        if others and not self.kubelet.answering:
            return Unavailable
        shown = self.kubelet.shown
        if list(sets.values()) == [set(asked)] and asked <= shown:
            return dict(self.held)
        if others and any(device in shown for device in asked if device in self.held):
            return DeviceInUse
        kept = shown | self.kubelet.init if self.kubelet.readable else set(GPUS)
        after = {device: number for device, number in self.held.items() if number not in others}
        for devices in sets.values():
            rest = next(self.numbers)
            after.update(dict.fromkeys((devices - asked) & kept, rest))
        after.update(dict.fromkeys(asked, next(self.numbers)))
        return after

    @rule(asked=st.sampled_from([[], [GPUS[0], GPUS[0]], [DeviceID("GPU-x")], [GPUS[0], DeviceID("")]]))
    def nonsense(self, asked: list[DeviceID]) -> None:
        before = self.ledger.state
        try:
            self.run(self.device_allocations.allocate(GPU, [asked]))
        except BadRequest as error:
            assert error.remedy
        else:
            raise AssertionError(f"{asked} were given")
        assert before is self.ledger.state

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def container_starts(self, data: st.DataObject) -> None:
        """The kubelet shows a pod with just what one record holds."""
        number = data.draw(st.sampled_from(sorted(set(self.held.values()))))
        devices = frozenset(device for device, other in self.held.items() if other == number)
        if not devices & (self.kubelet.shown | self.kubelet.init):
            self.kubelet.pods[f"pod-{next(self.numbers)}"] = devices

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def init_container_starts(self, data: st.DataObject) -> None:
        """An init container has just what one record holds that is nobody's yet."""
        unowned = [a.device_ids for a in self.ledger.state.allocations.values() if a.owner is None]
        if free := sorted(sorted(devices) for devices in unowned if not devices & self.kubelet.shown):
            self.kubelet.init |= set(data.draw(st.sampled_from(free)))

    @precondition(lambda self: self.kubelet.init)
    @rule(data=st.data())
    def app_takes_over(self, data: st.DataObject) -> None:
        """An app container of the same pod is given some of the init container's devices."""
        self.allocate([data.draw(st.sampled_from(sorted(self.kubelet.init)))])

    @precondition(lambda self: self.kubelet.init)
    @rule()
    def init_containers_end(self) -> None:
        self.kubelet.init.clear()

    @precondition(lambda self: len(self.kubelet.shown) < len(GPUS))
    @rule(data=st.data())
    def stranger_starts(self, data: st.DataObject) -> None:
        """A pod that never called us: it was there before."""
        free = [d for d in GPUS if d not in self.kubelet.shown | self.kubelet.init and d not in self.held]
        if free:
            devices = data.draw(st.lists(st.sampled_from(free), min_size=1, unique=True))
            self.kubelet.pods[f"stranger-{next(self.numbers)}"] = frozenset(devices)

    @precondition(lambda self: self.kubelet.pods)
    @rule(data=st.data())
    def container_ends(self, data: st.DataObject) -> None:
        del self.kubelet.pods[data.draw(st.sampled_from(sorted(self.kubelet.pods)))]

    @rule()
    def settles(self) -> None:
        """After a while of looking, the record is what the kubelet shows: no more and no less, with the right owners."""
        self.kubelet.answering = self.kubelet.readable = True
        self.journal.refusals = 0.0

        async def look() -> None:
            for _ in range(5):
                await self.device_allocations.reconcile()
                await anyio.sleep(130)

        self.run(look())
        owned = {(a.owner, a.device_ids) for a in self.ledger.state.allocations.values() if a.owner is not None}
        assert {(owner(pod), devices) for pod, devices in self.kubelet.pods.items()} == owned
        kept = {number for device, number in self.held.items() if device in self.kubelet.init}
        live = {device for each in self.ledger.state.allocations.values() for device in each.device_ids}
        # what a record has beside its entry in the checkpoint is kept while that may not be written yet
        sure = self.kubelet.init | live
        self.held = {
            device: number
            for device, number in self.held.items()
            if number in kept and device in sure and device not in self.kubelet.shown
        }
        for devices in self.kubelet.pods.values():
            self.held.update(dict.fromkeys(devices, next(self.numbers)))

    @rule(device=st.sampled_from(GPUS), health=st.sampled_from([HEALTHY, LOST]))
    def health_changes(self, device: DeviceID, health: DeviceHealth) -> None:
        self.health[device] = health
        self.tell_health()

    @rule(attribute=st.sampled_from(["answering", "readable"]), so=st.booleans())
    def kubelet_changes(self, attribute: str, so: bool) -> None:
        setattr(self.kubelet, attribute, so)

    @rule(likely=st.sampled_from([0.0, 1.0]))
    def disk_changes(self, likely: float) -> None:
        self.journal.refusals = likely

    @rule(jump=st.sampled_from([0.0, -86_400.0, 86_400.0]))
    def crash(self, jump: float) -> None:
        """I9: what was answered is there again, whatever the clock says meanwhile."""
        before = self.ledger.state
        self.clock.offset += jump
        self.start()
        assert before.digest == self.ledger.state.digest

    @rule()
    def compaction(self) -> None:
        try:
            self.ledger.announce()
        except StateFault as fault:
            assert fault.remedy

    @precondition(lambda self: self.ledger.pending)
    @rule()
    def bus_confirms(self) -> None:
        self.ledger.published([self.ledger.pending[0][0]])

    @rule(size=st.integers(1, 4), data=st.data())
    def preference(self, size: int, data: st.DataObject) -> None:
        """I7: the same question, the same answer; and only what was available."""
        available = data.draw(st.lists(st.sampled_from(GPUS), unique=True))
        once, again = (self.run(self.device_allocations.prefer(GPU, available, (), size)) for _ in range(2))
        assert once == again
        assert set(once) <= set(available)
        assert len(once) in (0, size)

    # what always holds

    @invariant()
    def the_record_is_the_references(self) -> None:
        """I1, I2."""
        allocations = self.ledger.state.allocations.values()
        places = [place for allocation in allocations for place in held_by(allocation)]
        assert len(set(places)) == len(places)
        assert {(GPU, device) for device in GPUS} >= set(places)
        numbers = set(self.held.values())
        sets = {frozenset(d for d, n in self.held.items() if n == number) for number in numbers}
        assert sets == {allocation.device_ids for allocation in allocations}

    @invariant()
    def every_device_is_in_its_place(self) -> None:
        """I3."""
        state = self.ledger.state
        free, allocated = set(state.ownership.free(GPU)), set(self.held)
        unavailable = {device for device in GPUS if not self.health[device].usable}
        assert set(GPUS) == free | allocated | unavailable
        assert not free & (allocated | unavailable)

    @invariant()
    def the_journal_replays_to_the_same_state_and_counts_without_gap(self) -> None:
        """I4, I5, I12."""
        assert self.ledger.state.digest == replayed(self.disk).digest
        for (epoch, seq), (next_epoch, next_seq) in zip(self.places, self.places[1:], strict=False):
            assert (next_epoch == epoch and next_seq == seq + 1) or (next_epoch > epoch and next_seq == 1)
        assert len(self.ledger.pending) <= PENDING_LIMIT + 2 * COMPACT_AFTER
        assert len(self.disk.journal.load()) <= PENDING_LIMIT + 2 * COMPACT_AFTER


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=3_000 if THOROUGH else 60, stateful_step_count=60 if THOROUGH else 30)
