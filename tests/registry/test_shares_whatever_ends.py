"""Pods with parts of GPUs that a kubelet admits in every order, whatever ends before it takes them."""

from random import Random

import msgspec
import pytest
from decision_support import GIB, container, machine, node, pod
from faults_support import THOROUGH
from feasibility_support import demand_of, held_by, refused_after_ends, with_pod
from slot_support import WITH_NUMA_NODES, in_slots
from unit_support import CORES, MEMORY, in_units
from view_support import NODE, OneNode, asked

from topoalign.core.admission.feasibility import alignment_need, need_of
from topoalign.core.admission.realignment import PendingPod
from topoalign.core.demand.pod_demand import PodDemand
from topoalign.core.model.ids import GPU
from topoalign.core.model.ids import MEMORY as HOST_MEMORY
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, Mode, PodRequest, Policy, Scope
from topoalign.core.model.topology.model import Topology
from topoalign.registry.scheduling.filter.admission_order import all_fit
from topoalign.runtime.request_turns import TaskTurns
from topoalign.testing.manual_clock import ManualClock

pytestmark = pytest.mark.anyio
RULES = AdmissionRules(mode=Mode.KUBELET, policy=Policy.RESTRICTED, cpu_manager="static", reserved_cpus="0")


def pending_pod(topology: Topology, demand: PodDemand) -> PendingPod:
    need = need_of(topology, demand)
    return PendingPod(demand.pod, demand, True, alignment_need(topology, demand), need is not None and need.complete)


def some_hardware(chance: Random) -> Topology:
    """Few GPUs of 16 GiB, in slots or in units."""
    nodes = chance.choice([2, 2, 3])
    places = [place for place in range(nodes) for _ in range(chance.choice([1, 1, 1, 2, 3]))]
    found = machine(nodes=nodes, cores=chance.choice([4, 8]), gpus=places)
    gpus = tuple(msgspec.structs.replace(gpu, memory=16 * GIB) for gpu in found.gpus)
    found = msgspec.structs.replace(found, gpus=gpus)
    if chance.random() < 0.6:
        return in_slots(found, slots=chance.choice([2, 3, 4]), scaling=WITH_NUMA_NODES)
    return in_units(found)


def some_rules(chance: Random) -> AdmissionRules:
    """Of kubelets that align."""
    static = chance.random() < 0.4
    return AdmissionRules(
        mode=Mode.KUBELET,
        policy=chance.choice([Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE, Policy.BEST_EFFORT]),
        scope=chance.choice([Scope.CONTAINER, Scope.POD]),
        cpu_manager="static",
        reserved_cpus="0",
        memory_manager="Static" if static else "None",
        reserved_memory={0: {HOST_MEMORY: GIB}} if static else {},
    )


def some_container(chance: Random, in_units: bool, name: str) -> ContainerRequest:
    """Mostly with a part of a GPU."""
    cores, others = chance.choice([20, 20, 30, 40, 70, 100]), dict[str, int]()
    if chance.random() < 0.85 and in_units:
        others = {CORES: cores, **({MEMORY: chance.choice([4, 30])} if cores < 100 else {})}
    elif chance.random() < 0.85:
        memory = chance.choice([1000, 1000, 9000])
        others = {GPU: chance.choice([1, 1, 1, 2]), "nvidia.com/gpucores": cores, "nvidia.com/gpumem": memory}
    return container(name, cpus=chance.choice([1, 2, 2, 4, 6]), gib=chance.choice([1, 1, 20, 40]), others=others)


def some_pod(chance: Random, hardware: Topology, name: str) -> PodRequest:
    in_units, count = hardware.kind_of(CORES) == "unit", chance.choice([1, 1, 1, 1, 2])
    made = pod(*(some_container(chance, in_units, f"c{number}") for number in range(count)), name=name)
    said = {"nvidia.com/use-gpuuuid": "GPU-0,GPU-2"} if chance.random() < 0.1 else {}
    return msgspec.structs.replace(made, annotations=said)


SLOT = {GPU: 1, "nvidia.com/gpucores": 80, "nvidia.com/gpumem": 1000}
NEW = asked(pod(container("main", cpus=4, gib=1, others=SLOT), name="new"), "new")


def shared_by(cpus: int) -> OneNode:
    """Two GPUs on a NUMA node each; on the first a pod with so many CPUs holds a quarter of the GPU."""
    base = machine(nodes=2, gpus=(0, 1))
    gpus = tuple(msgspec.structs.replace(gpu, memory=16 * GIB) for gpu in base.gpus)
    world = OneNode(RULES, in_slots(msgspec.structs.replace(base, gpus=gpus), slots=4, scaling=WITH_NUMA_NODES))
    world.tell(world.says.all())
    world.tell(world.says.admit(pod(container("c0", cpus=cpus, gib=1, others=SLOT), name="sharer"), "sharer"))
    return world


async def test_a_pod_with_slots_waits_alone_and_tries_other_nodes_first() -> None:
    """NUMA node 0 has 75 cores and 2 CPUs left. The pod is led there when another one ends, and not when the sharer does."""
    world = shared_by(cpus=1)
    world.tell(world.says.admit(pod(container("c0", cpus=4, gib=1), name="cpus"), "cpus"))
    before = world.scheduler.prioritize(NEW, (NODE,))
    waits = world.scheduler.filter(NEW, (NODE,)).passed, await world.scheduler.fits_in_every_order(NODE, NEW)
    after = world.scheduler.prioritize(NEW, (NODE,))
    world.tell(world.says.end("cpus"))
    led = world.scheduler.filter(NEW, (NODE,)).refused[NODE].code
    world.tell(world.says.end("sharer"))

    assert before[0] > 0 == after[0]
    assert ((NODE,), "PodsPending", "ShareSplit") == (*waits, led)
    assert "" == await world.scheduler.fits_in_every_order(NODE, NEW) == await world.scheduler.lone.refusal(NODE, NEW)


async def test_a_pod_with_slots_does_not_wait_for_one_whose_bind_has_begun() -> None:
    """It would wait for that one if it was shown (above). Binds of a node reserve one after the other."""
    world = shared_by(cpus=1)
    world.tell(world.says.admit(pod(container("c0", cpus=4, gib=1), name="cpus"), "cpus"))
    world.tell(world.says.end("sharer"))
    alone = await world.scheduler.lone.refusal(NODE, NEW)
    world.view.assume(NODE, asked(pod(container("c0", cpus=1, gib=1, others=SLOT), name="sharer"), "sharer"))
    world.view.renew()

    assert ("", "") == (alone, await world.scheduler.lone.refusal(NODE, NEW))


async def test_slots_and_cpus_of_a_pod_become_free_together() -> None:
    """The CPUs that the pod would need on NUMA node 0 are those of the sharer: the record and the kubelet's files say so."""
    world = shared_by(cpus=4)

    assert "" == await world.scheduler.fits_in_every_order(NODE, NEW)
    world.tell(world.says.end("sharer"))
    assert "" == await world.scheduler.fits_in_every_order(NODE, NEW)


async def test_pods_that_fit_are_admitted_whatever_ends() -> None:
    """Against whole decisions: one to three pods come in random orders, and others end in between. Few wait for nothing."""
    alone = beside = lost = refused = 0  # `refused`: alone
    for seed in range(6000 if THOROUGH else 120):
        chance = Random(seed)
        hardware, rules = some_hardware(chance), some_rules(chance)
        others = [
            demand_of(some_pod(chance, hardware, f"q{number}"), rules) for number in range(chance.randrange(4, 16))
        ]
        pods = [
            demand_of(some_pod(chance, hardware, f"p{number}"), rules)
            for number in range(chance.choice([1, 1, 1, 2, 3]))
        ]
        state, holders = held_by(node(hardware), others, chance)
        demands = [each for each in pods if each is not None]
        if len(demands) < len(pods) or with_pod(state, demands[0]) is None:
            continue
        fit = await all_fit(state, [pending_pod(hardware, each) for each in demands], TaskTurns(ManualClock()))
        hurt = refused_after_ends(state, demands, holders, chance)
        alone, beside = alone + (fit and len(pods) == 1), beside + (fit and len(pods) > 1)
        refused += hurt and len(pods) == 1
        lost += len(pods) == 1 and not fit and not hurt

        assert not (fit and hurt), seed

    assert alone > 5 * lost
    assert min(alone, beside, refused) > 2
