"""Nodes over real sockets: the fake kubelet, and an agent that can be started anew; GPUs in units, or as they are."""

from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, Self

import anyio
import msgspec
from anyio.abc import TaskGroup
from decision_support import container as container_of
from decision_support import pod as pod_of
from device_allocations_support import Observed, ledger_of, nothing_to_prepare, start_allocations
from fact_support import changed, reservation
from kubelet_support import short_directory, two_nodes
from unit_support import CORES, MEMORY, in_units

from topoalign.allocator.allocate.service import DeviceAllocations
from topoalign.allocator.containers.containers import Containers
from topoalign.allocator.containers.vcuda.limiter import VcudaLimiter
from topoalign.allocator.device_plugin.front import KubeletFront
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.mig.instances import Instances
from topoalign.allocator.reconciliation.pod_resources import PodResourcesClient
from topoalign.core.admission.admit import decide_demand
from topoalign.core.admission.gang_plan import reserved_for
from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.model.decisions import Admission, Decision
from topoalign.core.model.events import AllocationRefused
from topoalign.core.model.holdings import base_of
from topoalign.core.model.ids import ContainerName, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.model.requests import GPU_COUNT, AdmissionRules, Compat, Mode, PodRequest, Policy
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.node_reservations import NodeReservations
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.plugin_config.configuration import Configuration, DeviceList, Flags, PluginFlags
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet
from topoalign.testing.manual_clock import ManualClock
from topoalign.testing.memory_journal import MemoryJournal

MACHINE = two_nodes()
BLOCKS = 16
GPUS = 4
PLAIN = two_nodes(gpus=GPUS)
SMALL = msgspec.structs.replace(
    PLAIN, gpus=tuple(msgspec.structs.replace(gpu, memory=BLOCKS << 28) for gpu in PLAIN.gpus)
)
NAMES = (CORES, MEMORY)
OTHER_ORDER = (ResourceName("example.com/time"), ResourceName("example.com/bytes"))
"""A stand-in kubelet asks for resources in the order of their names: here for memory first."""
DEFAULT = Namespace("default")
Units = Counter[DeviceID]
"""GPU -> how many units of it."""


class ShareNode:
    """The kubelet of a node, and the parts of its agent."""

    def __init__(
        self,
        directory: Path,
        machine: Topology = SMALL,
        names: tuple[ResourceName, ...] = NAMES,
        policy: Policy = Policy.NONE,
        chance: Random | None = None,
        compat: Compat = "",
    ) -> None:
        self.plugins, self.resources = directory / "device-plugins", directory / "pod-resources"
        self.names, self.clock, self.journal = names, ManualClock(), MemoryJournal()
        self.machine = self.offered(machine)
        self.rules = AdmissionRules(policy=policy, mode=Mode.KUBELET, compat=compat)
        rules = AdmissionRules(policy=policy)
        self.kubelet = FakeKubelet(self.plugins, self.resources, machine, rules, chance=chance)
        self.reserved = NodeReservations()
        self.ledger: Ledger
        self.allocations: DeviceAllocations
        self.pod_resources: PodResourcesClient
        self._agent = anyio.CancelScope()
        self.limited_by: VcudaLimiter | None = None
        self.instances: Instances | None = None
        self.containers: Containers | None = None
        self.by_variable_alone = False
        self.forced: Mapping[ResourceName, Sequence[DeviceID]] = {}
        """What the kubelet takes of a resource whatever is preferred."""

    @classmethod
    @asynccontextmanager
    async def running(cls, *options: Any, **more: Any) -> AsyncIterator[tuple[Self, TaskGroup]]:
        """A node of these options, with its kubelet and agent running."""
        with short_directory() as directory:
            node = cls(directory, *options, **more)
            async with anyio.create_task_group() as tasks:
                await tasks.start(node.kubelet.run)
                await node.start_agent(tasks)
                yield node, tasks
                tasks.cancel_scope.cancel()

    def offered(self, machine: Topology) -> Topology:
        """The machine as its discovery offers it."""
        return in_units(machine, len(machine.gpus), *self.names[:2])

    async def start_agent(self, tasks: TaskGroup, machine: Topology | None = None) -> None:
        """The agent starts, also anew: with what is in the journal alone."""
        self._agent.cancel()
        self.machine = machine or self.machine
        self.ledger = ledger_of(self.machine, self.clock, self.journal)
        self.pod_resources = PodResourcesClient(self.resources / "kubelet.sock", self.plugins, self.clock)
        self.allocations = start_allocations(
            self.ledger,
            self.pod_resources,
            compat=self.rules.compat,
            placement=self.rules.placement,
            settle_seconds=0,
            reservations=Observed(self.observed),
            starting=self.limited_by.starting if self.limited_by is not None else nothing_to_prepare,
            instances=self.instances,
            by_variable_alone=lambda: self.by_variable_alone,
        )
        self.force()
        started = anyio.Event()

        async def run() -> None:
            front = KubeletFront(self.allocations, self.plugins, self.clock, containers=self.containers)
            with anyio.CancelScope() as self._agent:
                async with self.pod_resources, anyio.create_task_group() as parts:
                    await parts.start(front.run)
                    if self.limited_by is not None:
                        parts.start_soon(self.limited_by.run, self.allocations, self.clock)
                    started.set()
                    await anyio.sleep_forever()

        tasks.start_soon(run)
        await started.wait()
        await self.allocations.reconcile()
        if machine is None:
            await self.listed()

    def force(self) -> None:
        """The kubelet need not take what is preferred."""
        preferred = self.allocations.prefer

        async def prefer(resource: ResourceName, *asked: Any) -> Sequence[DeviceID]:
            return self.forced[resource] if resource in self.forced else await preferred(resource, *asked)

        self.allocations.prefer = prefer  # type: ignore[assignment,method-assign]  # the answer is forced

    def observed(self) -> NodeReservations:
        self.reserved = self.reserved.observe(self.ledger.state, self.ledger.release_log.origins, own=True)
        return self.reserved

    async def admit(self, name: str, *shares: tuple[int, int], init: tuple[tuple[int, int], ...] = ()) -> Decision:
        return await self.admit_pod(self.pod(name, *shares, init=init))

    async def admit_pod(self, pod: PodRequest) -> Decision:
        return await self.kubelet.admit(pod, f"uid-{pod.name}")

    def pod(self, name: str, *shares: tuple[int, int], init: tuple[tuple[int, int], ...] = ()) -> PodRequest:
        asked = [dict(zip(map(str, self.names), amounts, strict=True)) for amounts in (*init, *shares)]
        containers = [container_of(f"c{number}", others=each) for number, each in enumerate(asked)]
        return pod_of(*containers[len(init) :], init=containers[: len(init)], name=name)

    def reserve(self, *pods: PodRequest, beside: bool = False) -> list[Decision]:
        """
        What a registry reserves for these pods as far as the node would admit them: each as if it were alone, or `beside`
        what is reserved for those before it.
        """
        state = self.ledger.state
        kept: list[Reservation] = []
        decisions: list[Decision] = []
        for pod in pods:
            decision = decide_demand(state, read_pod(pod, self.rules))
            decisions.append(decision)
            if isinstance(decision, Admission):
                kept.append(reserved_for(f"uid-{pod.name}", pod, decision.allocations, 60.0))
                for each in decision.allocations if beside else ():
                    state = state.holding(each)
        self.set_reserved(*kept)
        return decisions

    def keep(self, **pods: dict[ResourceName, list[DeviceID]]) -> None:
        """These units are reserved for these pods, of one container each."""
        devices = {name: {each: tuple(ids) for each, ids in units.items()} for name, units in pods.items()}
        kept = {name: ReservedContainer(container=ContainerName("c0"), devices=each) for name, each in devices.items()}
        self.set_reserved(*(reservation(name, each, seconds=60.0) for name, each in kept.items()))

    def set_reserved(self, *reserved: Reservation) -> None:
        """The node receives that this is reserved on it, and nothing else."""
        seq, live = self.reserved.position + 1, self.ledger.state.allocations.keys()
        self.reserved = self.reserved.apply(changed(*reserved, seq=seq), seq, self.clock.monotonic(), live)

    async def remove(self, name: str) -> None:
        await self.kubelet.remove(DEFAULT, PodName(name))
        await self.settle()

    async def drop(self, name: str) -> None:
        """The pod is deleted, and the record has it still."""
        await self.kubelet.remove(DEFAULT, PodName(name))

    async def settle(self) -> None:
        """What is missing for so long has ended, and the kubelet has received all units how they are then."""
        await self.allocations.reconcile()
        await self.clock.advance(6)
        await self.allocations.reconcile()
        await self.listed()

    async def restart_kubelet(self, *, knowing: bool = True) -> None:
        """The kubelet starts anew, and hears of all units again. `knowing`: it has kept its checkpoint of who has what."""
        await (self.kubelet.restart() if knowing else self.kubelet.wipe())
        for _ in range(2):
            await self.clock.advance(1)
        await self.listed()

    async def listed(self) -> None:
        """The kubelet has received all units how they are now; those of a GPU whose driver fails are unhealthy."""

        def as_offered(kubelet: FakeKubelet, name: ResourceName) -> bool:
            faults = self.allocations.faults
            usable = {unit for unit in self.ledger.state.healthy(name) if base_of(unit) not in faults}
            return {*kubelet.state().healthy(name)} == usable

        await self.kubelet.until(lambda kubelet: all(as_offered(kubelet, name) for name in self.names))

    def units(self, gpu: int, cores: int = 0, memory: int = 0) -> dict[ResourceName, list[DeviceID]]:
        """The first units of a GPU."""
        found = {
            self.names[0]: [DeviceID(f"GPU-{gpu}::c{n}") for n in range(cores)],
            self.names[1]: [DeviceID(f"GPU-{gpu}::m{n}") for n in range(memory)],
        }
        return {name: some for name, some in found.items() if some}

    def gpus(self, name: str) -> dict[str, dict[ResourceName, Units]]:
        """Container of a running pod -> resource -> how many units it has of which GPU."""
        found: dict[str, dict[ResourceName, Units]] = {}
        for container, resource, devices in self.kubelet.running[DEFAULT, PodName(name)].parts():
            found.setdefault(str(container), {})[resource] = Counter(base_of(DeviceID(each)) for each in devices)
        return found

    def answers(self, name: str) -> Mapping[tuple[ContainerName, ResourceName], v1beta1.ContainerAllocateResponse]:
        """Container and resource of a running pod -> what Allocate answered."""
        return self.kubelet.running[DEFAULT, PodName(name)].responses

    def refusals(self, pod: str) -> list[tuple[str, str]]:
        """What is recorded of a pod that was not started: container and code."""
        return [
            (str(event.container), event.code)
            for event, _ in self.ledger.pending
            if isinstance(event, AllocationRefused) and event.pod == pod and event.reason == "PreStartContainer"
        ]

    def is_whole(self, names: Collection[str]) -> bool:
        """Whether the record has what these pods have, and nothing else: it may lag behind the kubelet."""
        return all(
            each.owner is not None and each.owner.pod in names for each in self.ledger.state.allocations.values()
        )

    async def check(self, names: Collection[str]) -> None:
        """Nobody has another's GPU, no GPU is above what it has, and all who tell of it tell the same."""
        held: dict[DeviceID, list[Counter[str]]] = {}
        shown: dict[tuple[str, str], set[str]] = {}
        for name in names:
            running = self.kubelet.running[DEFAULT, PodName(name)]
            for container, halves in self.gpus(name).items():
                cores, memory = (halves.get(resource, Counter()) for resource in self.names)
                whole, gpus = cores.total() >= 100, len({*cores, *memory})
                equal = all(not half or (len(half) == gpus and len({*half.values()}) == 1) for half in (cores, memory))
                most = int(running.pod.annotations.get(GPU_COUNT, 1))
                assert {*cores.values()} == {100} if whole else equal and gpus in (1, most), (name, halves)
                assert not whole or not memory or {*memory} == {*cores}, (name, halves)
                answers = [answer for (of, _), answer in running.responses.items() if str(of) == container]
                told = {answer.envs["NVIDIA_VISIBLE_DEVICES"] for answer in answers}
                assert {",".join(sorted({*cores, *memory}))} == told, (name, halves)
                if container not in {each.name for each in running.pod.init_containers}:
                    for gpu in {*cores, *memory}:
                        held.setdefault(gpu, []).append(Counter(cores=cores[gpu], memory=memory[gpu]))
            for container, _, devices in running.parts():
                shown.setdefault((name, str(container)), set()).update(devices)
        for gpu, shares in held.items():
            assert sum(each["cores"] for each in shares) <= 100, (gpu, shares)
            assert sum(each["memory"] for each in shares) <= BLOCKS, (gpu, shares)
            assert len(shares) == 1 or not any(each["cores"] == 100 for each in shares), (gpu, shares)
        await self.check_records(names, shown)

    async def check_records(self, names: Collection[str], shown: Mapping[tuple[str, str], set[str]]) -> None:
        """The kubelet lists and the ledger records for the app containers of these pods what is `shown` of them."""
        await self.allocations.reconcile()
        listing = await self.pod_resources.listing()
        listed: dict[tuple[str, str], set[str]] = {}
        for holding in listing.holdings:
            listed.setdefault((holding.owner.pod, holding.owner.container), set()).update(holding.devices)
        recorded: dict[tuple[str, str], set[str]] = {}
        for each in self.ledger.state.allocations.values():
            if each.owner is not None and each.owner.pod in names:
                recorded.setdefault((each.owner.pod, each.owner.container), set()).update(each.device_ids)
        apps = {key: units for key, units in shown.items() if key in listed}
        assert listed == apps == recorded


class Node(ShareNode):
    """All devices are offered as the machine has them. `strategies`: how containers receive the list of their devices."""

    def __init__(
        self,
        directory: Path,
        policy: Policy = Policy.RESTRICTED,
        machine: Topology = MACHINE,
        strategies: tuple[DeviceList, ...] = ("envvar",),
    ) -> None:
        super().__init__(directory, machine, tuple(machine.devices), policy)
        flags = Flags(plugin=PluginFlags(device_list_strategy=strategies))
        self.containers = Containers(lambda: Configuration(flags=flags))
        self.by_variable_alone = flags.plugin.by_variable_alone

    def offered(self, machine: Topology) -> Topology:
        return machine

    def facts(self) -> list[str]:
        """Names of the recorded facts, without the snapshot of the start."""
        return [type(event).__name__ for event, _ in self.ledger.pending][1:]


def fits(decision: Decision) -> Admission:
    assert isinstance(decision, Admission), decision
    return decision
