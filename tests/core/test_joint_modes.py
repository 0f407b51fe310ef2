"""Where the default differs from what Koordinator does (`compat`): each with both answers."""

from collections.abc import Sequence
from fractions import Fraction

import msgspec
import pytest
from joint_support import GPU, GPUS, NIC, SAME_PCIE, TOGETHER, UNITS, box, chosen, demand

from topoalign.core.deviceshare.candidates import DeviceCandidate, JointRequest, by_preferred_pcie
from topoalign.core.deviceshare.device_scores import DevicePacking, DeviceScorer
from topoalign.core.deviceshare.gpu_choice import NOT_ENOUGH
from topoalign.core.deviceshare.inventory import DeviceLocation, InventoryDevice, NodeInventory, Partition
from topoalign.core.deviceshare.joint_allocation import allocate_all_types
from topoalign.core.deviceshare.joint_refusals import DevicesDoNotFit
from topoalign.core.deviceshare.koordinator_names import CORE, RATIO
from topoalign.core.model.errors import InvalidField

ONE_TO_ONE = [(i // 4, f"pci-{i}") for i in range(8)]
"""Eight devices on as many root complexes, four of them near each NUMA node."""
VIOLATION = "node(s) Device Joint-Allocate rules violation"


def test_a_nic_of_the_same_numa_node_goes_before_one_that_is_anywhere() -> None:
    """GPU 4 is on node 1, and the NIC on its root complex is busy; NIC 5 is on node 1, too."""
    node = box(ONE_TO_ONE, ONE_TO_ONE, busy_gpus=[0, 1, 2, 3], busy_nics={4: 60})
    asked = {GPUS: 1, UNITS: 50}

    assert {"gpu": [4], "rdma": [0]} == chosen(node, asked, TOGETHER, compat=True)
    assert {"gpu": [4], "rdma": [5]} == chosen(node, asked, TOGETHER)


def test_a_nic_on_the_same_switch_goes_before_one_on_the_same_root_complex() -> None:
    """Koordinator sees root complexes only."""
    node = box([(0, "a", "a1")], [(0, "a", "a2"), (0, "a", "a1")])

    assert {"gpu": [0], "rdma": [0]} == chosen(node, {GPUS: 1, UNITS: 1}, TOGETHER, compat=True)
    assert {"gpu": [0], "rdma": [1]} == chosen(node, {GPUS: 1, UNITS: 1}, TOGETHER)


def test_pcie_level_keeps_away_from_nics_beside_which_another_is_in_use() -> None:
    node = box([], [(0, "a"), (0, "a"), (0, "b")], busy_nics={0: 1})
    hints = {"rdma": {"exclusivePolicy": "PCIeLevel"}}

    assert {"rdma": [0]} == chosen(node, {UNITS: 1}, None, hints, compat=True)
    assert {"rdma": [2]} == chosen(node, {UNITS: 1}, None, hints)


def test_device_level_takes_an_untouched_nic_as_a_whole() -> None:
    node = box([], [(0, "a"), (0, "b")], busy_nics={0: 1})
    hints = {"rdma": {"exclusivePolicy": "DeviceLevel"}}

    assert {"rdma": [0]} == chosen(node, {UNITS: 1}, None, hints, compat=True)
    assert {"rdma": [1]} == chosen(node, {UNITS: 1}, None, hints)


def test_nics_beyond_the_number_asked_for_are_near_the_gpus_or_not_given() -> None:
    """Four GPUs on four root complexes of node 0, and one NIC near each NUMA node."""
    node = box(ONE_TO_ONE, [(0, "pci-0"), (1, "pci-4")])

    assert {"gpu": [0, 1, 2, 3], "rdma": [0, 1]} == chosen(node, {GPUS: 4, UNITS: 1}, TOGETHER, compat=True)
    assert {"gpu": [0, 1, 2, 3], "rdma": [0]} == chosen(node, {GPUS: 4, UNITS: 1}, TOGETHER)


def test_nics_far_away_are_given_where_the_number_asked_for_needs_them() -> None:
    node = box(ONE_TO_ONE, [(0, "pci-0"), (1, "pci-4")])

    assert {"gpu": [0], "rdma": [0, 1]} == chosen(node, {GPUS: 1, UNITS: 200}, TOGETHER)


def test_every_pcie_of_the_gpus_gets_a_nic_if_it_has_one() -> None:
    """`rdma: 1` is at least one, as in Koordinator."""
    node = box(ONE_TO_ONE, ONE_TO_ONE)

    assert {"gpu": [0, 1, 2], "rdma": [0, 1, 2]} == chosen(node, {GPUS: 3, UNITS: 1}, TOGETHER, compat=True)
    assert {"gpu": [0, 1, 2], "rdma": [0, 1, 2]} == chosen(node, {GPUS: 3, UNITS: 1}, TOGETHER)


def test_same_pcie_looks_for_gpus_that_have_a_nic_beside_them() -> None:
    """GPU 0 is busy, and there are NICs beside GPU 0 and GPU 4 only."""
    node = box(ONE_TO_ONE, [(0, "pci-0"), (1, "pci-4")], busy_gpus=[0])

    assert VIOLATION == chosen(node, {GPUS: 1, UNITS: 1}, SAME_PCIE, compat=True)
    assert {"gpu": [4], "rdma": [1]} == chosen(node, {GPUS: 1, UNITS: 1}, SAME_PCIE)


def test_same_pcie_is_not_met_by_devices_of_which_no_place_is_known() -> None:
    node = box([None, None], [None])

    assert {"gpu": [0], "rdma": [0]} == chosen(node, {GPUS: 1, UNITS: 1}, SAME_PCIE, compat=True)
    assert VIOLATION == chosen(node, {GPUS: 1, UNITS: 1}, SAME_PCIE)


def test_gpus_as_secondary_devices_are_near_the_nics() -> None:
    node = box([(0, "a"), (0, "b")], [(0, "a"), (0, "b")], busy_nics={0: 100})
    joint = {"deviceTypes": ["rdma", "gpu"]}

    assert {"gpu": [0], "rdma": [1]} == chosen(node, {GPUS: 1, UNITS: 100}, joint, compat=True)
    assert {"gpu": [1], "rdma": [1]} == chosen(node, {GPUS: 1, UNITS: 100}, joint)


@pytest.mark.parametrize(
    ("joint", "hints", "field"),
    [
        (None, {"rdma": {"allocateStrategy": "Bogus"}}, "device-allocate-hint].rdma.allocateStrategy"),
        (None, {"rdma": {"exclusivePolicy": "Bogus"}}, "device-allocate-hint].rdma.exclusivePolicy"),
        (None, {"gpu": {"requiredTopologyScope": "Bogus"}}, "device-allocate-hint].gpu.requiredTopologyScope"),
        (None, {"nvme": {}}, "device-allocate-hint]"),
        ({"deviceTypes": ["gpu", "nvme"]}, None, "device-joint-allocate].deviceTypes"),
        ({"deviceTypes": ["gpu", "gpu"]}, None, "device-joint-allocate].deviceTypes"),
        ({**TOGETHER, "requiredScope": "Bogus"}, None, "device-joint-allocate].requiredScope"),
        (None, {"gpu": {"allocateStrategy": "ApplyForAll"}}, "device-allocate-hint].gpu.allocateStrategy"),
        (None, {"gpu": {"vfSelector": {"matchLabels": {"a": "b"}}}}, "device-allocate-hint].gpu.vfSelector"),
        (None, {"rdma": {"requiredTopologyScope": "PCIe"}}, "device-allocate-hint].rdma.requiredTopologyScope"),
        (None, {"rdma": {"alocateStrategy": "ApplyForAll"}}, "device-allocate-hint]"),
    ],
)
def test_a_value_that_would_have_no_effect_is_refused_by_its_path(joint: object, hints: object, field: str) -> None:
    """Koordinator gives something else than was meant instead."""
    node = box(ONE_TO_ONE, ONE_TO_ONE)

    assert {"gpu": [0], "rdma": [0]} == chosen(node, {GPUS: 1, UNITS: 1}, joint, hints, compat=True)
    with pytest.raises(InvalidField) as error:
        chosen(node, {GPUS: 1, UNITS: 1}, joint, hints)
    assert error.value.field.endswith(field)
    assert error.value.remedy


def test_an_unknown_partition_policy_is_refused_by_its_path() -> None:
    node = box(ONE_TO_ONE, table={1: (Partition((3,)),)})

    assert {"gpu": [3]} == chosen(node, {GPUS: 1}, partition={"allocatePolicy": "Bogus"}, compat=True)
    with pytest.raises(InvalidField, match=r"gpu-partition-spec\]\.allocatePolicy: 'Bogus' is not known"):
        chosen(node, {GPUS: 1}, partition={"allocatePolicy": "Bogus"})


def test_a_single_gpu_is_on_a_single_device() -> None:
    node = box(ONE_TO_ONE)
    hints = {"gpu": {"requiredTopologyScope": "Device"}}

    assert "Insufficient Topology Scoped GPU Devices" == chosen(node, {GPUS: 1}, None, hints, compat=True)
    assert {"gpu": [0]} == chosen(node, {GPUS: 1}, None, hints)
    assert "Insufficient Topology Scoped GPU Devices" == chosen(node, {GPUS: 2}, None, hints)


def test_all_nics_are_the_healthy_ones() -> None:
    node = box([], ONE_TO_ONE[:3], sick=[(NIC, 1)])
    hints = {"rdma": {"allocateStrategy": "ApplyForAll"}}

    assert "Insufficient rdma devices" == chosen(node, {UNITS: 1}, None, hints, compat=True)
    assert {"rdma": [0, 2]} == chosen(node, {UNITS: 1}, None, hints)


def test_all_nics_are_those_of_the_numa_nodes_asked_for() -> None:
    node = box([], ONE_TO_ONE)
    hints = {"rdma": {"allocateStrategy": "ApplyForAll"}}

    assert "Insufficient rdma devices" == chosen(node, {UNITS: 1}, None, hints, nodes=[1], compat=True)
    assert {"rdma": [4, 5, 6, 7]} == chosen(node, {UNITS: 1}, None, hints, nodes=[1])


def test_a_partition_of_a_higher_score_is_preferred() -> None:
    pairs = (Partition((0, 1), 1), Partition((2, 3), 2, Fraction(200)))
    node = box(ONE_TO_ONE[:4], table={2: pairs})

    assert {"gpu": [0, 1]} == chosen(node, {GPUS: 2}, compat=True)
    assert {"gpu": [2, 3]} == chosen(node, {GPUS: 2})


def test_a_hundred_units_counted_are_one_nic() -> None:
    node = box([], ONE_TO_ONE)
    hints = {"rdma": {"allocateStrategy": "RequestsAsCount"}}

    assert "Insufficient rdma devices" == chosen(node, {UNITS: 100}, None, hints, compat=True)
    assert {"rdma": [0]} == chosen(node, {UNITS: 100}, None, hints)


def test_a_resource_that_the_device_does_not_have_is_not_given() -> None:
    card = InventoryDevice(kind=GPU, minor=0, place=DeviceLocation(0, "a"), resources={RATIO: 100})
    node = NodeInventory(devices=(card,))

    assert {"gpu": [0]} == chosen(node, {CORE: 50, RATIO: 50}, compat=True)
    assert "Insufficient GPU Devices" == chosen(node, {CORE: 50, RATIO: 50})


def test_labels_in_a_selector_are_looked_at() -> None:
    node = box([], ONE_TO_ONE)
    hints = {"rdma": {"selector": {"matchLabels": {"a b": "c d"}}}}

    assert "Insufficient rdma devices" == chosen(node, {UNITS: 1}, None, hints, compat=True)
    with pytest.raises(InvalidField, match="'a b' is not a label key"):
        chosen(node, {UNITS: 1}, None, hints)


@pytest.mark.parametrize("switches", [False, True])
def test_same_pcie_reaches_over_numa_nodes_unless_one_is_required(switches: bool) -> None:
    spots = [(0, "a", "a1"), (1, "b", "b1")] if switches else [(0, "a"), (1, "b")]
    node = box(spots, spots)
    hints = {"gpu": {"requiredTopologyScope": "NUMANode"}}

    assert {"gpu": [0, 1], "rdma": [0, 1]} == chosen(node, {GPUS: 2, UNITS: 1}, SAME_PCIE)
    assert VIOLATION == chosen(node, {GPUS: 2, UNITS: 1}, SAME_PCIE, hints)


def test_same_pcie_prefers_one_root_complex_to_two_numa_nodes() -> None:
    """
    The scope SamePCIe prefers one root complex to the same switches of two NUMA nodes. GPUs near one another count for
    more than the last step of a NIC.
    """
    gpus = [(0, "a", "a1"), (0, "a", "a2"), (1, "b", "b1")]
    node = box(gpus, [(0, "a", "a1"), (1, "b", "b1")])

    assert {"gpu": [0, 1], "rdma": [0]} == chosen(node, {GPUS: 2, UNITS: 1}, SAME_PCIE)


def test_same_pcie_takes_the_same_switches_within_a_root_complex() -> None:
    gpus = [(0, "a", "a1"), (0, "a", "a2")]
    node = box(gpus, [(0, "a", "a3"), (0, "a", "a2"), (0, "a", "a1")])

    assert {"gpu": [0, 1], "rdma": [1, 2]} == chosen(node, {GPUS: 2, UNITS: 1}, SAME_PCIE)


@pytest.mark.parametrize("compat", [False, True])
def test_a_partition_is_taken_that_leaves_another_of_its_size_whole(compat: bool) -> None:
    node = box(ONE_TO_ONE[:4], table={2: (Partition((1, 2)), Partition((0, 1)), Partition((2, 3)))})

    assert {"gpu": [0, 1]} == chosen(node, {GPUS: 2}, compat=compat)


def test_each_round_over_the_pcies_begins_with_the_best_score() -> None:
    def card(minor: int, pcie: str, score: int) -> DeviceCandidate:
        return DeviceCandidate(InventoryDevice(kind=NIC, minor=minor, place=DeviceLocation(0, pcie)), {}, score)

    cards = [card(0, "a", 9), card(1, "a", 1), card(2, "b", 8), card(3, "b", 7), card(4, "c", 9)]

    assert [0, 2, 3, 1, 4] == [each.minor for each in by_preferred_pcie(cards, ["a", "b"])]


def test_each_switch_gets_a_nic_where_koordinator_counts_root_complexes() -> None:
    """
    Each switch gets a NIC, more than were asked for, where Koordinator counts root complexes. Four GPUs on four
    switches below two root complexes, a NIC on each switch, and one asked for.
    """
    spots = [(0, "ab"[i // 2], f"switch-{i}") for i in range(4)]
    node = box(spots, spots)

    assert {"gpu": [0, 1, 2, 3], "rdma": [0, 2]} == chosen(node, {GPUS: 4, UNITS: 1}, TOGETHER, compat=True)
    assert {"gpu": [0, 1, 2, 3], "rdma": [0, 1, 2, 3]} == chosen(node, {GPUS: 4, UNITS: 1}, TOGETHER)


def test_nics_beside_no_gpu_are_taken_from_each_root_complex_in_turn() -> None:
    """GPUs on root complexes a and b have no NIC on their switches; two NICs are asked for, and a has two of the three."""
    node = box([(0, "a", "a1"), (0, "b", "b1")], [(0, "a", "a2"), (0, "a", "a3"), (0, "b", "b2")])

    assert {"gpu": [0, 1], "rdma": [0, 2]} == chosen(node, {GPUS: 2, UNITS: 200}, TOGETHER)


def test_of_a_scope_the_gpu_with_the_best_score_is_shared() -> None:
    """With MostAllocated the GPU that is half in use is filled up, although another has a lower number."""
    node = box([(0, "a"), (0, "a")])
    half = {CORE: 50, RATIO: 50}
    used = msgspec.structs.replace(node.devices[1], used=half)
    node = NodeInventory(devices=(node.devices[0], used))
    scorer = DeviceScorer(strategy=DevicePacking.MOST_ALLOCATED)

    got = allocate_all_types(JointRequest(demand=demand(half), inventory=node, scorer=scorer))

    assert [1] == [each.device.minor for each in got[GPU]]


def test_what_an_init_container_left_counts_only_as_far_as_it_is_taken() -> None:
    """Both root complexes have a GPU that was left; b is in use already, and the second one left on a is not needed."""
    node = box([(0, "a"), (0, "a"), (0, "b"), (0, "b")], busy_gpus=[3])
    left = tuple(msgspec.structs.replace(each, left=each.minor < 3) for each in node.devices)

    assert {"gpu": [2]} == chosen(NodeInventory(devices=left), {GPUS: 1})


def test_the_device_policy_is_asked_once_about_the_scope_that_won() -> None:
    """One GPU of 32 root complexes with two each: the one in use already wins. Two: of the other NUMA node."""
    node = box([(i // 16, f"pci-{i // 2}") for i in range(64)], busy_gpus=[41])
    offered: list[list[int]] = []

    def last(gpus: Sequence[DeviceCandidate], count: int) -> Sequence[DeviceCandidate]:
        offered.append([each.minor for each in gpus])
        return gpus[-count:]

    for gpus, scope in ((1, [40]), (2, [32, 33])):
        got = allocate_all_types(JointRequest(demand=demand({GPUS: gpus}), inventory=node, chooser=last))
        assert scope == [each.device.minor for each in got[GPU]]
        assert [scope] == offered
        offered.clear()


@pytest.mark.parametrize(("gpus", "refused", "asked"), [(2, "Insufficient rdma devices", 0), (9, NOT_ENOUGH, 0)])
def test_counts_that_are_not_there_are_refused_before_gpus_are_chosen(gpus: int, refused: str, asked: int) -> None:
    """Too few GPUs are named first, as in Koordinator."""
    offered: list[int] = []

    def first(devices: Sequence[DeviceCandidate], count: int) -> Sequence[DeviceCandidate]:
        offered.append(count)
        return devices[:count]

    question = JointRequest(
        demand=demand({GPUS: gpus, UNITS: 10_000}, TOGETHER), inventory=box(ONE_TO_ONE, ONE_TO_ONE), chooser=first
    )
    with pytest.raises(DevicesDoNotFit, match=refused):
        allocate_all_types(question)
    assert asked == len(offered)
