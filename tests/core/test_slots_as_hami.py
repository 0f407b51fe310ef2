"""Where HAMi's rules choose, slots are of the GPUs that HAMi would choose: against its rules, and its traps by hand."""

from collections.abc import Mapping
from random import Random

import hami_reference as reference
import msgspec
import pytest
from decision_support import machine, node, pod
from hami_slot_support import (
    BIND,
    MIXED_SIZES,
    NAMES,
    NODES,
    NVLINKS,
    POLICY,
    SIZES,
    SLOTS,
    USE_UUID,
    WEIGHTS,
    Used,
    annotations,
    as_hami,
    hardware,
    mixed,
    state_of,
    usage,
)
from hami_support import request
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from instance_support import A100
from slot_support import MIB, asks, given, holding, in_slots
from unit_support import BEST, DGX, KUBELET, admitted, refused

from topoalign.core.admission.admit import admit
from topoalign.core.admission.gang_plan import has_its_own
from topoalign.core.model.decisions import Admission
from topoalign.core.model.ids import GPU
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, Mode, Policy
from topoalign.core.model.topology.device_offers import Offer, Slots
from topoalign.core.state.fold import NodeState
from topoalign.core.state.share_amounts import held_by_slot, offered_in_slots, sum_amounts

WEIGHED = (None, "binpack", "spread", "topology-aware", "binpack,numa", "numa,spread", "mutex,topology-aware")
POLICIES = (*filter(None, WEIGHED), "mutex", "numa", "numa,mutex", "topology-aware,binpack")
Asked = tuple[int, int, int, int]
"""GPUs, cores, MiB, percentage."""


def expected(used: Used, asked: list[Asked], says: Mapping[str, str]) -> list[set[int]] | None:
    """The GPUs of each of a pod's containers by HAMi's rules; None: it has none."""
    cards = [
        reference.Card(
            uuid=f"GPU-{at}",
            index=at,
            numa=NODES[at],
            type=NAMES[at],
            slots=SLOTS,
            used_slots=len(used.get(at, ())),
            memory=SIZES[at],
            used_memory=sum(memory for _, memory in used.get(at, ())),
            used_cores=sum(cores for cores, _ in used.get(at, ())),
        )
        for at in range(len(NODES))
    ]
    scores: dict[str, dict[str, int]] = {card.uuid: {} for card in cards}
    for a in range(len(NODES)):
        for b in range(len(NODES)):
            worth = (50 if NODES[a] == NODES[b] else 10) + 100 * NVLINKS.get((min(a, b), max(a, b)), 0)
            scores[f"GPU-{a}"] |= {f"GPU-{b}": worth} if a != b else {}
    requests = [
        [request(count=count, cores=cores, memory=memory, percent=101 if memory else percentage or 100)]
        for count, cores, memory, percentage in asked
    ]
    weights = [int(each.partition("=")[2]) for each in says.get(WEIGHTS, "slot=1,core=1,memory=1").split(",")]
    placed = reference.place(
        reference.Node(cards, scores=scores), list(requests), 0, says, (weights[0], weights[1], weights[2])
    )
    return None if isinstance(placed, str) else [{int(uuid[4:]) for uuid, _, _ in given} for given in placed[0]]


asked = st.tuples(
    st.sampled_from([1, 1, 2, 3]),
    st.sampled_from([0, 25, 50, 100]),
    st.sampled_from([0, 0, 2_048, 16_384]),
    st.sampled_from([0, 25, 50]),
).filter(lambda each: any(each[1:]))


BOTH = [as_hami(BEST), as_hami(KUBELET)]


def asking(several: list[Asked]) -> list[ContainerRequest]:
    return [
        asks(count, memory, cores, percentage, name=f"c{place}")
        for place, (count, cores, memory, percentage) in enumerate(several)
    ]


@settings(max_examples=60)
@drawn(usage(), st.lists(asked, min_size=1, max_size=2), annotations(POLICIES, WEIGHED), st.sampled_from(BOTH))
def test_containers_get_the_gpus_that_hami_would_choose(
    used: Used, several: list[Asked], says: dict[str, str], rules: AdmissionRules
) -> None:
    """On the whole machine, one container after the other; where HAMi finds none, neither does the node."""
    state, wanted = state_of(used), expected(used, several, says)

    decision = admit(state, pod(*asking(several), annotations=says), rules)

    assert (wanted is not None) == isinstance(decision, Admission), decision
    if isinstance(decision, Admission):
        assert wanted == [{*given(state, each)} for each in decision.allocations]
        assert decision == admit(state, pod(*asking(several), annotations=says), rules)


def check_amounts(state: NodeState) -> None:
    """Of no GPU more is held than it has, and one with all cores held by one container has no other."""
    for gpu, slots in held_by_slot(state.hardware, state.allocations.values()).items():
        offered, held = offered_in_slots(state.hardware)[gpu], sum_amounts(slots.values())
        assert held.cores <= offered.cores and held.memory <= offered.memory, (gpu, slots)
        assert len(slots) == 1 or all(each.cores < offered.cores for each in slots.values()), (gpu, slots)


def test_whatever_hami_would_oversell_no_gpu_has_more_held_than_it_offers() -> None:
    """Scaled cores and memory, an unknown NUMA node, and every alignment: pods come until ten were refused."""
    policies, outcomes = ["binpack", "spread", "mutex", "topology-aware", "numa,binpack"], set[bool]()
    for seed in range(8):
        chance = Random(seed)
        scaling = Slots(core_scaling=chance.choice([0.5, 1.0, 2.0]), memory_scaling=chance.choice([0.5, 1.0, 1.5]))
        topology = in_slots(mixed(), 4, scaling=scaling) if seed % 2 else hardware(scaling)
        rules = as_hami(AdmissionRules(mode=chance.choice([*Mode]), policy=chance.choice([*Policy])))
        state, left = node(topology), 10
        for number in range(60):
            says = {POLICY: chance.choice(policies), BIND: chance.choice(["true", "false"])}
            wanted = asks(
                chance.choice([1, 1, 2]), chance.choice([0, 3_000]), chance.choice([0, 20, 100]), chance.choice([0, 30])
            )
            request = msgspec.structs.replace(pod(wanted, annotations=says), name=f"p{number}")
            decision = admit(state, request, rules)
            outcomes.add(isinstance(decision, Admission))
            if isinstance(decision, Admission):
                (got,) = decision.allocations
                assert len(given(state, got)) == len(got.devices[GPU]), "of different GPUs"
                state = state.holding(got)
                check_amounts(state)
            elif left := left - 1:
                continue
            else:
                break

    assert {True, False} == outcomes


@pytest.mark.parametrize("rules", BOTH)
def test_without_a_policy_hami_spreads_where_we_pack(rules: AdmissionRules) -> None:
    """GPU-1 has 4 of 4 x 25 cores left, GPU-0 three; of two equal ones HAMi takes that of the higher NUMA node and index."""
    state, request = state_of({0: [(25, 1_024)]}), pod(asks(memory=1_024))

    as_we_do = admitted(state, request, msgspec.structs.replace(rules, compat=""))[0]

    assert {4} == {*given(state, admitted(state, request, rules)[0])}
    assert {0} == {*given(state, as_we_do)}


@pytest.mark.parametrize(
    ("says", "gpu"),
    [
        ({POLICY: "binpack"}, 0),
        ({POLICY: "spread"}, 1),
        ({}, 1),
        ({POLICY: "binpack", WEIGHTS: "slot=1,core=0,memory=1"}, 1),
        ({POLICY: "numa,binpack"}, 1),
    ],
)
@pytest.mark.parametrize("rules", BOTH)
def test_the_documented_example_is_decided_so(says: dict[str, str], gpu: int, rules: AdmissionRules) -> None:
    """10 x (0.1 + 0.3 + 0.1) = 5 of GPU-0, and 10 x (0.2 + 0.2) = 4 of GPU-1, on two NUMA nodes."""
    plain = machine(gpus=(0, 1))
    sized = tuple(msgspec.structs.replace(each, memory=40_960 * MIB) for each in plain.gpus)
    topology = in_slots(msgspec.structs.replace(plain, gpus=sized), 10)
    state = holding(node(topology), (0, 30, 4_096), (1, 0, 4_096), (1, 0, 4_096))

    assert {gpu} == {*given(state, admitted(state, pod(asks(cores=40, memory=4_096), annotations=says), rules)[0])}


@pytest.mark.parametrize("rules", BOTH)
def test_what_the_walk_throws_away_is_lost_as_in_hami(rules: AdmissionRules) -> None:
    """
    Best connected GPUs of one NUMA node: the walk ends on node 0, of which one GPU is full, and forgets the three of node 1.
    """
    state = state_of({2: [(0, 1_024)] * 4})
    request = pod(asks(2, memory=1_024), annotations={POLICY: "topology-aware", BIND: "true"})

    refusal = refused(state, request, rules)

    assert "ShareDoesNotFit" == refusal.code
    assert "1/" in refusal.finding and "AllocatedCardsInsufficientRequest" in refusal.finding
    assert {3, 4} == {*given(state, admitted(state, request, msgspec.structs.replace(rules, compat=""))[0])}


@pytest.mark.parametrize("rules", BOTH)
def test_whole_gpus_are_unused_ones_where_hami_would_share_them(rules: AdmissionRules) -> None:
    """Of 200 cores HAMi gives 100 to a container that wants a GPU for itself, beside others; of 50 it gives none."""
    whole = pod(asks(cores=100, memory=1_024), annotations={POLICY: "binpack"})
    doubled = state_of({0: [(20, 1_024)]}, hardware(Slots(core_scaling=2.0)))

    assert {4: (200, 1_024)} == given(doubled, admitted(doubled, whole, rules)[0])
    refusal = refused(node(hardware(Slots(core_scaling=0.5))), whole, rules)
    assert ("ShareDoesNotFit", True) == (refusal.code, "5/5 CardInsufficientCore" in refusal.finding)


@pytest.mark.parametrize("rules", BOTH)
def test_gpus_of_no_known_numa_node_are_on_none(rules: AdmissionRules) -> None:
    """GPU-4 would be on node 0 for HAMi, and comes first there."""
    says = {BIND: "true", POLICY: "binpack", USE_UUID: "GPU-0,GPU-1,GPU-4"}
    state = holding(node(mixed()), (4, 10, MIXED_SIZES[4] // 2), (0, 10, 1_000))

    assert {0, 1} == {*given(state, admitted(state, pod(asks(2, memory=100), annotations=says), rules)[0])}


@pytest.mark.parametrize("rules", BOTH)
def test_instances_for_one_container_are_of_different_gpus(rules: AdmissionRules) -> None:
    """HAMi may take several of one GPU. The fullest of three has no place for another instance of 20 GiB."""
    gpus = [msgspec.structs.replace(gpu, mig=(), mig_profiles=A100) for gpu in DGX.gpus[:3]]
    offer = Offer(resource=GPU, devices=tuple(gpu.id for gpu in gpus), replicas=7, slots=Slots(instances=True))
    topology = msgspec.structs.replace(DGX, gpus=(*gpus, *DGX.gpus[3:]), offers=(offer,))
    state = holding(node(topology), (0, 43, 20 * 1024), (0, 43, 20 * 1024), (1, 15, 5 * 1024))

    got = admitted(state, pod(asks(2, memory=11 * 1024), annotations={POLICY: "binpack"}), rules)[0]

    assert {1: (43, 20 * 1024), 2: (43, 20 * 1024)} == given(state, got)


@pytest.mark.parametrize(
    ("says", "found"),
    [
        ({POLICY: "numa,fastest"}, "'fastest' is no policy"),
        ({POLICY: "binpack,"}, "no policy"),
    ],
)
def test_words_that_hami_would_pass_over_are_refused(says: dict[str, str], found: str) -> None:
    refusal = refused(node(hardware()), pod(asks(memory=1), annotations=says), as_hami(KUBELET))

    assert ("InvalidShare", True) == (refusal.code, found in refusal.finding)


def test_lists_of_policies_are_for_nodes_where_hami_chooses() -> None:
    request = pod(asks(memory=1), annotations={POLICY: "numa,mutex"})
    allocations = admitted(node(hardware()), request, as_hami(KUBELET))

    assert "InvalidShare" == refused(node(hardware()), request, KUBELET).code
    assert has_its_own(request, allocations), "it must have unused GPUs"
