"""A case of the suites `koordinator/…` that is damaged has failed; without the inventories no case can be run."""

import json
from pathlib import Path

import pytest

from topoalign.core.model.errors import Undecodable
from topoalign.tools.conformance import suites

NODE = {"devices": [{"type": "gpu", "minor": 0, "health": True, "resources": {"koordinator.sh/gpu-memory-ratio": 100}}]}
GIVEN = {"gpu": [{"minor": 0, "resources": {"koordinator.sh/gpu-memory-ratio": 50}}]}
CASE = {
    "id": "t",
    "device": "one",
    "assigned": {},
    "pod": {"annotations": {}, "requests": {"koordinator.sh/gpu-memory-ratio": 50}},
    "expect": {"allocations": GIVEN},
}


def passed(folder: Path, changes: dict[str, object], node: object = NODE) -> list[bool]:
    (folder / "devices.json").write_text(json.dumps({"one": node}))
    file = folder / "allocate.jsonl"
    file.write_text(json.dumps({**CASE, **changes}) + "\n")
    return [case.passed for case in suites()["koordinator/allocate"](file)]


def test_a_case_is_passed_only_with_the_answer_that_is_expected(tmp_path: Path) -> None:
    wrong = {"gpu": [{"minor": 1, "resources": {"koordinator.sh/gpu-memory-ratio": 50}}]}
    error = {"code": "Unschedulable", "reasons": ["Insufficient gpu devices"]}

    assert [True] == passed(tmp_path, {})
    assert [False] == passed(tmp_path, {"expect": {"allocations": wrong}})
    assert [False] == passed(tmp_path, {"expect": {"error": error}})


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"device": "two"}, "'two' is not in devices.json"),
        ({"pod": []}, "at `$.pod`"),
        ({"assigned": {"x": []}}, "`$.assigned`"),
    ],
)
def test_a_line_that_is_no_case_is_a_failed_case(tmp_path: Path, changes: dict[str, object], place: str) -> None:
    assert [False] == passed(tmp_path, changes)
    (result,) = suites()["koordinator/allocate"](tmp_path / "allocate.jsonl")
    assert "t" == result.id and place in str(result.got)


def test_inventories_that_are_not_there_or_damaged_are_named(tmp_path: Path) -> None:
    assert [False] == passed(tmp_path, {}, {"devices": 1})
    (tmp_path / "devices.json").unlink()
    with pytest.raises(Undecodable, match=r"devices\.json"):
        list(suites()["koordinator/allocate"](tmp_path / "allocate.jsonl"))


RATIO = {"koordinator.sh/gpu-memory-ratio": 50}
PLACED = {"type": "gpu", "minor": 0, "health": True, "topology": {"socketID": 0, "nodeID": 0, "pcieID": "0"}}
PLACED_NODE = {"devices": [{**PLACED, "resources": {"koordinator.sh/gpu-memory-ratio": 100}}]}


def answered(folder: Path, suite: str, case: dict[str, object]) -> tuple[bool, str]:
    """Whether the case is passed, and what came out."""
    (folder / "devices.json").write_text(json.dumps({"one": PLACED_NODE}))
    file = folder / "cases.jsonl"
    file.write_text(json.dumps({"id": "t", **case}) + "\n")
    (result,) = suites()[f"koordinator/{suite}"](file)
    return result.passed, str(result.got)


def expecting(folder: Path, suite: str, expect: object, pod: object = CASE["pod"]) -> bool:
    return answered(folder, suite, {"device": "one", "pod": pod, "expect": expect})[0]


@pytest.mark.parametrize("suite", ["allocate", "numa_hints", "node_score", "prepare"])
def test_an_expected_error_is_compared_with_the_one_that_came_out(tmp_path: Path, suite: str) -> None:
    odd = {"annotations": {"scheduling.koordinator.sh/device-allocate-hint": "{bad"}, "requests": RATIO}
    reason = "invalid DeviceAllocateHint annotation"
    code = "UnschedulableAndUnresolvable"

    assert expecting(tmp_path, suite, {"error": {"code": code, "reasons": [f"{reason}, err: whatever"]}}, odd)
    assert expecting(tmp_path, suite, {"error": {"code": code}}, odd)
    assert expecting(tmp_path, suite, {"error": {"reasons": [reason]}}, odd)
    assert not expecting(tmp_path, suite, {"error": {"code": "Unschedulable", "reasons": [reason]}}, odd)
    assert not expecting(tmp_path, suite, {"error": {"code": code, "reasons": ["another"]}}, odd)
    assert not expecting(tmp_path, suite, {"error": {"code": code, "reasons": []}}, odd)
    assert not expecting(tmp_path, suite, {"error": {"code": code, "reasons": [reason]}})
    assert not expecting(tmp_path, suite, {"error": None}, odd)


@pytest.mark.parametrize(
    ("suite", "answer"),
    [("allocate", "allocations"), ("numa_hints", "hints"), ("prepare", "normalized_requests")],
)
def test_null_is_an_empty_answer_and_no_error(tmp_path: Path, suite: str, answer: str) -> None:
    nothing: dict[str, object] = {"annotations": {}, "requests": {}}
    odd = {"annotations": {"scheduling.koordinator.sh/device-allocate-hint": "{bad"}, "requests": RATIO}

    assert expecting(tmp_path, suite, {answer: None, "error": None}, nothing)
    assert not expecting(tmp_path, suite, {answer: None})
    assert not expecting(tmp_path, suite, {answer: None}, odd)
    assert not expecting(tmp_path, suite, {}), "a case that expects nothing has failed"


def test_keys_of_a_hint_are_compared_only_if_they_are_expected(tmp_path: Path) -> None:
    assert expecting(tmp_path, "numa_hints", {"hints": {"gpu": [{"numa": [0]}]}})
    assert not expecting(tmp_path, "numa_hints", {"hints": {"gpu": [{"numa": [1]}]}})
    assert not expecting(tmp_path, "numa_hints", {"hints": {"gpu": [{"numa": [0]}, {"numa": [0]}]}})


def test_keys_of_what_is_prepared_are_compared_only_if_they_are_expected(tmp_path: Path) -> None:
    assert expecting(tmp_path, "prepare", {"gpu": {"count": 1}})
    assert not expecting(tmp_path, "prepare", {"gpu": {"count": 2}})
    assert not expecting(tmp_path, "prepare", {"gpu": None})


def test_types_and_resources_that_are_not_expected_are_a_difference(tmp_path: Path) -> None:
    assert not expecting(tmp_path, "allocate", {"allocations": {}})
    assert not expecting(tmp_path, "allocate", {"allocations": {"gpu": [{"minor": 0, "resources": {}}]}})


def test_null_lists_and_maps_of_a_case_are_empty(tmp_path: Path) -> None:
    empty = dict.fromkeys(["assigned", "node_labels", "numa_nodes", "scorer", "required_free"])
    given = {"gpu": [{"minor": 0, "resources": RATIO, "vfs": None}]}
    pod = {"annotations": None, "requests": RATIO}

    case: dict[str, object] = {**empty, "device": "one", "pod": pod, "expect": {"allocations": given}}
    assert (True, "{'allocations': {'gpu': [{'minor': 0, 'resources': " + f"{RATIO}, 'vfs': None" + "}]}}") == answered(
        tmp_path, "allocate", case
    )


@pytest.mark.parametrize(
    ("expect", "passes"),
    [
        ({"valid": False}, True),
        ({"valid": True}, False),
        ({"error": None}, False),
        ({"valid": False, "error": "x"}, False),
    ],
)
def test_a_small_rule_is_compared_only_with_what_is_expected(
    tmp_path: Path, expect: dict[str, object], passes: bool
) -> None:
    asked = {"requests": {"amd.com/gpu": 1, "nvidia.com/gpu": 1}, "normalized_requests": None, "devices": None}
    case: dict[str, object] = {"kind": "validate_request", "input": asked, "expect": expect}
    assert passes == answered(tmp_path, "small_rules", case)[0]
