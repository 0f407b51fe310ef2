"""
A kubelet for places that have none: tests, the demo, a laptop.

It does what a kubelet does for topology and devices, over the same sockets and protocols: plugins register with it, it keeps
their devices, admits pods under a Topology Manager policy, hands out what it chose, remembers it in the checkpoint, and
tells who holds what. A plugin cannot tell the difference. What it does not do is run containers: an admitted pod holds its
resources until it is removed.

The Topology Manager, the CPU, memory and device manager are `topoalign.core.admission` in mode `kubelet`, which is held to
the results of the real ones; here its questions are answered, the one about preferred devices by the plugin itself.

Source: kubelet v1.36.3, cm/devicemanager and cm/topologymanager.
"""

import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
import msgspec
from anyio.abc import TaskGroup, TaskStatus
from grpclib.exceptions import ProtocolError

from topoalign.allocator.kubelet.api import v1beta1
from topoalign.allocator.kubelet.client import FAILURES, KubeletAway, apart, described
from topoalign.allocator.kubelet.registration import KUBELET_SOCKET
from topoalign.allocator.kubelet.standin_plugins import Plugins
from topoalign.allocator.kubelet.standin_pods import PodKey, Running, remembered, restored
from topoalign.allocator.kubelet.standin_resources import PodResources
from topoalign.allocator.kubelet.transport import Server
from topoalign.core.admission import admission
from topoalign.core.checks import checked
from topoalign.core.decisions import Admission, Decision, Explanation, PreferenceQuestion, Refusal
from topoalign.core.errors import NoFit
from topoalign.core.events import DeviceHealthChanged, TopologyDiscovered
from topoalign.core.hints.model import HintQuestion
from topoalign.core.hints.providers import answer
from topoalign.core.ids import ContainerName, DeviceID, Namespace, NodeName, PodName, ResourceName
from topoalign.core.ports import Clock
from topoalign.core.requests import AdmissionRules, Mode, PodRequest
from topoalign.core.state import NodeState
from topoalign.core.topology.model import Topology
from topoalign.kubelet import device_checkpoint
from topoalign.kubelet.device_checkpoint import CheckpointData
from topoalign.runtime.clock import SystemClock

PRE_START_SECONDS = 30.0
DRAIN_SECONDS = 1.0
FIELD = "directory"
NODE = NodeName("stand-in")


class KubeletStandIn:
    """One node's kubelet."""

    def __init__(
        self,
        plugins_dir: Path,
        pod_resources_dir: Path,
        machine: Topology,
        rules: AdmissionRules,
        clock: Clock | None = None,
    ) -> None:
        """
        `machine`: of it the CPUs, the memory and the NUMA distances count; devices come from the plugins that register.
        `rules`: of them all but the mode, which is the kubelet's. `clock` tells for how long a plugin has been away; None:
        the system's.
        """
        self.plugins_dir = plugins_dir
        self.pod_resources_dir = pod_resources_dir
        self.running: dict[PodKey, Running] = {}
        self._machine = msgspec.structs.replace(machine, gpus=(), nics=(), links=(), others=(), offers=None)
        self._rules = msgspec.structs.replace(rules, mode=Mode.KUBELET)
        self._clock = clock or SystemClock()
        self._turn = anyio.Lock()
        self._changed = anyio.Event()
        self._revision = 0
        self._tasks: TaskGroup | None = None
        self._plugins: Plugins | None = None
        self._servers: list[Server] = []

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled. Raises StateFault for a checkpoint that cannot be trusted."""
        async with anyio.create_task_group() as self._tasks:
            try:
                await self.start()
                task_status.started()
                await anyio.sleep_forever()
            finally:
                await self.stop()

    async def start(self) -> None:
        """As a kubelet starts: sockets are swept, the checkpoint is read, no device is healthy until it is listed anew."""
        assert self._tasks is not None
        sweep(self.plugins_dir)
        sweep(self.pod_resources_dir)
        remembered = device_checkpoint.load(self.plugins_dir) or CheckpointData()
        self._plugins = Plugins(self.plugins_dir, self._tasks, self.changed, self._clock)
        self._plugins.remember(remembered.registered_devices)
        for key, running in restored(remembered.pod_device_entries or ()).items():
            self.running.setdefault(key, running)
        resources = PodResources(self.state, self.running.values, self._rules)
        self._servers = [
            Server(self._plugins, self.plugins_dir / KUBELET_SOCKET, FIELD),
            Server(resources, self.pod_resources_dir / KUBELET_SOCKET, FIELD),
        ]
        for server in self._servers:
            await server.listen()

    async def stop(self) -> None:
        if self._plugins is not None:
            self._plugins.stop()
        for server in self._servers:
            await server.stop(DRAIN_SECONDS)

    async def restart(self) -> None:
        """The kubelet stops and starts again; pods go on running."""
        await self.stop()
        await self.start()

    async def wipe(self) -> None:
        """Somebody deletes every file in the plugin directory, and the kubelet starts again."""
        await self.stop()
        for path in self.plugins_dir.iterdir():
            path.unlink()
        await self.start()

    @property
    def plugins(self) -> Plugins:
        assert self._plugins is not None, "the stand-in has not been started"
        return self._plugins

    async def admit(self, pod: PodRequest) -> Decision:
        """Admits the pod and starts its containers, or refuses it; a refused pod leaves nothing. Raises InvalidField."""
        checked(pod)
        async with self._turn:
            decision = await self.decide(pod)
            if isinstance(decision, Admission):
                try:
                    await self.hand_out(pod, decision)
                except FAILURES as error:
                    self.running.pop((pod.namespace, pod.name), None)
                    self.changed()
                    decision = unexpected(described(error), decision.explanation)
            return decision

    async def decide(self, pod: PodRequest) -> Decision:
        """Runs the managers, asking the plugin what it prefers where they want to know."""
        state, topology = self.state(), self.discovered()
        for container in (*pod.init_containers, *pod.containers):
            for resource in container.limits:
                if self.plugins.forgotten(resource):
                    why = f"no healthy devices present; cannot allocate unhealthy devices {resource}"
                    return unexpected(why, Explanation())
        steps = admission(state, pod, self._rules)
        proceed = partial(steps.send, None)
        while True:
            try:
                question = proceed()
            except StopIteration as end:
                decided: Decision = end.value
                return decided
            try:
                if isinstance(question, HintQuestion):
                    proceed = partial(steps.send, answer(question, topology))
                else:
                    proceed = partial(steps.send, await self.preferred(question))
            except NoFit as misfit:
                proceed = partial(steps.throw, misfit)
            except FAILURES as error:
                proceed = partial(steps.throw, KubeletAway(described(error)))

    async def preferred(self, question: PreferenceQuestion) -> tuple[DeviceID, ...]:
        endpoint = self.plugins.endpoints[question.resource]
        if not endpoint.options.get_preferred_allocation_available:
            return ()
        request = v1beta1.ContainerPreferredAllocationRequest(
            available_deviceIDs=list(question.available),
            must_include_deviceIDs=list(question.must_include),
            allocation_size=question.size,
        )
        question_of_all = v1beta1.PreferredAllocationRequest(container_requests=[request])
        response = await apart(partial(endpoint.client().get_preferred_allocation, question_of_all))
        return tuple(DeviceID(device) for answer in response.container_responses[:1] for device in answer.device_i_ds)

    async def hand_out(self, pod: PodRequest, decision: Admission) -> None:
        """
        One Allocate per container and resource; then the containers start. What a container got is written down before the
        next one's calls, and the pod is shown when it has it all. Raises what the calls fail with.
        """
        running = Running(pod=pod, allocations=decision.allocations)
        before: ContainerName | None = None
        for container, resource, devices in running.parts():
            if container != before:
                self.write_down(running)
            before = container
            request = v1beta1.ContainerAllocateRequest(devices_ids=list(devices))
            call = self.plugins.endpoints[resource].client().allocate
            response = await apart(partial(call, v1beta1.AllocateRequest(container_requests=[request])))
            if not response.container_responses:
                raise ProtocolError(f"the plugin of {resource} answered for no container")
            running.responses[container, resource] = response.container_responses[0]
        self.running[pod.namespace, pod.name] = running
        self.changed()
        for _, resource, devices in running.parts():
            endpoint = self.plugins.endpoints[resource]
            if endpoint.options.pre_start_required:
                start = v1beta1.PreStartContainerRequest(devices_ids=list(devices))
                await apart(partial(endpoint.client().pre_start_container, start, timeout=PRE_START_SECONDS))

    async def remove(self, namespace: Namespace, name: PodName) -> None:
        """The pod has gone."""
        if self.running.pop((namespace, name), None) is not None:
            self.changed()

    def state(self) -> NodeState:
        """The node as the managers see it now."""
        topology = self.discovered()
        health = DeviceHealthChanged(node=NODE, epoch=1, revision=topology.revision, devices=self.plugins.health())
        state = NodeState(node=NODE, topology=topology, health=health)
        for running in self.running.values():
            for allocation in running.allocations:
                state = state.holding(allocation)
        return state

    def discovered(self) -> TopologyDiscovered:
        """The machine with the devices that plugins have listed."""
        hardware = msgspec.structs.replace(self._machine, others=self.plugins.devices())
        return TopologyDiscovered(
            node=NODE, epoch=1, revision=self._revision, boot_id="", source="device plugins", topology=hardware
        )

    def capacity(self, resource: ResourceName) -> int:
        """Healthy and unhealthy devices."""
        self.plugins.forget_stopped()
        return len(self.state().hardware.devices.get(resource, {}))

    def allocatable(self, resource: ResourceName) -> int:
        """Healthy devices, busy or not."""
        self.plugins.forget_stopped()
        return len(self.state().healthy(resource))

    async def until(self, true: Callable[["KubeletStandIn"], bool]) -> None:
        """Waits until this holds, looking whenever something has been heard of a plugin or a pod."""
        while not true(self):
            await self._changed.wait()

    def changed(self) -> None:
        """Something is not as it was: it is written down, and who waits looks again."""
        self._revision += 1
        self._changed.set()
        self._changed = anyio.Event()
        self.write_down()

    def write_down(self, *admitting: Running) -> None:
        """The pods that run, and of those that are being admitted what their containers have so far."""
        device_checkpoint.store(self.plugins_dir, self.remembered(*admitting))

    def remembered(self, *admitting: Running) -> CheckpointData:
        state = self.state()
        entries = [entry for pod in (*self.running.values(), *admitting) for entry in remembered(pod, state)]
        return CheckpointData(pod_device_entries=entries or None, registered_devices=self.plugins.healthy())


def unexpected(why: str, explanation: Explanation) -> Refusal:
    """What the kubelet says of every failure that has no word of its own."""
    return Refusal(
        reason="UnexpectedAdmissionError",
        code="AllocateFailed",
        finding=f"Allocate failed due to {why}, which is unexpected",
        remedy="see the log of the device plugin that serves the resource",
        container=None,
        provider="device",
        explanation=explanation,
    )


def sweep(directory: Path) -> None:
    """Removes every socket, served or not, as a kubelet does when it starts; nothing else."""
    for path in directory.iterdir():
        if stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()
