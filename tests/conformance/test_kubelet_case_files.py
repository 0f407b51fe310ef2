"""A case of the CPU manager or of admissions that is damaged has failed, and the others are run all the same."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from topoalign.core.model.errors import Undecodable
from topoalign.tools.conformance import suites

TAKE = {
    "id": "t",
    "topology": "one",
    "count": 1,
    "strategy": "packed",
    "options": {},
    "available": "0",
    "expect": {"cpus": "0"},
}
TOPOLOGY = {
    "cpus": [[0, 0, 0, 0, 0]],
    "num_cpus": 1,
    "num_cores": 1,
    "num_sockets": 1,
    "num_numa_nodes": 1,
    "num_uncore": 1,
}


def taken(folder: Path, changes: Mapping[str, object], topology: Mapping[str, object] = TOPOLOGY) -> list[bool]:
    """Whether the cases of a file of two lines passed: one that is sound, and one with changes."""
    (folder / "cpu_topologies.json").write_text(json.dumps({"one": topology}))
    file = folder / "cpu_take.jsonl"
    file.write_text(json.dumps(TAKE) + "\n" + json.dumps({**TAKE, **changes}) + "\n")
    return [case.passed for case in suites()["kubelet/cpu_take"](file)]


def test_expectations_without_the_defects_take_precedence(tmp_path: Path) -> None:
    """A case of which the kubelet never returns is passed with the result that it has without the defect."""
    fixed = {"expect": {"never_returns": True}, "expect_fixed": {"cpus": "0"}}

    assert [True, True] == taken(tmp_path, fixed)
    assert [True, False] == taken(tmp_path, {"expect": {"cpus": "1"}})


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"available": "0-x"}, "0-x"),
        ({"strategy": "greedy"}, "`$.strategy`"),
        ({"options": {"group_size": 0}}, "`$.options.group_size`"),
        ({"options": {"group": 1}}, "unknown field `group`"),
        ({"topology": "two"}, "'two' is not in cpu_topologies.json"),
        ({"id": 7}, "`$.id`"),
    ],
)
def test_a_line_that_is_no_case_is_a_failed_case(tmp_path: Path, changes: dict[str, object], place: str) -> None:
    assert [True, False] == taken(tmp_path, changes)
    _, result = suites()["kubelet/cpu_take"](tmp_path / "cpu_take.jsonl")
    assert ("line 2 of cpu_take.jsonl" if "id" in changes else "t") == result.id
    assert place in str(result.got)


def test_an_unreadable_topology_fails_its_cases_an_odd_file_the_run(tmp_path: Path) -> None:
    """A topology that cannot be read fails its cases; a file that is no table of topologies ends the run."""
    assert [False, False] == taken(tmp_path, {}, topology={"cpus": "none"})
    (tmp_path / "cpu_topologies.json").write_text("[]")
    with pytest.raises(Undecodable, match=r"cpu_topologies\.json"):
        list(suites()["kubelet/cpu_take"](tmp_path / "cpu_take.jsonl"))


def test_a_step_that_differs_is_the_one_that_is_shown(tmp_path: Path) -> None:
    """The first step is right. The second expects free devices that the node does not have."""
    after = {"shared_cpus": "0", "free_devices": {}}
    wrong = {**after, "free_devices": {"example.com/a": ["a0"]}}
    case = {
        "id": "c",
        "machine": {
            "numa_nodes": [
                {
                    "id": 0,
                    "memory_total": 1,
                    "hugepages_total": {},
                    "reserved": {},
                    "distances": [10],
                    "cpus": [[0, 0, 0, 0]],
                }
            ],
            "devices": {},
        },
        "config": {
            "topology_policy": "none",
            "scope": "pod",
            "prefer_closest_numa_nodes": False,
            "cpu_options": {},
            "reserved_cpus": "0",
            "reserved_cpu_count": 1,
            "memory_policy": "None",
        },
        "expect": {"reserved_cpus": "0"},
        "steps": [{"op": "remove", "pod_name": "p", "expect": {"state_after": each}} for each in (after, wrong)],
    }
    file = tmp_path / "admission.jsonl"
    file.write_text(json.dumps(case))

    (result,) = suites()["kubelet/admission"](file)

    assert not result.passed
    assert "step 1" in repr(result.got)
