"""Koordinator's Device object is read as Koordinator writes it."""

import json
from fractions import Fraction

import pytest

from topoalign.core.deviceshare.inventory import (
    ANYWHERE,
    DeviceLocation,
    FunctionGroup,
    InventoryFunction,
    Partition,
)
from topoalign.core.deviceshare.koordinator_names import DeviceType
from topoalign.tools.conformance.koordinator_devices import DescribedInventory, read_device, with_used


def read_without_labels(raw: object) -> DescribedInventory:
    return read_device(raw, {})


TABLE = {"2": [{"minors": [0, 1], "allocationScore": 4, "ringBusBandwidth": "400Gi"}, {"minors": [2, 3]}]}
PARTITIONS = {2: (Partition((0, 1), 4, Fraction(400 << 30)), Partition((2, 3), 0, None))}


def test_a_device_is_read_with_all_that_is_said_of_it() -> None:
    raw = {
        "type": "rdma",
        "minor": 3,
        "id": "0000:99:00.0",
        "health": True,
        "labels": {"a": "b"},
        "resources": {"koordinator.sh/rdma": 100},
        "topology": {"socketID": 1, "nodeID": 1, "pcieID": "pci0000:97", "busID": "0000:99:00.0"},
        "vfGroups": [{"labels": {"c": "d"}, "vfs": [{"minor": 5, "busID": "0000:99:00.6"}]}],
    }

    (device,) = read_device({"devices": [raw]}, {}).devices

    assert (DeviceType.RDMA, 3, "0000:99:00.0", True) == (device.kind, device.minor, device.id, device.healthy)
    assert ({"a": "b"}, DeviceLocation(1, "pci0000:97")) == (device.labels, device.place)
    assert {"koordinator.sh/rdma": 100} == device.resources == device.total == device.free
    assert (FunctionGroup({"c": "d"}, (InventoryFunction("0000:99:00.6", 5),)),) == device.groups


def test_a_device_of_which_little_is_said_is_ill_and_nowhere() -> None:
    """Go leaves out what is empty: a device without `health` is not healthy."""
    bare, placed = read_without_labels(
        {"devices": [{"type": "gpu", "minor": 1, "resources": {"x": 1}}, {"type": "gpu", "minor": 0, "topology": {}}]}
    ).devices

    assert (False, {}, {}, None, ()) == (bare.healthy, bare.total, bare.labels, bare.place, bare.groups)
    assert DeviceLocation(ANYWHERE, "") == placed.place


def test_devices_of_unknown_types_are_left_out() -> None:
    found = read_without_labels({"devices": [{"type": kind, "minor": 0} for kind in ("gpu", "xpu", "fpga", "rdma")]})

    assert [DeviceType.GPU, DeviceType.FPGA, DeviceType.RDMA] == [device.kind for device in found.devices]


@pytest.mark.parametrize("written", [TABLE, json.dumps(TABLE)], ids=["decoded", "as text"])
def test_a_partition_table_is_read_as_text_or_decoded(written: object) -> None:
    found = read_without_labels({"annotations": {"scheduling.koordinator.sh/gpu-partitions": written}})

    assert PARTITIONS == found.table


POLICY = "node.koordinator.sh/gpu-partition-policy"


@pytest.mark.parametrize("own", [None, "Honor", "Prefer"])
@pytest.mark.parametrize("of_node", [None, "Honor", "Prefer"])
@pytest.mark.parametrize("with_table", [False, True])
def test_the_partition_policy_stands_where_the_table_does(
    own: str | None, of_node: str | None, with_table: bool
) -> None:
    """On the Device object if that has a table, else on the node, whose GPUs may have a table that is built in."""
    raw = {
        "labels": {} if own is None else {POLICY: own},
        "annotations": {"scheduling.koordinator.sh/gpu-partitions": TABLE} if with_table else {},
    }

    found = read_device(raw, {} if of_node is None else {POLICY: of_node})

    assert ((own if with_table else of_node) == "Honor") is found.honored


@pytest.mark.parametrize(
    ("model", "vendor", "built_in"),
    [
        ("H100", "nvidia", True),
        ("H800", "", True),
        ("H20", None, True),
        ("H100", "amd", False),
        ("A100", "nvidia", False),
    ],
)
def test_hoppers_of_nvidia_have_a_table_that_is_built_in(model: str, vendor: str | None, built_in: bool) -> None:
    """All ways to cut eight GPUs into neighbours: 8 ones, 4 pairs, 2 fours, and all."""
    labels = {"node.koordinator.sh/gpu-model": model}
    labels |= {} if vendor is None else {"node.koordinator.sh/gpu-vendor": vendor}

    table = read_device({}, labels).table

    assert built_in == (table is not None)
    if table is not None:
        assert {1: 8, 2: 4, 4: 2, 8: 1} == {size: len(partitions) for size, partitions in table.items()}
        for size, partitions in table.items():
            assert [*range(8)] == [minor for each in partitions for minor in each.minors]
            assert {(size, 1, None)} == {(len(each.minors), each.score, each.bandwidth) for each in partitions}
    assert PARTITIONS == read_device({"annotations": {"scheduling.koordinator.sh/gpu-partitions": TABLE}}, labels).table


@pytest.mark.parametrize(("said", "expected"), [("true", True), ("True", False), (None, False)])
def test_a_node_is_well_planned_if_its_device_object_says_so(said: str | None, expected: bool) -> None:
    labels = {} if said is None else {"node.koordinator.sh/secondary-device-well-planned": said}

    assert expected is read_without_labels({"labels": labels}).well_planned
    assert not read_device({}, labels).well_planned


def test_what_is_booked_is_in_use_of_that_device_alone() -> None:
    node = read_without_labels(
        {"devices": [{"type": "rdma", "minor": minor, "health": True, "resources": {"r": 100}} for minor in (1, 0)]}
    )

    in_use = with_used(node, DeviceType.RDMA, 1, {"r": 30}, ["vf"])
    in_use = with_used(in_use, DeviceType.RDMA, 1, {"r": 80, "s": 1})
    ignored = with_used(with_used(in_use, DeviceType.RDMA, 7, {"r": 1}), DeviceType.FPGA, 1, {"r": 1})

    idle, used = in_use.by_type[DeviceType.RDMA]
    assert ({}, {"r": 100}, False) == (idle.used, idle.free, idle.busy)
    assert ({"r": 110, "s": 1}, {"r": 0}, frozenset({"vf"}), True) == (
        used.used,
        used.free,
        used.used_functions,
        used.busy,
    )
    assert ignored == in_use
    assert with_used(node, DeviceType.RDMA, 0, {}, ["vf"]).by_type[DeviceType.RDMA][0].busy
    assert not with_used(node, DeviceType.RDMA, 0, {"r": 0}).by_type[DeviceType.RDMA][0].busy
