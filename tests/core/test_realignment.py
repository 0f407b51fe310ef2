"""Pods that a kubelet admits in every order, whatever ends before it takes them."""

from random import Random

import pytest
from decision_support import GIB, container, machine, node, pod
from faults_support import THOROUGH
from feasibility_support import (
    Holders,
    demand_of,
    held_by,
    refused_after_ends,
    some_machine,
    some_pod,
    some_rules,
    with_pod,
)

from topoalign.core.admission.feasibility import need_of
from topoalign.core.admission.free_amounts import count_free
from topoalign.core.admission.realignment import AlignmentBudget, PendingPod, fit_whatever_ends, left_elsewhere
from topoalign.core.demand.pod_demand import PodDemand, read_pod
from topoalign.core.model.ids import GPU, MEMORY
from topoalign.core.model.requests import AdmissionRules, Mode, PodRequest, Policy
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState

RULES = AdmissionRules(
    mode=Mode.KUBELET,
    policy=Policy.RESTRICTED,
    cpu_manager="static",
    reserved_cpus="0",
    memory_manager="Static",
    reserved_memory={0: {MEMORY: GIB}},
)
SMALL = machine(nodes=3, gpus=(0, 0, 1, 1, 2, 2))
"""Eight CPUs and 64 GiB on each NUMA node."""


def waiting(topology: Topology, demand: PodDemand, key: object) -> PendingPod:
    need = need_of(topology, demand)
    return PendingPod(key, demand, True, need, need is not None and need.complete)


def small_pod(chance: Random, name: str) -> PodRequest:
    """Pods of which none needs as much of everything as another one."""
    gpus, cpus, gib = chance.choice([0, 1, 1, 1, 2]), chance.choice([1, 1, 2, 4, 6]), chance.choice([1, 1, 20, 45])
    return pod(container("main", gpus=gpus, cpus=cpus, gib=gib), name=name)


@pytest.fixture
def tight() -> tuple[NodeState, Holders]:
    """Free: 2 CPUs and 39 GiB on NUMA node 0, 7 CPUs and 4 GiB on node 1, and a GPU on each."""
    held = {"some": (1, 23), "most": (1, 60), "cpus": (4, 1)}
    pods = [
        read_pod(pod(container("main", cpus=cpus, gib=gib), name=name), RULES) for name, (cpus, gib) in held.items()
    ]
    state, holders = node(machine(nodes=2, gpus=(0, 1))), Holders()
    for each in pods:
        admitted = with_pod(state, each)
        assert admitted is not None
        state, holders[each.pod] = admitted
    return state, holders


MOVES = read_pod(pod(container("main", gpus=1, cpus=4, gib=1), name="a"), RULES)
STAYS = read_pod(pod(container("main", gpus=1, cpus=1, gib=20), name="b"), RULES)


def test_a_pod_may_take_what_another_was_to_get_once_a_third_ended(tight: tuple[NodeState, Holders]) -> None:
    """The first moves to the GPU of node 0 when CPUs are given back there; the other finds too little memory on node 1."""
    state, holders = tight
    pods = [waiting(state.hardware, each, number) for number, each in enumerate((MOVES, STAYS))]
    (moved,) = left_elsewhere(pods[0], count_free(state, RULES))
    ended = state.without(holders["cpus"][0])
    first = with_pod(ended, MOVES)
    assert first is not None

    assert (0, 1) == (moved.within[GPU][1], moved.within[GPU][2])
    assert with_pod(ended, STAYS) is not None
    assert with_pod(first[0], STAYS) is None
    assert not fit_whatever_ends(count_free(state, RULES), pods, AlignmentBudget())


def test_pods_that_find_room_in_the_first_set_fit_whatever_ends(tight: tuple[NodeState, Holders]) -> None:
    """Two that ask for the same: where the one moves, the other has the place that it leaves."""
    state, _ = tight
    pods = [waiting(state.hardware, each, "alike") for each in (MOVES, MOVES)]
    single = waiting(state.hardware, STAYS, "single")

    assert not fit_whatever_ends(count_free(state, RULES), pods, AlignmentBudget())
    assert fit_whatever_ends(count_free(state, RULES), [single], AlignmentBudget())
    assert not fit_whatever_ends(count_free(state, RULES), [single], AlignmentBudget(0))
    assert not fit_whatever_ends(count_free(state, RULES), [single._replace(decides=False)], AlignmentBudget())
    assert fit_whatever_ends(
        count_free(state, RULES), [single._replace(decides=False, must_fit=False)], AlignmentBudget()
    )


@pytest.mark.parametrize(
    ("small", "seeds"), [(True, 1500), (False, 15_000)] if THOROUGH else [(True, 60), (False, 400)]
)
def test_pods_that_fit_whatever_ends_are_admitted_whatever_ends(small: bool, seeds: int) -> None:
    """Against whole decisions, on random machines and rules: pods come in random orders, and others end in between."""
    fit = lost = 0
    for seed in range(seeds):
        chance = Random(seed)
        hardware = SMALL if small else some_machine(chance)
        rules = RULES if small else some_rules(chance, hardware)
        if rules.policy not in (Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE):
            continue

        def some(name: str, chance: Random = chance, hardware: Topology = hardware) -> PodRequest:
            return small_pod(chance, name) if small else some_pod(chance, hardware, name)

        pods = [demand_of(some(f"p{number}"), rules) for number in range(chance.choice([2, 2, 3]))]
        state, holders = held_by(
            node(hardware), [demand_of(some(f"q{number}"), rules) for number in range(chance.randrange(7))], chance
        )
        demands = [each for each in pods if each is not None]
        known = [waiting(hardware, each, number) for number, each in enumerate(demands)]
        if len(demands) < 2:
            continue
        if fit_whatever_ends(count_free(state, rules), known, AlignmentBudget()):
            fit += 1
            assert not refused_after_ends(state, demands, holders, chance), seed
        elif all(each.decides for each in known):
            lost += 1

    assert fit > seeds // 40
    assert lost or not small
