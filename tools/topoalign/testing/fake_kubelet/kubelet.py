"""
A kubelet for tests, the demo and laptops.

It does what a kubelet does for topology and devices, over the same sockets and protocols: plugins register with it, it
keeps their devices, admits pods under a Topology Manager policy, gives out devices, and lists their holders. A plugin
cannot tell the difference. It does not run containers: an admitted pod holds its resources until it is removed.

Its root directory is the one above the plugin directory, and has the files of a real kubelet, as stale as a kubelet
leaves them: `cpu_manager_state`, `memory_manager_state`, the device checkpoint, and a directory of each pod. Resources
of a pod that is gone stay in these files until their manager drops them (`cpu_manager`, `memory_manager`,
`device_manager`).

The decisions are made by `topoalign.core.admission.admit` in mode `kubelet`, which is tested against the results of the
real managers. The question about preferred devices is answered by the plugin itself.

Source: kubelet v1.36.3, cm/devicemanager and cm/topologymanager.
"""

import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

import anyio
import msgspec
from anyio.abc import TaskGroup, TaskStatus

from topoalign.core.admission.pipeline import AdmissionRun
from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.model.decisions import Admission, Decision, Refusal
from topoalign.core.model.events import TopologyDiscovered
from topoalign.core.model.ids import Namespace, NodeName, PodName, ResourceName
from topoalign.core.model.requests import AdmissionRules, Mode, PodRequest
from topoalign.core.model.topology.device_sets import NO_DEVICES
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Clock
from topoalign.core.state.fold import NodeState
from topoalign.kubelet.grpc.kubelet_client import FAILURES, describe_call_error
from topoalign.kubelet.grpc.plugin_api import KUBELET_SOCKET
from topoalign.kubelet.grpc.transport import GrpcServer
from topoalign.runtime.clock import SystemClock
from topoalign.testing.fake_kubelet.admission import Admitting, Managers, started, unannotated
from topoalign.testing.fake_kubelet.cpu_manager import RECONCILE_SECONDS
from topoalign.testing.fake_kubelet.device_manager import DeviceManager
from topoalign.testing.fake_kubelet.node import node_state
from topoalign.testing.fake_kubelet.plugin_calls import decide, pre_start, unexpected
from topoalign.testing.fake_kubelet.plugins import Plugins
from topoalign.testing.fake_kubelet.pod_resources import PodResources
from topoalign.testing.fake_kubelet.pods import PodKey, Pods, Running

DRAIN_SECONDS = 1.0
FIELD = "directory"
NODE = NodeName("stand-in")


class FakeKubelet:
    """One node's kubelet."""

    def __init__(
        self,
        plugins_dir: Path,
        pod_resources_dir: Path,
        machine: Topology,
        rules: AdmissionRules,
        clock: Clock | None = None,
        chance: Random | None = None,
    ) -> None:
        """
        `machine`: of it the CPUs, the memory and the NUMA distances count; devices come from the plugins that register.
        `rules`: of them all but the mode, which is the kubelet's. `clock` tells for how long a plugin has been away, and
        when the CPU manager looks for pods that are gone; None: the system's. `chance` picks where a kubelet picks at
        random: in which order it asks for the resources of a container, and which of an init container's devices a later
        container uses again; None: in the order of the names, and the first ones.
        """
        for directory in (plugins_dir, pod_resources_dir):
            directory.mkdir(parents=True, exist_ok=True)
        self.root = plugins_dir.parent
        self.plugins_dir = plugins_dir
        self.pod_resources_dir = pod_resources_dir
        self._pods = Pods(self.root)
        self.running: Mapping[PodKey, Running] = self._pods.running
        """The active pods."""
        self._machine = msgspec.structs.replace(machine, gpus=(), nics=(), links=(), others=(), offers=None)
        self._rules = msgspec.structs.replace(rules, mode=Mode.KUBELET)
        self._clock = clock or SystemClock()
        self._chance = chance
        self._settled_at = 0.0
        self._admitting: tuple[Running, ...] = ()
        self._turn = anyio.Lock()
        self._changed = anyio.Event()
        self._revision = 0
        self._tasks: TaskGroup | None = None
        self._plugins: Plugins | None = None
        self._managers: Managers | None = None
        self._servers: list[GrpcServer] = []

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled. Raises StateFault for a checkpoint that cannot be trusted."""
        async with anyio.create_task_group() as self._tasks:
            try:
                await self.start()
                task_status.started()
                await anyio.sleep_forever()
            finally:
                await self.stop()

    async def start(self, settle_seconds: float = 0.0) -> None:
        """
        As a kubelet starts: sockets are swept, the managers' files are read, no device is healthy until it is listed anew.
        For `settle_seconds` it does not know yet which pods are active, and nothing of any pod is dropped.
        """
        assert self._tasks is not None
        sweep(self.plugins_dir)
        sweep(self.pod_resources_dir)
        self._settled_at = self._clock.monotonic() + settle_seconds
        self._plugins = Plugins(self.plugins_dir, self._tasks, self.heard, self._clock)
        devices = DeviceManager(self.plugins_dir, lambda: self.discovered().topology, self._plugins.healthy)
        self._plugins.remember(devices.registered)
        self._managers = started(self.root, devices, self._machine, self._rules)
        self._pods.find(devices)
        resources = PodResources(self.state, self.listed_pods, self._rules, self.listed)
        self._servers = [
            GrpcServer(self._plugins, self.plugins_dir / KUBELET_SOCKET, FIELD),
            GrpcServer(resources, self.pod_resources_dir / KUBELET_SOCKET, FIELD),
        ]
        for server in self._servers:
            await server.listen()
        self._tasks.start_soon(self.reconcile_cpus, self._managers)
        self.changed()

    async def stop(self) -> None:
        """Close all sockets and connections; the files stay. `start` begins again."""
        self._managers = None
        self._admitting = ()
        if self._plugins is not None:
            self._plugins.stop()
        for server in self._servers:
            await server.stop(DRAIN_SECONDS)

    async def restart(self, settle_seconds: float = 0.0) -> None:
        """The kubelet stops and starts again; pods go on running."""
        await self.stop()
        await self.start(settle_seconds)

    async def wipe(self) -> None:
        """Somebody deletes every file in the plugin directory, and the kubelet starts again."""
        await self.stop()
        for path in self.plugins_dir.iterdir():
            path.unlink()
        await self.start()

    @property
    def plugins(self) -> Plugins:
        """The registered plugins. Only between `start` and `stop`."""
        assert self._plugins is not None, "the fake kubelet has not been started"
        return self._plugins

    @property
    def managers(self) -> Managers:
        """Of the kubelet as it was last started."""
        assert self._managers is not None, "the fake kubelet has not been started"
        return self._managers

    def active(self) -> frozenset[str] | None:
        """The UIDs of the active pods, and of one that is being admitted. None: not known before the kubelet has settled."""
        settled = self._clock.monotonic() >= self._settled_at
        return frozenset(each.uid for each in self.listed_pods()) if settled else None

    def listed_pods(self) -> tuple[Running, ...]:
        """What PodResources lists: a pod is active while it is being admitted, with what its containers have by then."""
        return (*self.running.values(), *self._admitting)

    async def reconcile_cpus(self, managers: Managers) -> None:
        """The CPU manager looks by itself, too, for pods that are gone."""
        while True:
            await self._clock.sleep(RECONCILE_SECONDS)
            if self._managers is not managers:
                return
            managers.cpus.drop(self.active())

    async def admit(
        self, pod: PodRequest, uid: str | None = None, *, volumes: bool = True, start: bool = True
    ) -> Decision:
        """
        Admits the pod and starts its containers, or refuses it. Waits while the kubelet is stopped. Raises InvalidField.

        `uid`: None for one made of its name. `volumes`: whether it has any. `start`: whether all its containers are
        started at once; else `start_containers` does it.
        """
        demand = read_pod(unannotated(pod), self._rules)
        async with self._turn:
            await self.until(lambda kubelet: kubelet._managers is not None)
            managers = self.managers
            uid = uid or self._pods.new_uid(pod, managers.pods())
            self._pods.remove((pod.namespace, pod.name))
            self._admitting = (Running(uid=uid, pod=pod, allocations=(), responses={}),)
            try:
                topology = self.shuffled(self.discovered())
                active = self.active()
                state = msgspec.structs.replace(self.state(), topology=topology)
                decision = await decide(Admitting(state, demand, uid, managers, active, self._chance), self.plugins)
            finally:
                self._admitting = ()
            if isinstance(decision, Admission):
                responses = managers.devices.responses.get(uid, {})
                running = Running(uid=uid, pod=pod, allocations=decision.allocations, responses=dict(responses))
                self._pods.admitted(running, volumes)
                if start:
                    try:
                        await self.start_containers(pod.namespace, pod.name)
                    except FAILURES as error:
                        decision = unexpected(describe_call_error(error), decision.explanation)
            if isinstance(decision, Refusal):
                self._pods.remove((pod.namespace, pod.name))
                self._pods.refused(pod, uid, volumes, settled=self.active() is not None)
            self.changed()
            return decision

    async def decide(self, pod: PodRequest) -> Decision:
        """What `admit` would say, with nothing given to anyone. Raises InvalidField."""
        return await decide(AdmissionRun(self.state(), read_pod(unannotated(pod), self._rules)), self.plugins)

    async def start_containers(self, namespace: Namespace, name: PodName) -> None:
        """
        All containers of a pod have started: its plain init containers have ended, and their memory is free. Raises what a
        plugin's PreStartContainer fails with.
        """
        running = self.running[namespace, name]
        managers = self.managers
        self.changed()
        await pre_start(running, self.plugins)
        if self._managers is not managers:
            return  # stopped meanwhile: the next one reads from the files who has memory
        ended = [container.name for container in running.pod.init_containers if not container.sidecar]
        managers.memory.release(running.uid, ended)

    async def end(self, namespace: Namespace, name: PodName) -> None:
        """The pod has ended by itself, and is not deleted."""
        self._pods.end((namespace, name))
        self.changed()

    async def remove(self, namespace: Namespace, name: PodName) -> None:
        """The pod is deleted and gone. What it had stays in the managers' files until they drop it."""
        if self._pods.remove((namespace, name)):
            self.changed()

    def state(self) -> NodeState:
        """The node as the next admission sees it."""
        pods = {each.uid: each for each in self.listed_pods()}
        return node_state(self.discovered(), self.plugins.health(), self.managers, pods, self.active())

    def shuffled(self, discovered: TopologyDiscovered) -> TopologyDiscovered:
        """With the devices in the order in which this admission happens upon them."""
        if self._chance is None:
            return discovered
        hardware = discovered.topology
        others = self._chance.sample(hardware.others, len(hardware.others))
        hardware = msgspec.structs.replace(hardware, others=tuple(others))
        return msgspec.structs.replace(discovered, topology=hardware)

    def discovered(self) -> TopologyDiscovered:
        """The machine with the devices that plugins have listed."""
        hardware = msgspec.structs.replace(self._machine, others=self.plugins.devices())
        return TopologyDiscovered(
            node=NODE, epoch=1, revision=self._revision, boot_id="", source="device plugins", topology=hardware
        )

    def capacity(self, resource: ResourceName) -> int:
        """Healthy and unhealthy devices."""
        self.plugins.forget_stopped()
        return len(self.state().hardware.devices.get(resource, NO_DEVICES))

    def allocatable(self, resource: ResourceName) -> int:
        """Healthy devices, busy or not; none while the kubelet is stopped."""
        if self._managers is None:
            return 0
        self.plugins.forget_stopped()
        return len(self.state().healthy(resource))

    async def until(self, true: Callable[["FakeKubelet"], bool]) -> None:
        """Waits until this holds, looking whenever something has been known a plugin or a pod."""
        while not true(self):
            await self._changed.wait()

    def heard(self) -> None:
        """A plugin has said something, or has gone: that is written down."""
        self._revision += 1
        self.changed()
        if self._managers is not None:
            self._managers.devices.write()

    def listed(self) -> None:
        """PodResources is listed: the device manager drops what pods have that are gone, in memory."""
        self.managers.devices.drop(self.active())

    def changed(self) -> None:
        """Something is not as it was: who waits looks again."""
        self._changed.set()
        self._changed = anyio.Event()


def sweep(directory: Path) -> None:
    """Removes every socket, served or not, as a kubelet does when it starts; nothing else."""
    for path in directory.iterdir():
        if stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()
