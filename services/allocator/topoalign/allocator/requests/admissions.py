"""
Requests for allocations over the bus: a client asks for a pod, and `admit` decides.

Hints are asked from the hinting service, which answers from what the question carries. If it is silent, or what it says
cannot be used, the same providers are asked in process for the rest of the decision, so that it waits for a neighbour once
at most, however many containers the pod has.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import anyio
import msgspec
import structlog

from topoalign.allocator.ledger.ledger import Binding, Ledger
from topoalign.allocator.mig.instances import check_no_instances
from topoalign.allocator.ports import nothing_to_ask
from topoalign.allocator.requests.kubelet_files import absence, lists_nothing
from topoalign.allocator.requests.predictions import Predictions, check_discovered, check_own
from topoalign.core import wire
from topoalign.core.admission.admit import answer_to, drive_async, iterate_decision
from topoalign.core.admission.pipeline import AdmissionRun, Question, Reply
from topoalign.core.admission.prediction import describe_unconfirmed_record
from topoalign.core.admission.resolvability import explain_decision, with_resolvability
from topoalign.core.demand.pod_demand import PodDemand, pod_demand
from topoalign.core.demand.pod_validation import validate_pod
from topoalign.core.demand.shares import share_in_units
from topoalign.core.hints.answer_checks import check_answer
from topoalign.core.hints.joint_hints import decided_together, is_held
from topoalign.core.hints.preconditions import check_resources_known
from topoalign.core.hints.provider import HintRequest
from topoalign.core.hints.providers import to_hint_question
from topoalign.core.hints.reuse import held_by_pod
from topoalign.core.model.decisions import Admission, Decision, Explained, Explanation
from topoalign.core.model.errors import (
    BadRequest,
    DeadlinePassed,
    InvalidField,
    KubeletOwnsDevices,
    NoFit,
    NotFound,
    PodAlreadyAllocated,
    StateFault,
    Unavailable,
    clean,
)
from topoalign.core.model.events import Allocation
from topoalign.core.model.hints import HintAnswer
from topoalign.core.model.ids import CPU, AllocationID
from topoalign.core.model.maintenance import TrustRequest
from topoalign.core.model.requests import (
    AdmissionRules,
    AllocateRequest,
    ClockReading,
    ClockRequest,
    ConfirmRequest,
    Deadline,
    ExplainRequest,
    Mode,
    PodRequest,
    ReleaseRequest,
    SnapshotRequest,
    override_rules,
)
from topoalign.core.model.topology.cpuset import parse_cpuset
from topoalign.core.ports import Bus, Clock, Endpoint
from topoalign.core.state.fold import NodeState
from topoalign.runtime.replies import answer_with

# What a pod holds already, and whether it asks for just that again: then it gets the same answer.


def has_requested(held: Sequence[Allocation], demand: PodDemand, state: NodeState) -> bool:
    """
    Whether these allocations are what the pod asks for: one for each container, with as many of each device, CPU and byte.
    Of NICs that are decided together there may be more (`core.deviceshare.joint_allocation`).
    """
    asked = {container.container: container for container in demand.containers}
    if asked.keys() != {allocation.owner.container for allocation in held if allocation.owner is not None}:
        return False  # a part of it may have been given back
    for allocation in held:
        container = asked.get(allocation.owner.container) if allocation.owner is not None else None
        if container is None:
            return False
        together = decided_together(state, container) if demand.together else frozenset()
        if together and not is_held(state, container, allocation):
            return False
        share = share_in_units(state.hardware, container.devices, container.cards)
        if share is not None and len(allocation.amounts) != share.gpus:
            return False
        devices = {name: n for name, n in container.devices.items() if n and name not in together}
        sizes = {block.resource: 0 for block in allocation.memory}
        for block in allocation.memory:
            sizes[block.resource] += block.size
        if (
            {name: len(ids) for name, ids in allocation.from_kubelet.items() if name not in together} != devices
            or (allocation.virtual_functions and not (together or allocation.co_allocated))
            or (allocation.cpus and len(parse_cpuset(allocation.cpus)) * 1000 != container.asked.get(CPU))
            or not all(is_size(allocation, size, container.asked.get(name, 0)) for name, size in sizes.items())
        ):
            return False
    return True


def is_size(allocation: Allocation, size: int, asked: int) -> bool:
    """
    Whether an allocation holds as many bytes of memory as were `asked` for. An init container may hold fewer: later
    containers of the pod take what they reuse of its memory out of its record.
    """
    return size <= asked if allocation.role == "init" else size == asked


# Requests that come too late are refused.
#
# A request can wait anywhere: in a socket buffer, at the NATS server, in this process while it is stopped. Its asker
# has given up by then, and what is granted to it all the same is held for good. So a request names a deadline, on the
# clock of the process that judges it: the asker reads this clock first (`ClockRequest`), and no clocks of two machines
# are compared.
#
#     clock read: 100.0; the asker waits 10 s in all, 0.5 s of which are gone: deadline 109.5; at 131.0 it is refused
#
# The clock is a new one with each start, so a request that was made to the process before is refused, too. A request
# without a deadline is never late. docs/decisions/0009-deadlines.md has the reasons.


class Deadlines:
    """The clock of one process of an allocator, and the check of requests against it."""

    def __init__(self, clock: Clock, epoch: int) -> None:
        """`epoch`: that of the ledger since this start. With the time of the start it names the clock."""
        self._clock = clock
        self._name = f"{epoch:x}-{int(clock.monotonic() * 1_000_000):x}"
        self.missed = 0
        """Requests that came too late."""

    def reading(self) -> ClockReading:
        """The clock's name, and its time in seconds."""
        return ClockReading(clock=self._name, now=self._clock.monotonic())

    def check(self, deadline: Deadline | None, request: str) -> None:
        """Refuses a request after its deadline. `request` names it in the error. Raises DeadlinePassed."""
        if deadline is None:
            return
        now = self._clock.monotonic()
        if deadline.clock != self._name:
            self.missed += 1
            raise DeadlinePassed(request, "it was made before this allocator started")
        if now > deadline.at:
            self.missed += 1
            raise DeadlinePassed(request, f"it came {now - deadline.at:.1f} s after its deadline")


# Which rules a request for an allocation may choose; the others are the node's own.


CHOICES = frozenset({"policy", "scope", "mode", "placement", "compat", "prefer_closest_numa_nodes"})


def check_rule_changes(changes: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
    """
    Returns the changes of rules in a request for an allocation, if all are in `CHOICES`.

    Raises InvalidField that names the first rule that is the node's own. A prediction may change any rule.
    """
    for name in sorted(changes.keys() - CHOICES):
        raise InvalidField(
            f"rules.{clean(name)}", "is the node's own", f"choose {', '.join(sorted(CHOICES))} per request"
        )
    return changes


REMEMBERED = 1_000
"""Decisions kept for `explain`."""


log = structlog.get_logger("topoalign.allocator.requests.admissions")


class Admissions:
    """Answers allocate, release, what-if, confirm, explain, snapshot, trust and clock for one node."""

    def __init__(  # one parameter for each collaborator
        self,
        ledger: Ledger,
        bus: Bus,
        rules: AdmissionRules,
        *,
        kubelet_owns_devices: bool,
        predictions: Predictions | None = None,
        hint_seconds: float = 0.25,
        ensure_fresh: Callable[[], Awaitable[None]] = nothing_to_ask,
        lists: Callable[[str], bool | None] = lists_nothing,
    ) -> None:
        """
        `predictions`: None: by the node's own rules and record. `lists` returns whether the kubelet lists a pod of this
        name, None where there is no kubelet to ask. `ensure_fresh` is called before anything is allocated, as by
        `DeviceAllocations`.
        """
        self._ledger = ledger
        self._bus = bus
        self._rules = rules
        self._ensure_fresh = ensure_fresh
        self._lists = lists
        self._kubelet_owns_devices = kubelet_owns_devices
        self._hint_seconds = hint_seconds
        self.predictions = predictions or Predictions(ledger, rules, None, kubelet_owns_devices=kubelet_owns_devices)
        self._turn = anyio.Lock()
        self._decisions: OrderedDict[str, Decision] = OrderedDict()
        self.deadlines = Deadlines(ledger.clock, ledger.state.epoch)
        self.hint_fallbacks = 0
        """Questions that were answered in process because the hinting service did not."""

    def endpoints(self) -> Sequence[Endpoint]:
        """The endpoints to serve on the bus, one for each kind of request."""
        answers = {
            "allocate": answer_with(AllocateRequest, self.allocate),
            "release": answer_with(ReleaseRequest, self.release),
            "what-if": answer_with(AllocateRequest, self.predictions.what_if),
            "confirm": answer_with(ConfirmRequest, self.predictions.confirm),
            "explain": answer_with(ExplainRequest, self.explain),
            "snapshot": answer_with(SnapshotRequest, self.snapshot),
            "trust": answer_with(TrustRequest, self.trust),
            "clock": answer_with(ClockRequest, self.clock),
        }
        node = self._ledger.node
        return [
            Endpoint(name=verb, subject=wire.admission_subject(node, verb), answer=a) for verb, a in answers.items()
        ]

    async def allocate(self, request: AllocateRequest) -> Decision:
        """
        Admits the pod and records what it gets, or refuses it and records that. A pod that holds just this gets it again.

        Raises InvalidField, KubeletOwnsDevices, HardwareUnknown, DeadlinePassed, PodAlreadyAllocated, and StateFault where
        the record is unconfirmed or cannot be written.
        """
        check_own(self._ledger, request.node)
        if self._kubelet_owns_devices:
            raise KubeletOwnsDevices(self._ledger.node)
        pod = validate_pod(request.pod)
        rules = override_rules(self._rules, check_rule_changes(request.rules))
        demand = pod_demand(pod, rules)
        await self._ensure_fresh()
        check_discovered(self._ledger)
        if rules.mode is Mode.KUBELET:  # it passes over what no plugin serves, relying on a scheduler that there is not
            for container in demand.containers:
                check_resources_known(self._ledger.state.hardware, container)
        name = f"{demand.namespace}/{demand.pod}"
        async with self._turn:
            self.deadlines.check(request.deadline, f"the allocation for pod {name}")
            if held := held_by_pod(self._ledger.state, demand):
                if not has_requested(held, demand, self._ledger.state):
                    raise PodAlreadyAllocated(name)
                return self._again(name, held)
            self._check_confirmed()
            decision = await self._decide(demand)
            self.deadlines.check(request.deadline, f"the allocation for pod {name}")
            return self._record(demand.request, decision)

    async def release(self, request: ReleaseRequest) -> tuple[AllocationID, ...]:
        """Releases one allocation, by its id, or all of a pod, by NAMESPACE/NAME; returns the ids. Raises NotFound."""
        check_own(self._ledger, request.node)
        if self._kubelet_owns_devices:
            raise KubeletOwnsDevices(self._ledger.node)
        async with self._turn:
            self.deadlines.check(request.deadline, f"the release of {request.target}")
            names = tuple(allocation.id for allocation in self._named(request.target))
            if not names:
                raise NotFound(
                    "live allocation or pod", request.target, "`topoalign watch --since 1` shows what there was"
                )
            self._ledger.release(names, "released")
            return names

    async def explain(self, request: ExplainRequest) -> Explained:
        """
        Explains an allocation, by its id, or a pod, by NAMESPACE/NAME: what it holds and how that was decided. Raises
        NotFound.
        """
        check_own(self._ledger, request.node)
        live = tuple(self._named(request.target))
        decision = self._decisions.get(request.target)
        state = self._ledger.state
        notes = self._ledger.release_log.explain(request.target, state.allocations)
        if not live and decision is None and not notes:
            notes = (absence(request.target, self._lists(request.target), by_kubelet=self._kubelet_owns_devices),)
        ailing = {device: health for held in live for device, health in state.ailing(held).items()}
        return Explained(allocations=live, decision=decision, ailing=ailing, notes=notes)

    async def snapshot(self, request: SnapshotRequest) -> tuple[int, int]:
        """Publishes a snapshot of all live allocations; returns its (epoch, seq)."""
        check_own(self._ledger, request.node)
        return self._ledger.announce()

    async def clock(self, request: ClockRequest) -> ClockReading:
        """The reading of this process's clock, from which the asker makes the deadline of its next request."""
        check_own(self._ledger, request.node)
        return self.deadlines.reading()

    async def trust(self, request: TrustRequest) -> str | None:
        """Confirms the record on an operator's request; returns why it was unconfirmed, None if it was not."""
        check_own(self._ledger, request.node)
        unconfirmed = self._ledger.unconfirmed
        self._ledger.confirm("an operator")
        return unconfirmed

    def _check_confirmed(self) -> None:
        """No kubelet shows here what else is held, so an operator has to confirm the record. Raises StateFault."""
        if self._ledger.unconfirmed is not None:
            raise StateFault(
                describe_unconfirmed_record(self._ledger.unconfirmed),
                "compare what runs with `topoalign watch`, cordon devices that are busy without an allocation, then run "
                "`topoalign trust`",
            )

    def _named(self, target: str) -> list[Allocation]:
        live = self._ledger.state.allocations
        if target in live:
            return [live[AllocationID(target)]]
        return [a for a in live.values() if a.owner is not None and f"{a.owner.namespace}/{a.owner.pod}" == target]

    async def _decide(self, demand: PodDemand) -> Decision:
        """
        Decides with hints from the hinting service; again and at once if the node changed meanwhile.

        A service that once gave no answer or no usable one is not asked again for this pod: others wait for the decision.
        """
        state = self._ledger.state
        served = True

        async def answer(asked: Question) -> Reply:
            nonlocal served
            if isinstance(asked, HintRequest):
                reply = await self._hints(asked, demand.request) if served else None
                served = reply is not None
                self.hint_fallbacks += not served
                if reply is not None:
                    return reply
            return answer_to(asked, state, demand.rules)

        decision = await drive_async(iterate_decision(AdmissionRun(state, demand, explain=True)), answer)
        if self._ledger.state is not state:
            return explain_decision(self._ledger.state, demand)
        return decision if isinstance(decision, Admission) else with_resolvability(state, demand, decision)

    async def _hints(self, asked: HintRequest, pod: PodRequest) -> HintAnswer | None:
        """The answer of the hinting service; None without an answer or if it cannot be used."""
        try:
            body = msgspec.json.encode(to_hint_question(asked, pod))
            reply = await self._bus.ask(wire.hints_subject(self._ledger.node), body, self._hint_seconds)
            answer = wire.decode_answer(reply, HintAnswer)
            check_answer(asked, answer)
        except (Unavailable, BadRequest, NoFit) as error:
            if self.hint_fallbacks == 0:
                log.warning("hints are computed in process", finding=error.finding)
            return None
        return answer

    def _record(self, pod: PodRequest, decision: Decision) -> Decision:
        """Records the decision. The state on which it was made has not changed since."""
        if isinstance(decision, Admission):
            check_no_instances(self._ledger.state.hardware, decision.allocations)
            named = tuple(self._ledger.named(each, place) for place, each in enumerate(decision.allocations))
            decision = msgspec.structs.replace(decision, allocations=named)
            self._ledger.grant(named)
            for allocation in named:
                self._remember(allocation.id, decision)
        else:
            self._ledger.refuse(pod, decision)
        self._remember(f"{pod.namespace}/{pod.name}", decision)
        return decision

    def _again(self, name: str, held: Sequence[Allocation]) -> Admission:
        """The same answer as before; whoever asks for it again has it in this boot of the node."""
        stale = [(each.id, each.owner) for each in held if each.id in self._ledger.state.stale]
        with suppress(StateFault):  # they are held all the same
            self._ledger.bind([Binding(name, owner) for name, owner in stale if owner is not None])
        had = self._decisions.get(name)
        ids = {each.id for each in held}
        same = isinstance(had, Admission) and ids == {each.id for each in had.allocations}
        explanation = had.explanation if had is not None and same else Explanation()
        allocations = tuple(self._ledger.state.allocations[each.id] for each in held)
        return Admission(allocations=allocations, explanation=explanation)

    def _remember(self, name: str, decision: Decision) -> None:
        self._decisions[name] = decision
        self._decisions.move_to_end(name)
        while len(self._decisions) > REMEMBERED:
            self._decisions.popitem(last=False)
