"""
Pods that a kubelet admits whatever ends before, though it may align them elsewhere: none of several containers takes what
another one was to get, and GPUs have the NICs beside them that the pod must have.
"""

import json
from collections import Counter
from collections.abc import Sequence
from itertools import chain, combinations
from random import Random

import msgspec
import pytest
from decision_support import container, machine, node, pod
from faults_support import THOROUGH
from feasibility_support import Holders, held_by, with_pod
from view_support import NODE, OneNode, asked

from topoalign.core.admission.feasibility import need_of
from topoalign.core.admission.free_amounts import count_free
from topoalign.core.admission.realignment import AlignmentBudget, containers_fit
from topoalign.core.demand.pod_demand import PodDemand, read_pod
from topoalign.core.deviceshare.koordinator_names import JOINT_ANNOTATION
from topoalign.core.model.requests import AdmissionRules, Mode, Policy
from topoalign.core.state.fold import NodeState
from topoalign.machines import catalogue
from topoalign.registry.scheduling.filter.admission_order import keeps_containers_together

pytestmark = pytest.mark.anyio
RULES = AdmissionRules(mode=Mode.KUBELET, policy=Policy.RESTRICTED, cpu_manager="static", reserved_cpus="0")
NEW = asked(pod(container("a", gpus=1, cpus=4, gib=1), container("b", gpus=2, cpus=1, gib=1), name="new"), "new")


def world(rules: AdmissionRules = RULES) -> OneNode:
    """Left are 2 GPUs and 2 CPUs on NUMA node 0, 1 GPU and 8 CPUs on node 1: the first container is aligned to node 1."""
    found = OneNode(rules, machine(nodes=2, gpus=(0, 0, 1)))
    found.tell(found.says.all())
    found.tell(found.says.admit(pod(container("c0", cpus=5, gib=1), name="cpus"), "cpus"))
    return found


async def test_a_pod_waits_while_an_end_could_part_its_containers() -> None:
    """Once the CPUs are given back, its first container is aligned to node 0, and no node has two GPUs for the second."""
    it = world()
    passed = it.scheduler.filter(NEW, (NODE,)).passed
    waits = await it.scheduler.lone.refusal(NODE, NEW), await it.scheduler.fits_in_every_order(NODE, NEW)
    it.tell(it.says.end("cpus"))

    assert ((NODE,), "PodsPending", "PodsPending") == (passed, *waits)
    assert "NotAligned" == it.scheduler.filter(NEW, (NODE,)).refused[NODE].code


@pytest.mark.parametrize(
    "rules", [AdmissionRules(mode=Mode.KUBELET), AdmissionRules(mode=Mode.KUBELET, policy=Policy.BEST_EFFORT)]
)
async def test_no_pod_waits_for_ends_where_no_alignment_refuses_it(rules: AdmissionRules) -> None:
    assert "" == await world(rules).scheduler.fits_in_every_order(NODE, NEW)


def test_pods_of_many_containers_are_given_up_on_before_they_take_long() -> None:
    """Each of 16 containers may be aligned to three NUMA nodes before that where there are CPUs now."""
    hardware = machine(nodes=4, cores=16, gpus=[place for place in range(4) for _ in range(16)])
    new = read_pod(pod(*(container(f"c{at}", gpus=1, cpus=1, gib=1) for at in range(16)), name="new"), RULES)
    fillers = [read_pod(pod(container(cpus=32 - (at == 0), gib=1), name=f"q{at}"), RULES) for at in range(3)]
    state, need = node(hardware), need_of(hardware, new)
    for each in fillers:
        state, _ = with_pod(state, each) or (state, [])
    emptied, steps = node(hardware), AlignmentBudget(500)

    assert with_pod(state, new) is not None
    assert need is not None
    assert not containers_fit(need, count_free(state, RULES), count_free(emptied, RULES), steps)
    assert steps.left < 0


def refused_after_some_end(state: NodeState, new: PodDemand, holders: Holders) -> bool:
    """Whether the node refuses the pod once some of the holders have ended, whichever."""
    sets = chain.from_iterable(combinations(holders, count) for count in range(1, len(holders) + 1))
    return any(with_pod(without(state, holders, ended), new) is None for ended in sets)


def without(state: NodeState, holders: Holders, ended: Sequence[str]) -> NodeState:
    for held in chain.from_iterable(holders[name] for name in ended):
        state = state.without(held)
    return state


def test_containers_stay_together_whatever_ends() -> None:
    """Against whole decisions, for all sets of pods that may end. Few wait for nothing."""
    seen = Counter[tuple[bool, bool]]()
    for seed in range(10_000 if THOROUGH else 250):
        chance = Random(seed)
        rules = msgspec.structs.replace(RULES, policy=chance.choice([Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE]))
        hardware = machine(gpus=[place for place in (0, 1) for _ in range(chance.choice([1, 2, 3]))])
        asks = [(chance.choice([0, 0, 0, 1]), chance.choice([1, 2, 3, 5])) for _ in range(chance.choice([1, 2, 3, 4]))]
        others = [container("c", gpus=gpus, cpus=cpus, gib=1) for gpus, cpus in asks]
        pods: list[PodDemand | None] = [
            read_pod(pod(each, name=f"q{number}"), rules) for number, each in enumerate(others)
        ]
        state, holders = held_by(node(hardware), pods, chance)
        parts = ((chance.choice([1, 1, 2]), chance.choice([1, 2, 4, 6])) for _ in range(chance.choice([2, 2, 3])))
        some = [container(f"c{at}", gpus=gpus, cpus=cpus, gib=1) for at, (gpus, cpus) in enumerate(parts)]
        new = read_pod(pod(*some, name="new"), rules)
        if with_pod(state, new) is not None:
            keeps = keeps_containers_together(state, new, need_of(hardware, new))
            seen[keeps, refused_after_some_end(state, new, holders)] += 1

    assert 0 == seen[True, True]
    assert seen[True, False] > 10 * seen[False, False]
    assert seen[False, True]


async def test_a_joint_pod_waits_while_an_end_could_cost_it_its_nic() -> None:
    """Four GPUs, each on a NUMA node; the second has no NIC beside it. It may be aligned there while that pod may end."""
    it = OneNode(msgspec.structs.replace(RULES, cpu_manager="none"), catalogue.machine("epyc-nps4-4gpu"))
    it.tell(it.says.all())
    for name in ("first", "second"):
        it.tell(it.says.admit(pod(container("c0", gpus=1), name=name), name))
    plain = pod(container("main", gpus=1), name="new")
    said = {JOINT_ANNOTATION: json.dumps({"deviceTypes": ["gpu", "rdma"], "requiredScope": "SamePCIe"})}
    new = asked(msgspec.structs.replace(plain, annotations=said))
    waits = [await it.scheduler.fits_in_every_order(NODE, each) for each in (new, asked(plain))]
    it.tell(it.says.end("second"))
    led = it.scheduler.filter(new, (NODE,)).refused[NODE].code
    it.tell(it.says.end("first"))

    assert (["PodsPending", ""], "DevicesDoNotFit") == (waits, led)
    assert "" == await it.scheduler.fits_in_every_order(NODE, new)
