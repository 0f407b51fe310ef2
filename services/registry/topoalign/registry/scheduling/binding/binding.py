"""
Binds a pod to a node that has confirmed what it will give it.

    see the pod -> check its node -> ask the node -> reserve by compare-and-set -> create the Binding -> see the pod there

A pod is seen where the watch of all pods has shown it, and read where it has not. What the watch does not know yet the
Binding finds out, which names the UID: the API server refuses it for a pod that is bound, being deleted or gone.

The answer is ok only after the API server has shown the pod with our node in it, and always if it is found there, whoever
bound it: the scheduler believes an ok, and holds an error against a pod that is bound. Whatever is not known at the deadline
is an error. The deadline is below the five seconds after which the scheduler tries again, so that no Binding of an earlier
try comes between. Binds of different nodes do not wait for one another; those of one node ask and reserve one after the
other.

A bind waits for what passes by itself: for pods of the node that have to be admitted first, and for the end of pods whose
devices it is to get. It is woken by the next change of the node, and fails only when its time is over: an error makes the
scheduler try the pod again after seconds, and binds run beside its next cycles.

A Binding that has failed for good cancels the reservation. One of which nothing is known keeps it: it is replaced when the
scheduler tries again, and ends by its own time.
"""

from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Protocol
from weakref import WeakValueDictionary

import anyio
import msgspec
import structlog

from topoalign.core import wire
from topoalign.core.admission.gang_plan import reserved_for
from topoalign.core.diagnosis.hami_nodes import REASONS
from topoalign.core.model.decisions import Admission, Refusal
from topoalign.core.model.errors import BusConflict, NoFit, TopoalignError, Unavailable, clean
from topoalign.core.model.ids import DeviceID, NodeName
from topoalign.core.model.requests import ConfirmRequest, PodRequest
from topoalign.core.model.reservations import Reservation
from topoalign.core.ports import Bus, Clock
from topoalign.registry.ports import ApiConflict, ApiNotFound, ApiRefused, ApiUnavailable, KubernetesApi, SeenPod
from topoalign.registry.scheduling.binding.reservations import Change, Reservations, are_mistakable
from topoalign.registry.scheduling.cluster_state.assumed_pods import holds_something
from topoalign.registry.scheduling.cluster_state.nodes import NOT_KNOWN
from topoalign.registry.scheduling.cluster_state.shown_pods import ShownPods
from topoalign.registry.scheduling.filter.quotas import Quotas
from topoalign.registry.scheduling.filter.scheduler import NotReadYet, Scheduler
from topoalign.registry.scheduling.model import PODS_PENDING, PodToSchedule

# Whether a pod may be bound to a node at all, by what the API server shows of both: said before anything is reserved.
#
# A bind comes from whoever reaches the scheduler's address. A kube-scheduler asks for what its filters have let pass,
# and for pods that name it; anybody else may ask for any pod and any node.


DEFAULT_SCHEDULER = "default-scheduler"

Allows = Callable[[PodToSchedule, NodeName], bool]
"""Whether Kubernetes has the node, and its filters leave it to the pod."""


class NodeNotAllowed(NoFit):
    """Raised for a pod that Kubernetes keeps off the node."""

    code = "NodeNotAllowed"

    def __init__(self, node: NodeName) -> None:
        super().__init__(
            f"node {clean(node)} is not for the pod: there is none, it is cordoned, or a taint, the pod's nodeSelector or "
            "its node affinity keeps it off",
            "the scheduler tries again, on another node",
        )


class OtherScheduler(NoFit):
    """Raised for a pod that another scheduler is to bind."""

    code = "OtherScheduler"

    def __init__(self, scheduler: str) -> None:
        super().__init__(f"the pod names scheduler {clean(scheduler)}", "leave it to that one")


def check_placement(pod: SeenPod, node: NodeName, allows: Allows, scheduler: str) -> None:
    """
    Raises NodeNotAllowed and OtherScheduler. `scheduler`: the name of ours; empty where none is set, as the extender then
    serves whichever profiles it is configured for. Kubernetes' default scheduler may have it in any case.
    """
    named = pod.scheduler or DEFAULT_SCHEDULER
    if scheduler and named not in (scheduler, DEFAULT_SCHEDULER):
        raise OtherScheduler(named)
    if not allows(pod.to_schedule(), node):
        raise NodeNotAllowed(node)


BIND_SECONDS = 4.0
"""The scheduler gives up a bind after five."""
WAIT_SECONDS = 3.2
"""After so long a bind stops to wait for other pods: the rest of its time is for the Binding."""
CONFIRM_SECONDS = 1.5
"""For the node's allocator to answer, which reads its kubelet's files."""
SHOWN_SECONDS = 0.05
"""For the watch to show a pod or a Binding that was created, which takes it some milliseconds. Then the pod is read."""
TIDY_SECONDS = 0.5
"""After the pod is bound, for ending what an earlier try reserved elsewhere. What is left ends by its own time."""
RESERVED_SECONDS = 300.0
"""For the kubelet of a pod that is bound to admit it. One that takes longer is busy; what it will give is predicted then."""
PAUSE = 0.1
"""Seconds between two tries to reach the API server."""
RETRY_SECONDS = 0.25
"""After so long a bind that waits tries again although the node has not changed: its kubelet may have."""

REMEMBERED = 10_000
"""Pods whose requests are kept: far more than are bound and not shown by their nodes."""


log = structlog.get_logger("topoalign.registry.scheduling")


class PodGone(NoFit):
    """Raised for a pod that is deleted, being deleted, or replaced by another one of its name."""

    code = "PodGone"

    def __init__(self, pod: str) -> None:
        super().__init__(f"pod {clean(pod, 300)} is gone, or another one has its name", "nothing is to be bound")


class BoundElsewhere(NoFit):
    """Raised for a pod that is bound to another node already."""

    code = "BoundElsewhere"

    def __init__(self, pod: str, node: NodeName) -> None:
        super().__init__(f"pod {clean(pod, 300)} is bound to node {clean(node)}", "nothing is to be bound")


class NodeRefuses(NoFit):
    """Raised where the node would refuse the pod, though the view of the cluster lets it pass."""

    code = "NodeRefuses"

    def __init__(self, node: NodeName, code: str, finding: str) -> None:
        self.reason = code
        super().__init__(
            f"node {clean(node)} would refuse the pod: {code}: {clean(finding, 200)}", "the scheduler tries again"
        )


class PodsPending(NoFit):
    """
    Raised where pods of the node come first: they are bound and have to be admitted, or their end could lead the kubelet to
    refuse the pod. What is reserved for the pod stays.
    """

    code = PODS_PENDING

    def __init__(self, node: NodeName) -> None:
        super().__init__(
            f"pods that are bound to node {clean(node)}, or whose end could misalign the pod there, come first",
            "the scheduler tries again",
        )


class BindUnknown(Unavailable):
    """Raised where it is not known in time whether a pod is bound."""

    code = "BindUnknown"

    def __init__(self, pod: str, node: NodeName) -> None:
        super().__init__(
            f"pod {clean(pod, 300)} could not be bound to node {clean(node)} within {BIND_SECONDS:g} s",
            "the scheduler tries again; see whether the API server, the bus and the node's allocator answer",
        )


class NodeChecks(Protocol):
    """What a registry knows of a node at a bind."""

    def passes(self, node: NodeName, pod: PodToSchedule) -> bool:
        """Whether the pod is bound to the node without asking it, because topoalign does not run it."""

    def assume(self, node: NodeName, pod: PodToSchedule) -> None:
        """From now on the pod holds on the node what it will get: the scheduler asks about the next pod meanwhile."""

    def unassume(self, node: NodeName, uid: str) -> None:
        """The pod is not bound to the node after all."""

    def foreign(self, node: NodeName) -> str:
        """Code of the refusal where others give out the node's GPUs; empty: nobody does."""

    async def fits(self, node: NodeName, pod: PodToSchedule) -> str:
        """The code of why the node would not admit the pod in every order of the pods pending there; empty: it would."""

    def terminated(self, node: NodeName) -> Sequence[str]:
        """UIDs of pods that the API server shows as terminated, and the node's facts still show with something."""

    def is_being_freed(self, node: NodeName, pod: PodToSchedule) -> bool:
        """Whether pods of the node end now, so that what the pod lacks may be free within seconds."""

    def version_of(self, node: NodeName) -> int:
        """Rises with each change of what is known of the node."""

    async def until_changed(self, node: NodeName, version: int) -> None:
        """Until the node has changed since this version."""


async def no_gangs(pod: PodToSchedule, node: NodeName) -> str:
    """No pod belongs to a gang."""
    return ""


class Binder:
    """Binds pods for the scheduler."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        api: KubernetesApi,
        reservations: Reservations,
        checks: NodeChecks,
        plan: Callable[[PodToSchedule, NodeName], Awaitable[str]] = no_gangs,
        shown: ShownPods | None = None,
        check: Callable[[SeenPod, NodeName], None] = lambda pod, node: None,
    ) -> None:
        """
        `plan` reserves for all of the pod's gang, if it has one and that was not done, and returns its name; raises
        NoFit where the pod must not be bound there. `shown`: what the watch of all pods has shown; None: there is none.
        `check` raises NoFit where the pod may not be bound to the node at all.
        """
        self.counts: Counter[str] = Counter()
        """Binds by how they ended: `bound`, or the code of the error; and `stale`: the node knew better than the view."""
        self.requests: OrderedDict[str, PodRequest] = OrderedDict()
        """UID -> what it asks for, of the pods that were reserved here last."""
        self._bus = bus
        self._clock = clock
        self._api = api
        self._reservations = reservations
        self._checks = checks
        self._plan = plan
        self._shown = shown or ShownPods()
        self._check = check
        self._turns: WeakValueDictionary[NodeName, anyio.Lock] = WeakValueDictionary()
        """Node -> its lock, while a bind waits for it or has it."""

    async def bind(self, namespace: str, name: str, uid: str, node: NodeName) -> None:
        """As `Scheduling.bind`."""
        try:
            with anyio.move_on_after(BIND_SECONDS) as scope:
                await self._bind(namespace, name, uid, node)
            if scope.cancelled_caught:
                raise BindUnknown(f"{namespace}/{name}", node)
        except TopoalignError as error:
            self.counts[error.code] += 1
            raise
        self.counts["bound"] += 1
        with anyio.move_on_after(TIDY_SECONDS):  # it is bound, whether the bus is there or not
            await self._end_elsewhere(uid, node)

    async def _bind(self, namespace: str, name: str, uid: str, node: NodeName) -> None:
        until = anyio.current_time() + WAIT_SECONDS
        seen = await self._shown.waiting_pod(namespace, name, uid, SHOWN_SECONDS)
        if seen is None:
            seen = await self._read(namespace, name, uid, node)
        if seen.node == node:
            return
        try:
            self._check(seen, node)
        except NoFit:
            await self._reservations.cancel(uid, {node})
            raise
        pod = seen.to_schedule()
        if self._checks.passes(node, pod):
            await self._create_binding(seen, node)
            return
        try:
            await self._reserve(pod, node, until)
            await self._create_binding(seen, node)
        finally:
            self._checks.unassume(node, uid)

    async def _create_binding(self, seen: SeenPod, node: NodeName) -> None:
        """Creates the Binding until the pod is there. Raises what a failure for good raises, with nothing reserved."""
        namespace = seen.namespace
        name = seen.name
        uid = seen.uid
        while seen.node != node:
            refusal: TopoalignError | None = None
            try:
                await self._api.bind(namespace, name, uid, node)
                if await self._shown.node_of(uid, SHOWN_SECONDS) == node:
                    return
            except ApiUnavailable:
                await self._clock.sleep(PAUSE)
            except (ApiConflict, ApiNotFound, ApiRefused) as error:
                refusal = error
            try:
                seen = await self._read(namespace, name, uid, node)
                if refusal is not None and seen.node is None:
                    raise refusal
            except (NoFit, ApiNotFound, ApiRefused):
                await self._reservations.cancel(uid, {node})
                raise

    async def _read(self, namespace: str, name: str, uid: str, node: NodeName) -> SeenPod:
        """
        The pod, which is bound to this node or to none. Waits for the API server; raises PodGone, BoundElsewhere and
        ApiRefused.
        """
        while True:
            try:
                seen = await self._api.pod(namespace, name)
                break
            except ApiUnavailable:
                await self._clock.sleep(PAUSE)
        if seen is None or seen.uid != uid or (seen.deleting and seen.node is None):
            raise PodGone(f"{namespace}/{name}")
        if seen.node not in (None, node):
            raise BoundElsewhere(f"{namespace}/{name}", NodeName(str(seen.node)))
        return seen

    async def _end_elsewhere(self, uid: str, node: NodeName) -> None:
        """What an earlier try reserved on another node is not needed any more."""
        if others := {*self._reservations.of_pod(uid)} - {node}:
            with suppress(Unavailable):
                await self._reservations.cancel(uid, others)

    async def _reserve(self, pod: PodToSchedule, node: NodeName, until: float) -> None:
        """
        Reserves what the node confirms, if that is anything, once pods that come first are admitted or have ended. It waits
        for them `until` this second of the loop. Raises PodsPending and NodeRefuses, and what asking the node and writing
        raise.
        """
        gang = await self._plan(pod, node)
        self._checks.assume(node, pod)
        turn = self._turns.setdefault(node, anyio.Lock())
        has_waited = False
        while True:
            version = self._checks.version_of(node)
            async with turn:
                obstacle = await self._try_to_reserve(pod, node, gang)
            if obstacle is None:
                return
            if anyio.current_time() >= until:
                if isinstance(obstacle, NodeRefuses):
                    await self._reservations.cancel(pod.uid, {node})
                raise obstacle
            self.counts["waited"] += not has_waited
            has_waited = True
            with anyio.move_on_after(min(RETRY_SECONDS, until - anyio.current_time())):
                await self._checks.until_changed(node, version)

    async def _try_to_reserve(self, pod: PodToSchedule, node: NodeName, gang: str) -> NoFit | None:
        """As `_reserve`, at once: returns what passes by itself and is in the way; None: it is reserved."""
        while True:
            position = self._reservations.of(node).position
            try:
                admission = await self._judged(pod, node)
            except PodsPending as pending:
                return pending
            except NodeRefuses as refusal:
                if self._checks.is_being_freed(node, pod):
                    return refusal
                if refusal.reason not in NOT_KNOWN:  # else what is reserved may be that of a gang, by another registry
                    await self._reservations.cancel(pod.uid, {node})  # what an earlier try reserved is of no use
                raise
            made = reserved_for(pod.uid, pod.request, admission.allocations, RESERVED_SECONDS, gang)
            if not made.containers:
                return None
            if any(are_mistakable(made, each) for each in self._left_over(pod.uid, node)):
                return PodsPending(node)
            if devices_of(made) & self._reserved_for_others(pod.uid, node):
                await self._clock.sleep(PAUSE)  # the node has given another pod its devices, which is not known yet
                continue
            self.requests[pod.uid] = pod.request
            while len(self.requests) > REMEMBERED:
                self.requests.popitem(last=False)
            with suppress(BusConflict):
                await self._reservations.write([Change(node=node, position=position, made=(made,))])
                return None

    async def _judged(self, pod: PodToSchedule, node: NodeName) -> Admission:
        """What the node will give the pod. Raises NodeRefuses, PodsPending, and what asking the node raises."""
        if code := self._checks.foreign(node):
            raise NodeRefuses(node, code, REASONS[code]().finding)
        admission = await self._confirmed(pod, node)
        refusal = await self._checks.fits(node, pod)
        if refusal == PODS_PENDING:
            raise PodsPending(node)
        if refusal:
            raise NodeRefuses(node, refusal, "not beside the pods that are pending there")
        return admission

    def _reserved_for_others(self, uid: str, node: NodeName) -> frozenset[DeviceID]:
        held = (each for each in self._reservations.held(node) if each.pod_uid != uid)
        return frozenset[DeviceID]().union(*map(devices_of, held))

    def _left_over(self, uid: str, node: NodeName) -> list[Reservation]:
        """What is reserved on the node for pods that are gone: unknown to `fits`, and known to the node until it ends."""
        held = [each for each in self._reservations.held(node) if each.pod_uid != uid]
        return [each for each in held if not self._shown.has(each.pod_uid)]

    async def _confirmed(self, pod: PodToSchedule, node: NodeName) -> Admission:
        """What the node will give the pod. Raises NodeRefuses; raises Unavailable if its allocator does not answer."""
        others = tuple(each for each in self._reservations.held(node) if each.pod_uid != pod.uid)
        terminated = tuple(self._checks.terminated(node))
        request = ConfirmRequest(node=node, pod=pod.request, reserved=others, terminated=terminated)
        answer = await self._bus.ask(
            wire.admission_subject(node, "confirm"), msgspec.json.encode(request), CONFIRM_SECONDS
        )
        decision: Admission | Refusal = wire.decode_answer(answer, Admission | Refusal)  # type: ignore[arg-type]  # a union is a type to msgspec
        if isinstance(decision, Refusal):
            self.counts["stale"] += 1
            log.info("a node refuses what the view let pass", node=node, pod=pod.request.name, code=decision.code)
            raise NodeRefuses(node, decision.code, decision.finding)
        return decision


def devices_of(reservation: Reservation) -> frozenset[DeviceID]:
    """All whole devices of a reservation; of NICs that are shared, their virtual functions."""
    return frozenset(
        DeviceID(part)
        for each in reservation.containers
        for ids in (*each.devices.values(), *each.co_allocated.values())
        for device in ids
        for part in each.virtual_functions.get(device, (device,))
    )


# What the registry knows of a node when a pod is to be bound there: may it be bound now, and what does it wait for.


class BindChecks:
    """Judges binds from the view of a scheduler (`binding.NodeChecks`)."""

    def __init__(
        self,
        scheduler: Scheduler,
        behind: Callable[[], str | None],
        foreign: Callable[[NodeName], str],
        quotas: Quotas,
    ) -> None:
        """
        `behind`: why not all is known that an answer depends on. `foreign`: code of the refusal where others give out the
        node's GPUs; empty: nobody does.
        """
        self._scheduler = scheduler
        self._view = scheduler.view
        self._behind = behind
        self._foreign = foreign
        self._quotas = quotas

    def passes(self, node: NodeName, pod: PodToSchedule) -> bool:
        """As `NodeChecks.passes`."""
        return self._behind() is None and self._scheduler.passes(pod, node)

    def assume(self, node: NodeName, pod: PodToSchedule) -> None:
        """As `NodeChecks.assume`."""
        if holds_something(pod.request):
            self._view.assume(node, pod)

    def unassume(self, node: NodeName, uid: str) -> None:
        """As `NodeChecks.unassume`."""
        self._view.unassume(node, uid)

    def foreign(self, node: NodeName) -> str:
        """As `NodeChecks.foreign`."""
        return self._foreign(node)

    async def fits(self, node: NodeName, pod: PodToSchedule) -> str:
        """
        As `NodeChecks.fits`, of a pod that its node has confirmed: only others that are pending, or end, can change that.
        Raises NotReadYet: without what is reserved and bound nobody would be pending; and as `Quotas.check_read`.
        """
        finding = self._behind()
        if finding is not None:
            raise NotReadYet(finding)
        self._quotas.check_read(pod, node)
        if not self._view.holds(node).has_others(pod.uid):
            return await self._scheduler.lone.refusal(node, pod)
        return await self._scheduler.fits_in_every_order(node, pod)

    def terminated(self, node: NodeName) -> Sequence[str]:
        """As `NodeChecks.terminated`."""
        return self._view.terminated(node)

    def is_being_freed(self, node: NodeName, pod: PodToSchedule) -> bool:
        """As `NodeChecks.is_being_freed`."""
        leaving = self._view.terminating(node) if pod.nominated == node else frozenset[str]()
        if not leaving and not self._view.terminated(node):
            return False
        return self._scheduler.would_admit_without(node, pod, leaving)

    def version_of(self, node: NodeName) -> int:
        """As `NodeChecks.version_of`."""
        return self._view.version_of(node)

    async def until_changed(self, node: NodeName, version: int) -> None:
        """As `NodeChecks.until_changed`."""
        await self._view.until_changed(node, version)
