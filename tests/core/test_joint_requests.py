"""What pods may ask for, and that whatever stands in an annotation is an answer or an error that names the place."""

import json
from fractions import Fraction
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from joint_support import GPUS, SAME_PCIE, UNITS, box, chosen

from topoalign.core.deviceshare import same_pcie
from topoalign.core.deviceshare.annotations import parse_quantity_exactly
from topoalign.core.deviceshare.candidates import JointRequest
from topoalign.core.deviceshare.demand import read_demand
from topoalign.core.deviceshare.inventory import DeviceLocation, InventoryDevice, NodeInventory
from topoalign.core.deviceshare.joint_allocation import allocate_all_types
from topoalign.core.deviceshare.joint_refusals import InvalidShareRequest, refuse_same_pcie
from topoalign.core.deviceshare.koordinator_names import (
    ANNOTATIONS,
    CORE,
    FPGA,
    GPU_BYTES,
    HINT_ANNOTATION,
    JOINT_ANNOTATION,
    PARTITION_ANNOTATION,
    RATIO,
    RESOURCES,
    SHARED,
    DeviceType,
)
from topoalign.core.deviceshare.request_combinations import by_type, gpu_demand
from topoalign.core.model.errors import InvalidField, TooMuchWork, TopoalignError
from topoalign.tools.conformance.koordinator_devices import read_device

NODE = box([(0, "a"), (0, "a"), (1, "b")], [(0, "a"), (1, "b")], functions=2)

MALFORMED = [
    "",
    "{",
    "[",
    "null,",
    "{]",
    "nul",
    '{"a":}',
    "\ud800",
    "[" * 100_000,
    '{"a"' * 10_000,
    "1e",
    "\x00",
    "{} x",
]
WRONG_SHAPE = {
    HINT_ANNOTATION: ["[]", "1", '"x"', '{"rdma": null}', '{"rdma": 1}', '{"rdma": {"selector": []}}'],
    JOINT_ANNOTATION: ["[1,2]", "1", '{"deviceTypes": "gpu"}', '{"deviceTypes": [1]}', '{"requiredScope": 1}'],
    PARTITION_ANNOTATION: ["[]", '{"allocatePolicy": []}', '{"ringBusBandwidth": "fast"}', '{"ringBusBandwidth": {}}'],
}


@pytest.mark.parametrize("compat", [False, True])
@pytest.mark.parametrize("key", ANNOTATIONS)
def test_invalid_json_is_refused_by_the_name_of_its_annotation(key: str, compat: bool) -> None:
    """
    JSON that is broken or has another shape is refused by the name of its annotation. So is a hint that is null, on
    which Koordinator's scheduler crashes.
    """
    for text in (*MALFORMED, *WRONG_SHAPE[key]):
        with pytest.raises(InvalidShareRequest) as error:
            read_demand({key: text}, {GPUS: 1}, compat=compat)
        assert error.value.field.startswith(f"pod.annotations[{key}]")
        assert error.value.reasons[0].startswith("invalid ")


@pytest.mark.parametrize("compat", [False, True])
@pytest.mark.parametrize("key", ANNOTATIONS)
def test_null_and_an_empty_object_say_nothing(key: str, compat: bool) -> None:
    for text in ("null", "{}", ' { "deviceTypes" : null } ' if key == JOINT_ANNOTATION else "{}"):
        assert read_demand({key: text}, {GPUS: 1}, compat=compat).joint == ()


def test_an_annotation_longer_than_kubernetes_takes_is_refused() -> None:
    with pytest.raises(InvalidShareRequest, match="longer than 262144 characters"):
        read_demand({JOINT_ANNOTATION: " " * 262_145}, {GPUS: 1})


def test_names_of_fields_are_found_in_any_case_for_koordinator() -> None:
    """
    The names of fields are found in any case where Koordinator's answers are wanted, as Go's decoder finds them; the
    default refuses another spelling.
    """
    text = '{"DEVICETYPES": ["gpu", "rdma"], "requiredscope": "SamePCIe", "else": 1}'

    assert read_demand({JOINT_ANNOTATION: text}, {GPUS: 1, UNITS: 1}, compat=True).same_pcie
    with pytest.raises(InvalidShareRequest, match="unknown field"):
        read_demand({JOINT_ANNOTATION: text}, {GPUS: 1, UNITS: 1})


WORDS = ["gpu", "rdma", "selector", "vfSelector", "matchLabels", "matchExpressions", "key", "operator", "values", "In"]
WORDS += ["deviceTypes", "requiredScope", "SamePCIe", "allocateStrategy", "ApplyForAll", "RequestsAsCount", "Exists"]
WORDS += [
    "requiredTopologyScope",
    "PCIe",
    "Device",
    "exclusivePolicy",
    "PCIeLevel",
    "allocatePolicy",
    "1Gi",
    "",
    "\ud83d",
]
words = st.sampled_from(WORDS)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4),
    max_leaves=12,
)
names = st.sampled_from([*chain.from_iterable(RESOURCES.values()), "cpu"])
amounts = st.sampled_from([-1, 0, 1, 2, 50, 100, 101, 200, 2**63 - 1]) | st.integers(-5, 500)


@given(
    st.dictionaries(st.sampled_from(ANNOTATIONS), anything.map(json.dumps) | st.text(max_size=20)),
    st.dictionaries(names, amounts, max_size=4) | st.just({GPUS: 1, UNITS: 1}),
    st.booleans(),
)
def test_whatever_is_asked_is_answered_or_refused_with_a_remedy(
    annotations: dict[str, str], requests: dict[str, int], compat: bool
) -> None:
    try:
        allocate_all_types(JointRequest(demand=read_demand(annotations, requests, compat=compat), inventory=NODE))
    except TopoalignError as error:
        assert str(error).isprintable()
        assert error.remedy


@pytest.mark.parametrize(
    ("requests", "reason"),
    [
        ({GPUS: 1, "amd.com/gpu": 1}, "invalid resource device requests: [amd.com/gpu nvidia.com/gpu]"),
        ({CORE: 50}, f"invalid resource device requests: [{CORE}]"),
        ({UNITS: 150}, "invalid resource unit koordinator.sh/rdma: 150"),
        ({UNITS: -1}, "invalid resource unit koordinator.sh/rdma: -1"),
        ({GPUS: -1}, "invalid resource device requests: [nvidia.com/gpu]"),
        ({SHARED: 2, RATIO: 201}, f"invalid resource device requests: [{RATIO} {SHARED}]"),
        ({SHARED: -2, RATIO: 200}, f"invalid resource device requests: [{RATIO} {SHARED}]"),
    ],
)
def test_requests_that_cannot_be_meant_are_refused_in_koordinators_words(requests: dict[str, int], reason: str) -> None:
    with pytest.raises(InvalidShareRequest) as error:
        by_type(requests)
    assert (reason,) == error.value.reasons


def test_memory_need_not_divide_by_the_number_of_gpus() -> None:
    demand = gpu_demand(by_type({SHARED: 3, GPU_BYTES: 10})[DeviceType.GPU])

    assert (3, {GPU_BYTES: 3}, True) == (demand.count, demand.each, demand.shared)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("200Gi", 200 << 30),
        ("1.5", Fraction(3, 2)),
        ("1e3", 1000),
        ("5m", Fraction(1, 200)),
        (7, 7),
        ("2E", 2 * 10**18),
        ("1e-2", Fraction(1, 100)),
    ],
)
def test_quantities_are_read_as_kubernetes_writes_them(text: str | int, value: Fraction | int) -> None:
    assert value == parse_quantity_exactly(text)


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "-1", "1Qi", "1e", "0x10", "1e999", "٣"])
def test_what_is_no_quantity_is_none(text: str) -> None:
    assert parse_quantity_exactly(text) is None


@pytest.mark.parametrize(
    "described",
    [
        None,
        [],
        {"devices": {}},
        {"devices": [{"type": "gpu"}]},
        {"devices": [{"type": "gpu", "minor": "0"}]},
        {"annotations": {"scheduling.koordinator.sh/gpu-partitions": "{"}},
        {"annotations": {"scheduling.koordinator.sh/gpu-partitions": {"two": []}}},
        {
            "annotations": {
                "scheduling.koordinator.sh/gpu-partitions": {"2": [{"minors": [0], "ringBusBandwidth": "x"}]}
            }
        },
    ],
)
def test_a_device_object_that_is_damaged_is_refused(described: object) -> None:
    with pytest.raises(InvalidField, match=r"^device: "):
        read_device(described, {})


def test_a_search_for_same_pcie_is_exact_or_says_that_it_did_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root complex i of 24 has i + 1 NICs and 24 - i FPGAs: twelve of them have 300 devices, and never 151 of each."""
    complexes = range(24)
    nics = [(0, str(i)) for i in complexes for _ in range(i + 1)]
    cards = tuple(
        InventoryDevice(
            kind=DeviceType.FPGA, minor=24 * i + card, place=DeviceLocation(0, str(i)), resources={FPGA: 100}
        )
        for i in complexes
        for card in range(24 - i)
    )
    node = NodeInventory(devices=(*box([(0, str(i)) for i in complexes], nics).devices, *cards))
    joint = {"deviceTypes": ["gpu", "rdma", "fpga"], "requiredScope": "SamePCIe"}

    assert refuse_same_pcie().reasons[0] == chosen(node, {GPUS: 12, UNITS: 15_100, FPGA: 15_100}, joint)
    got = chosen(node, {GPUS: 12, UNITS: 14_000, FPGA: 14_000}, joint)
    assert isinstance(got, dict)
    assert [12, 140, 140] == [len(got[kind]) for kind in ("gpu", "rdma", "fpga")]
    monkeypatch.setattr(same_pcie, "MOST_STEPS", 100)
    with pytest.raises(TooMuchWork, match="100 steps"):
        chosen(node, {GPUS: 12, UNITS: 15_100, FPGA: 15_100}, joint)


def test_64_devices_are_no_hostile_machine() -> None:
    """Switches with two GPUs and two NICs, some of them in use: a step for each switch, more or less."""
    spots = [(i // 8, f"{i // 4}", f"{i // 2}") for i in range(64)]
    node = box(spots, spots, busy_gpus=range(0, 64, 5), busy_nics=dict.fromkeys(range(0, 64, 3), 100))

    for gpus in range(1, 52):
        got = chosen(node, {GPUS: gpus, UNITS: 200}, SAME_PCIE)
        assert isinstance(got, dict)
        assert gpus == len(got["gpu"])
