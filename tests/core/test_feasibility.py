"""Verdicts from amounts agree with whole decisions."""

from collections import Counter
from random import Random

import msgspec
import pytest
from decision_support import container, machine, node, pod
from faults_support import THOROUGH
from feasibility_support import demand_of, some_machine, some_node, some_pod, some_rules

from topoalign.core.admission.admit import decide_demand
from topoalign.core.admission.feasibility import PodNeed, judge_amounts, machine_key, need_of, order_free_digest
from topoalign.core.admission.free_amounts import count_free
from topoalign.core.demand.pod_demand import PodDemand, read_pod
from topoalign.core.model.decisions import Refusal
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.requests import AdmissionRules, Mode, PodRequest, Policy
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.shapes import device_positions, rename_devices

PODS = 10
"""That are asked about on each node."""
NODES = 10_000 if THOROUGH else 250
CHUNK = 50


@pytest.mark.parametrize("first", range(0, NODES, CHUNK))
def test_verdict_from_amounts_is_that_of_the_decision(first: int) -> None:
    """On random machines, rules and nodes; where amounts do not decide, the verdict says so and is not compared."""
    answered = Counter[bool]()
    for seed in range(first, first + CHUNK):
        random = Random(seed)
        hardware = some_machine(random)
        rules = some_rules(random, hardware)
        state = some_node(random, hardware, rules)
        free = count_free(state, rules)
        for number in range(PODS):
            demand = demand_of(some_pod(random, hardware), rules)
            if demand is None:
                continue
            need = need_of(hardware, demand)
            got = judge_amounts(need, free) if need is not None else None
            answered[got is not None] += 1
            if got is not None:
                decision = decide_demand(state, demand)
                assert (decision.code if isinstance(decision, Refusal) else "") == got, (seed, number)
    assert answered[True] > 4 * answered[False]


def test_machines_with_equal_keys_have_equal_needs() -> None:
    """A machine with other uuids has the same key; and whatever changes a need changes a key."""
    needs: dict[tuple[bytes, bytes], PodNeed | None] = {}
    repeated = 0
    for seed in range(300):
        random = Random(seed)
        hardware = some_machine(random)
        rules = some_rules(random, hardware)
        other = rename_devices(hardware, {uuid: DeviceID(f"other-{uuid}") for _, uuid in device_positions(hardware)})
        assert machine_key(hardware) == machine_key(other)
        for number in range(PODS):
            demand = demand_of(some_pod(random, hardware, f"p{number}"), rules)
            for each in (hardware, other) if demand is not None else ():
                assert demand is not None
                key, need = (machine_key(each), demand_key(demand)), need_of(each, demand)
                repeated += key in needs
                assert needs.setdefault(key, need) == need, seed
    assert repeated > PODS


def demand_key(demand: PodDemand) -> bytes:
    """Equal for demands that ask for the same under the same rules."""
    containers = [(each.role, each.asked, each.devices, each.cpus, each.memory) for each in demand.containers]
    return order_free_digest(
        (demand.rules, demand.manages_memory, demand.devices, demand.cpus, demand.memory, containers)
    )


def judged(hardware: Topology, request: PodRequest, rules: AdmissionRules) -> tuple[str | None, str]:
    """The verdict on an empty machine, and the code of the decision."""
    demand, state = read_pod(request, rules), node(hardware)
    need, decision = need_of(hardware, demand), decide_demand(state, demand)
    assert need is not None
    return judge_amounts(need, count_free(state, rules)), decision.code if isinstance(decision, Refusal) else ""


def test_on_an_uneven_machine_more_cpus_may_be_given_than_are_free() -> None:
    """Sockets of 8 and 4 CPUs, of which 2 are kept: a socket with 6 free ones, as many as the average, is given whole."""
    hardware = machine(nodes=3, cores=2)
    cpus = tuple(msgspec.structs.replace(cpu, socket=cpu.node // 2) for cpu in hardware.cpus)
    uneven = msgspec.structs.replace(hardware, cpus=cpus)
    rules = AdmissionRules(mode=Mode.KUBELET, reserved_cpus="0,1", memory_manager="None")

    assert ("NotEnoughCpus", "NotEnoughCpus") == judged(hardware, pod(container(cpus=12, gib=1)), rules)
    assert (None, "") == judged(uneven, pod(container(cpus=12, gib=1)), rules)


def test_what_is_left_is_not_known_where_devices_have_no_numa_node() -> None:
    """On one NUMA node single-numa-node leaves the alignment open, and the first GPU is the one without a NUMA node."""
    rules = AdmissionRules(mode=Mode.KUBELET, policy=Policy.SINGLE_NUMA_NODE, memory_manager="None")
    request = pod(container("c0", gpus=1), container("c1", gpus=2))

    assert (None, "") == judged(machine(nodes=1, gpus=(None, 0, 0), nics=()), request, rules)
    assert ("", "") == judged(machine(nodes=1, gpus=(0, 0, 0), nics=()), request, rules)


def test_a_container_is_judged_by_what_the_one_before_leaves() -> None:
    """Two NUMA nodes with two GPUs and 64 GiB each: the second container fits on the other node, a third nowhere."""
    rules = AdmissionRules(mode=Mode.KUBELET, policy=Policy.RESTRICTED)
    apart = [container(f"c{number}", gpus=2, cpus=2, gib=40) for number in range(3)]

    assert ("", "") == judged(machine(), pod(*apart[:2]), rules)
    assert ("NotEnoughDevices", "NotEnoughDevices") == judged(machine(), pod(*apart), rules)
