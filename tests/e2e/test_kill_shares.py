"""What a node agent leaves that is killed at any step of a share of a GPU, the next one puts right."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import anyio
import msgspec
import pytest
from e2e.agents import TOGETHER, Agents, Life, agreeing
from fact_support import changed
from faults_support import THOROUGH
from share_support import BLOCKS, DEFAULT, NAMES, OTHER_ORDER
from vcuda_support import TWO, Host, Read, read_config, with_addresses

from topoalign.allocator.reconciliation.pod_resources import PodResourcesClient
from topoalign.core import wire
from topoalign.core.model.decisions import Admission, Refusal
from topoalign.core.model.events import AllocationRefused
from topoalign.core.model.holdings import base_of
from topoalign.core.model.ids import ContainerName, DeviceID, NodeName, PodName, ResourceName
from topoalign.core.model.requests import AdmissionRules, ConfirmRequest, ContainerRequest, PodRequest, Policy
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.core.model.topology.device_offers import CORES, MEMORY_BLOCK
from topoalign.core.ports import Bus, Stream
from topoalign.kubelet.grpc.kubelet_client import FAILURES
from topoalign.machines import Machine
from topoalign.machines.document import encode_machine
from topoalign.runtime.clock import SystemClock
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_server import local_nats
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet
from topoalign.testing.fake_kubelet.pods import Running

MACHINE = with_addresses(msgspec.structs.replace(TWO, nics=()))
MAIN = ContainerName("main")
RESIDENT = (60, 9)
"""Cores and blocks of a pod on each GPU that stays from the first agent to the last: neither half fits beside another."""
SHARE = (20, 3)
"""Of the pods in whose admission agents die."""
PATIENCE = 60.0
"""Seconds in which this process, which is both kubelet and caller, is sure to answer itself, however busy it is."""


class Step(NamedTuple):
    """Where an agent dies: before the nth step of this name, of any if it has none (`dying`)."""

    call: str
    nth: int


class Pair(Life):
    """Pods come one after the other, each to an agent that dies; the next agent puts right what is left."""

    def __init__(
        self,
        folder: Path,
        node: NodeName,
        nats: str,
        bus: Bus,
        agents: Agents,
        names: tuple[ResourceName, ResourceName],
    ) -> None:
        """`names`: of computing time and memory; the kubelet asks for them in the order of their names."""
        super().__init__(folder, node, nats, bus, agents)
        host, self.root, self.names = Host(folder / "host"), folder / "vcuda", names
        (folder / "machine.json").write_bytes(
            encode_machine(Machine(name="two", topology=MACHINE, source="made for a test"))
        )
        (folder / "config.yaml").write_text(
            f"version: v1\nflags: {{vcudaRoot: {self.root}}}\n"
            f"sharing: {{limiter: vcuda, units: {{cores: {names[0]}, memory: {names[1]}}}}}\n"
        )
        self.environment |= {
            "TOPOALIGN_MACHINE": str(folder / "machine.json"),
            "TOPOALIGN_CONFIG": str(folder / "config.yaml"),
            "HOST_PROC": str(host.proc),
            "HOST_CGROUPS": str(host.cgroups),
        }
        self.plugins, self.resources = folder / "device-plugins", folder / "pod-resources"
        self.kubelet = FakeKubelet(self.plugins, self.resources, MACHINE, AdmissionRules(policy=Policy.NONE))
        gpus = len(MACHINE.gpus)
        self.offered = {names[0]: CORES * gpus, names[1]: BLOCKS * gpus}
        self.reserved: dict[str, frozenset[DeviceID]] = {}
        """Pod UID -> the units that registries have reserved for it."""
        self.waiting: list[str] = []
        """Pods that the kubelet has admitted and that have not started yet."""
        self._seq = 0

    async def begin(self) -> None:
        """Two pods run that stay."""
        agent = self.start()
        await self.listed()
        for name in ("resident-0", "resident-1"):
            decision = await self.kubelet.admit(self.pod(name, *RESIDENT))
            assert isinstance(decision, Admission), decision
        await self.check()
        await self.end(agent)

    async def die(self, name: str, step: Step, *, is_reserved: bool, former: str = "") -> bool:
        """
        An agent puts right what is left of the `former` pod, and dies at this step of the admission of a pod. Returns
        whether it has survived that.
        """
        agent = self.start(step.nth, call=step.call)
        await self.listed()
        await self.put_right(former)
        if is_reserved:
            await self.reserve(self.pod(name, *SHARE))
        self.arm.touch()
        decision = await self.kubelet.admit(self.pod(name, *SHARE), uid_of(name), start=False)
        if isinstance(decision, Admission):
            self.waiting.append(name)
            with suppress(*FAILURES):
                await self.start_waiting()
                await self.until_said(agent, True)
        else:
            check_refusal(decision)
        survived = not self.arm.with_name("arm.died").exists()
        await self.end(agent)
        await self.keep_reserved()
        return survived

    async def finish(self, former: str) -> None:
        """What is left of the last pod is put right, and the journal alone tells all."""
        agent = self.start()
        await self.listed()
        await self.put_right(former)
        assert [] == [each for each in await self.refusals() if not each.code]
        await self.end_in_agreement(agent)

    async def put_right(self, former: str) -> None:
        """
        What an agent has to put right that starts where one has died: the kubelet tries to start again what it has admitted;
        a pod that it has refused is made anew; whatever nobody has is there for others, also what a pod was given that it
        has refused afterwards. Then these end.
        """
        if not former:
            return
        await self.start_waiting()
        if (DEFAULT, PodName(former)) not in self.kubelet.running:
            again = PodName(f"{former}-again")
            await self.give(self.pod(again, *SHARE))
            await self.kubelet.remove(DEFAULT, again)  # what the refused pod was given may be of the other GPU
        rest = sorted((self.left(gpu.id) for gpu in MACHINE.gpus), reverse=True)
        for number, amounts in enumerate(rest):
            await self.give(self.pod(f"rest-{number}", *amounts))
        await self.check()
        for name in (former, "rest-0", "rest-1"):
            await self.kubelet.remove(DEFAULT, PodName(name))

    async def start_waiting(self) -> None:
        """As a kubelet does again and again. Raises what PreStartContainer fails with."""
        for name in [*self.waiting]:
            await self.kubelet.start_containers(DEFAULT, PodName(name))
            self.waiting.remove(name)

    def pod(self, name: str, cores: int, blocks: int) -> PodRequest:
        asked = dict(zip(self.names, (cores, blocks), strict=True))
        return PodRequest(
            namespace=DEFAULT,
            name=PodName(name),
            containers=(ContainerRequest(name=MAIN, requests=asked, limits=asked),),
        )

    async def reserve(self, pod: PodRequest) -> None:
        """
        As a registry that binds a pod: the node is asked what it would give the pod, and something is reserved for it; here
        that is on another GPU than the node would choose by itself.
        """
        subject, question = wire.admission_subject(self.node, "confirm"), ConfirmRequest(node=self.node, pod=pod)
        wire.decode_answer(await self.bus.ask(subject, msgspec.json.encode(question), 10), object)
        gpu, uid = MACHINE.gpus[-1].id, uid_of(pod.name)
        units = {name: self.free(gpu, name)[-amount:] for name, amount in zip(self.names, SHARE, strict=True)}
        self.reserved[uid] = frozenset(unit for ids in units.values() for unit in ids)
        container = ReservedContainer(container=MAIN, devices=units)
        await self.keep_reserved(
            Reservation(pod_uid=uid, namespace=DEFAULT, pod=pod.name, containers=(container,), seconds_left=60.0)
        )

    async def keep_reserved(self, *reserved: Reservation) -> None:
        """Registries keep this, and nothing else."""
        self._seq += 1
        event = msgspec.structs.replace(changed(*reserved, seq=self._seq), node=self.node)
        await self.bus.publish(wire.encode_event(event, 0.0))

    def free(self, gpu: DeviceID, name: ResourceName) -> tuple[DeviceID, ...]:
        """The units of a GPU that the kubelet has given to nobody."""
        held = {unit for running in self.kubelet.running.values() for *_, units in running.parts() for unit in units}
        kind, count = ("c", CORES) if name == self.names[0] else ("m", BLOCKS)
        ids = (DeviceID(f"{gpu}::{kind}{number}") for number in range(count))
        return tuple(unit for unit in ids if unit not in held)

    def left(self, gpu: DeviceID) -> tuple[int, int]:
        """Cores and blocks of a GPU that the kubelet has given to nobody."""
        cores, blocks = (len(self.free(gpu, name)) for name in self.names)
        return cores, blocks

    async def check(self) -> None:
        """
        Nobody has another's GPU or limits, no GPU is above what it has, and kubelet, record and environment tell the same.
        Whoever has a reservation has what is reserved.
        """
        state = await agreeing(self.kubelet, self.bus, self.node)
        async with PodResourcesClient(self.resources / "kubelet.sock", self.plugins, SystemClock()) as pod_resources:
            holdings = (await pod_resources.listing(PATIENCE)).holdings
        recorded = {
            (each.owner.pod, frozenset(ids))
            for each in state.allocations.values()
            for ids in each.devices.values()
            if each.owner is not None
        }
        assert recorded == {(each.owner.pod, each.devices) for each in holdings}
        held = Counter[tuple[DeviceID, ResourceName]]()
        for (_, pod), running in self.kubelet.running.items():
            units = [unit for *_, ids in running.parts() for unit in ids]
            (gpu,) = {base_of(unit) for unit in units}
            held.update((gpu, resource) for _, resource, ids in running.parts() for _ in ids)
            assert {gpu} == {each.envs["NVIDIA_VISIBLE_DEVICES"] for each in running.responses.values()}
            assert pod in self.waiting or {limits_of(running, gpu, *self.names)} == {*self.limits(running)}
            assert self.reserved.get(running.uid, frozenset(units)) == frozenset(units)
        assert all(count <= (CORES if name == self.names[0] else BLOCKS) for (_, name), count in held.items()), held

    def limits(self, running: Running) -> Iterator[Read]:
        """What the library of a container reads, of each half."""
        for answer in running.responses.values():
            (mount,) = [each for each in answer.mounts if each.container_path == "/etc/vcuda"]
            yield read_config(Path(mount.host_path) / "vcuda.config")

    async def refusals(self) -> list[AllocationRefused]:
        """All that the node has said of pods that were refused."""
        found: list[AllocationRefused] = []
        newest = await self.bus.last_position(Stream.ALLOCATIONS, wire.allocation_subjects(self.node))
        async with self.bus.follow(Stream.ALLOCATIONS, wire.allocation_subjects(self.node)) as messages:
            async for received in messages:
                event = wire.decode_event(received.message)
                found += [event] if isinstance(event, AllocationRefused) else []
                if received.position >= newest:
                    break
        return found


def uid_of(name: str) -> str:
    return f"uid-{name}"


def limits_of(running: Running, gpu: DeviceID, cores: ResourceName, memory: ResourceName) -> Read:
    """What a container has to be limited to by what the kubelet gave it."""
    asked = running.pod.containers[0].limits
    address = next(each.pci for each in MACHINE.gpus if each.id == gpu)
    assert address is not None
    return Read(running.uid, MAIN, address.upper(), asked[memory] * MEMORY_BLOCK, asked[cores], 1, 1)


def check_refusal(decision: object) -> None:
    assert isinstance(decision, Refusal) and decision.code and decision.finding and decision.remedy


pytestmark = [pytest.mark.anyio, pytest.mark.timeout(7200 if THOROUGH else 600)]

ALLOCATE = ("allocate", "write journal", "fsync journal done", "allocate done")
START = ("pre_start_container", "pre_start_container done")
PAIR = [
    *(Step(call, half) for half in (1, 2) for call in ALLOCATE),
    *(Step(call, 3) for call in ("write journal", "fsync journal done")),
    *(Step(call, half) for half in (1, 2) for call in START),
]
"""
Of either half: its Allocate has come, is about to be in the journal, is there, is about to be answered; then the owners are
about to be in the journal, and are there; and PreStartContainer of either half has come, and is about to be answered.
"""
CHAIN = 10
"""Agents that die one after the other on a node, where every step is tried."""


def pair_chains() -> list[tuple[tuple[ResourceName, ResourceName], bool, list[Step]]]:
    """Names of the two resources, whether the first pod has a reservation (then every second has), and where agents die."""
    if not THOROUGH:
        return [(NAMES, True, PAIR[1::3]), (OTHER_ORDER, False, PAIR[2::3])]
    every = [PAIR, *([Step("", nth) for nth in range(at, at + CHAIN)] for at in range(1, 161, CHAIN))]
    return [
        (names, is_reserved, steps)
        for steps in every
        for names in (NAMES, OTHER_ORDER)
        for is_reserved in (True, False)
    ]


async def test_an_agent_killed_at_any_step_of_a_pair_recovers(short_folder: Path, agents: Agents) -> None:
    """
    A container asks for units of computing time and memory, in either order, with and without a reservation, and limited by
    vcuda. After each death the next agent starts what the kubelet has admitted, and gives everything else to other pods.
    """
    survived: list[Step] = []
    async with local_nats(short_folder / "nats") as nats, connect_bus(nats) as bus:
        turn = anyio.CapacityLimiter(TOGETHER)

        async def run(
            number: int, names: tuple[ResourceName, ResourceName], is_reserved: bool, steps: list[Step]
        ) -> None:
            async with turn, anyio.create_task_group() as tasks:
                node = NodeName(f"node-{number}")
                life = Pair(short_folder / str(number), node, nats, bus, agents, names)
                await tasks.start(life.kubelet.run)
                await life.begin()
                former = ""
                for place, step in enumerate(steps):
                    name = f"pod-{place}"
                    if await life.die(name, step, is_reserved=is_reserved == (place % 2 == 0), former=former):
                        survived.append(step)
                    former = name
                await life.finish(former)
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for number, chain in enumerate(pair_chains()):
                tasks.start_soon(run, number, *chain)

    assert [] == [step for step in survived if step.call or step.nth == 1]
