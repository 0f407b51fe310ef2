"""
One node of a benchmark or a simulation: its allocator, which confirms, and its kubelet, which admits.

The kubelet aligns a pod as it would without reservations. Of the GPUs on the NUMA nodes of that alignment the allocator
prefers those that are reserved for the pod, and then those that are reserved for one with as many GPUs.

For a kubelet, what a terminated pod held is free at once. The node's facts show that later, and the kubelet admits a pod
some time after the bind; by how much later is chance (`Delays`). A real kubelet 1.36.2 took 1 to 5 s to admit a pod, and the
facts of an agent that polls it every five seconds lagged by 5.6 to 11.3 s.
"""

from collections.abc import Callable, Iterable
from random import Random

import anyio
import msgspec

from topoalign.core import wire
from topoalign.core.admission.prediction import predict
from topoalign.core.model.decisions import Decision, Refusal
from topoalign.core.model.events import Allocation, Event, ReservationsChanged
from topoalign.core.model.ids import GPU, DeviceID, NodeName
from topoalign.core.model.requests import ConfirmRequest
from topoalign.core.ports import Bus, Clock
from topoalign.core.state.fold import NodeState, replay
from topoalign.core.state.node_reservations import NodeReservations
from topoalign.core.state.terminated_pods import without_pods
from topoalign.kubelet.files.manifest import PodManifest, request_from_pod
from topoalign.tools.bench.filter.cluster import BusyNode


class Bound(msgspec.Struct, frozen=True, tag=True):
    """A pod was bound to a node."""

    node: NodeName
    uid: str
    pod: PodManifest


class Admitted(msgspec.Struct, frozen=True):
    """What became of a pod at its node."""

    uid: str
    code: str
    """Of the refusal; empty: it runs."""


class Delays(msgspec.Struct, frozen=True, kw_only=True):
    """Between which two numbers of seconds something is late."""

    admits: tuple[float, float] = (0.0, 0.0)
    """The kubelet admits a pod so long after the bind."""
    shows: tuple[float, float] = (0.0, 0.0)
    """The node's facts show what a terminated pod held as free so long after its end."""


AT_ONCE = Delays()
AS_RECORDED = Delays(admits=(0.2, 5.0), shows=(1.0, 12.0))
"""Kubelets and an agent as a real kube-scheduler was recorded in front of them."""


class Node:
    """One node, by the events of a `BusyNode`."""

    def __init__(self, create: Callable[[], BusyNode], clock: Clock, delays: Delays, chance: Random) -> None:
        """`create`: the node as it is at first, whenever it is called."""
        self.busy = create()
        self._create = create
        self._clock = clock
        self._delays = delays
        self._chance = chance
        self._turn = anyio.Lock()
        self._facts: NodeState | None = None
        """All that the node has published. None: not needed yet; few nodes are asked, so the others keep no topology."""
        self._reservations = NodeReservations()
        self._terminated: set[str] = set()
        """UIDs of pods that have ended at the kubelet, and are in the facts."""

    @property
    def facts(self) -> NodeState:
        """All that the node has published."""
        if self._facts is None:
            first = self._create()
            self._facts = replay(first.node, first.said())
        return self._facts

    @property
    def kubelet(self) -> NodeState:
        """What its kubelet has."""
        return without_pods(self.facts, self._terminated, ()) if self._terminated else self.facts

    def confirm(self, request: ConfirmRequest) -> Decision:
        """What the node's allocator confirms; it asks its kubelet where terminated pods are named."""
        state = self.kubelet if request.terminated else self.facts
        return predict(state, request.pod, self._clock.wall(), reserved=request.reserved)

    async def admit(self, bus: Bus, bound: Bound) -> Admitted:
        """What its kubelet decides, some time after the bind, one pod after another."""
        await self._clock.sleep(self._chance.uniform(*self._delays.admits))
        async with self._turn:
            decision = predict(self.kubelet, request_from_pod(bound.pod), self._clock.wall())
            if isinstance(decision, Refusal):
                return Admitted(bound.uid, decision.code)
            allocations = [self._with_preferred(bound.uid, each) for each in decision.allocations]
            given = {device for each in allocations for device in each.device_ids}
            for uid in sorted(self._terminated & self._holders_of(given)):
                await self._show_end(bus, uid)
            for allocation in allocations:
                await self._publish(bus, self.busy.admitted(bound.uid, allocation))
        return Admitted(bound.uid, "")

    def reserve(self, event: ReservationsChanged, position: int) -> None:
        """These are the reservations of the node now."""
        now = self._clock.monotonic()
        self._reservations = self._reservations.apply(event, position, now).observe(self.facts)

    def _with_preferred(self, uid: str, given: Allocation) -> Allocation:
        """What a container of the pod gets: GPUs that are reserved, where the kubelet offers them."""
        count = len(given.devices.get(GPU, ()))
        held = self._reservations.held(self._clock.monotonic())
        reserved = [
            each.devices.get(GPU, ())
            for pod in sorted(held, key=lambda each: each.pod_uid != uid)
            for each in pod.containers
        ]
        offered = self._offered(given)
        for ids in reserved:
            if count and len(ids) == count and offered.issuperset(ids):
                return msgspec.structs.replace(given, devices={**given.devices, GPU: ids})
        return given

    def _offered(self, given: Allocation) -> set[DeviceID]:
        """The free GPUs on the NUMA nodes to which a container is aligned."""
        state = self.kubelet
        hardware = state.hardware
        free = [gpu for gpu in hardware.gpus if not state.ownership.is_held(gpu.id)]
        if given.affinity is None:
            return {gpu.id for gpu in free}
        nodes = set(given.affinity)
        return {gpu.id for gpu in free if nodes.issuperset(hardware.listed_nodes(gpu.numa_affinity) or ())}

    async def terminate(self, bus: Bus, uid: str) -> None:
        """The pod has ended: its kubelet has what it held free now, and the facts show it later."""
        self._terminated.add(uid)
        await self._clock.sleep(self._chance.uniform(*self._delays.shows))
        async with self._turn:
            if uid in self._terminated:
                await self._show_end(bus, uid)

    async def _show_end(self, bus: Bus, uid: str) -> None:
        await self._publish(bus, self.busy.end_pod(uid))
        self._terminated.discard(uid)

    def _holders_of(self, devices: Iterable[str]) -> set[str]:
        """UIDs of the pods that have any of these devices by the facts."""
        wanted = set(devices)
        return {each.pod_uid for each in self.facts.allocations.values() if wanted.intersection(each.device_ids)}

    async def _publish(self, bus: Bus, events: Iterable[Event]) -> None:
        for event in events:
            self._facts = self.facts.apply(event)
            self._reservations = self._reservations.observe(self._facts)
            await bus.publish(wire.encode_event(event, self._clock.wall()))
