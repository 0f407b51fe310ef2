"""A node that has too little in total is not called badly aligned: the code names what it has too little of."""

from random import Random

import msgspec
import pytest
from decision_support import container, machine, node, pod, refused
from faults_support import THOROUGH
from feasibility_support import demand_of, some_machine, some_node, some_pod, some_rules

from topoalign.core.admission.admit import decide_demand
from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.model.decisions import Refusal
from topoalign.core.model.ids import GPU, MEMORY
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, Mode, Policy, Scope
from topoalign.core.state.fold import NodeState

NODES = 4000 if THOROUGH else 800
POLICIES = [Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE]


def has_in_total(state: NodeState, asked: ContainerRequest, rules: AdmissionRules) -> bool:
    """Whether devices, exclusive CPUs and memory are free in total, by the allocations and the health of the node."""
    held = [*state.allocations.values()]
    in_use = {device for each in held for device in each.device_ids}
    for name, amount in asked.requests.items():
        if name in state.hardware.devices:
            free = [each for each in state.healthy(name) if each not in in_use]
            if len(free) < amount:
                return False
    if rules.memory_manager == "Static" and MEMORY in asked.requests:
        taken = sum(block.size for each in held for block in each.memory if block.resource == MEMORY)
        there = sum(
            (each.memory or 0) - sum(each.hugepages.values()) - rules.reserved_memory.get(each.id, {}).get(MEMORY, 0)
            for each in state.hardware.nodes
        )
        if there - taken < asked.requests[MEMORY]:
            return False
    return True


def test_a_node_with_too_little_in_total_is_never_called_not_aligned() -> None:
    """Random machines, rules, allocations and pods of one container, against a count of what is left."""
    named = aligned = 0
    for seed in range(NODES):
        chance = Random(seed)
        hardware = some_machine(chance)
        rules = msgspec.structs.replace(some_rules(chance, hardware), policy=chance.choice(POLICIES))
        state = some_node(chance, hardware, rules)
        request = some_pod(chance, hardware)
        demand = demand_of(request, rules)
        if demand is None or len(request.containers) > 1 or request.init_containers:
            continue
        decision = decide_demand(state, demand)
        if isinstance(decision, Refusal) and decision.reason == "TopologyAffinityError":
            if decision.code == "NotAligned":
                aligned += 1
                if demand.memory:
                    assert has_in_total(state, request.containers[0], rules), seed
                else:
                    lax = msgspec.structs.replace(rules, memory_manager="None")
                    assert has_in_total(state, request.containers[0], lax), seed
            else:
                named += 1
                assert decision.code.startswith("NotEnough") or decision.code == "NoHealthyDevice"
                assert decision.provider is None
    assert named > 20 and aligned > 20


@pytest.mark.parametrize("mode", [*Mode])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (container(gpus=5), "NotEnoughDevices"),
        (container(gpus=1, cpus=17, gib=1), "NotEnoughCpus"),
        (container(gpus=5, cpus=17, gib=1), "NotEnoughDevices"),
    ],
)
def test_the_code_names_what_an_empty_node_has_too_little_of(
    mode: Mode, policy: Policy, asked: ContainerRequest, code: str
) -> None:
    """Four GPUs and 16 CPUs; the reason stays that of the kubelet, as the policy refuses."""
    refusal = refused(decide_demand(node(machine()), read_pod(pod(asked), AdmissionRules(mode=mode, policy=policy))))

    assert (code, "TopologyAffinityError", None) == (refusal.code, refusal.reason, refusal.provider)


def test_a_pod_that_is_aligned_as_a_whole_is_counted_as_a_whole() -> None:
    """Two containers with three GPUs each, of four: in scope container the second has one left."""
    two = pod(container("a", gpus=3), container("b", gpus=3))
    codes = {
        scope: refused(
            decide_demand(
                node(machine(gpus=(0, 0, 0, 0))), read_pod(two, AdmissionRules(policy=Policy.RESTRICTED, scope=scope))
            )
        ).finding
        for scope in Scope
    }

    assert {
        Scope.POD: f"6 of {GPU} needed, 4 free and healthy",
        Scope.CONTAINER: f"3 of {GPU} needed, 1 free and healthy",
    } == codes


@pytest.mark.parametrize(
    ("init", "app"),
    [
        (container("init", gpus=3), container("main", gpus=2)),
        (container("init", cpus=10, gib=100), container("main", gpus=1, cpus=10, gib=100)),
    ],
)
def test_what_an_init_container_left_counts_as_free(init: ContainerRequest, app: ContainerRequest) -> None:
    """It is of both NUMA nodes, and the app container prefers one: it has to take over what would not suffice without it."""
    rules = AdmissionRules(mode=Mode.KUBELET, policy=Policy.RESTRICTED)

    refusal = refused(decide_demand(node(machine()), read_pod(pod(app, init=[init]), rules)))

    assert ("NotAligned", "main") == (refusal.code, refusal.container)
