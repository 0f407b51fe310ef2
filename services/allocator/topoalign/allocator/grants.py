"""
Judges what the kubelet asks for in Allocate by the record, and records what it is given.

Calls that are ready together are judged in order, each by the state in which those before it have what they were given, and
recorded in one entry of the journal. Nothing here pauses between judging and recording.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from topoalign.allocator.allocate_checks import check_allocate, check_amount
from topoalign.allocator.group_commit import AllocateCall
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.ports import PodResources
from topoalign.allocator.preferences import Preferences
from topoalign.allocator.reconciliation.adoption import returned
from topoalign.allocator.reconciliation.device_order import in_order
from topoalign.allocator.reconciliation.displacement import displaced_by, remainders, tell_displaced, touching
from topoalign.allocator.reconciliation.liveness import places, shown_of
from topoalign.allocator.reconciliation.memory import Grant, Rest
from topoalign.allocator.reconciliation.reconciliation import Reconciliation
from topoalign.core.model.errors import DeviceInUse, StateFault
from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.ports import Clock
from topoalign.core.state.fold import NodeState


class Judgement(NamedTuple):
    """What one Allocate is given."""

    answers: Sequence[Allocation]
    """One for each container."""
    granted: Sequence[Allocation]
    """All that are new, with those beside the answers."""
    rests: Sequence[Rest]


class Grants:
    """Grants over the kubelet's protocol."""

    def __init__(
        self,
        ledger: Ledger,
        clock: Clock,
        pod_resources: PodResources,
        reconciliation: Reconciliation,
        preferences: Preferences,
        expect: Callable[[Sequence[Allocation]], None],
    ) -> None:
        """`expect` is told what each call is given once that is recorded, whether or not the caller still waits for it."""
        self._ledger, self._clock, self._pod_resources = ledger, clock, pod_resources
        self._reconciliation, self._preferences, self._expect = reconciliation, preferences, expect

    @property
    def state(self) -> NodeState:
        """What is known of the node now; while calls are judged, with what those before were given."""
        return self._ledger.state

    def check(self, resource: ResourceName, containers: Sequence[Sequence[DeviceID]]) -> None:
        """As `check_allocate`, by what is known of the node now."""
        check_allocate(self.state, resource, containers)

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
            tell_displaced(answers)
            self._reconciliation.liveness.granted(granted, answers, call.grant or grant)

    def judge(self, call: AllocateCall) -> Judgement | None:
        """
        Grants what a call asks for, or finds that it has it already. Returns None where the kubelet has to tell first what
        became of a record: it was not asked, or was before that was granted. Raises why the call is refused.
        """
        resource, containers = call.resource, call.containers
        if self._ledger.version != call.checked:
            self.check(resource, containers)  # the hardware may have changed while this waited
        listing, known = (call.poll.listing, call.poll.live) if call.poll is not None else (None, frozenset())
        shown, owned = shown_of(listing), self.state.ownership
        answers: list[Allocation] = []
        granted: list[Allocation] = []
        gone: dict[AllocationID, Allocation] = {}
        for devices in containers:
            asked = frozenset(devices)
            records = [self.state.allocations[name] for name in owned.overlapping(map(owned.holding, asked))]
            if not known.issuperset(record.id for record in records):
                return None
            if len(records) == 1 and records[0].device_ids == asked and shown.issuperset(places(records[0])):
                assert listing is not None
                self._reconciliation.seen(records[0].id, listing)
                answers.append(records[0])
                continue
            for record in records:
                if in_use := [d for _, d in shown.intersection(touching(owned, record, asked))]:
                    raise DeviceInUse(sorted(in_use), record.id)
                gone[record.id] = record
            check_amount(self.state, resource, len(asked))
            granted.append(
                Allocation(
                    id=self._ledger.next_id(len(granted)),
                    devices={resource: in_order(self.state.hardware, resource, asked)},
                    boot=self._ledger.boot,
                    machine=self._ledger.machine,
                    cards=owned.cards_of(devices),
                    displaced=displaced_by(self._reconciliation.liveness, self._ledger, records, asked, listing),
                )
            )
            answers.append(granted[-1])
        deviations = self._preferences.deviations(resource, granted)
        reasons = {former.allocation: "displaced" for each in granted for former in each.displaced}
        rests = remainders(self._ledger, gone.values(), containers, listing, granted)
        granted += [rest.allocation for rest in rests]
        granted += returned(self._ledger, [*gone.values()], listing, granted)
        self._ledger.grant(granted, instead_of=list(gone), reasons=reasons, preferred=deviations)
        return Judgement(answers, granted, rests)
