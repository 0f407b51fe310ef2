"""Pods whose units are spread over several GPUs: where they are offered, what is reserved, beside whom they wait."""

from collections.abc import AsyncIterator
from random import Random

import msgspec
import pytest
from binding_support import Registry, Site, running
from decision_support import container, machine, node, pod
from feasibility_support import with_pod
from unit_support import CORES, KUBELET, MEMORY, asks, in_units, spread
from view_support import NODE, RULES, TIME, OneNode, asked

from topoalign.core.admission.prediction import predict
from topoalign.core.admission.realignment import PendingPod
from topoalign.core.admission.share_alignment import finds_gpus
from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.model.allocations import amounts_of
from topoalign.core.model.decisions import Refusal
from topoalign.core.model.errors import NoFit
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import GPU_COUNT, AdmissionRules, Mode, PodRequest, Policy
from topoalign.core.model.topology.device_offers import MEMORY_BLOCK
from topoalign.core.model.topology.model import Topology
from topoalign.registry.scheduling.filter.admission_order import all_fit, are_ambiguous
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.request_turns import TaskTurns
from topoalign.testing.manual_clock import ManualClock

BLOCKS = 40


def shared(places: tuple[int, ...] = (0, 0, 0, 1, 1)) -> Topology:
    """GPUs in units, of 40 blocks each, near these NUMA nodes."""
    plain = machine(gpus=places)
    sized = tuple(msgspec.structs.replace(gpu, memory=BLOCKS * MEMORY_BLOCK) for gpu in plain.gpus)
    return in_units(msgspec.structs.replace(plain, gpus=sized), len(places))


def world(hardware: Topology, policy: Policy = Policy.RESTRICTED) -> OneNode:
    found = OneNode(msgspec.structs.replace(RULES, policy=policy), hardware)
    found.tell(found.says.all())
    return found


def code(of: OneNode, request: PodRequest) -> str:
    try:
        refused = of.scheduler.filter(asked(request), (NODE,)).refused
    except NoFit as error:  # no node has as many GPUs
        return error.code
    return refused[NODE].code if NODE in refused else ""


def over(cards: int, cores: int, blocks: int, name: str = "p") -> PodRequest:
    """A pod that asks for so much of each of so many GPUs."""
    asking = pod(asks(cores * cards, blocks * cards), name=name)
    return asking if cards == 1 else spread(asking, cards)


@pytest.mark.parametrize("seed", range(3))
def test_the_filter_says_what_a_decision_does(seed: int) -> None:
    """While pods come and go; of pods that differ in the number of GPUs alone each has its own answer."""
    chance, running_pods = Random(seed), list[str]()
    it = world(shared(), chance.choice([Policy.NONE, Policy.BEST_EFFORT, Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE]))
    said = set[str]()
    for number in range(8):
        if len(running_pods) > 2 and chance.random() < 0.4:
            it.tell(it.says.end(running_pods.pop(chance.randrange(len(running_pods)))))
        name = f"p{number}"
        it.tell(it.says.admit(over(chance.randint(1, 3), chance.randint(0, 33), chance.randint(1, 13), name), name))
        running_pods.append(name)
        amounts = chance.choice([(30, 12), (12, 30), (0, 36)])
        for request in (over(1, *amounts), *(spread(over(1, *amounts), cards) for cards in (2, 3, 6))):
            decision = predict(it.says.state, request, TIME)
            said.add(expected := decision.code if isinstance(decision, Refusal) else "")
            assert expected == code(it, request), (number, request)
    assert {"", "NotEnoughShareGpus"} <= said


def pending_pod(request: PodRequest, rules: AdmissionRules = KUBELET) -> PendingPod:
    return PendingPod((request.annotations.get(GPU_COUNT), repr(request.containers)), read_pod(request, rules), True)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (over(2, 30, 4), over(2, 30, 4), False),
        (over(2, 30, 4), pod(asks(60, 8)), True),
        (over(2, 30, 4), over(3, 20, 2), True),
        (over(2, 30, 4), over(2, 30, 5), True),
        (over(2, 30, 4), over(2, 20, 2), False),
    ],
)
def test_pods_are_mistakable_that_spread_as_much_over_others(
    one: PodRequest, other: PodRequest, expected: bool
) -> None:
    assert [expected] * 2 == [
        are_ambiguous(shared(), pending_pod(a), pending_pod(b)) for a, b in ((one, other), (other, one))
    ]


def test_what_is_spread_stays_where_it_is_reserved() -> None:
    """Of any GPUs there would be enough; a kubelet that is led to others finds no such share reserved there."""
    rules = AdmissionRules(mode=Mode.KUBELET, policy=Policy.RESTRICTED, cpu_manager="static", reserved_cpus="0")
    plain = container(cpus=6, gib=1)
    held = with_pod(node(shared((0, 0, 1, 1))), read_pod(pod(plain, name="held"), rules))
    assert held is not None
    amounts = {str(CORES): 60, str(MEMORY): 8}
    asking = pod(container(cpus=2, gib=1, others=amounts), name="new")
    whole = [
        pod(container(cpus=2, gib=1, others={str(CORES): 100, **memory}), name="new")
        for memory in ({}, {str(MEMORY): 8})
    ]

    found = [finds_gpus(held[0], read_pod(each, rules)) for each in (asking, spread(asking, 2), *whole)]

    assert [True, False, True, False] == found, "nor does one with whole GPUs and memory"


@pytest.mark.anyio
async def test_pods_that_spread_are_aligned_alike_in_every_order() -> None:
    """With 4 CPUs each they come to one NUMA node each, and which of them is to which depends on the order."""
    rules = AdmissionRules(mode=Mode.KUBELET, policy=Policy.RESTRICTED, cpu_manager="static", reserved_cpus="0")

    def comers(cards: int, *cpus: int) -> list[PendingPod]:
        asking = [
            pod(container(cpus=each, gib=1, others={str(CORES): 60, str(MEMORY): 8 + 2 * each}), name=f"p{each}")
            for each in cpus
        ]
        return [pending_pod(each if cards == 1 else spread(each, cards), rules) for each in asking]

    state = node(shared((0, 0, 1, 1)))
    found = [await all_fit(state, comers(cards, 4, 5), TaskTurns(ManualClock())) for cards in (1, 2)]

    assert [True, False] == found


@pytest.mark.anyio
async def test_whole_gpus_with_memory_are_aligned_alike_in_every_order() -> None:
    """Their memory is told by the reservation alone; of whole GPUs without any it does not matter which they are."""
    rules = AdmissionRules(mode=Mode.KUBELET, policy=Policy.BEST_EFFORT)

    def comers(memory: int) -> list[PendingPod]:
        whole = pod(container(others={str(CORES): 200}), name="whole")
        amounts = {str(CORES): 100, str(MEMORY): memory} if memory else {str(CORES): 100}
        return [pending_pod(each, rules) for each in (whole, pod(container(others=amounts), name="new"))]

    state = node(shared((0, 0, 1, 1)))
    found = [await all_fit(state, comers(memory), TaskTurns(ManualClock())) for memory in (0, 8)]

    assert [True, False] == found


@pytest.fixture
async def site() -> Site:
    return Site(hardware=shared())


@pytest.fixture
async def registry(site: Site) -> AsyncIterator[Registry]:
    bus = MemoryBus()
    one = Registry(site, bus)
    async with running(site, bus, one):
        yield one


@pytest.mark.anyio
async def test_a_bind_reserves_equal_parts(site: Site, registry: Registry) -> None:
    uid = site.add("a", annotations={GPU_COUNT: "2"}, limits={CORES: 60, MEMORY: 40})

    await registry.bind("a", uid)

    (found,) = registry.reservations.held(NodeName("node-1"))
    units = [unit for ids in found.containers[0].devices.values() for unit in ids]
    assert "node-1" == site.node_of("a")
    assert [(30, 20)] * 2 == [(each.cores, each.memory // MEMORY_BLOCK) for each in amounts_of(units).values()]
