"""
Two registries that bind pods for one scheduler, in virtual time, while what is around them fails.

Product code are the reservations, the binds and the nodes' admissions and allocators. Simulated are the bus (`bus`), an API
server whose answers are late or lost, before or after the deed; registries that are killed and begin anew; a view of the
nodes that lags; kubelets (`registry_nodes`); and a scheduler that asks any of the registries, gives up after five seconds
and tries again. Pods end, or are deleted before they begin. Some ask by annotations for NICs beside their GPUs, or for units
that are spread over several.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from random import Random
from typing import NamedTuple

import anyio
import msgspec
from binding_support import ScriptedChecks, Site
from simulation.bus import Broker, FaultyBus, happens
from simulation.loop import Process, SimulatedLoop
from simulation.registry_nodes import Node, co_allocated_of, devices_of
from simulation.registry_shares import ShareNode, asked_of, check_enough, compat_of, division_of, hardware_of
from simulation.world import SimulatedClock, Violation

from topoalign.core import wire
from topoalign.core.admission.admit import admit
from topoalign.core.admission.gang_plan import GangPlacement, pod_class_key
from topoalign.core.admission.realignment import PendingPod
from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.deviceshare.koordinator_names import JOINT_ANNOTATION
from topoalign.core.model.decisions import Admission
from topoalign.core.model.errors import TopoalignError
from topoalign.core.model.events import ReservationsChanged
from topoalign.core.model.ids import NodeName, ResourceName
from topoalign.core.model.requests import GANG, GANG_SIZE, AdmissionRules, Mode, PodRequest, Policy
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Stream
from topoalign.core.state.fold import NodeState
from topoalign.core.state.node_reservations import with_reserved
from topoalign.registry.ports import ApiUnavailable, SeenPod
from topoalign.registry.scheduling.binding.binding import PodBinder
from topoalign.registry.scheduling.binding.cluster_reservations import ClusterReservations
from topoalign.registry.scheduling.binding.gang_binding import Gangs
from topoalign.registry.scheduling.cluster_state.reported_pods import ReportedPods
from topoalign.registry.scheduling.filter.admission_order import are_ambiguous
from topoalign.registry.scheduling.scheduling_api import PODS_PENDING, PodToSchedule
from topoalign.testing.memory_kubernetes import MemoryKubernetes

NODES = ("node-1", "node-2", "node-3")
PODS, CALM_SECONDS = 24, 700.0
"""Pods of a run; and seconds after the faults, longer than any reservation lasts."""
LAG_SECONDS = (0.1, 0.5, 2.0, 8.0)
"""Between two looks of a registry at the nodes: some take longer than the next bind."""
GANGS = 0.15
"""How likely a pod with a part of GPUs is the first of a gang."""
JOINT = 0.3
"""How likely a pod asks for NICs beside its GPUs."""
SAME_PCIE = {JOINT_ANNOTATION: '{"deviceTypes": ["gpu", "rdma"], "requiredScope": "SamePCIe"}'}
RULES = AdmissionRules(mode=Mode.KUBELET)
UNALIGNED = AdmissionRules(mode=Mode.KUBELET, policy=Policy.NONE)
"""Of nodes whose GPUs are in slots or in units."""
BACK_OFF_SECONDS = (3.0, 8.0)
"""Until a pod is tried again whose gang is not complete."""
GIVES_UP_SECONDS = 5.0
"""After which the scheduler waits for a bind no longer."""


class FaultyApi(MemoryKubernetes):
    """The API server as one registry reaches it."""

    def __init__(self, world: "Cluster", process: Process) -> None:
        super().__init__(world.site.cluster)
        self._world = world
        self._process = process

    async def bind(self, namespace: str, name: str, uid: str, node: NodeName) -> None:
        await self._reach()
        await super().bind(namespace, name, uid, node)
        await self._reach()

    async def pod(self, namespace: str, name: str) -> SeenPod | None:
        await self._reach()
        seen = await super().pod(namespace, name)
        await self._reach()
        return seen

    async def _reach(self) -> None:
        """The way there, or back."""
        if happens(self._world.faults, self._world.chance):
            await anyio.sleep(self._world.chance.choice((0.01, 0.4, 6.0)))
        if self._process.dead:
            await anyio.sleep_forever()
        if happens(self._world.faults, self._world.chance):
            raise ApiUnavailable("no answer")


class Replica:
    """One registry, as far as it binds. `start` begins anew."""

    def __init__(self, world: "Cluster", name: str) -> None:
        self._world = world
        self._name = name
        self._lives = 0
        self.process = Process(name)
        self.start()

    def start(self) -> None:
        world, self._lives = self._world, self._lives + 1
        process = self.process = Process(self._name)
        bus = FaultyBus(world.broker, world.chance, lambda: process.dead)
        self.seen: dict[NodeName, NodeState] = {name: NodeState(node=name) for name in world.site.ledgers}
        self.reservations = ClusterReservations(bus, world.clock, f"{self._name}-{self._lives}", self.seen.__getitem__)
        api = FaultyApi(world, process)
        self._shown = ReportedPods()
        self._gangs = Gangs(self.reservations, world.clock, self._hardware, self._candidate)
        plan = partial(self._gangs.plan, self._passing)
        self.binder = PodBinder(bus, world.clock, api, self.reservations, ScriptedChecks(self._fits), plan, self._shown)
        world.loop.start(process, self.reservations.run)
        world.loop.create_in(process, self._look)

    async def _look(self) -> None:
        """What nodes say, which pods there are and which are gone is seen some time later."""
        while True:
            await anyio.sleep(self._world.chance.choice(LAG_SECONDS))
            for name, ledger in self._world.site.ledgers.items():
                self.seen[name] = ledger.state
                self.reservations.observe(name)
            for pod in [*self._world.site.cluster.pods]:
                uid, node = pod["metadata"]["uid"], pod["spec"].get("nodeName")
                if node:
                    self._shown.bind(uid, NodeName(node))
                else:
                    self._shown.wait(await self._world.seen(pod["metadata"]["name"]))
                if GANG in pod["metadata"]["annotations"]:
                    self._gangs.see(await self._world.seen(pod["metadata"]["name"]))
            for uid in [*self._world.gone]:
                self._shown.end(uid)
                self._gangs.lose(uid)
                if self.reservations.of_pod(uid):
                    await self.reservations.cancel(uid)

    async def _passing(self, pod: PodToSchedule, chosen: NodeName | None = None) -> Sequence[NodeName]:
        return [name for name in self.admitting(pod) if chosen in (None, name)]

    def _hardware(self, name: NodeName) -> Topology:
        return self.seen[name].hardware

    def _candidate(self, name: NodeName) -> GangPlacement:
        state = self.seen[name]
        return GangPlacement(with_reserved(state, state, self.reservations.held(name)), self._world.rules)

    def admitting(self, pod: PodToSchedule) -> list[NodeName]:
        """Which nodes would admit the pod, as this registry sees them; what is reserved for itself does not count."""
        found = []
        for name, state in self.seen.items():
            others = [each for each in self.reservations.held(name) if each.pod_uid != pod.uid]
            beside, rules = with_reserved(state, state, others), self._world.rules
            if state.topology and isinstance(admit(beside, pod.request, rules), Admission):
                found.append(name)
        return found

    async def _fits(self, node: NodeName, pod: PodToSchedule) -> str:
        """The rule of `Scheduler.fits_in_every_order` for pods that a kubelet may mistake for one another."""
        own = PendingPod(pod_class_key(pod.request), read_pod(pod.request, self._world.rules), must_fit=True)
        for each in self.reservations.held(node):
            if each.pod_uid == pod.uid or each.planned or not self._shown.has(each.pod_uid):
                continue
            request = self._world.requests[each.pod_uid]
            other = PendingPod(pod_class_key(request), read_pod(request, self._world.rules), must_fit=True)
            if are_ambiguous(self.seen[node].hardware, own, other):
                return PODS_PENDING
        return ""

    async def bind(self, name: str, uid: str, node: NodeName) -> str | None:
        """How the bind ended: empty for ok, or the code of the error. None: no answer came in time."""
        answered, answers = anyio.Event(), list[str]()

        async def asked() -> None:
            try:
                await self.binder.bind("ml", name, uid, node)
                answers.append("")
            except TopoalignError as error:
                answers.append(error.code)
            answered.set()

        self._world.loop.create_in(self.process, asked)
        with anyio.move_on_after(GIVES_UP_SECONDS):
            await answered.wait()
            return answers[0]
        return None


class Asked(NamedTuple):
    """What a pod asks for."""

    gpus: int = 1
    limits: Mapping[ResourceName, int] = {}
    """Instead of GPUs."""
    annotations: Mapping[str, str] = {}


class Cluster:
    """All of a run."""

    def __init__(self, loop: SimulatedLoop, seed: int) -> None:
        self.loop = loop
        self.chance = Random(f"registries-{seed}")
        self.clock = SimulatedClock(loop)
        self.broker = Broker()
        self.faults = self.chance.choice((0.0, 0.1, 0.3))
        self.division = division_of(seed)
        """How the GPUs of all nodes are offered."""
        rules = RULES if self.division == "whole" else UNALIGNED
        self.rules = msgspec.structs.replace(rules, compat=compat_of(seed, self.division))
        self.site = Site(NODES, self.clock, hardware_of(self.division, seed))
        self.requests: dict[str, PodRequest] = {}
        """By UID, of all pods that there ever were."""
        self.uids: dict[str, str] = {}
        """By name; none is used twice."""
        self.gone: list[str] = []
        """UIDs of pods that were deleted, in their order: that of a set is not the seed's."""
        self.done: set[str] = set()
        """UIDs of pods that were admitted or refused, or are gone."""
        self.answers: list[str | None] = []
        self._members: list[Asked] = []
        """Of a gang, that are to come next."""
        kind = Node if self.division == "whole" else ShareNode
        self.nodes = {name: kind(self, name) for name in self.site.ledgers}
        self.replicas = [Replica(self, name) for name in ("r1", "r2")]

    async def run(self) -> None:
        """Raises Violation."""
        weather = self.broker.weather
        weather.late = self.faults
        weather.timeout = self.faults / 2
        weather.lose = self.faults / 2
        weather.repeat = self.faults
        async with self.site.serving(self.broker.bus, self.rules), anyio.create_task_group() as tasks:
            tasks.start_soon(self._check)
            for node in self.nodes.values():
                tasks.start_soon(node.run)
            async with anyio.create_task_group() as pods:
                for number in range(PODS):
                    pods.start_soon(self._live, f"p{number}", self._asked())
                    await anyio.sleep(self.chance.choice((0.0, 0.2, 3.0)))
                    if happens(self.faults / 3, self.chance):
                        self._restart(self.chance.choice(self.replicas))
            self.faults = 0.0
            weather.clear()
            await anyio.sleep(CALM_SECONDS)
            tasks.cancel_scope.cancel()
        await self._settle()

    async def seen(self, name: str) -> SeenPod:
        """A pod as a watch shows it."""
        pod = await MemoryKubernetes(self.site.cluster).pod("ml", name)
        assert pod is not None
        return pod

    def _restart(self, replica: Replica) -> None:
        self.loop.kill(replica.process)
        replica.start()

    def _asked(self) -> Asked:
        """What the next pod asks for: the same as the one before it, as long as members of its gang are missing."""
        if self._members:
            return self._members.pop()
        if self.division == "whole":
            return Asked(self.chance.randint(1, 4))
        limits, spread = asked_of(self.division, self.chance)
        if not happens(GANGS, self.chance):
            return Asked(limits=limits, annotations=spread)
        size = self.chance.choice((2, 3))
        gang = {GANG: f"g{len(self.uids)}", GANG_SIZE: str(size), **spread}
        self._members = [Asked(limits=limits, annotations=gang)] * (size - 1)
        return Asked(limits=limits, annotations=gang)

    async def _live(self, name: str, asked: Asked) -> None:
        """A pod is created, scheduled, runs for a while, and ends; or it is deleted at any time."""
        joint = SAME_PCIE if self.division == "whole" and happens(JOINT, self.chance) else {}
        annotations = {**asked.annotations, **joint}
        uid = self.uids[name] = self.site.add(name, asked.gpus, annotations, asked.limits)
        pod = (await self.seen(name)).to_schedule()
        self.requests[uid] = pod.request
        with anyio.move_on_after(self.chance.choice((2.0, 60.0, 400.0))):
            await self._schedule(name, pod)
            await anyio.sleep(self.chance.choice((1.0, 30.0)))
        self.site.cluster.delete_pod("ml", name, grace=0)
        self.gone.append(uid)
        self.done.add(uid)
        for ledger in self.site.ledgers.values():
            held = [each.id for each in ledger.state.allocations.values() if each.pod_uid == uid]
            if held:
                ledger.release(held, "gone")

    async def _schedule(self, name: str, pod: PodToSchedule) -> None:
        while not self.site.node_of(name):
            replica = self.chance.choice(self.replicas)
            nodes = replica.admitting(pod)
            if nodes:
                node = self.chance.choice(nodes)
                answer = await replica.bind(name, pod.uid, node)
                self.answers.append(answer)
                if answer == "GangWaits":
                    await anyio.sleep(self.chance.choice(BACK_OFF_SECONDS))
                if answer == "" and self.site.node_of(name) != node:
                    raise Violation(
                        "bind", f"{name} is said to be bound to {node} and is on {self.site.node_of(name)!r}"
                    )
            await anyio.sleep(self.chance.choice((1.2, 1.9)))

    async def _check(self) -> None:
        """I14: no device is reserved for two pods."""
        async with self.broker.bus.follow(Stream.RESERVATIONS, wire.reservation_subject()) as messages:
            async for received in messages:
                said = wire.decode_event(received.message)
                assert isinstance(said, ReservationsChanged)
                devices = [each for pod in said.reservations for each in (*devices_of(pod), *co_allocated_of(pod))]
                if len(devices) != len({*devices}):
                    raise Violation("I14", f"a device of {said.node} is reserved twice: {said}")
                if self.division != "whole":
                    live = self.site.ledgers[said.node].state.allocations.values()
                    check_enough(live, said.reservations, self.done)

    async def _settle(self) -> None:
        """What is reserved in the end, after all pods have ended: nothing; and no kubelet has refused a pod."""
        refused = [pod for node in self.nodes.values() for pod in node.refused]
        if refused:
            raise Violation("refused", f"kubelets refused {', '.join(refused)}")
        for name, node in self.nodes.items():
            left = await node.reserved()
            if left:
                raise Violation("left", f"{name} still has {left}")
