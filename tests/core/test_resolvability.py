"""A refusal says whether waiting can help: by the decision on the empty machine, with the amounts that decide."""

import re
from collections import Counter
from random import Random

import msgspec
import pytest
import unit_support
from decision_support import GIB, container, machine, node, pod
from feasibility_support import PAGES, demand_of, some_machine, some_node, some_pod, some_rules
from slot_support import asks, holding, in_slots
from unit_support import CORES as CORE_UNITS
from unit_support import DGX, KUBELET
from unit_support import MEMORY as MEMORY_UNITS

from topoalign.core.admission.admit import decide_demand
from topoalign.core.admission.resolvability import HEAL, NEVER, WAIT, explain_decision, smaller_requests
from topoalign.core.admission.shortages import format_amount
from topoalign.core.demand.pod_demand import PodDemand, read_pod
from topoalign.core.model.decisions import Admission, Refusal, Resolvability
from topoalign.core.model.events import DeviceHealth, HealthState
from topoalign.core.model.ids import CPU, GPU, MEMORY, NIC
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, Mode, PodRequest, Policy, Scope
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState

SINGLE = AdmissionRules(mode=Mode.KUBELET, policy=Policy.SINGLE_NUMA_NODE)
RESTRICTED = AdmissionRules(mode=Mode.KUBELET, policy=Policy.RESTRICTED)
"""The machine has two NUMA nodes with 8 CPUs, 64 GiB and two GPUs each."""


def refusal(state: NodeState, asked: PodRequest, rules: AdmissionRules) -> Refusal:
    found = explain_decision(state, read_pod(asked, rules))
    assert isinstance(found, Refusal)
    return found


def held(state: NodeState, *pods: PodRequest, rules: AdmissionRules = SINGLE) -> NodeState:
    for each in pods:
        decision = decide_demand(state, read_pod(each, rules))
        assert isinstance(decision, Admission)
        for allocation in decision.allocations:
            state = state.holding(allocation)
    return state


@pytest.mark.parametrize(
    ("asked", "finding", "remedy"),
    [
        (
            container(gpus=3, cpus=1, gib=1),
            "3 nvidia.com/gpu (2, 2), 1 CPUs (8, 8), 1 GiB of memory (64, 64)",
            "ask for 2 instead of 3 nvidia.com/gpu; or set topologyManagerPolicy: best-effort",
        ),
        (
            container(gpus=1, cpus=9, gib=1),
            "1 nvidia.com/gpu (2, 2), 9 CPUs (8, 8), 1 GiB of memory (64, 64)",
            "ask for 8 instead of 9 CPUs; or set topologyManagerPolicy: best-effort",
        ),
        (
            container(gpus=1, cpus=1, gib=70),
            "1 nvidia.com/gpu (2, 2), 1 CPUs (8, 8), 70 GiB of memory (64, 64)",
            "ask for 64 instead of 70 GiB of memory; or set topologyManagerPolicy: best-effort",
        ),
    ],
)
def test_a_pod_that_never_fits_on_a_numa_node_is_not_advised_to_wait(
    asked: ContainerRequest, finding: str, remedy: str
) -> None:
    for state in (node(machine()), held(node(machine()), pod(container(gpus=1, cpus=4, gib=4), name="held"))):
        found = refusal(state, pod(asked), SINGLE)

        assert Resolvability.NEVER == found.resolvability
        assert found.finding.startswith(
            "even with no other pod on the node: policy single-numa-node refuses container 'main': "
        )
        assert found.finding.endswith(f"; needed, and free on NUMA nodes 0-1: {finding}")
        assert f"the pod never fits on this node: {remedy}" == found.remedy


def test_amounts_of_memory_are_named_in_gib() -> None:
    rules = with_rules(SINGLE, policy=Policy.NONE)

    found = refusal(node(machine()), pod(container(cpus=1, gib=130)), rules)

    assert found.finding.endswith("no NUMA nodes that may be used together have 130 GiB of memory free")
    assert ("2.5", f"GiB of {PAGES}") == format_amount(PAGES, 5 * GIB >> 1)
    assert ("1007.56", "GiB of memory") == format_amount(MEMORY, int(1007.56 * GIB))


def test_a_refusal_names_the_container_that_the_empty_machine_refuses() -> None:
    """Two of four GPUs are held: now `first` is refused, and on the empty machine `second`, which one GPU is left for."""
    asked = pod(container("first", gpus=3), container("second", gpus=2))
    rules = with_rules(SINGLE, policy=Policy.NONE)

    found = refusal(held(node(machine()), pod(container(gpus=2), name="held"), rules=rules), asked, rules)

    assert ("first", Resolvability.NEVER) == (found.container, found.resolvability)
    assert (
        "even with no other pod on the node: container 'second': 2 of nvidia.com/gpu needed, 1 free and healthy"
        == found.finding
    )
    assert (
        "the pod never fits on this node: ask for 1 instead of 2 nvidia.com/gpu in container 'second'" == found.remedy
    )


def test_a_pod_that_fits_once_others_end_may_wait_or_ask_for_less() -> None:
    state = held(node(machine()), *(pod(container(gpus=1, cpus=4, gib=4), name=f"held-{i}") for i in range(3)))

    found = refusal(state, pod(container(gpus=2, cpus=2, gib=4)), SINGLE)

    assert (Resolvability.IN_USE, "NotEnoughDevices") == (found.resolvability, found.code)
    assert "2 of nvidia.com/gpu needed, 1 free and healthy" == found.finding
    assert "wait until pods on this node end; or ask for 1 instead of 2 nvidia.com/gpu" == found.remedy


def test_a_pod_that_its_init_container_keeps_out_fits_by_scope_pod() -> None:
    """CPU 0 is kept for the system: the init container gets CPU 8 of NUMA node 0, and 7 are left there even when empty."""
    rules = with_rules(SINGLE, reserved_cpus="0")
    asked = pod(container("main", cpus=8, gib=4), init=[container("init", cpus=1, gib=1)])

    found = refusal(node(machine()), asked, rules)

    assert Resolvability.NEVER == found.resolvability
    assert "8 CPUs (7, 8)" in found.finding
    assert "set topologyManagerScope: pod" in found.remedy
    assert isinstance(decide_demand(node(machine()), read_pod(asked, with_rules(rules, scope=Scope.POD))), Admission)


def test_a_limit_of_0_that_the_kubelet_aligns_is_named() -> None:
    """All GPUs are near NUMA node 0 and the NIC near node 1: the kubelet gives hints for a limit of 0 NICs, too."""
    limits = {GPU: 1, NIC: 0}
    asked = pod(msgspec.structs.replace(container(), requests=limits, limits=limits))

    found = refusal(node(machine(gpus=(0, 0), nics=(1,))), asked, SINGLE)

    assert found.finding.endswith("1 nvidia.com/gpu (2, 0), 0 topoalign.io/nic (0, 1)")


def test_resources_that_need_different_numbers_of_numa_nodes_are_named() -> None:
    found = refusal(node(machine()), pod(container(gpus=1, cpus=9, gib=70)), RESTRICTED)

    assert Resolvability.NEVER == found.resolvability
    assert found.finding.endswith("1 nvidia.com/gpu (2, 2), 9 CPUs (8, 8), 70 GiB of memory (64, 64)")
    assert "the pod never fits on this node: set topologyManagerPolicy: best-effort" == found.remedy


@pytest.mark.parametrize(
    ("asked", "held_gpus", "held_mib"),
    [(asks(4, memory=1000), 0, 0), (asks(2, memory=30_000), 1, 5_000), (asks(2, memory=30_000), 1, 20_000)],
)
def test_unhealthy_gpus_are_the_cause_where_no_pod_that_ends_would_help(
    asked: ContainerRequest, held_gpus: int, held_mib: int
) -> None:
    """Seven, or six, of eight GPUs in slots are unhealthy; policy none. Changes are tried as if nobody had anything."""
    gpus = [gpu.id for gpu in DGX.gpus]
    state = holding(node(in_slots(DGX), unhealthy=gpus[: 6 + held_gpus]), *[(7, 0, held_mib)] * held_gpus)

    found = refusal(state, pod(asked), KUBELET)

    assert Resolvability.UNHEALTHY == found.resolvability
    assert found.finding.endswith(f"{6 + held_gpus} of 8 devices of nvidia.com/gpu are unhealthy or cordoned")
    assert found.remedy.startswith("the end of other pods does not help: repair, heal or uncordon the devices")
    assert f"ask for {2 - held_gpus} instead of" in found.remedy


def with_rules(rules: AdmissionRules, **changes: object) -> AdmissionRules:
    return msgspec.structs.replace(rules, **changes)


def test_a_refusal_that_has_its_own_remedy_keeps_it() -> None:
    found = refusal(node(machine()), pod(container(others={"example.com/none": 1})), AdmissionRules(mode=Mode.BEST))

    assert (Resolvability.NEVER, "UnknownResource") == (found.resolvability, found.code)
    assert "even with no other pod on the node" not in found.finding and found.remedy.startswith("ask for what it has")


def without_pods(state: NodeState) -> NodeState:
    """The node when all of its pods have ended, one after the other."""
    for each in list(state.allocations):
        state = state.without(each)
    return msgspec.structs.replace(state, memory={})


def all_healthy(state: NodeState) -> NodeState:
    assert state.health is not None
    good = DeviceHealth(state=HealthState.HEALTHY)
    cards = dict.fromkeys(state.health.devices, good)
    return msgspec.structs.replace(state, health=msgspec.structs.replace(state.health, devices=cards))


def some_shares(random: Random) -> tuple[Topology, PodRequest]:
    """A machine with its GPUs in slots or in units, and a pod that asks for some with amounts."""
    cpus = {CPU: random.choice([1, 8, 40, 70]) * 1000, MEMORY: GIB} if random.random() < 0.4 else {}
    if random.random() < 0.4:
        share = unit_support.asks(random.choice([20, 60, 100, 200, 500]), random.choice([0, 10, 150, 160]))
        found = unit_support.in_units(DGX)
    else:
        memory, cores = random.choice([0, 1000, 20_000, 40_000]), random.choice([0, 30, 60])
        share, found = asks(random.choice([1, 1, 2, 3, 4, 5, 8]), memory, cores), in_slots(DGX)
    amounts = {**share.requests, **cpus}
    return found, pod(msgspec.structs.replace(share, requests=amounts, limits=amounts))


def some_holders(random: Random, state: NodeState) -> NodeState:
    """The node of which some GPUs in slots, or units of them, are held, and some are unhealthy."""
    gpus = [gpu.id for gpu in DGX.gpus]
    state = node(state.hardware, random.sample(gpus, random.choice([0, 0, 0, 1, 4, 6])))
    if MEMORY_UNITS in state.hardware.devices:
        for number, gpu in enumerate(random.sample(gpus, random.randrange(9))):
            cores = state.hardware.devices[CORE_UNITS].by_base[gpu]
            state = unit_support.holds(state, f"q{number}", {CORE_UNITS: tuple(cores)[: random.choice([10, 60, 100])]})
        return state
    amounts = [(gpu, random.choice([0, 30, 50]), random.choice([5_000, 20_000])) for gpu in range(8)]
    return holding(state, *random.sample(amounts, random.randrange(9)))


def some_refusal(random: Random) -> tuple[NodeState, PodDemand, Refusal]:
    """A random pod on a random node, in either mode, and what it is explained to be."""
    while True:
        in_shares = random.random() < 0.4
        hardware = some_machine(random)
        asked = some_pod(random, hardware)
        if in_shares:
            hardware, asked = some_shares(random)
        rules = with_rules(some_rules(random, hardware), mode=random.choice([Mode.KUBELET, Mode.KUBELET, Mode.BEST]))
        demand = demand_of(asked, rules)
        if demand is None:
            continue
        state = some_holders(random, node(hardware)) if in_shares else some_node(random, hardware, rules)
        decision = explain_decision(state, demand)
        if isinstance(decision, Refusal):
            return state, demand, decision


def check_resolvability(state: NodeState, demand: PodDemand, found: Refusal) -> None:
    """That what a refusal says of waiting is what the decision says on the empty machine."""
    empty = decide_demand(without_pods(state), demand)
    healthy = decide_demand(all_healthy(without_pods(state)), demand)
    if found.resolvability is Resolvability.IN_USE:
        assert isinstance(empty, Admission)
    elif found.resolvability is Resolvability.UNHEALTHY:
        assert isinstance(empty, Refusal) and isinstance(healthy, Admission)
    elif found.resolvability is Resolvability.NEVER:
        assert isinstance(empty, Refusal) and isinstance(healthy, Refusal)
    assert found.remedy.startswith(WAIT) == (found.resolvability is Resolvability.IN_USE)
    assert found.resolvability not in (Resolvability.NEVER, Resolvability.UNHEALTHY) or "wait until" not in found.remedy
    if not found.remedy.startswith((WAIT, HEAL, NEVER)):  # its own remedy is none of those that are tried
        return
    check_changes(found.remedy, state if found.resolvability is Resolvability.IN_USE else without_pods(state), demand)


def check_changes(remedy: str, state: NodeState, demand: PodDemand) -> None:
    """That each rule of the kubelet that a remedy names suffices."""
    for field, name, kind in (("topologyManagerScope", "scope", Scope), ("topologyManagerPolicy", "policy", Policy)):
        for value in re.findall(f"(?:set {field}:|use {name}) ([a-z-]+)", remedy):
            changed = read_pod(demand.request, with_rules(demand.rules, **{name: kind(value)}))
            assert isinstance(decide_demand(state, changed), Admission)


def test_what_is_said_of_waiting_holds_on_the_empty_machine() -> None:
    """Random refused pods: all policies, scopes, modes and CPU options, machines of the catalogue, whole GPUs and slots."""
    random, seen = Random(7), Counter[Resolvability | None]()
    for _ in range(60):
        state, demand, found = some_refusal(random)
        check_resolvability(state, demand, found)
        seen[found.resolvability] += 1
    assert {Resolvability.IN_USE, Resolvability.NEVER, Resolvability.UNHEALTHY} <= seen.keys()


def test_a_smaller_request_is_the_largest_that_is_admitted() -> None:
    asked = pod(container(gpus=4, cpus=9, gib=4))

    found = smaller_requests(asked, lambda each: each.containers[0].requests[GPU] < 3)

    assert [(GPU, 2, "ask for 2 instead of 4 nvidia.com/gpu")] == [
        (each.resource, each.amount, each.text) for each in found
    ]


def test_a_smaller_request_keeps_a_limit_that_is_larger() -> None:
    """A limit that equals the request goes with it."""
    asked = container(gpus=4, cpus=2)
    asked = msgspec.structs.replace(asked, limits={**asked.limits, CPU: 4_000})

    found = {
        each.resource: each.pod.containers[0] for each in smaller_requests(pod(asked), lambda each: each != pod(asked))
    }

    assert (1_000, 4_000) == (found[CPU].requests[CPU], found[CPU].limits[CPU])
    assert (3, 3) == (found[GPU].requests[GPU], found[GPU].limits[GPU])
