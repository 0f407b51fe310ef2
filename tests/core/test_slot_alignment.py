"""Slots and the kubelet's Topology Manager: what it may align, what then never fits, and that GPUs are chosen near CPUs."""

from random import Random
from typing import Literal

import msgspec
import pytest
from decision_support import GIB, container, machine, node, pod
from feasibility_support import with_pod
from slot_support import CORES, MEMORY, PLAIN, WITH_NUMA_NODES, asks, given, holding, in_slots

from topoalign.core.admission.admit import admit
from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.model.decisions import Admission, Refusal
from topoalign.core.model.ids import GPU
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, Mode, Policy
from topoalign.core.model.topology.device_offers import Slots
from topoalign.core.model.topology.model import Topology
from topoalign.core.scoring.zones import device_counts

RULES = AdmissionRules(mode=Mode.KUBELET, policy=Policy.RESTRICTED, cpu_manager="static", reserved_cpus="0")
ALIGNING = (Policy.BEST_EFFORT, Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE)


def shared(places: tuple[int, ...] = (0, 0, 1, 1), slots: int = 10, terms: Slots = PLAIN) -> Topology:
    """Two NUMA nodes with eight CPUs each, and GPUs of 16 GiB."""
    plain = machine(nodes=max(places) + 1, gpus=places)
    sized = tuple(msgspec.structs.replace(gpu, memory=16 * GIB) for gpu in plain.gpus)
    return in_slots(msgspec.structs.replace(plain, gpus=sized), slots, scaling=terms)


def with_cpus(cpus: int, cores: int = 30, name: str = "main") -> ContainerRequest:
    return container(name, cpus=cpus, gib=1, others={GPU: 1, MEMORY: 1000, CORES: cores})


def test_slots_are_listed_without_numa_nodes_unless_the_offer_says_so() -> None:
    """So no zone of a NUMA node contains them; in an event the setting is read as it was written."""
    plain = shared()
    listed = shared(terms=WITH_NUMA_NODES)

    assert {None} == {*plain.devices[GPU].values()} and {(0,), (1,)} == {*listed.devices[GPU].values()}
    assert GPU not in device_counts(plain) and {0: 20, 1: 20} == device_counts(listed)[GPU]
    for offers in (plain.offers, listed.offers):
        assert offers is not None
        assert offers == tuple(msgspec.json.decode(msgspec.json.encode(each), type=type(each)) for each in offers)


@pytest.mark.parametrize("policy", [*Policy])
def test_a_pod_gets_gpus_near_its_cpus_if_these_have_enough(policy: Policy) -> None:
    """Node 0 has no CPUs left, and its GPUs have least left; then node 1 has GPUs with too little, and the pod runs."""
    rules = msgspec.structs.replace(RULES, policy=policy)
    first = with_pod(node(shared()), read_pod(pod(with_cpus(7), name="first"), rules))
    assert first is not None
    full = holding(first[0], (2, 80, 100), (3, 80, 100))

    near, far = (admit(state, pod(with_cpus(2)), rules) for state in (first[0], full))

    assert isinstance(near, Admission) and isinstance(far, Admission)
    gpus = [{*given(first[0], each.allocations[0])} for each in (near, far)]
    assert [{0}, {0}] == gpus if policy is Policy.NONE else [{2}, {0}] == gpus


@pytest.mark.parametrize("compat", ["", "hami"])
@pytest.mark.parametrize("policy", ALIGNING)
def test_topoalign_aligns_slots_that_no_kubelet_does(policy: Policy, compat: Literal["", "hami"]) -> None:
    """Mode `best`: node 1 has CPUs, and GPU-3 enough left; of GPU-0, which would be chosen without CPUs, least is left."""
    rules = AdmissionRules(policy=policy, compat=compat)
    state = holding(node(shared()), (0, 60, 100), (2, 80, 100))
    first = with_pod(state, read_pod(pod(container(cpus=8, gib=1), name="first"), rules))
    assert first is not None
    asked = pod(with_cpus(2), annotations={"hami.io/gpu-scheduler-policy": "binpack"})

    decision = admit(first[0], asked, rules)

    assert isinstance(decision, Admission)
    assert ({3}, (1,)) == ({*given(first[0], decision.allocations[0])}, decision.allocations[0].affinity)


def test_aligned_slots_of_more_gpus_than_a_numa_node_has_never_fit() -> None:
    """On any machine that is empty, under each policy that aligns; as many as the least of them has fit, and all without."""
    chance = Random(0)
    for _ in range(60):
        counts = [chance.randint(1, 3) for _ in range(chance.randint(2, 4))]
        places = tuple(place for place, count in enumerate(counts) for _ in range(count))
        slots = chance.choice([2, 3, 10])
        rules = msgspec.structs.replace(RULES, policy=chance.choice(ALIGNING))
        listed, plain = (node(shared(places, slots, terms)) for terms in (WITH_NUMA_NODES, PLAIN))
        for gpus in range(1, len(places) + 1):
            decisions = [admit(state, pod(asks(gpus, memory=100)), rules) for state in (listed, plain)]
            if gpus <= min(counts):
                assert isinstance(decisions[0], Admission), (counts, gpus)
            if gpus > max(counts):
                assert isinstance(decisions[0], Refusal), (counts, gpus)
            assert isinstance(decisions[1], Admission), (counts, gpus)


@pytest.mark.parametrize("policy", ALIGNING)
def test_a_refusal_names_the_setting_and_what_never_fits(policy: Policy) -> None:
    """Two NUMA nodes with one and two GPUs: the kubelet aligns two slots to the first, which one GPU has."""
    state = node(shared((0, 1, 1), terms=WITH_NUMA_NODES))

    found = [
        admit(state, pod(asks(gpus, memory=100)), msgspec.structs.replace(RULES, policy=policy)) for gpus in (2, 3)
    ]

    refusals = [each for each in found if isinstance(each, Refusal)]
    assert ["ShareSplit", "ShareSplit"] == [each.code for each in refusals]
    assert all("without sharing.slots.numaTopology" in each.remedy for each in refusals)
    assert all("alignment of slots (sharing.slots.numaTopology) leads" in each.finding for each in refusals)


@pytest.mark.parametrize(("policy", "code"), [(Policy.BEST_EFFORT, ""), (Policy.RESTRICTED, "NotAligned")])
def test_best_effort_aligns_slots_as_widely_as_the_cpus_need(policy: Policy, code: str) -> None:
    """Two NUMA nodes with eight CPUs each: for ten CPUs the kubelet takes both, and slots of three GPUs with them."""
    asked = container(cpus=10, gib=1, others={GPU: 3, MEMORY: 1000})

    decision = admit(node(shared(terms=WITH_NUMA_NODES)), pod(asked), msgspec.structs.replace(RULES, policy=policy))

    assert code == (decision.code if isinstance(decision, Refusal) else "")


def test_a_refusal_by_alignment_alone_names_the_setting() -> None:
    """The GPUs of node 0 have too little left; slots that are not aligned are not refused."""
    for terms in (WITH_NUMA_NODES, PLAIN):
        state = holding(node(shared(terms=terms)), (0, 80, 100), (1, 80, 100))
        decision = admit(state, pod(asks(1, memory=100, cores=30)), RULES)
        if terms is PLAIN:
            assert isinstance(decision, Admission) and {2} == {*given(state, decision.allocations[0])}
        else:
            assert isinstance(decision, Refusal) and "without sharing.slots.numaTopology" in decision.remedy
