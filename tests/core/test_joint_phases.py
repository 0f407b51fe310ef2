"""What Koordinator's filter leaves out of account and its reserve does not, and what no NUMA node of a machine has."""

import json
from pathlib import Path

import pytest
from joint_support import GPU, NIC, SAME_PCIE, box, demand

from topoalign.core.deviceshare.candidates import JointRequest
from topoalign.core.deviceshare.joint_allocation import allocate_all_types
from topoalign.core.deviceshare.joint_refusals import DevicesDoNotFit, FrameworkStatus
from topoalign.core.deviceshare.koordinator_names import DeviceType
from topoalign.tools.conformance.koordinator import SUITES
from topoalign.tools.conformance.koordinator_devices import DescribedInventory, seen_by_filter
from topoalign.tools.conformance.koordinator_numa_hints import numa_hints

SPARSE = DescribedInventory(devices=box([(0, "a"), (0, "b")], [(0, "b")]).devices, well_planned=True)
"""The only NIC is beside the second GPU, and the first GPU is taken first."""
ONE_EACH = {"nvidia.com/gpu": 1, "koordinator.sh/rdma": 1}


def minors(first_look: bool, requests: dict[str, int]) -> dict[DeviceType, list[int]]:
    pod = demand(requests, SAME_PCIE, compat=True)
    asked = seen_by_filter(pod, SPARSE) if first_look else pod
    given = allocate_all_types(JointRequest(demand=asked, inventory=SPARSE))
    return {kind: [each.device.minor for each in some] for kind, some in given.items()}


def test_filter_reads_the_primary_type_of_a_well_planned_node_alone() -> None:
    """On a well-planned node Filter looks at the primary type alone, and Reserve at all types."""
    assert {GPU: [0]} == minors(True, ONE_EACH)
    with pytest.raises(DevicesDoNotFit, match="Joint-Allocate rules violation"):
        minors(False, ONE_EACH)


def test_filter_of_a_well_planned_node_ignores_types_it_has_no_device_of() -> None:
    """Filter of a well-planned node ignores types that are in no joint list and of which there is no device."""
    assert {GPU: [0]} == minors(True, {**ONE_EACH, "koordinator.sh/fpga": 100})
    with pytest.raises(DevicesDoNotFit, match="Insufficient fpga devices"):
        minors(False, {**ONE_EACH, "koordinator.sh/fpga": 100})


@pytest.mark.parametrize(("phase", "passes"), [("Filter", True), ("Reserve", False)])
def test_a_case_that_names_its_phase_is_answered_for_it(
    phase: str, passes: bool, tmp_path: Path, vectors: Path
) -> None:
    lines = (vectors / "koordinator" / "allocate.jsonl").read_text().splitlines()
    case = next(each for each in map(json.loads, lines) if each["id"] == "run-wellplanned-filter")
    (tmp_path / "devices.json").write_bytes((vectors / "koordinator" / "devices.json").read_bytes())
    (tmp_path / "cases.jsonl").write_text(json.dumps({**case, "phase": phase}))

    assert [passes] == [result.passed for result in SUITES["koordinator/allocate"](tmp_path / "cases.jsonl")]


@pytest.mark.parametrize("wanted", [3, 1_000_000])
def test_more_than_all_numa_nodes_have_is_refused_before_any_search(wanted: int) -> None:
    """A request for more than all NUMA nodes have is refused for that reason before any search."""
    node = box([(0, "a"), (1, "b")], [(0, "a")])
    asked = JointRequest(demand=demand({"nvidia.com/gpu": wanted}, compat=True), inventory=node)

    with pytest.raises(DevicesDoNotFit) as refused:
        numa_hints(asked)
    assert ("Insufficient NUMA Scoped Devices",) == refused.value.reasons
    assert FrameworkStatus.UNRESOLVABLE == refused.value.status


def test_devices_that_are_there_and_held_are_a_refusal_of_their_own() -> None:
    asked = JointRequest(
        demand=demand({"nvidia.com/gpu": 2}, compat=True), inventory=box([(0, "a"), (1, "b")], busy_gpus=[0])
    )

    with pytest.raises(DevicesDoNotFit, match="Insufficient GPU Devices"):
        numa_hints(asked)


def test_a_type_that_no_numa_node_has_is_missing_by_its_name() -> None:
    asked = JointRequest(demand=demand({"koordinator.sh/rdma": 200}, compat=True), inventory=box([(0, "a")]))

    with pytest.raises(DevicesDoNotFit, match="Insufficient rdma devices"):
        numa_hints(asked)
    assert NIC is DeviceType.RDMA
