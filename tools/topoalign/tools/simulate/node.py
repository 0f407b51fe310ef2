"""A simulated node: a described machine, the product's services, and a kubelet that runs what is bound to it."""

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import NamedTuple

import anyio
import msgspec
from anyio.abc import TaskGroup, TaskStatus

from topoalign.core.deviceshare.demand import is_joint
from topoalign.core.deviceshare.node_inventory import locate_devices
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.decisions import Refusal
from topoalign.core.model.events import HealthState
from topoalign.core.model.ids import DeviceID, Namespace, NodeName, PodName
from topoalign.core.model.requests import AdmissionRules, PodRequest
from topoalign.kubelet.files import kubelet_configuration as configuration
from topoalign.kubelet.files import manifest
from topoalign.machines import load_machine
from topoalign.runtime.installed import load_services
from topoalign.runtime.runner import RunningServices, run_services
from topoalign.runtime.settings import PREFIX
from topoalign.testing.fake_api_server.cluster import FakeCluster
from topoalign.testing.fake_api_server.objects import ApiError, Object
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet
from topoalign.tools.simulate.cases import Taken
from topoalign.tools.simulate.reserved import Given

GPUS_VARIABLE = "NVIDIA_VISIBLE_DEVICES"
NICS_VARIABLE = "TOPOALIGN_NICS"
SERVICES = ("discovery", "hinting", "allocator")
LATE_SECONDS = 0.5
"""A kubelet that takes pods in a random order takes the next one so much later at most."""
MOST_HAPPENED = 100
"""Of a node, that are kept: what happens to some dozens of pods."""
Key = tuple[str, str]


class Refused(NamedTuple):
    """A pod that a kubelet refused."""

    taken: Taken
    reason: str
    container: str | None
    message: str


class SimulatedNode:
    """One node. What its containers would do is to last for a while."""

    def __init__(
        self,
        name: NodeName,
        machine: str,
        policy: str,
        folder: Path,
        nats: str,
        cluster: FakeCluster,
        chance: Random,
        *,
        shuffled: bool,
        turns: anyio.Semaphore | None = None,
    ) -> None:
        """
        `folder`: its own, and short: sockets are made in it. `chance`: for how long pods last. `shuffled`: its kubelet
        takes pods late and in a random order. `turns`: held while its kubelet admits a pod.
        """
        self.name = name
        self._cluster = cluster
        self._folder = folder
        self._chance = chance
        self._shuffled = shuffled
        self._turns = turns or anyio.Semaphore(1)
        self.refusals: list[Refused] = []
        """Pods that its kubelet refused."""
        self.foreign_binds: list[float] = []
        """When another scheduler bound pods to it, in seconds of the loop."""
        self.admitted: list[str] = []
        """Pods that its kubelet admitted."""
        self.given: list[Given] = []
        """What each of these got."""
        self.freed: list[float] = []
        """When pods gave back what they had, in seconds of the loop."""
        self.doubled: list[tuple[str, DeviceID]] = []
        """Pod and device, where it was given a device that a running pod had."""
        self.apart: list[tuple[str, DeviceID]] = []
        """Pod and GPU, where no NIC of the pod is beside a GPU of it and its annotations ask for one."""
        self._happened: deque[tuple[float, str]] = deque(maxlen=MOST_HAPPENED)
        """What happened last, for cases: seconds of the loop, and words."""
        self._held: dict[DeviceID, str] = {}
        self._bound: list[Object] = []
        """Pods that its kubelet has not taken yet, in the order in which they were bound."""
        self._bound_more = anyio.Event()
        folder.mkdir(parents=True, exist_ok=True)
        (config := folder / "config.yaml").write_bytes(msgspec.json.encode(kubelet_configuration(policy)))
        rules: AdmissionRules = configuration.load_configuration(config)
        self._topology = load_machine(machine).topology
        self.kubelet = FakeKubelet(folder / "device-plugins", folder / "pod-resources", self._topology, rules)
        settings = {"NODE": name, "NATS_URL": nats, "MACHINE": machine, "STATE_DIR": str(folder / "state")}
        settings |= {"KUBELET_DIR": str(self.kubelet.plugins_dir), "SETTLE_SECONDS": "0", "LOG_LEVEL": "error"}
        settings |= {"RECONCILE_SECONDS": "1", "GONE_SECONDS": "1"}  # pods last for seconds: ends are known sooner
        self._environment = {PREFIX + each: value for each, value in settings.items()}

    async def run(self, seconds: tuple[float, float], *, task_status: TaskStatus[None]) -> None:
        """Runs until cancelled; started once its devices are allocatable. Pods last between two numbers of `seconds`."""
        async with anyio.create_task_group() as tasks:
            await tasks.start(self.kubelet.run)
            serving = anyio.Event()

            def ready(_: RunningServices) -> None:
                serving.set()

            async def serve() -> None:
                await run_services(load_services(SERVICES), self._environment, ready=ready, signals=False)

            tasks.start_soon(serve)
            await serving.wait()
            await self.kubelet.until(lambda kubelet: all(self._allocatable().values()))
            self._register()
            tasks.start_soon(self._follow)
            tasks.start_soon(self._admit_all, tasks, seconds)
            task_status.started()

    def _allocatable(self) -> Mapping[str, int]:
        return {
            str(name): self.kubelet.allocatable(name) for name, devices in self._topology.devices.items() if devices
        }

    def _register(self) -> None:
        self._cluster.add_node(self.name)
        allocatable = {name: str(amount) for name, amount in self._allocatable().items()}
        self._cluster.nodes.merge(("", self.name), {"status": {"allocatable": allocatable}})

    async def _follow(self) -> None:
        """Notes what is bound to this node."""
        seen = self._cluster.pods.newest
        pods = self._cluster.pods
        noted: set[str] = set()
        while True:
            for change in pods.since(seen):
                seen = change.version
                pod = change.object
                uid = pod["metadata"]["uid"]
                if change.type != "DELETED" and pod["spec"].get("nodeName") == self.name and uid not in noted:
                    noted.add(uid)
                    self._note(f"bound {pod['metadata']['name']}")
                    self._bound.append(pod)
                    self._bound_more.set()
            await pods.wait()

    async def _admit_all(self, tasks: TaskGroup, seconds: tuple[float, float]) -> None:
        """Admits what is bound to this node, one pod after another, as a kubelet does."""
        while True:
            if not self._bound:
                self._bound_more = anyio.Event()
                await self._bound_more.wait()
            if self._shuffled:
                await anyio.sleep(self._chance.uniform(0, LATE_SECONDS))
            place = self._chance.randrange(len(self._bound)) if self._shuffled else 0
            pod = self._bound.pop(place)
            async with self._turns:
                await self._admit(pod, tasks, seconds)

    async def _admit(self, pod: Object, tasks: TaskGroup, seconds: tuple[float, float]) -> None:
        request = manifest.request_from_document(pod)
        uid = pod["metadata"]["uid"]
        free = (
            frozenset(device for devices in self._topology.devices.values() for device in devices) - self._held.keys()
        )
        unhealthy = frozenset(
            name for name, each in self.kubelet.plugins.health().items() if each.state is not HealthState.HEALTHY
        )
        decision = await self.kubelet.admit(request, uid)
        happened = tuple(self._happened)
        preferred = self.kubelet.plugins.preferred
        taken = Taken(uid, request.name, anyio.current_time(), free, preferred, unhealthy, happened)
        if isinstance(decision, Refusal):
            self._note(f"refused {request.name}")
            self.refusals.append(Refused(taken, decision.reason, decision.container, decision.finding))
            message = f"Pod was rejected: {decision.finding}"
            self._set_status(request.namespace, request.name, phase="Failed", reason=decision.reason, message=message)
            return
        self.admitted.append(request.name)
        self._note(f"admitted {request.name}: {'; '.join(map(words, decision.allocations))}")
        devices = frozenset(device for allocation in decision.allocations for device in allocation.device_ids)
        holders = [each.owner.container for each in decision.allocations if each.owner is not None and each.device_ids]
        self.given.append(Given(taken, devices, next(iter(holders), None)))
        gpus = self._told(request, GPUS_VARIABLE)
        nics = self._told(request, NICS_VARIABLE)
        for device in devices.union(gpus, nics):
            if device in self._held:
                self.doubled.append((request.name, device))
            self._held[device] = request.name
        if is_joint(request.annotations):
            places = locate_devices(self._topology)
            beside = {places[nic].switch for nic in nics}
            self.apart += ((request.name, gpu) for gpu in gpus if places[gpu].switch not in beside)
        self._set_status(request.namespace, request.name, phase="Running")
        tasks.start_soon(self._last, request.namespace, request.name, self._chance.uniform(*seconds))

    def _told(self, pod: PodRequest, variable: str) -> list[DeviceID]:
        """The devices that this variable names to the containers of a pod."""
        responses = self.kubelet.running[pod.namespace, pod.name].responses.values()
        said = [each.envs[variable] for each in responses if variable in each.envs]
        return [DeviceID(name) for names in dict.fromkeys(said) for name in names.split(",")]

    async def _last(self, namespace: Namespace, name: PodName, seconds: float) -> None:
        """The containers of a pod run, and end."""
        await anyio.sleep(seconds)
        self._held = {device: pod for device, pod in self._held.items() if pod != name}
        self.freed.append(anyio.current_time())
        self._note(f"ended {name}")
        await self.kubelet.remove(namespace, name)
        self._set_status(namespace, name, phase="Succeeded")

    def _note(self, what: str) -> None:
        self._happened.append((anyio.current_time(), what))

    def _set_status(self, namespace: Namespace, name: PodName, **status: str) -> None:
        try:
            self._cluster.set_status(namespace, name, **status)
        except ApiError:  # it was deleted meanwhile
            return


def words(allocation: Allocation) -> str:
    """What a container got, in words: devices, CPUs, and the NUMA nodes of its memory."""
    memory = (f"{block.size >> 30} GiB of {','.join(map(str, block.nodes))}" for block in allocation.memory)
    cpus = (f"CPUs {allocation.cpus}",) if allocation.cpus else ()
    return " ".join((*sorted(allocation.device_ids), *cpus, *memory))


def kubelet_configuration(policy: str) -> dict[str, object]:
    """A kubelet with all its managers."""
    return {
        "kind": "KubeletConfiguration",
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "topologyManagerPolicy": policy,
        "cpuManagerPolicy": "static",
        "reservedSystemCPUs": "0",
        "memoryManagerPolicy": "Static",
        "reservedMemory": [{"numaNode": 0, "limits": {"memory": "1Gi"}}],
        "evictionHard": {"memory.available": "0"},
        "kubeReserved": {"memory": "1Gi"},
    }
