"""What may be asked of devices, how full they are and which partitions will do, against Koordinator's rules as tables."""

from collections.abc import Collection, Mapping
from fractions import Fraction
from itertools import groupby
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from joint_support import GPUS, SAME_PCIE, TOGETHER, UNITS, Spot, box, chosen, demand

from topoalign.core.deviceshare.annotations import parse_quantity_exactly
from topoalign.core.deviceshare.candidates import JointRequest
from topoalign.core.deviceshare.device_scores import DevicePacking, DeviceScorer, score_device
from topoalign.core.deviceshare.gpu_choice import feasible_partitions
from topoalign.core.deviceshare.inventory import ANYWHERE, DeviceLocation, InventoryDevice, NodeInventory, Partition
from topoalign.core.deviceshare.joint_refusals import DevicesDoNotFit, FrameworkStatus, InvalidShareRequest
from topoalign.core.deviceshare.koordinator_names import DeviceType
from topoalign.core.deviceshare.request_combinations import GpuDemand, by_type, gpu_demand
from topoalign.core.model.errors import TooMuchWork
from topoalign.tools.conformance.koordinator import score_node
from topoalign.tools.conformance.koordinator_numa_hints import NumaHint, numa_hints

K, H = "koordinator.sh", "huawei.com"
SHARE = ({"gpu-memory"}, {"gpu-memory-ratio"}, {"gpu-core", "gpu-memory"}, {"gpu-core", "gpu-memory-ratio"})
MEANT = {
    *({frozenset({name}) for name in ("nvidia.com/gpu", "amd.com/gpu", "dcu.com/gpu", f"{K}/gpu")}),
    *(frozenset(f"{K}/{name}" for name in names) for names in SHARE),
    *(frozenset(f"{K}/{name}" for name in {*names, "gpu.shared"}) for names in SHARE),
    frozenset({f"{H}/npu-core", f"{K}/gpu-memory-ratio"}),
    frozenset({f"{K}/gpu.shared", f"{H}/npu-core", f"{H}/npu-cpu", f"{K}/gpu-memory"}),
    frozenset({f"{K}/gpu.shared", f"{H}/npu-core", f"{H}/npu-cpu", f"{H}/npu-dvpp", f"{K}/gpu-memory"}),
}
"""The sets of resources of GPUs that Koordinator a7a1b76b takes; all others are refused."""
OF_GPUS = sorted(frozenset().union(*MEANT))


@given(st.sampled_from(sorted(MEANT, key=sorted)), st.sets(st.sampled_from(OF_GPUS), max_size=2))
def test_resources_of_gpus_come_in_the_sets_that_can_be_meant(meant: frozenset[str], changed: set[str]) -> None:
    """One of each, which is sound in any amount; zeros count for nothing."""
    names = meant ^ changed
    asked = dict.fromkeys(OF_GPUS, 0) | dict.fromkeys(names, 1)
    if not names:
        assert {} == by_type(asked)
    elif names in MEANT:
        assert [DeviceType.GPU] == [*by_type(asked)]
    else:
        with pytest.raises(InvalidShareRequest) as caught:
            by_type(asked)
        assert (f"invalid resource device requests: [{' '.join(sorted(names))}]",) == caught.value.reasons
        assert (FrameworkStatus.UNRESOLVABLE, "pod.requests") == (caught.value.status, caught.value.field)


CORE, RATIO, BYTES, SHARED = (f"{K}/{name}" for name in ("gpu-core", "gpu-memory-ratio", "gpu-memory", "gpu.shared"))
DVPP = {SHARED: 1, f"{H}/npu-core": 1, f"{H}/npu-cpu": 1, BYTES: 1}


@pytest.mark.parametrize(
    ("requests", "meant"),
    [
        ({f"{K}/gpu": 100}, True),
        ({f"{K}/gpu": 101}, False),
        ({f"{K}/gpu": 200}, True),
        ({f"{K}/fpga": 99}, True),
        ({f"{K}/fpga": 101}, False),
        ({f"{K}/rdma": 300}, True),
        ({f"{K}/rdma": 250}, False),
        ({CORE: 100, RATIO: 100}, True),
        ({CORE: 101, RATIO: 100}, False),
        ({CORE: 100, RATIO: 150}, False),
        ({CORE: 200, RATIO: 200}, True),
        ({CORE: 200, BYTES: 7}, True),
        ({CORE: -1, RATIO: 1}, False),
        ({SHARED: 2, RATIO: 200}, True),
        ({SHARED: 2, RATIO: 202}, False),
        ({SHARED: 2, RATIO: 150}, True),
        ({SHARED: 2, RATIO: 151}, False),
        ({SHARED: 3, CORE: 300, RATIO: 3}, True),
        ({SHARED: 3, CORE: 301, RATIO: 3}, False),
        ({**DVPP, f"{H}/npu-dvpp": 100}, True),
        ({**DVPP, f"{H}/npu-dvpp": 101}, False),
        ({**DVPP, SHARED: 2}, False),
        ({**DVPP, SHARED: 1}, True),
    ],
)
def test_amounts_divide_evenly_and_whole_devices_are_whole(requests: dict[str, int], meant: bool) -> None:
    if meant:
        assert 1 == len(by_type(requests))
        return
    with pytest.raises(InvalidShareRequest):
        by_type(requests)


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ({"nvidia.com/gpu": 3}, GpuDemand(3, {CORE: 100, RATIO: 100}, False)),
        ({"amd.com/gpu": 1}, GpuDemand(1, {CORE: 100, RATIO: 100}, False)),
        ({f"{K}/gpu": 50}, GpuDemand(1, {CORE: 50, RATIO: 50}, True)),
        ({f"{K}/gpu": 200}, GpuDemand(2, {CORE: 100, RATIO: 100}, False)),
        ({RATIO: 100}, GpuDemand(1, {RATIO: 100}, False)),
        ({RATIO: 99}, GpuDemand(1, {RATIO: 99}, True)),
        ({CORE: 200, RATIO: 200}, GpuDemand(2, {CORE: 100, RATIO: 100}, False)),
        ({BYTES: 9}, GpuDemand(1, {BYTES: 9}, True)),
        ({SHARED: 2, CORE: 100, BYTES: 9}, GpuDemand(2, {CORE: 50, BYTES: 4}, True)),
        ({SHARED: 2, RATIO: 200}, GpuDemand(2, {RATIO: 100}, False)),
    ],
)
def test_what_is_asked_of_gpus_is_shared_out_over_them(requests: dict[str, int], expected: GpuDemand) -> None:
    assert expected == gpu_demand(by_type(requests)[DeviceType.GPU])


amounts = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(0, 12), max_size=3)


def naive_score(
    scorer: DeviceScorer, total: Mapping[str, int], free: Mapping[str, int], asked: Mapping[str, int]
) -> int:
    points, weights = 0, 0
    for name, weight in scorer.weights.items():
        whole = total.get(name, 0)
        if weight <= 0 or whole <= 0:
            continue
        left = free.get(name, 0)
        used = Fraction(whole - left + asked.get(name, 0) if left <= whole else whole)
        if scorer.strategy is DevicePacking.MOST_ALLOCATED:
            points += weight * floor(min(used / whole, Fraction(1)) * 100)
        else:
            points += weight * floor(max((whole - used) / whole, Fraction(0)) * 100)
        weights += weight
    return points // weights if weights else 0


@given(
    st.sampled_from(DevicePacking),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 3)),
    amounts,
    amounts,
    amounts,
)
def test_a_score_is_the_weighted_mean_of_how_full_a_device_is(
    strategy: DevicePacking, weights: dict[str, int], total: dict[str, int], free: dict[str, int], asked: dict[str, int]
) -> None:
    scorer = DeviceScorer(strategy, weights)

    assert naive_score(scorer, total, free, asked) == score_device(scorer, total, free, asked)


@given(st.sampled_from(DevicePacking), st.lists(st.lists(st.tuples(amounts, amounts), max_size=3), max_size=2), amounts)
def test_a_node_scores_the_sum_over_types_of_all_their_devices(
    strategy: DevicePacking, types: list[list[tuple[dict[str, int], dict[str, int]]]], asked: dict[str, int]
) -> None:
    scorer = DeviceScorer(strategy, {"a": 2, "b": 1})
    devices = [
        [
            InventoryDevice(kind=DeviceType.GPU, minor=i, resources=total, used=used)
            for i, (total, used) in enumerate(each)
        ]
        for each in types
    ]
    expected = 0
    for each in types:
        total = {name: sum(had.get(name, 0) for had, _ in each) for name in "abc"}
        free = {name: sum(max(0, had.get(name, 0) - used.get(name, 0)) for had, used in each) for name in "abc"}
        expected += naive_score(scorer, total, free, asked)

    assert expected == score_node(scorer, [(each, asked) for each in devices])


def test_the_default_weighs_memory_of_gpus_and_units_of_others_alike() -> None:
    assert {RATIO: 1, BYTES: 1, f"{K}/rdma": 1, f"{K}/fpga": 1} == DeviceScorer().weights
    assert ("LeastAllocated", "MostAllocated") == (DeviceScorer().strategy, DevicePacking.MOST_ALLOCATED)


def listed(size: int, least: int) -> st.SearchStrategy[tuple[Partition, ...]]:
    minors = st.lists(st.integers(0, min(7, 2 * size)), min_size=size, max_size=size, unique=True).map(tuple)
    bandwidths = st.sampled_from([None, Fraction(100), Fraction(200), Fraction(200)])
    partitions = st.builds(Partition, minors, st.sampled_from([1, 1, 1, 2, 0]), bandwidths)
    return st.lists(partitions, min_size=least, max_size=5).map(tuple)


@st.composite
def tables(draw: st.DrawFn) -> tuple[int, dict[int, tuple[Partition, ...]]]:
    """The size that is wanted, of which there are several in all but one of five tables, and a table of some sizes."""
    size = draw(st.sampled_from([1, 2, 2, 4, 8]))
    table = {each: draw(listed(each, 0)) for each in draw(st.sets(st.sampled_from([2, 4, 8]), max_size=2))}
    if draw(st.sampled_from([True] * 4 + [False])):
        table[size] = draw(listed(size, 3))
    return size, table


def left_whole(table: Mapping[int, Collection[Partition]], size: int, gone: set[int], lowest_first: bool) -> int:
    """What stays whole of the best-scored partitions of this size and above."""
    worth = 0
    for left, weight in ((2, 1), (4, 100), (8, 10_000)):
        scores = [each.score for each in table.get(left, ())]
        if left >= size and scores:
            best = min(scores) if lowest_first else max(scores)
            whole = [each for each in table[left] if each.score == best and not gone & {*each.minors}]
            worth += sum(weight * each.score for each in whole)
    return worth


@given(
    tables(),
    st.frozensets(st.integers(0, 7), max_size=2),
    st.frozensets(st.integers(0, 7), max_size=1),
    st.sampled_from([None, "", "100", "150"]),
    st.booleans(),
    st.booleans(),
)
def test_partitions_come_by_score_and_by_what_they_leave(
    of: tuple[int, dict[int, tuple[Partition, ...]]],
    used: frozenset[int],
    sick: frozenset[int],
    bandwidth: str | None,
    restricted: bool,
    compat: bool,
) -> None:
    """
    By default the highest score comes first, with Koordinator the lowest. Of one score the one is first that leaves the
    most, then as listed.
    """
    size, table = of
    spec: dict[str, object] | None = None if bandwidth is None and not restricted else {}
    if spec is not None and bandwidth:
        spec["ringBusBandwidth"] = bandwidth
    if spec is not None and restricted:
        spec["allocatePolicy"] = "Restricted"
    usable = {*range(8)} - sick
    ordered = sorted(table.get(size, ()), key=lambda each: each.score if compat else -each.score)
    groups = [[*group] for _, group in groupby(ordered, key=lambda each: each.score)]
    expected = []
    for group in groups[:1] if restricted else groups:
        able = [
            each
            for each in group
            if not used & {*each.minors}
            and {*each.minors} <= usable
            and (not bandwidth or (each.bandwidth is not None and each.bandwidth >= int(bandwidth)))
        ]
        expected += sorted(able, key=lambda each: -left_whole(table, size, {*used, *each.minors}, compat))

    got = feasible_partitions(demand({GPUS: size}, partition=spec, compat=compat), table, size, used, usable)

    assert expected == [*got]


def test_a_four_that_stays_whole_is_worth_more_than_some_pairs() -> None:
    """GPUs 4 and 5 are given, which breaks two more pairs, and not 0 and 1, which would break the four."""
    pairs = tuple(map(Partition, ((0, 1), (4, 5), (4, 6), (5, 6))))
    table = {2: pairs, 4: (Partition((0, 1, 2, 3)),)}

    got = feasible_partitions(demand({GPUS: 2}), table, 2, frozenset(), frozenset(range(8)))

    assert (4, 5) == next(iter(got)).minors


SPOTS: dict[int, Spot] = {node: (node, f"pci-{node}") for node in range(3)}


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=5),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
    st.frozensets(st.integers(0, 4), max_size=2),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([None, TOGETHER, SAME_PCIE]),
    st.booleans(),
)
def test_hints_are_the_sets_of_nodes_on_which_the_devices_can_be_had(
    gpus: list[int], nics: list[int], busy: frozenset[int], count: int, units: int, joint: object, compat: bool
) -> None:
    """The narrowest are preferred, and 500 points go to the GPUs that the whole machine would give."""
    node = box([SPOTS[each] for each in gpus], [SPOTS[each] for each in nics], busy_gpus=sorted(busy))
    asked = {GPUS: count, UNITS: 100 * units}
    nodes = sorted({*gpus, *nics})
    whole = chosen(node, asked, joint, nodes=nodes, compat=compat)
    question = JointRequest(demand=demand(asked, joint, compat=compat), inventory=node)
    if isinstance(whole, str):
        with pytest.raises(DevicesDoNotFit):
            numa_hints(question)
        return
    sets = sorted(
        ([each for each in nodes if number >> each & 1] for number in range(1, 8)), key=lambda each: (len(each), each)
    )
    possible = []
    for inside in {tuple(each): None for each in sets if each}:
        got = chosen(node, asked, joint, nodes=inside, compat=compat)
        if isinstance(got, dict):
            possible.append((inside, 500 if got["gpu"] == whole["gpu"] else 0))
    least = min(len(inside) for inside, _ in possible)

    found = numa_hints(question)

    expected = [NumaHint(inside, len(inside) == least, score) for inside, score in possible]
    assert dict.fromkeys([DeviceType.GPU, DeviceType.RDMA], expected) == found


@pytest.mark.parametrize(("nodes", "too_many"), [(10, False), (11, True)])
def test_hints_are_worked_out_over_ten_numa_nodes_at_most(nodes: int, too_many: bool) -> None:
    question = JointRequest(demand=demand({GPUS: 1}), inventory=box([(node, "") for node in range(nodes)]))
    if too_many:
        with pytest.raises(TooMuchWork, match="hints over 11 NUMA nodes"):
            numa_hints(question)
        return
    assert 2**10 - 1 == len(numa_hints(question)[DeviceType.GPU])


def test_too_few_devices_on_known_nodes_are_refused_for_good() -> None:
    """One GPU has a known NUMA node, and two are wanted: whatever is released later, a hint cannot be given."""
    node = box([(0, "a"), None])

    with pytest.raises(DevicesDoNotFit, match="Insufficient NUMA Scoped Devices") as refused:
        numa_hints(JointRequest(demand=demand({GPUS: 2}), inventory=node))

    assert FrameworkStatus.UNRESOLVABLE is refused.value.status


def test_devices_of_no_known_node_give_no_hints() -> None:
    lost = InventoryDevice(kind=DeviceType.GPU, minor=1, place=DeviceLocation(ANYWHERE, "a"))

    for node in (box([None]), NodeInventory(devices=(lost,))):
        assert {} == numa_hints(JointRequest(demand=demand({GPUS: 1}), inventory=node))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1n", Fraction(1, 10**9)),
        ("1u", Fraction(1, 10**6)),
        ("1m", Fraction(1, 1000)),
        ("1k", 10**3),
        ("1M", 10**6),
        ("1G", 10**9),
        ("1T", 10**12),
        ("1P", 10**15),
        ("1E", 10**18),
        ("1Ki", 1 << 10),
        ("1Mi", 1 << 20),
        ("1Gi", 1 << 30),
        ("1Ti", 1 << 40),
        ("1Pi", 1 << 50),
        ("1Ei", 1 << 60),
        ("+.5Ki", 512),
        ("5.", 5),
        ("1E2", 100),
        ("9" * 20, int("9" * 20)),
        ("9" * 21, None),
        ("0." + "1" * 21, None),
        ("1e100", None),
        (0.5, Fraction(1, 2)),
    ],
)
def test_each_suffix_of_a_quantity_is_that_of_kubernetes(text: str | float, value: Fraction | int | None) -> None:
    assert value == parse_quantity_exactly(text)
