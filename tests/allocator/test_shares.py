"""Shares of GPUs over the kubelet's protocol: no container has halves on two GPUs, and no GPU is more than once its own."""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random

import anyio
import msgspec
import pytest
from faults_support import THOROUGH
from kubelet_support import NODE, MemoryAllocator, offers, short_directory, two_nodes
from reservation_support import changed
from unit_support import CORES, MEMORY, in_units

from topoalign.allocator.device_allocations import DeviceAllocations
from topoalign.allocator.device_plugin.front import KubeletFront
from topoalign.allocator.ledger.journal import MemoryJournal
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.reconciliation.pod_resources import PodResourcesClient
from topoalign.core.admission.admit import decide
from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.demand.units import InvalidShare
from topoalign.core.model.decisions import Admission, Decision, Refusal
from topoalign.core.model.events import AllocationRefused
from topoalign.core.model.holdings import base_of
from topoalign.core.model.ids import ContainerName, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, Mode, PodRequest, Policy
from topoalign.core.model.topology.model import Topology
from topoalign.core.sharing.refusals import ShareSplit
from topoalign.core.state.reservations import NodeReservations, reservation_of
from topoalign.runtime.clock import ManualClock
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet

pytestmark = pytest.mark.anyio

BLOCKS = 16
PLAIN = two_nodes(gpus=4)
SMALL = msgspec.structs.replace(
    PLAIN, gpus=tuple(msgspec.structs.replace(gpu, memory=BLOCKS << 28) for gpu in PLAIN.gpus)
)
NAMES = (CORES, MEMORY)
OTHER_ORDER = (ResourceName("example.com/time"), ResourceName("example.com/bytes"))
"""A stand-in kubelet asks for resources in the order of their names: here for memory first."""
DEFAULT = Namespace("default")


@dataclass
class Node:
    kubelet: FakeKubelet
    ledger: Ledger
    allocations: DeviceAllocations
    clock: ManualClock
    names: tuple[ResourceName, ResourceName]
    reserved: list[NodeReservations]

    async def admit(self, name: str, *shares: tuple[int, int]) -> Decision:
        return await self.kubelet.admit(self.pod(name, *shares))

    def pod(self, name: str, *shares: tuple[int, int]) -> PodRequest:
        containers = []
        for number, amounts in enumerate(shares):
            asked = {resource: amount for resource, amount in zip(self.names, amounts, strict=True) if amount}
            containers.append(ContainerRequest(name=ContainerName(f"c{number}"), requests=asked, limits=asked))
        return PodRequest(name=PodName(name), containers=tuple(containers))

    def reserve(self, pod: PodRequest, rules: AdmissionRules) -> Decision:
        """What a registry reserves for a pod alone, if the node is to admit it."""
        decision = decide(self.ledger.state, read_pod(pod, rules))
        if isinstance(decision, Admission):
            kept = reservation_of(str(pod.name), pod, decision.allocations, 60.0)
            self.reserved[:] = [NodeReservations().apply(changed(kept), 1, self.clock.monotonic())]
        return decision

    async def remove(self, name: str) -> None:
        await self.kubelet.remove(DEFAULT, PodName(name))
        await self.allocations.reconcile()
        await self.clock.advance(6)  # what is missing for so long has ended
        await self.allocations.reconcile()
        await self.listed()

    async def listed(self) -> None:
        """The kubelet has heard of all units how they are now."""
        state = self.ledger.state
        healthy = {resource: {*state.healthy(resource)} for resource in self.names}
        await self.kubelet.until(
            lambda kubelet: all({*kubelet.state().healthy(name)} == units for name, units in healthy.items())
        )

    def gpus(self, name: str) -> list[dict[str, Counter[DeviceID]]]:
        """For each container of a running pod: resource -> how many units it has of which GPU."""
        found: dict[str, dict[str, Counter[DeviceID]]] = {}
        for container, resource, devices in self.kubelet.running[DEFAULT, PodName(name)].parts():
            counts = Counter(map(self.ledger.state.hardware.card_of, map(DeviceID, devices)))
            found.setdefault(str(container), {})[resource] = counts
        return list(found.values())


@asynccontextmanager
async def node(
    machine: Topology = SMALL, names: tuple[ResourceName, ResourceName] = NAMES, policy: Policy = Policy.BEST_EFFORT
) -> AsyncIterator[Node]:
    with short_directory() as directory:
        plugins, resources = directory / "device-plugins", directory / "pod-resources"
        plugins.mkdir()
        resources.mkdir()
        clock = ManualClock()
        ledger = Ledger(NODE, MemoryJournal(), clock)
        known = MemoryAllocator(in_units(machine, 4, *names)).state
        assert known.topology is not None and known.health is not None
        ledger.hear(known.topology)
        ledger.hear(known.health)
        pod_resources = PodResourcesClient(resources / "kubelet.sock", plugins, clock)
        reserved = [NodeReservations()]

        def observed() -> NodeReservations:
            reserved[0] = reserved[0].observe(ledger.state, own=True)
            return reserved[0]

        allocations = DeviceAllocations(ledger, clock, pod_resources, settle_seconds=0, reserved=observed)
        kubelet = FakeKubelet(plugins, resources, machine, AdmissionRules(policy=policy))
        async with pod_resources, anyio.create_task_group() as tasks:
            await tasks.start(kubelet.run)
            await tasks.start(KubeletFront(allocations, plugins, clock).run)
            await kubelet.until(offers(known.hardware))
            yield Node(kubelet, ledger, allocations, clock, names, reserved)
            tasks.cancel_scope.cancel()


@pytest.mark.parametrize("names", [NAMES, OTHER_ORDER])
async def test_both_halves_of_a_share_are_of_one_gpu(names: tuple[ResourceName, ResourceName]) -> None:
    async with node(names=names) as it:
        for number in range(6):
            assert isinstance(await it.admit(f"p{number}", (30, 4), (20, 3)), Admission)

        for number in range(6):
            for halves in it.gpus(f"p{number}"):
                assert 1 == len({gpu for counts in halves.values() for gpu in counts})


async def test_a_container_is_told_the_gpu_of_its_share_by_both_halves() -> None:
    async with node() as it:
        await it.admit("p", (30, 4))

        responses = it.kubelet.running[DEFAULT, PodName("p")].responses
        told = {answer.envs["NVIDIA_VISIBLE_DEVICES"] for answer in responses.values()}

        assert 2 == len(responses)
        assert {next(iter(it.gpus("p")[0][CORES]))} == told


async def test_whole_gpus_come_with_their_memory() -> None:
    async with node() as it:
        await it.admit("small", (10, 1))
        assert isinstance(await it.admit("large", (200, 20)), Admission)

        (halves,) = it.gpus("large")

        assert {100} == {*halves[CORES].values()} and 2 == len(halves[CORES])
        assert halves[MEMORY].keys() == halves[CORES].keys()


async def test_units_of_two_gpus_are_refused_at_allocate() -> None:
    async with node() as it:
        units = [DeviceID(f"GPU-{number}::c0") for number in range(2)]

        with pytest.raises(ShareSplit):
            await it.allocations.allocate(CORES, [units])
        with pytest.raises(InvalidShare):
            await it.allocations.allocate(CORES, [[DeviceID(f"GPU-{n // 100}::c{n % 100}") for n in range(150)]])

        assert {} == dict(it.ledger.state.allocations)


async def test_a_container_with_halves_of_two_gpus_does_not_start() -> None:
    """A kubelet need not take what is preferred."""
    async with node() as it:
        cores, memory = ([DeviceID(f"GPU-0::c{n}") for n in range(20)], [DeviceID(f"GPU-1::m{n}") for n in range(4)])
        forced = {CORES: cores, MEMORY: memory}

        async def prefer(resource: ResourceName, *_: object) -> Sequence[DeviceID]:
            return forced[resource]

        it.allocations.prefer = prefer  # type: ignore[assignment,method-assign]  # the kubelet's own mind
        decision = await it.admit("p", (20, 4))

        assert isinstance(decision, Refusal)
        assert "of 2 GPUs" in decision.finding
        refusals = [event for event, _ in it.ledger.pending if isinstance(event, AllocationRefused)]
        assert {("p", "ShareSplit", "PreStartContainer")} == {(each.pod, each.code, each.reason) for each in refusals}


async def test_a_share_of_what_an_init_container_had_whole_starts() -> None:
    async with node() as it:
        pod = it.pod("p", (100, 8), (20, 4))
        first, second = pod.containers
        decision = await it.kubelet.admit(
            msgspec.structs.replace(pod, init_containers=(first,), containers=(second,)), "uid-p"
        )

        assert isinstance(decision, Admission), decision
        assert 1 == len({gpu for halves in it.gpus("p") for counts in halves.values() for gpu in counts})


async def test_a_whole_gpu_is_given_whose_last_share_has_ended() -> None:
    """The record has the share still, and the kubelet knows better."""
    async with node() as it:
        for number in range(4):
            await it.admit(f"small-{number}", (0, 10))
        await it.allocations.reconcile()
        await it.kubelet.remove(DEFAULT, PodName("small-2"))

        assert isinstance(await it.admit("large", (100, 1)), Admission)


@pytest.mark.parametrize("seed", range(100 if THOROUGH else 2))
async def test_no_gpu_has_more_held_than_it_has(seed: int) -> None:
    """Random shares come and go, in either order of their halves; each is of one GPU, or fails with a reason."""
    chance = Random(seed)
    async with node(names=chance.choice([NAMES, OTHER_ORDER])) as it:
        running: list[str] = []
        for number in range(16):
            if running and chance.random() < 0.4:
                await it.remove(running.pop(chance.randrange(len(running))))
            whole = chance.random() < 0.15
            share = (100 * chance.randint(1, 2), 0) if whole else (chance.choice([0, 5, 30, 60]), chance.randint(1, 10))
            decision = await it.admit(f"p{number}", share)
            if isinstance(decision, Refusal):
                assert decision.finding
                await it.remove(f"p{number}")
                continue
            running.append(f"p{number}")
            (halves,) = it.gpus(f"p{number}")
            assert max(1, share[0] // 100) == len({gpu for counts in halves.values() for gpu in counts})
        held: Counter[DeviceID] = Counter()
        for name in running:
            for halves in it.gpus(name):
                held.update(halves.get(it.names[0], {}))
        assert all(amount <= 100 for amount in held.values())
        assert running


@pytest.mark.parametrize("seed", range(100 if THOROUGH else 2))
async def test_what_a_registry_offers_with_a_reservation_is_admitted(seed: int) -> None:
    """Whichever half the kubelet asks for first, and whatever runs: on the GPUs of the prediction, or on none."""
    chance = Random(seed)
    policy = chance.choice([Policy.SINGLE_NUMA_NODE, Policy.RESTRICTED, Policy.BEST_EFFORT])
    rules = AdmissionRules(policy=policy, mode=Mode.KUBELET)
    async with node(names=chance.choice([NAMES, OTHER_ORDER]), policy=policy) as it:
        running: list[str] = []
        offered = 0
        for number in range(12):
            if running and chance.random() < 0.3:
                await it.remove(running.pop(chance.randrange(len(running))))
            shares = [(chance.choice([0, 10, 40, 100]), chance.randint(1, 8)) for _ in range(chance.randint(1, 2))]
            pod = it.pod(f"p{number}", *shares)
            predicted = it.reserve(pod, rules)
            if not isinstance(predicted, Admission):
                continue
            offered += 1
            decision = await it.kubelet.admit(pod, str(pod.name))

            assert isinstance(decision, Admission), (number, shares, decision)
            running.append(f"p{number}")
            await it.allocations.reconcile()
            await it.listed()
            expected = [
                {resource: Counter(map(base_of, devices)) for resource, devices in each.devices.items()}
                for each in predicted.allocations
            ]
            assert sorted(map(repr, expected)) == sorted(map(repr, it.gpus(f"p{number}")))
        assert offered
