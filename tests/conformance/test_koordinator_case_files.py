"""A case of the suites `koordinator/…` that is damaged has failed; without the inventories no case can be run."""

import json
from pathlib import Path

import pytest

from topoalign.cli.conformance import suites
from topoalign.core.errors import Undecodable

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
        ({"device": "two"}, "'two' is not in it"),
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
