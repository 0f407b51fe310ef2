"""
Answers the requests that come over the bus: admissions, which `admit` decides, and predictions.

The hints come from the hinting service. If it does not answer in time, or its answer is invalid, the same providers run
in this process for the rest of the decision. So a decision reaches the time limit of the service at most once.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import anyio
import msgspec
import structlog

from topoalign.allocator.ledger.ledger import Binding, Ledger
from topoalign.allocator.mig.instances import check_no_instances
from topoalign.allocator.ports import nothing_to_ask
from topoalign.allocator.requests.kubelet_files import KubeletWatch
from topoalign.core import wire
from topoalign.core.admission.admit import answer_to, decide_demand, drive_async, iterate_decision
from topoalign.core.admission.pipeline import AdmissionRun, Question, Reply
from topoalign.core.admission.prediction import describe_unconfirmed_record, predict
from topoalign.core.admission.resolvability import explain_decision, with_resolvability
from topoalign.core.demand.device_lists import list_notes
from topoalign.core.demand.pod_demand import PodDemand, pod_demand, read_pod
from topoalign.core.demand.pod_validation import validate_pod
from topoalign.core.demand.unserved import unserved_names
from topoalign.core.hints.answer_checks import check_answer
from topoalign.core.hints.joint_hints import decided_together, is_held
from topoalign.core.hints.preconditions import check_resources_known
from topoalign.core.hints.provider import HintRequest
from topoalign.core.hints.providers import to_hint_question
from topoalign.core.hints.reuse import held_by_pod
from topoalign.core.model.decisions import Admission, Decision, Explained, Explanation, with_notes, with_unserved
from topoalign.core.model.errors import (
    BadRequest,
    DeadlinePassed,
    HardwareUnknown,
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
from topoalign.core.model.ids import CPU, AllocationID, NodeName
from topoalign.core.model.requests import (
    AdmissionRules,
    AllocateRequest,
    ClockReading,
    ConfirmRequest,
    Deadline,
    ExplainRequest,
    Mode,
    NodeRequest,
    PodRequest,
    ReleaseRequest,
    RuleChanges,
    override_rules,
)
from topoalign.core.model.reservations import Reservation
from topoalign.core.model.topology.cpuset import parse_cpuset
from topoalign.core.ports import Bus, Clock, Endpoint
from topoalign.core.state.fold import NodeState
from topoalign.core.state.node_reservations import with_reserved
from topoalign.runtime.recent_dict import RecentDict
from topoalign.runtime.replies import answer_with


def has_requested(held: Sequence[Allocation], demand: PodDemand, state: NodeState) -> bool:
    """
    Whether these allocations are what the pod requests: one for each container, with the requested numbers of devices,
    CPUs and bytes of memory. There may be more NICs if they are allocated jointly
    (`core.deviceshare.joint_allocation`).
    """
    asked = {container.container: container for container in demand.containers}
    if asked.keys() != {allocation.owner.container for allocation in held if allocation.owner is not None}:
        return False  # the allocation of a container may have been released
    for allocation in held:
        container = asked.get(allocation.owner.container) if allocation.owner is not None else None
        if container is None:
            return False
        together = decided_together(state, container) if demand.together else frozenset()
        if together and not is_held(state, container, allocation):
            return False
        share = container.share_in_units(state.hardware)
        if share is not None and len(allocation.amounts) != share.gpus:
            return False
        devices = {name: n for name, n in container.devices.items() if n and name not in together}
        sizes = {block.resource: 0 for block in allocation.memory}
        for block in allocation.memory:
            sizes[block.resource] += block.size
        asked_sizes = {name: container.asked.get(name, 0) for name in sizes}
        has_sizes = sizes == asked_sizes
        if allocation.role == "init":  # memory that a later container of the pod reuses is no longer in its record
            has_sizes = all(sizes[name] <= asked_sizes[name] for name in sizes)
        if (
            {name: len(ids) for name, ids in allocation.from_kubelet.items() if name not in together} != devices
            or (allocation.virtual_functions and not (together or allocation.co_allocated))
            or (allocation.cpus and len(parse_cpuset(allocation.cpus)) * 1000 != container.asked.get(CPU))
            or not has_sizes
        ):
            return False
    return True


UNKNOWN = (
    "name an allocation's id, or a pod as NAMESPACE/NAME; a pod that was refused or that requests no devices is not known "
    "here: `kubectl describe pod` has its reason"
)


class Deadlines:
    """
    Refuses requests after their deadline, by the clock of this process (docs/decisions/0009-deadlines.md).

    A request may still be waiting after its caller has given up. If it got devices then, they would stay allocated. So
    the caller first reads this clock, and sends a deadline in the time of this clock. After each start, it is another
    clock. Example: the clock reads 100.0, and the caller waits for 10 s, of which 0.5 s have passed. The deadline is
    109.5. The request is refused at 131.0.
    """

    def __init__(self, clock: Clock, epoch: int) -> None:
        """`epoch`: the ledger's, which began at this start. The epoch and the time of the start identify the clock."""
        self._clock = clock
        self._name = f"{epoch:x}-{int(clock.monotonic() * 1_000_000):x}"
        self.missed = 0
        """Number of refused requests."""

    def reading(self) -> ClockReading:
        """The clock's name, and its time in seconds."""
        return ClockReading(clock=self._name, now=self._clock.monotonic())

    def check(self, deadline: Deadline | None, request: str) -> None:
        """Raises DeadlinePassed after the deadline. `request` names the request in the error."""
        if deadline is None:
            return
        now = self._clock.monotonic()
        if deadline.clock != self._name:
            self.missed += 1
            raise DeadlinePassed(request, "it was made before this allocator started")
        if now > deadline.at:
            self.missed += 1
            raise DeadlinePassed(request, f"it came {now - deadline.at:.1f} s after its deadline")


CHOICES = frozenset({"policy", "scope", "mode", "placement", "compat", "prefer_closest_numa_nodes"})
"""The rules that a request for an allocation may choose. A prediction may change any rule."""


class Predictions:
    """
    Predicts the decision about a pod: `what-if` for users, `confirm` for the registry before it binds the pod.

    On a node with a kubelet, both predict the kubelet's decision from its current files. `what-if` reads all files.
    Because a scheduler waits for `confirm`, `confirm` reads only if a file has changed or the last reading is a few
    seconds old. If the registry names terminated pods that still hold devices here, `confirm` reads all files, because
    the end of a pod may not change any file.
    """

    def __init__(
        self,
        ledger: Ledger,
        rules: AdmissionRules,
        kubelet: KubeletWatch | None,
        *,
        kubelet_owns_devices: bool,
        confirmed: Callable[[], None] = lambda: None,
        by_variable_alone: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        `kubelet`: reads the data for predictions; None: the node's own rules and record are used. `confirmed` is called
        after each `confirm`. `by_variable_alone`: as in the current `PluginFlags`.
        """
        self._confirmed = confirmed
        self._by_variable_alone = by_variable_alone
        self._ledger = ledger
        self._kubelet = kubelet
        self._rules = msgspec.structs.replace(rules, mode=Mode.KUBELET) if kubelet_owns_devices else rules

    async def what_if(self, request: AllocateRequest) -> Decision:
        """Predicts the decision that `allocate` or the kubelet would make now. Nothing is recorded."""
        check_own(self._ledger, request.node)
        check_discovered(self._ledger)
        if self._kubelet is not None:
            await self._kubelet.read_all()
        decision = self._predict(request.pod, request.rules, explain=True)
        if not self._by_variable_alone():
            return decision
        return with_notes(decision, list_notes(self._ledger.state.hardware, read_pod(request.pod, self._rules)))

    async def confirm(self, request: ConfirmRequest) -> Decision:
        """Predicts the decision as if the other reservations were allocated already. Nothing is recorded."""
        check_own(self._ledger, request.node)
        check_discovered(self._ledger)
        if self._kubelet is not None:
            await (self._kubelet.read_all() if request.terminated else self._kubelet.read_changed())
        decision = self._predict(request.pod, {}, request.reserved)
        self._confirmed()
        return decision

    def _predict(
        self,
        pod: PodRequest,
        changes: RuleChanges,
        reserved: Sequence[Reservation] = (),
        *,
        explain: bool = False,
    ) -> Decision:
        pod = validate_pod(pod)
        if self._kubelet is not None:
            now = self._ledger.clock.wall()
            return predict(self._ledger.state, pod, now, changes, explain=explain, reserved=reserved)
        state = with_reserved(self._ledger.state, self._ledger.state, reserved)
        demand = pod_demand(pod, override_rules(self._rules, changes))
        decision = explain_decision(state, demand) if explain else decide_demand(state, demand)
        decision = with_unserved(decision, unserved_names(demand, state.hardware))
        return with_notes(
            decision,
            () if self._ledger.unconfirmed is None else (describe_unconfirmed_record(self._ledger.unconfirmed),),
        )


def check_own(ledger: Ledger, node: NodeName) -> None:
    """Raises InvalidField for a request to another node."""
    if node != ledger.node:
        raise InvalidField("node", f"{clean(node)!r} is not this node", f"ask {ledger.node!r} here")


def check_discovered(ledger: Ledger) -> None:
    """Raises HardwareUnknown if the topology or the health of the devices has not been received yet."""
    state = ledger.state
    if state.topology is None or state.health is None:
        raise HardwareUnknown(ledger.node, "no facts of discovery have been received")


REMEMBERED = 1_000
"""Maximum number of decisions that are kept for `explain`."""


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
    ) -> None:
        """
        `predictions`: None: predictions use the node's own rules and record. `ensure_fresh` is called before every
        allocation, as in `DeviceAllocations`.
        """
        self._ledger = ledger
        self._bus = bus
        self._rules = rules
        self._ensure_fresh = ensure_fresh
        self._kubelet_owns_devices = kubelet_owns_devices
        self._hint_seconds = hint_seconds
        self.predictions = predictions or Predictions(ledger, rules, None, kubelet_owns_devices=kubelet_owns_devices)
        self._turn = anyio.Lock()
        self._decisions = RecentDict[str, Decision](REMEMBERED)
        self.deadlines = Deadlines(ledger.clock, ledger.state.epoch)
        self.hint_fallbacks = 0
        """Number of questions that were answered in this process because the hinting service did not answer them."""

    def endpoints(self) -> Sequence[Endpoint]:
        """The endpoints to serve on the bus, one for each kind of request."""
        answers = {
            "allocate": answer_with(AllocateRequest, self.allocate),
            "release": answer_with(ReleaseRequest, self.release),
            "what-if": answer_with(AllocateRequest, self.predictions.what_if),
            "confirm": answer_with(ConfirmRequest, self.predictions.confirm),
            "explain": answer_with(ExplainRequest, self.explain),
            "snapshot": answer_with(NodeRequest, self.snapshot),
            "trust": answer_with(NodeRequest, self.trust),
            "clock": answer_with(NodeRequest, self.clock),
        }
        node = self._ledger.node
        return [
            Endpoint(name=verb, subject=wire.admission_subject(node, verb), answer=a) for verb, a in answers.items()
        ]

    async def allocate(self, request: AllocateRequest) -> Decision:
        """
        Admits the pod and records its allocations, or refuses it and records the refusal. If the pod already holds
        exactly what it requests, returns the existing allocations again.

        Raises InvalidField, KubeletOwnsDevices, HardwareUnknown, DeadlinePassed, PodAlreadyAllocated, and StateFault if the
        record is unconfirmed or cannot be written.
        """
        check_own(self._ledger, request.node)
        if self._kubelet_owns_devices:
            raise KubeletOwnsDevices(self._ledger.node)
        pod = validate_pod(request.pod)
        for name in sorted(request.rules.keys() - CHOICES):
            choices = f"choose {', '.join(sorted(CHOICES))} per request"
            raise InvalidField(f"rules.{clean(name)}", "is the node's own", choices)
        rules = override_rules(self._rules, request.rules)
        demand = pod_demand(pod, rules)
        await self._ensure_fresh()
        check_discovered(self._ledger)
        if rules.mode is Mode.KUBELET:  # a kubelet ignores resources without a plugin: a scheduler checks them
            for container in demand.containers:
                check_resources_known(self._ledger.state.hardware, container)
        name = f"{demand.namespace}/{demand.pod}"
        async with self._turn:
            self.deadlines.check(request.deadline, f"the allocation for pod {name}")
            if held := held_by_pod(self._ledger.state, demand):
                if not has_requested(held, demand, self._ledger.state):
                    raise PodAlreadyAllocated(name)
                return self._again(name, held)
            if self._ledger.unconfirmed is not None:  # there is no kubelet to report the missing allocations
                raise StateFault(
                    describe_unconfirmed_record(self._ledger.unconfirmed),
                    "compare what runs with `topoalign watch`, cordon devices that are busy without an allocation, then run "
                    "`topoalign trust`",
                )
            decision = await self._decide(demand)
            self.deadlines.check(request.deadline, f"the allocation for pod {name}")
            return self._record(demand.request, decision)

    async def release(self, request: ReleaseRequest) -> tuple[AllocationID, ...]:
        """
        Releases an allocation by its id, or all allocations of a pod by NAMESPACE/NAME; returns the ids. Raises
        InvalidField, KubeletOwnsDevices, DeadlinePassed, NotFound, and StateFault if the record cannot be written.
        """
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
        """Explains an allocation by its id, or a pod by NAMESPACE/NAME. Raises NotFound."""
        check_own(self._ledger, request.node)
        live = tuple(self._named(request.target))
        decision = self._decisions.get(request.target)
        notes = self._ledger.release_log.explain(request.target)
        if not live and decision is None and not notes:
            raise NotFound("allocation or pod", request.target, UNKNOWN)
        ailing = {device: health for held in live for device, health in self._ledger.state.ailing(held).items()}
        return Explained(allocations=live, decision=decision, ailing=ailing, notes=notes)

    async def snapshot(self, request: NodeRequest) -> tuple[int, int]:
        """Publishes a snapshot of all live allocations; returns its (epoch, seq)."""
        check_own(self._ledger, request.node)
        return self._ledger.announce()

    async def clock(self, request: NodeRequest) -> ClockReading:
        """Returns the reading from which the caller computes the deadline of its next request."""
        check_own(self._ledger, request.node)
        return self.deadlines.reading()

    async def trust(self, request: NodeRequest) -> str | None:
        """Confirms the record for an operator; returns why it was unconfirmed. None: it was confirmed already."""
        check_own(self._ledger, request.node)
        unconfirmed = self._ledger.unconfirmed
        self._ledger.confirm("an operator")
        return unconfirmed

    def _named(self, target: str) -> list[Allocation]:
        live = self._ledger.state.allocations
        if target in live:
            return [live[AllocationID(target)]]
        return [a for a in live.values() if a.owner is not None and f"{a.owner.namespace}/{a.owner.pod}" == target]

    async def _decide(self, demand: PodDemand) -> Decision:
        """Decides with hints from the hinting service. If the node changes meanwhile, decides again without it."""
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
        """The answer of the hinting service; None if there is no answer or it is invalid."""
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
                self._decisions[allocation.id] = decision
        else:
            self._ledger.refuse(pod, decision)
        self._decisions[f"{pod.namespace}/{pod.name}"] = decision
        return decision

    def _again(self, name: str, held: Sequence[Allocation]) -> Admission:
        """Returns the existing allocations. Stale ones are bound again: the pod was requested since the last reboot."""
        stale = [(each.id, each.owner) for each in held if each.id in self._ledger.state.stale]
        with suppress(StateFault):  # the allocations are held anyway
            self._ledger.bind([Binding(name, owner) for name, owner in stale if owner is not None])
        had = self._decisions.get(name)
        ids = {each.id for each in held}
        same = isinstance(had, Admission) and ids == {each.id for each in had.allocations}
        explanation = had.explanation if had is not None and same else Explanation()
        allocations = tuple(self._ledger.state.allocations[each.id] for each in held)
        return Admission(allocations=allocations, explanation=explanation)
