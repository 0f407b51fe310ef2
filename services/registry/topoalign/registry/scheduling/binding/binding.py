"""
Binds a pod to a node that has confirmed which devices the pod will get.

    get the pod -> check its node -> query the node -> reserve by compare-and-set -> create the Binding -> verify it

The pod comes from the watch of all pods. If the watch has not reported it yet, it is read from the API server. The
Binding has the pod's UID, so the API server refuses it for a pod that is bound, being deleted or gone.

The result is OK only if the API server reports the pod on this node, whichever client bound it. If the result is
unknown at the deadline, an error is returned. The deadline is below the five seconds after which the scheduler retries,
so that no Binding of an earlier attempt interferes. Binds to different nodes run concurrently. Binds to one node
confirm and reserve one after another.

A bind waits for temporary obstacles: pods of the node that must be admitted first, and pods that must end because it
needs their devices. The next change of the node wakes it. It fails only at its deadline, because the scheduler retries
a failed pod only after seconds, and continues with other pods while a bind waits.

A Binding that fails permanently cancels the reservation. If the result is unknown, the reservation remains: the next
attempt replaces it, or it expires.
"""

from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from weakref import WeakValueDictionary

import anyio
import msgspec
import structlog

from topoalign.core import wire
from topoalign.core.admission.gang_plan import reserved_for
from topoalign.core.diagnosis.hami_nodes import REASONS
from topoalign.core.model.decisions import Admission, Refusal
from topoalign.core.model.errors import BusConflict, NoFit, TopoalignError, Unavailable, clean, quoted
from topoalign.core.model.ids import DeviceID, NodeName
from topoalign.core.model.requests import ConfirmRequest
from topoalign.core.model.reservations import Reservation
from topoalign.core.ports import Bus, Clock
from topoalign.registry.ports import (
    DEFAULT_SCHEDULER,
    ApiConflict,
    ApiNotFound,
    ApiRefused,
    ApiUnavailable,
    KubernetesApi,
    PodEvent,
    SeenPod,
)
from topoalign.registry.scheduling.binding.cluster_reservations import (
    ClusterReservations,
    ReservationChange,
)
from topoalign.registry.scheduling.cluster_state.assumed_pods import holds_something
from topoalign.registry.scheduling.cluster_state.reported_pods import ReportedPods
from topoalign.registry.scheduling.cluster_state.view import NOT_KNOWN
from topoalign.registry.scheduling.filter.scheduler import Scheduler
from topoalign.registry.scheduling.scheduling_api import PODS_PENDING, PodToSchedule


class NodeForbidden(NoFit):
    """Raised for a pod that Kubernetes' filters do not allow on the node."""

    code = "NodeNotAllowed"

    def __init__(self, node: NodeName) -> None:
        super().__init__(
            f"the pod cannot be bound to node {clean(node)}: the node does not exist, is cordoned, has a taint that the pod "
            "does not tolerate, or does not match the pod's nodeSelector or node affinity",
            "the scheduler tries again, on another node",
        )


class OtherScheduler(NoFit):
    """Raised for a pod that names another scheduler."""

    def __init__(self, scheduler: str) -> None:
        super().__init__(f"the pod names scheduler {clean(scheduler)}", "nothing: that scheduler binds it")


BIND_SECONDS = 4.0
"""Deadline of a bind. The scheduler times out after five seconds."""
WAIT_SECONDS = 3.2
"""Maximum time that a bind waits for other pods. The remaining time is for the Binding."""
CONFIRM_SECONDS = 1.5
"""Timeout for the answer of the node's allocator, which reads the files of its kubelet."""
REPORTED_SECONDS = 0.05
"""
Maximum wait for the watch to report a pod or a Binding, which usually takes milliseconds. Then the API server is asked.
"""
TIDY_SECONDS = 0.5
"""Timeout for cancelling reservations of earlier attempts on other nodes after a bind. Uncancelled ones expire."""
RESERVED_SECONDS = 300.0
"""Duration of a reservation if the kubelet does not admit the bound pod. Later, the registry predicts its devices."""
PAUSE = 0.1
"""Seconds between two attempts to reach the API server."""
RETRY_SECONDS = 0.25
"""Time after which a waiting bind retries even if the node has not changed, because its kubelet may have changed."""


log = structlog.get_logger("topoalign.registry.scheduling")


class PodGone(NoFit):
    """Raised for a pod that was deleted, or replaced by another pod with the same name."""

    def __init__(self, pod: str) -> None:
        super().__init__(
            f"pod {clean(pod, 300)} was deleted, or replaced by a pod of the same name", "no action is needed"
        )


class BoundElsewhere(NoFit):
    """Raised for a pod that is already bound to another node."""

    def __init__(self, pod: str, node: NodeName) -> None:
        super().__init__(f"pod {clean(pod, 300)} is bound to node {clean(node)}", "no action is needed")


class NodeRefuses(NoFit):
    """Raised when the node would refuse the pod although the registry expected it to fit."""

    def __init__(self, node: NodeName, code: str, finding: str) -> None:
        self.reason = code
        super().__init__(
            f"node {clean(node)} would refuse the pod: {code}: {clean(finding, 200)}", "the scheduler tries again"
        )


class PodsPending(NoFit):
    """Raised while the kubelet could refuse the pod because other pods start or end. Its reservation remains."""

    code = PODS_PENDING

    def __init__(self, node: NodeName) -> None:
        super().__init__(
            f"node {clean(node)} has pods that must be admitted, or must end, before this pod can be bound there",
            "the scheduler tries again",
        )


class BindUnknown(Unavailable):
    """Raised if it is unknown at the deadline whether the pod is bound."""

    def __init__(self, pod: str, node: NodeName) -> None:
        super().__init__(
            f"it is not known after {BIND_SECONDS:g} s whether pod {clean(pod, 300)} is bound to node {clean(node)}",
            "the scheduler tries again; check whether the API server, NATS and the node's allocator answer",
        )


class BindChecks:
    """The checks of a bind: quotas, Kubernetes' own filters, and whether the pod fits."""

    def __init__(self, scheduler: Scheduler, scheduler_name: str) -> None:
        """`scheduler_name`: the configured name; empty: the extender serves all profiles that use it."""
        self.view = scheduler.view
        self._scheduler = scheduler
        self._scheduler_name = scheduler_name

    def check_placement(self, pod: SeenPod, node: NodeName) -> None:
        """Raises OtherScheduler and NodeForbidden. Any client of the extender can send any pod and any node."""
        # Kubernetes' default scheduler is always allowed.
        if self._scheduler_name and pod.scheduler not in (self._scheduler_name, DEFAULT_SCHEDULER):
            raise OtherScheduler(pod.scheduler)
        if not self._scheduler.allows(pod.to_schedule(), node):
            raise NodeForbidden(node)

    def passes(self, node: NodeName, pod: PodToSchedule) -> bool:
        """Whether the pod is bound without the node's confirmation, because topoalign does not manage the node."""
        return self._scheduler.behind() is None and self._scheduler.passes(pod, node)

    def claim(self, pod: PodToSchedule, node: NodeName) -> AbstractContextManager[object]:
        """Counts the pod against its namespace's quotas while it is being bound. Raises OverQuota and QuotasUnknown."""
        quotas = self._scheduler.quotas
        return nullcontext() if quotas is None else quotas.claim(pod, node)

    def assume(self, node: NodeName, pod: PodToSchedule) -> None:
        """Assumes the pod on the node, because the scheduler filters the next pod during the bind."""
        if holds_something(pod.request):
            self.view.assume(node, pod)

    async def fits(self, node: NodeName, pod: PodToSchedule) -> str:
        """
        The code of the reason why the node could refuse the pod in some order of its pending pods; empty: it admits the
        pod in every order. The node has confirmed the pod, so only pods that are pending or that end can change this.

        Raises NotReadYet while reservations and binds are unknown.
        """
        self._scheduler.check_ready()
        if not self.view.pods_on(node).has_others(pod.uid):
            return await self._scheduler.lone.refusal(node, pod)
        return await self._scheduler.fits_in_every_order(node, pod)

    def is_being_freed(self, node: NodeName, pod: PodToSchedule) -> bool:
        """Whether the node would admit the pod without the pods that are ending there, so that waiting can help."""
        leaving = self.view.terminating(node) if pod.nominated == node else frozenset[str]()
        if not leaving and not self.view.terminated(node):
            return False
        return self._scheduler.would_admit_without(node, pod, leaving)


class PodBinder:
    """Binds pods for the scheduler."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        api: KubernetesApi,
        reservations: ClusterReservations,
        checks: BindChecks,
        plan: Callable[[PodToSchedule, NodeName], Awaitable[str]],
        reported: ReportedPods,
        submit: Callable[[PodEvent], None] = lambda event: None,
    ) -> None:
        """
        `plan` reserves devices for the pod's gang if it is not reserved yet, and returns the gang's name. It raises
        NoFit if the pod must not be bound to the node. `reported`: the pods of the watch. `submit` queues an Event.
        """
        self.counts: Counter[str] = Counter()
        """Binds by result: `bound` or the error code. `waited`: it waited. `stale`: the node contradicted the view."""
        self._bus = bus
        self._clock = clock
        self._api = api
        self._reservations = reservations
        self._checks = checks
        self._plan = plan
        self._reported = reported
        self._submit = submit
        self._turns: WeakValueDictionary[NodeName, anyio.Lock] = WeakValueDictionary()
        """Node -> its lock, while a bind waits for it or holds it."""

    async def bind(self, namespace: str, name: str, uid: str, node: NodeName) -> None:
        """Implements `Bind`."""
        try:
            with anyio.move_on_after(BIND_SECONDS) as scope:
                await self._bind(namespace, name, uid, node)
            if scope.cancelled_caught:
                raise BindUnknown(f"{namespace}/{name}", node)
        except TopoalignError as error:
            self.counts[error.code] += 1
            note = f"not bound to {clean(node)}: {error.code}: {error.finding}; {error.remedy}"
            self._submit(
                PodEvent(namespace=namespace, name=name, uid=uid, reason="BindFailed", note=note, kind="Warning")
            )
            raise
        self.counts["bound"] += 1
        reserved = self._reservations.of_pod(uid)
        if node in reserved and (devices := list_devices(reserved[node])):
            note = f"reserved on {clean(node)}: {quoted(devices)}"
            self._submit(PodEvent(namespace=namespace, name=name, uid=uid, reason="DevicesReserved", note=note))
        # Reservations on other nodes come from earlier attempts. The pod is bound even if the bus is unavailable.
        if others := reserved.keys() - {node}:
            with anyio.move_on_after(TIDY_SECONDS), suppress(Unavailable):
                await self._reservations.cancel(uid, others)

    async def _bind(self, namespace: str, name: str, uid: str, node: NodeName) -> None:
        until = anyio.current_time() + WAIT_SECONDS
        seen = await self._reported.waiting_pod(namespace, name, uid, REPORTED_SECONDS)
        if seen is None:
            seen = await self._read(namespace, name, uid, node)
        if seen.node == node:
            return
        try:
            self._checks.check_placement(seen, node)
        except NoFit:
            await self._reservations.cancel(uid, {node})
            raise
        pod = seen.to_schedule()
        with self._checks.claim(pod, node):
            try:
                if not self._checks.passes(node, pod):
                    await self._reserve(pod, node, until)
                await self._create_binding(seen, node)
            finally:
                self._checks.view.unassume(node, uid)

    async def _create_binding(self, seen: SeenPod, node: NodeName) -> None:
        """Retries the Binding until the pod is on the node. A permanent error cancels the reservation and is raised."""
        while seen.node != node:
            refusal: TopoalignError | None = None
            try:
                await self._api.bind(seen.namespace, seen.name, seen.uid, node)
                if await self._reported.node_of(seen.uid, REPORTED_SECONDS) == node:
                    return
            except ApiUnavailable:
                await self._clock.sleep(PAUSE)
            except (ApiConflict, ApiNotFound, ApiRefused) as error:
                refusal = error
            try:
                seen = await self._read(seen.namespace, seen.name, seen.uid, node)
                if refusal is not None and seen.node is None:
                    raise refusal
            except (NoFit, ApiNotFound, ApiRefused):
                await self._reservations.cancel(seen.uid, {node})
                raise

    async def _read(self, namespace: str, name: str, uid: str, node: NodeName) -> SeenPod:
        """Reads the pod, which must be on this node or unbound. Raises PodGone, BoundElsewhere and ApiRefused."""
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

    async def _reserve(self, pod: PodToSchedule, node: NodeName, until: float) -> None:
        """Reserves the devices that the node confirms. Waits for temporary obstacles `until` this event loop time."""
        gang = await self._plan(pod, node)
        self._checks.assume(node, pod)
        turn = self._turns.setdefault(node, anyio.Lock())
        has_waited = False
        while True:
            version = self._checks.view.version_of(node)
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
                await self._checks.view.until_changed(node, version)

    async def _try_to_reserve(self, pod: PodToSchedule, node: NodeName, gang: str) -> NoFit | None:
        """Reserves without waiting. Returns a temporary obstacle; None: the devices are reserved."""
        while True:
            position = self._reservations.of(node).position
            try:
                admission = await self._judged(pod, node)
            except PodsPending as pending:
                return pending
            except NodeRefuses as refusal:
                if self._checks.is_being_freed(node, pod):
                    return refusal
                if refusal.reason not in NOT_KNOWN:  # otherwise keep what another registry reserved for the gang
                    await self._reservations.cancel(pod.uid, {node})
                raise
            made = reserved_for(pod.uid, pod.request, admission.allocations, RESERVED_SECONDS, gang)
            if not made.containers:
                return None
            # `fits` ignores reservations of deleted pods, but the node counts them until they end.
            held = {each.pod_uid for each in self._reservations.held(node)} - {pod.uid}
            if not all(map(self._reported.has, held)):
                return PodsPending(node)
            # The node may have allocated these devices to another pod that it has not reported yet.
            if not self._reserved_for_others(pod.uid, node).isdisjoint(list_devices(made)):
                return PodsPending(node)
            with suppress(BusConflict):
                await self._reservations.write([ReservationChange(node=node, position=position, made=(made,))])
                return None

    async def _judged(self, pod: PodToSchedule, node: NodeName) -> Admission:
        """Returns the node's admission of the pod. Raises NodeRefuses, PodsPending, and the errors of `_confirmed`."""
        if code := self._checks.view.foreign(node):
            raise NodeRefuses(node, code, REASONS[code]().finding)
        admission = await self._confirmed(pod, node)
        refusal = await self._checks.fits(node, pod)
        if refusal == PODS_PENDING:
            raise PodsPending(node)
        if refusal:
            raise NodeRefuses(node, refusal, "the pod does not fit together with the pods that are pending there")
        return admission

    def _reserved_for_others(self, uid: str, node: NodeName) -> frozenset[DeviceID]:
        held = (each for each in self._reservations.held(node) if each.pod_uid != uid)
        return frozenset[DeviceID]().union(*map(list_devices, held))

    async def _confirmed(self, pod: PodToSchedule, node: NodeName) -> Admission:
        """Requests the admission of the pod from the node. Raises NodeRefuses, or Unavailable if there is no answer."""
        others = tuple(each for each in self._reservations.held(node) if each.pod_uid != pod.uid)
        terminated = self._checks.view.terminated(node)
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


def list_devices(reservation: Reservation) -> list[DeviceID]:
    """Returns all devices of a reservation; for shared NICs, their virtual functions."""
    return [
        DeviceID(part)
        for each in reservation.containers
        for ids in (*each.devices.values(), *each.co_allocated.values())
        for device in ids
        for part in each.virtual_functions.get(device, (device,))
    ]
