"""Shares of GPUs by Koordinator's names: units of a GPU, never more than it has, beside others who ask for units."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import pytest
from decision_support import NODE, container, granted, machine, node, pod
from hypothesis import given, settings
from hypothesis import strategies as st
from unit_support import CORES, DGX, KUBELET, MEMORY, admitted, asks, in_units, refused

from topoalign.core.admission.admit import admit
from topoalign.core.deviceshare.koordinator_names import (
    CORE,
    GPU_BYTES,
    HINT_ANNOTATION,
    HUNDREDTHS,
    JOINT_ANNOTATION,
    RATIO,
    RDMA,
    SHARED,
)
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.decisions import Admission
from topoalign.core.model.events import AllocationReleased
from topoalign.core.model.ids import GPU, NIC, AllocationID, DeviceID
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, PodRequest, Policy, Scope
from topoalign.core.model.topology.device_offers import MEMORY_BLOCK, Offer
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState
from topoalign.core.state.gpu_partitioning import Parts, partitioning_by_gpu
from topoalign.machines import load_machine

GIB = 1 << 30
BEST = AdmissionRules(policy=Policy.NONE)
RESTRICTED = AdmissionRules(policy=Policy.RESTRICTED)
KOORDINATOR = AdmissionRules(policy=Policy.NONE, compat="koordinator")
SAID = {HINT_ANNOTATION: "{}"}
SAME_PCIE = {JOINT_ANNOTATION: '{"deviceTypes": ["gpu", "rdma"], "requiredScope": "SamePCIe"}'}

Amounts = dict[str, int]


def sharing(
    amounts: Amounts, name: str = "pod-1", said: dict[str, str] = SAID, init: Sequence[ContainerRequest] = ()
) -> PodRequest:
    return pod(container(others=amounts), init=init, name=name, annotations=said)


def hardware(sizes: Sequence[int], whole: int = 0) -> Topology:
    """GPUs in units with so many blocks of memory and a bit more, and then whole ones, on two NUMA nodes in turn."""
    plain = machine(gpus=[i % 2 for i in range(len(sizes) + whole)])
    blocks = (*sizes, *(16 for _ in range(whole)))
    gpus = (
        msgspec.structs.replace(gpu, memory=n * MEMORY_BLOCK + 1) for gpu, n in zip(plain.gpus, blocks, strict=True)
    )
    found = in_units(msgspec.structs.replace(plain, gpus=tuple(gpus)), gpus=len(sizes))
    nics = Offer(resource=NIC, devices=tuple(found.nic_by_id))
    return msgspec.structs.replace(found, offers=(*(found.offers or ()), nics))


def given_of(allocation: Allocation) -> dict[str, tuple[int, int]]:
    """GPU -> cores and blocks, counted by the letters of the ids; a whole GPU has none."""
    found = dict[str, Counter[str]]()
    for device in (each for name, some in allocation.devices.items() if name != NIC for each in some):
        gpu, _, unit = device.partition("::")
        found.setdefault(gpu, Counter())[unit[:1]] += 1
    return {gpu: (units["c"], units["m"]) for gpu, units in found.items()}


def share_of(state: NodeState, amounts: Amounts, rules: AdmissionRules = BEST) -> dict[str, tuple[int, int]]:
    return given_of(admitted(state, sharing(amounts), rules)[0])


def after(state: NodeState, *shares: Amounts, rules: AdmissionRules = BEST) -> NodeState:
    for amounts in shares:
        asked = sharing(amounts, f"earlier-{state.seq}")
        state = granted(state, admit(state, asked, rules))
    return state


@pytest.mark.parametrize(
    ("amounts", "expected"),
    [
        ({HUNDREDTHS: 50}, (50, 159)),
        ({CORE: 30, RATIO: 50}, (30, 159)),
        ({CORE: 30, GPU_BYTES: 10 * GIB}, (30, 40)),
        ({GPU_BYTES: 10 * GIB + 1}, (0, 41)),
        ({RATIO: 1}, (0, 3)),
        ({GPU_BYTES: 1}, (0, 1)),
        ({HUNDREDTHS: 100}, (100, 318)),
        ({RATIO: 100}, (100, 318)),
        ({SHARED: 1, CORE: 20, RATIO: 10}, (20, 31)),
    ],
)
def test_a_share_is_hundredths_of_computing_time_and_blocks(amounts: Amounts, expected: tuple[int, int]) -> None:
    """Of a GPU with 318 blocks: bytes are rounded up, hundredths of the memory down."""
    state = node(hardware([318]))

    assert {"GPU-0": expected} == share_of(state, amounts) == share_of(state, amounts, KOORDINATOR)


@pytest.mark.parametrize("amounts", [{HUNDREDTHS: 50}, {CORE: 50, RATIO: 60}, {HUNDREDTHS: 200}, {RDMA: 100}])
def test_koordinators_names_need_no_annotation_where_no_kubelet_decides(amounts: Amounts) -> None:
    """A kubelet passes over them."""
    state = node(hardware([60, 60, 60], whole=2))

    assert admit(state, sharing(amounts), BEST) == admit(state, sharing(amounts, said={}), BEST)
    assert isinstance(admit(state, sharing(amounts, said={}), BEST), Admission)
    passed_over = admit(state, sharing(amounts, said={}), KUBELET)
    assert isinstance(passed_over, Admission) and {} == passed_over.allocations[0].devices


def test_two_halves_fit_on_a_gpu_and_the_division_shows_them() -> None:
    """318 blocks are 159 for each. Units are asked for of the same GPU in their own name."""
    state = after(node(hardware([319])), {HUNDREDTHS: 50}, {CORE: 40, RATIO: 50})
    (division,) = partitioning_by_gpu(state).values()

    assert ("units",) == division.ways
    assert [(50, 159), (40, 159)] == [
        (each.parts.cores, each.parts.memory // MEMORY_BLOCK) for each in division.held if not each.parts.whole
    ]
    assert Parts(cores=10, memory=MEMORY_BLOCK) == division.left
    assert {"GPU-0": (10, 1)} == given_of(admitted(state, pod(asks(10, 1)), BEST)[0])
    assert "DevicesDoNotFit" == refused(state, sharing({HUNDREDTHS: 11}), BEST).code


def test_a_share_goes_beside_others_and_koordinators_where_most_is_left() -> None:
    """Of the GPUs on one switch. For Koordinator, too, a scope that is in use comes before others."""
    state = node(hardware([16, 16, 16, 16]))
    (gpu,) = share_of(state, {HUNDREDTHS: 30})
    state = after(state, {HUNDREDTHS: 30})

    assert [gpu] == [*share_of(state, {HUNDREDTHS: 30})]
    (other,) = share_of(state, {HUNDREDTHS: 30}, KOORDINATOR)
    assert other != gpu and int(other[-1]) % 2 == int(gpu[-1]) % 2


@pytest.mark.parametrize("rules", [BEST, KOORDINATOR])
def test_nobody_gets_memory_where_all_computing_time_is_held(rules: AdmissionRules) -> None:
    """And who asks for all computing time gets it of a GPU of which nobody has anything, memory alone included."""
    state = after(node(hardware([16])), {CORE: 100, RATIO: 50}, rules=rules)
    lonely = after(node(hardware([16])), {GPU_BYTES: 1}, rules=rules)

    assert "DevicesDoNotFit" == refused(state, sharing({RATIO: 10}), rules).code
    assert "DevicesDoNotFit" == refused(lonely, sharing({CORE: 100, RATIO: 10}), rules).code
    assert {"GPU-0": (99, 1)} == share_of(lonely, {CORE: 99, RATIO: 10}, rules)


def test_several_gpus_are_shared_evenly() -> None:
    amounts = {SHARED: 2, CORE: 60, RATIO: 100}

    assert {"GPU-0": (30, 8), "GPU-1": (30, 5)} == share_of(node(hardware([16, 10])), amounts)
    assert "DevicesDoNotFit" == refused(node(hardware([16])), sharing(amounts), BEST).code


def test_whole_gpus_are_those_that_are_offered_whole_or_else_unused_ones() -> None:
    """By Koordinator's names. `nvidia.com/gpu` is what is offered under that name."""
    mixed, shared = node(hardware([16, 16], whole=1)), after(node(hardware([16, 10, 16])), {HUNDREDTHS: 1})
    (used,) = share_of(node(hardware([16, 10, 16])), {HUNDREDTHS: 1})

    assert {"GPU-2": (0, 0)} == share_of(mixed, {HUNDREDTHS: 100})
    assert "DevicesDoNotFit" == refused(mixed, sharing({HUNDREDTHS: 200}), BEST).code
    rest = {gpu: (100, 10 if gpu == "GPU-1" else 16) for gpu in ("GPU-0", "GPU-1", "GPU-2") if gpu != used}
    assert rest == share_of(shared, {HUNDREDTHS: 200})
    assert "DevicesDoNotFit" == refused(shared, sharing({HUNDREDTHS: 300}), BEST).code
    assert "DevicesDoNotFit" == refused(shared, sharing({GPU: 1}), BEST).code


def test_whole_gpus_in_units_are_chosen_by_the_device_policy() -> None:
    """Those with the most NVLinks, as of a machine whose GPUs are offered whole: they are not the first three."""
    volta, asked = load_machine("dgx1-volta").topology, sharing({HUNDREDTHS: 300}, said=SAME_PCIE)

    assert ("GPU-0", "GPU-2", "GPU-3") == admitted(node(volta), asked, RESTRICTED)[0].devices[GPU]
    assert ["GPU-0", "GPU-2", "GPU-3"] == [*given_of(admitted(node(in_units(volta)), asked, RESTRICTED)[0])]


def test_a_share_has_the_nic_beside_its_gpu() -> None:
    """On each NUMA node is one NIC; that of GPU-0 is in use."""
    taken = Allocation(id=AllocationID("held"), devices={NIC: (DeviceID("mlx5_0"),)})
    state = node(hardware([16, 16])).holding(taken)
    asked = sharing({HUNDREDTHS: 50, "koordinator.sh/rdma": 100}, said=SAME_PCIE)

    for rules in (BEST, RESTRICTED):
        got = admitted(state, asked, rules)[0]
        assert {"GPU-1": (50, 8)} == given_of(got)
        assert ("mlx5_1",) == got.devices[NIC]


def test_a_share_is_aligned_with_the_cpus_of_its_container() -> None:
    """GPU-0 is full, so the alignment is to the NUMA node of GPU-1. In scope `pod` both containers are aligned to it."""
    state = after(node(hardware([16, 16])), {CORE: 90, RATIO: 90})
    (full,) = share_of(node(hardware([16, 16])), {CORE: 90, RATIO: 90})
    other, near = ("GPU-1", (1,)) if full == "GPU-0" else ("GPU-0", (0,))
    both = [container(each, cpus=1, others={HUNDREDTHS: 40}) for each in ("a", "b")]

    got = admitted(state, pod(*both, annotations=SAID), RESTRICTED)
    per_pod = msgspec.structs.replace(RESTRICTED, scope=Scope.POD)
    together = admitted(state, pod(*both, annotations=SAID), per_pod)
    for allocations in (got, together):
        assert [{other: (40, 6)}] * 2 == [*map(given_of, allocations)]
        assert {near} == {each.affinity for each in allocations}


def test_a_pod_is_aligned_to_the_nodes_of_shares_and_of_whole_gpus() -> None:
    """GPU-0 is in units, on NUMA node 0, and GPU-1 is offered whole, on node 1."""
    both = [container("a", others={HUNDREDTHS: 50}), container("b", others={HUNDREDTHS: 100})]
    per_pod = msgspec.structs.replace(RESTRICTED, scope=Scope.POD)

    got = admitted(node(hardware([16], whole=1)), pod(*both, annotations=SAID), per_pod)
    assert [{"GPU-0": (50, 8)}, {"GPU-1": (0, 0)}] == [*map(given_of, got)]
    assert {(0, 1)} == {each.affinity for each in got}


def test_a_container_takes_over_the_units_of_its_init_container() -> None:
    """It has them before any others, and of a GPU of which only they are held it may have all."""
    state, small = node(hardware([16, 16])), container("first", others={HUNDREDTHS: 20})

    first, main = admitted(state, sharing({HUNDREDTHS: 50}, init=[small]), BEST)
    assert first.device_ids < main.device_ids
    first, main = admitted(state, sharing({HUNDREDTHS: 100}, init=[small]), BEST)
    assert first.device_ids < main.device_ids and {(100, 16)} == {*given_of(main).values()}


@pytest.mark.parametrize("held", ["GPU-0", "GPU-0::1"])
def test_a_gpu_that_is_held_in_another_way_has_no_share(held: str) -> None:
    """Since before it was offered in units, whole or as a time slice. Nor has one that is not healthy."""
    taken = Allocation(id=AllocationID("held"), devices={GPU: (DeviceID(held),)})

    for state in (node(hardware([16])).holding(taken), node(hardware([16]), unhealthy=["GPU-0"])):
        assert "DevicesDoNotFit" == refused(state, sharing({HUNDREDTHS: 10}), BEST).code


def test_a_container_asks_for_gpus_in_one_way() -> None:
    both = {HUNDREDTHS: 50, str(CORES): 20, str(MEMORY): 5}
    refusal = refused(node(hardware([16])), sharing(both), BEST)

    assert "InvalidShare" == refusal.code
    assert f"spec.containers[0].resources.limits[{HUNDREDTHS}]: GPUs in two ways" in refusal.finding


@pytest.mark.parametrize("rules", [BEST, RESTRICTED, KOORDINATOR])
@pytest.mark.parametrize("gpus", [1, 2])
def test_memory_above_a_gpu_is_refused_by_its_field(gpus: int, rules: AdmissionRules) -> None:
    """In bytes of each GPU, against the largest one, whoever holds it."""
    state, most = after(node(hardware([10, 16, 16])), {HUNDREDTHS: 100}), gpus * 16 * MEMORY_BLOCK
    above: Amounts = {SHARED: gpus, CORE: 10 * gpus, GPU_BYTES: most + gpus}
    field = f"resources.limits[{GPU_BYTES}]: 4096.000001 MiB are asked for of one GPU"
    init = sharing({HUNDREDTHS: 10}, init=[container("first", others=above)])

    for asked, where in ((sharing(above), "spec.containers[0]"), (init, "spec.initContainers[0]")):
        refusal = refused(state, asked, rules)
        assert "MemoryAboveGpu" == refusal.code
        assert refusal.finding.startswith(f"{where}.{field}")
        assert "ask for less memory" in refusal.remedy
    assert gpus == len(share_of(node(hardware([10, 16, 16])), {**above, GPU_BYTES: most}, rules))


@pytest.mark.parametrize("amounts", [{HUNDREDTHS: 50}, {GPU_BYTES: 8 * GIB}, {RATIO: 5}])
def test_a_node_without_gpus_in_units_has_no_shares(amounts: Amounts) -> None:
    refusal = refused(node(DGX), sharing(amounts), BEST)

    assert "SharesNeedUnits" == refusal.code
    assert "sharing.units" in refusal.remedy


@pytest.mark.parametrize("amounts", [{HUNDREDTHS: 50}, {CORE: 5, RATIO: 5}, {HUNDREDTHS: 200}, {GPU: 1, SHARED: 1}])
def test_a_kubelet_passes_over_koordinators_names_for_gpus(amounts: Amounts) -> None:
    """So a container would start without a GPU. Without annotations these names are of no concern to topoalign."""
    state, asked = node(in_units(DGX, gpus=4)), sharing(amounts)
    refusal = refused(state, asked, KUBELET)

    assert "InvalidShare" == refusal.code
    assert refusal.finding.startswith("spec.containers[0].resources.limits[koordinator.sh/gpu")
    for word in (*map(str, (CORES, MEMORY, GPU)), "nvidia.com/gpucores"):
        assert word in refusal.remedy
    assert isinstance(admit(state, msgspec.structs.replace(asked, annotations={}), KUBELET), Admission)
    init = sharing({GPU: 1}, init=[container("first", others=amounts)])
    assert "spec.initContainers[0]" in refused(state, init, KUBELET).finding


class Meant(NamedTuple):
    """What a request comes to, read from its words."""

    gpus: int
    cores: int
    hundredths: int
    size: int
    whole: bool

    def of(self, blocks: int) -> tuple[int, int]:
        """Cores and blocks of a GPU with so many blocks."""
        if self.whole:
            return 100, blocks
        some = (self.size + MEMORY_BLOCK - 1) // MEMORY_BLOCK or blocks * self.hundredths // 100
        return self.cores, max(some, 1)


def meant(amounts: Amounts) -> Meant:
    if str(CORES) in amounts:
        return Meant(1, amounts[str(CORES)], 0, amounts[str(MEMORY)] * MEMORY_BLOCK, whole=False)
    if HUNDREDTHS in amounts:
        n = amounts[HUNDREDTHS]
        return Meant(n // 100, 0, 0, 0, whole=True) if n >= 100 else Meant(1, n, n, 0, whole=False)
    n = amounts.get(SHARED, 1)
    return Meant(n, amounts.get(CORE, 0) // n, amounts.get(RATIO, 0) // n, amounts.get(GPU_BYTES, 0) // n, whole=False)


percent = st.integers(1, 99)
sizes = st.integers(1, 12 * MEMORY_BLOCK)
requests = st.one_of(
    percent.map(lambda q: {HUNDREDTHS: q}),
    st.integers(1, 2).map(lambda n: {HUNDREDTHS: 100 * n}),
    st.builds(lambda c, r: {CORE: c, RATIO: r}, st.integers(1, 100), percent),
    st.builds(lambda c, b: {CORE: c, GPU_BYTES: b}, st.integers(1, 100), sizes),
    sizes.map(lambda b: {GPU_BYTES: b}),
    percent.map(lambda r: {RATIO: r}),
    st.builds(lambda n, c, r: {SHARED: n, CORE: n * c, RATIO: n * r}, st.integers(1, 3), st.integers(1, 100), percent),
    st.builds(lambda c, b: {str(CORES): c, str(MEMORY): b}, st.integers(1, 100), st.integers(1, 12)),
)
"""By Koordinator's names, and by those of units."""

fits_all = st.sampled_from([BEST, RESTRICTED, AdmissionRules(), KOORDINATOR])


@settings(max_examples=50)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.integers(0, 2),
    st.lists(st.tuples(requests, st.booleans()), min_size=1, max_size=10),
    fits_all,
)
def test_shares_are_given_as_a_look_at_each_gpu_says(
    blocks: list[int], whole: int, steps: list[tuple[Amounts, bool]], rules: AdmissionRules
) -> None:
    """
    I14, by a book of each GPU: pods come and the oldest one ends now and then. A share is of one GPU, or equal shares of
    several; who has 100 hundredths has the GPU alone; what ends is to be had again.
    """
    state = node(hardware(blocks, whole))
    had = {f"GPU-{i}": (100, n) for i, n in enumerate(blocks)}
    left, spare = dict(had), whole
    held: list[tuple[str, dict[str, tuple[int, int]]]] = []
    for number, (amounts, ends) in enumerate(steps):
        if ends and held:
            oldest, gone = held.pop(0)
            (allocation,) = [each.id for each in state.allocations.values() if each.owner and each.owner.pod == oldest]
            end = AllocationReleased(node=NODE, epoch=0, seq=state.seq + 1, allocation=allocation, reason="released")
            state = state.apply(end)
            spare += sum(each == (0, 0) for each in gone.values())
            left.update((gpu, (left[gpu][0] + c, left[gpu][1] + m)) for gpu, (c, m) in gone.items() if gpu in left)
        by_units = str(CORES) in amounts
        asked = meant(amounts)
        needs = {gpu: asked.of(n) for gpu, (_, n) in had.items()}
        fitting = [
            gpu
            for gpu, (cores, memory) in left.items()
            if cores
            and memory
            and needs[gpu][0] <= cores
            and needs[gpu][1] <= memory
            and (needs[gpu][0] < 100 or left[gpu] == had[gpu])
        ]
        said = {} if by_units else SAID
        decision = admit(state, sharing(amounts, f"pod-{number}", said), rules)

        room = spare if asked.whole and whole else len(fitting)
        assert (room >= asked.gpus) == isinstance(decision, Admission), (number, amounts, left)
        if not isinstance(decision, Admission):
            continue
        got = given_of(decision.allocations[0])
        assert asked.gpus == len(got)
        if asked.whole and whole:
            assert {(0, 0)} == {*got.values()} and had.keys().isdisjoint(got)
            spare -= asked.gpus
        else:
            assert got == {gpu: needs[gpu] for gpu in got} and {*got} <= {*fitting}
            left.update((gpu, (left[gpu][0] - c, left[gpu][1] - m)) for gpu, (c, m) in got.items())
        units = [unit for each in decision.allocations for unit in each.device_ids]
        assert not {*units} & {unit for each in state.allocations.values() for unit in each.device_ids}
        held.append((f"pod-{number}", got))
        state = granted(state, decision)
