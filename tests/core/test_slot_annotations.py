"""Pods with slots that say which GPUs they accept and how they are chosen: against a look at all sets, and by hand."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import combinations

import msgspec
import pytest
from decision_support import machine, node, pod
from hami_slot_support import (
    BIND,
    MIXED_NODES,
    MIXED_SIZES,
    NAMES,
    NO_TYPE,
    NO_UUID,
    POLICY,
    SLOTS,
    USE_TYPE,
    USE_UUID,
    WEIGHTS,
    Used,
    annotations,
    mixed,
    state_of,
    usage,
)
from hypothesis import assume, settings
from hypothesis import given as drawn
from hypothesis import strategies as st
from slot_support import MIB, WITH_NUMA_NODES, asks, given, holding, in_mig_mode, in_slots
from unit_support import BEST, DGX, KUBELET, admitted, refused

from topoalign.core.admission.admit import admit
from topoalign.core.demand.shares import are_on_one_node
from topoalign.core.model.decisions import Admission
from topoalign.core.model.holdings import base_of
from topoalign.core.model.ids import CPU
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, Mode, Policy
from topoalign.core.state.fold import NodeState


class Reference:
    """The rules, one after the other; all sets of GPUs."""

    def __init__(self, used: Used, asked: tuple[int, int, int, int], says: Mapping[str, str]) -> None:
        """`asked`: GPUs, cores, MiB, percentage."""
        self.used, self.says = used, says
        self.count, self.cores, self.memory, self.percentage = asked
        self.weights = [int(each.partition("=")[2]) for each in says.get(WEIGHTS, "slot=1,core=1,memory=1").split(",")]

    def memory_of(self, gpu: int) -> int:
        return self.memory or MIXED_SIZES[gpu] * (self.percentage or 100) // 100

    def accepts(self, gpu: int) -> bool:
        model, uuid = NAMES[gpu].casefold(), f"GPU-{gpu}"

        def is_listed(key: str) -> bool:
            parts = self.says[key].split(",")
            return uuid in parts if key in (USE_UUID, NO_UUID) else any(part.casefold() in model for part in parts)

        return all(key not in self.says or is_listed(key) for key in (USE_TYPE, USE_UUID)) and not any(
            key in self.says and is_listed(key) for key in (NO_TYPE, NO_UUID)
        )

    def has_enough(self, gpu: int) -> bool:
        held = self.used.get(gpu, ())
        if held and (self.cores == 100 or self.says.get(POLICY) == "mutex"):
            return False
        cores, memory = sum(cores for cores, _ in held), sum(mib for _, mib in held)
        return (
            len(held) < SLOTS and 100 - cores >= max(1, self.cores) and MIXED_SIZES[gpu] - memory >= self.memory_of(gpu)
        )

    def sets(self) -> list[tuple[int, ...]]:
        ones = [gpu for gpu in range(len(NAMES)) if self.accepts(gpu) and self.has_enough(gpu)]
        return [each for each in combinations(ones, self.count) if self.count == 1 or self.may_be_together(each)]

    def may_be_together(self, gpus: Sequence[int]) -> bool:
        nodes = {MIXED_NODES[gpu] for gpu in gpus}
        return self.says.get(BIND) != "true" or (len(nodes) == 1 and None not in nodes)

    def fullness(self, gpus: Sequence[int]) -> Fraction:
        total = Fraction(0)
        for gpu in gpus:
            held = self.used.get(gpu, ())
            slot, core, memory = self.weights
            total += slot * Fraction(len(held) + 1, SLOTS)
            total += core * Fraction(sum(cores for cores, _ in held) + self.cores, 100)
            total += memory * Fraction(sum(mib for _, mib in held) + self.memory_of(gpu), MIXED_SIZES[gpu])
        return total


BOTH = [BEST, KUBELET]
ALIGNED = [
    AdmissionRules(mode=mode, policy=policy)
    for mode in Mode
    for policy in (Policy.BEST_EFFORT, Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE)
]


def gpus_of(state: NodeState, decision: object, place: int = 0) -> set[int]:
    assert isinstance(decision, Admission), decision
    return {*given(state, decision.allocations[place])}


chosen = annotations(("binpack", "spread", "mutex", "topology-aware"), ("binpack", "spread"))
wanted = st.tuples(
    st.integers(1, 3),
    st.sampled_from([0, 20, 50, 100]),
    st.sampled_from([0, 0, 2_000, 30_000]),
    st.sampled_from([0, 25, 50]),
)


@drawn(
    usage(MIXED_SIZES, (0, 10, 40), (1, 4_000, 15_000)),
    wanted,
    chosen,
    st.sampled_from(BOTH),
)
def test_gpus_are_those_that_the_annotations_choose(
    used: Used, asked: tuple[int, int, int, int], says: dict[str, str], rules: AdmissionRules
) -> None:
    count, cores, memory, percentage = asked
    assume(cores or memory or percentage)
    reference, state = Reference(used, asked, says), state_of(used, mixed())

    decision = admit(state, pod(asks(count, memory, cores, percentage), annotations=says), rules)

    sets = reference.sets()
    assert isinstance(decision, Admission) == bool(sets), decision
    if sets:
        found = tuple(sorted(gpus_of(state, decision)))
        assert found in sets
        best = {"binpack": max, "spread": min}.get(says.get(POLICY, ""))
        if best is not None and cores < 100:
            assert best(map(reference.fullness, sets)) == reference.fullness(found)


@settings(max_examples=60)
@drawn(
    usage(MIXED_SIZES, (0, 10, 40), (1, 4_000, 15_000)),
    wanted,
    chosen,
    st.sampled_from(ALIGNED),
)
def test_no_alignment_leads_to_other_gpus(
    used: Used, asked: tuple[int, int, int, int], says: dict[str, str], rules: AdmissionRules
) -> None:
    """Wherever a policy aligns a container, it gets GPUs that its pod accepts, or nothing."""
    count, cores, memory, percentage = asked
    assume(cores or memory or percentage)
    state = state_of(used, mixed())

    decision = admit(state, pod(asks(count, memory, cores, percentage), annotations=says), rules)

    if isinstance(decision, Admission):
        assert tuple(sorted(gpus_of(state, decision))) in Reference(used, asked, says).sets()


@pytest.mark.parametrize("rules", BOTH)
@pytest.mark.parametrize(
    ("says", "asked", "code"),
    [
        ({USE_UUID: "GPU-1"}, asks(2, memory=1), "NotEnoughShareGpus"),
        ({USE_UUID: "GPU-1"}, asks(memory=70_000), "NotEnoughShareMemory"),
        ({NO_TYPE: "H100,l4"}, asks(cores=100), "NotEnoughUnusedGpus"),
        ({POLICY: "mutex", USE_TYPE: "a100"}, asks(memory=1), "NotEnoughUnusedGpus"),
        ({BIND: "true", USE_TYPE: "a100"}, asks(2, memory=1), "ShareSplit"),
    ],
)
def test_a_node_without_room_on_such_gpus_says_why(
    says: dict[str, str], asked: ContainerRequest, code: str, rules: AdmissionRules
) -> None:
    state = state_of({0: [(5, 100)], 1: [(5, 20_000)], 2: [(5, 100)]}, mixed())

    refusal = refused(state, pod(asked, annotations=says), rules)

    assert code == refusal.code
    assert refusal.finding.startswith("limits[nvidia.com/gpu")


@pytest.mark.parametrize("rules", BOTH)
@pytest.mark.parametrize(
    ("says", "why"),
    [
        ({USE_TYPE: "B200"}, "5 of another type"),
        ({USE_UUID: "GPU-7"}, "5 not among the uuids"),
        ({NO_TYPE: "NVIDIA"}, "5 of another type"),
        ({NO_UUID: "GPU-0,GPU-1,GPU-2,GPU-3,GPU-4"}, "5 not among the uuids"),
        ({USE_UUID: "GPU-1,GPU-7", NO_TYPE: "H100"}, "3 not among the uuids, 2 of another type"),
        ({USE_UUID: "GPU-1", NO_UUID: "GPU-1,GPU-2"}, "5 not among the uuids"),
    ],
)
def test_lists_that_accept_no_gpu_of_the_node_are_named(says: dict[str, str], why: str, rules: AdmissionRules) -> None:
    refusal = refused(node(mixed()), pod(asks(memory=1), annotations=says), rules)
    lists = {"of another type": f" ({USE_TYPE}, {NO_TYPE})", "not among the uuids": f" ({USE_UUID}, {NO_UUID})"}
    for reason, keys in lists.items():
        why = why.replace(reason, reason + keys)

    assert "NoGpuAccepted" == refusal.code
    assert f"limits[nvidia.com/gpu]: no GPU of the node may be chosen: {why}" == refusal.finding


def test_where_the_alignment_leaves_none_of_the_gpus_it_is_split() -> None:
    """A kubelet aligns to the first NUMA node, and the only GPU that is accepted is on the second."""
    aligned = AdmissionRules(mode=Mode.KUBELET, policy=Policy.SINGLE_NUMA_NODE)
    asked = pod(asks(memory=100), annotations={USE_UUID: "GPU-3"})

    refusal = refused(node(mixed(WITH_NUMA_NODES)), asked, aligned)

    assert "ShareSplit" == refusal.code
    assert "'GPU-0' is not what the pod's annotations accept" in refusal.finding
    assert {3} == gpus_of(node(mixed()), admit(node(mixed()), asked, AdmissionRules(policy=Policy.SINGLE_NUMA_NODE)))


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ({POLICY: "binpack"}, 0),
        ({POLICY: "binpack", WEIGHTS: "slot=1,core=1,memory=3"}, 1),
        ({POLICY: "binpack", WEIGHTS: "slot=1,core=3,memory=1"}, 0),
        ({POLICY: "spread"}, 1),
        ({POLICY: "spread", WEIGHTS: "slot=1,core=1,memory=3"}, 0),
    ],
)
@pytest.mark.parametrize("rules", BOTH)
def test_weights_say_which_gpu_is_fullest(says: dict[str, str], expected: int, rules: AdmissionRules) -> None:
    """
    Of ten slots, 100 cores and 40960 MiB each one GPU has 1, 49 and a tenth held, the other 3, 10 and a fifth. As in HAMi's
    example equal weights take the first, and thrice the memory the second.
    """
    state = holding(node(in_slots(DGX, 10, 2)), (0, 49, 4_096), *((1, cores, 2_731) for cores in (4, 3, 3)))

    assert {expected} == {*given(state, admitted(state, pod(asks(cores=40, memory=4_096), annotations=says), rules)[0])}


def test_a_share_by_percentage_counts_what_it_is_of_each_gpu() -> None:
    """With half of the memory GPU-0 would be full to 24000 of 40000 MiB, GPU-1 to 50000 of 80000."""
    state = state_of({0: [(0, 4_000)], 1: [(0, 10_000)]}, mixed())
    says = {POLICY: "spread", USE_UUID: "GPU-0,GPU-1", WEIGHTS: "slot=0,core=0,memory=1"}

    assert {0} == gpus_of(state, admit(state, pod(asks(percentage=50), annotations=says), BEST))


def test_a_kubelet_that_leaves_no_choice_must_not_take_two_numa_nodes() -> None:
    """GPU-0 and GPU-2 have the only slots, and the kubelet does not ask which of two it is to take."""
    full = [(gpu, 0, 1) for gpu in (0, 2) for _ in range(SLOTS - 1)] + [
        (gpu, 0, 1) for gpu in (1, 3, 4) for _ in range(SLOTS)
    ]
    state, asked = holding(node(mixed()), *full), asks(2, memory=10)
    aligned = AdmissionRules(mode=Mode.KUBELET, policy=Policy.BEST_EFFORT)

    assert "ShareSplit" == refused(state, pod(asked, annotations={BIND: "true"}), aligned).code
    assert {0, 2} == gpus_of(state, admit(state, pod(asked, annotations={}), aligned))


def test_no_hint_promises_gpus_of_two_numa_nodes_to_who_binds_to_one() -> None:
    """The CPUs need two nodes. The first two have a GPU each, and only the third has two."""
    plain = machine(nodes=3, gpus=(0, 1, 2, 2))
    sized = tuple(msgspec.structs.replace(gpu, memory=40_000 * MIB) for gpu in plain.gpus)
    state = node(in_slots(msgspec.structs.replace(plain, gpus=sized)))
    asking = asks(2, memory=10)
    with_cpus = msgspec.structs.replace(
        asking, limits={**asking.limits, CPU: 10_000}, requests={**asking.requests, CPU: 10_000}
    )
    aligned = AdmissionRules(policy=Policy.RESTRICTED)

    assert {2, 3} == gpus_of(state, admit(state, pod(with_cpus, annotations={BIND: "true"}), aligned))


@pytest.mark.parametrize("rules", BOTH)
def test_a_list_of_uuids_takes_the_mig_instances_of_its_gpus(rules: AdmissionRules) -> None:
    state = node(in_slots(in_mig_mode(machine(), [4_864, 9_856], [4_864, 4_864]), SLOTS, 2))
    says = {USE_UUID: "GPU-1", BIND: "true"}

    found = admitted(state, pod(asks(2, memory=100), annotations=says), rules)[0]

    assert ["MIG-1-0", "MIG-1-1"] == sorted(base_of(slot) for slot in found.slots)
    assert "NotEnoughShareGpus" == refused(state, pod(asks(3, memory=100), annotations=says), rules).code


@pytest.mark.parametrize("rules", BOTH)
def test_containers_of_a_pod_that_wants_unused_gpus_have_one_each(rules: AdmissionRules) -> None:
    """An init container has ended when the next one starts, which takes its slot over."""
    state = state_of({0: [(5, 100)]}, mixed())
    asked = pod(
        asks(memory=10),
        asks(memory=10, name="two"),
        init=[asks(memory=20, name="first")],
        annotations={POLICY: "mutex"},
    )

    first, main, two = (gpus_of(state, admit(state, asked, rules), place) for place in range(3))

    assert first == main
    assert not main & two
    assert 0 not in main | two


def test_a_share_that_minds_the_topology_breaks_no_pair() -> None:
    """GPU-3 is in use: a share beside others cuts no links. By default the share goes to the smallest GPU."""
    plain = machine(gpus=(0, 0, 1, 1))
    sizes = (20_000, 20_000, 40_000, 80_000)
    sized = [msgspec.structs.replace(gpu, memory=size * MIB) for gpu, size in zip(plain.gpus, sizes, strict=True)]
    state = holding(node(in_slots(msgspec.structs.replace(plain, gpus=tuple(sized)))), (3, 0, 1_000))
    asked = asks(memory=100)

    mindful, default = (
        gpus_of(state, admit(state, pod(asked, annotations=says), BEST)) for says in ({POLICY: "topology-aware"}, {})
    )

    assert {3} == mindful
    assert {0} == default


def test_what_annotations_choose_is_told_to_be_by_reservation() -> None:
    asked = pod(asks(memory=100), annotations={POLICY: "spread"})

    told, unreadable = (
        admit(state, asked, KUBELET).explanation.notes for state in (node(mixed()), node(machine(gpus=MIXED_NODES)))
    )

    assert any("the kubelet reads no annotations" in each for each in told)
    assert () == unreadable


@pytest.mark.parametrize(
    ("near", "expected"), [((0, 0), True), ((0, 1), False), ((0, None), False), ((None, None), False), ((None,), True)]
)
def test_gpus_are_on_one_numa_node_where_that_is_known(near: tuple[int | None, ...], expected: bool) -> None:
    """One alone is, wherever that may be."""
    hardware = machine(gpus=near, nics=())

    assert expected is are_on_one_node(hardware, [gpu.id for gpu in hardware.gpus])
