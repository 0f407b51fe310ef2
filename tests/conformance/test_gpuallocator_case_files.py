"""Cases of the suite `gpuallocator` as Go may write them: null for what is empty, links of no known kind, no ties listed."""

import json
from pathlib import Path

import pytest

from topoalign.tools.conformance import suites

NVLINK = ["SingleNVLINKLink"]
CASE: dict[str, object] = {
    "id": "t",
    "topology": {"gpus": 3, "links": [[[], [], NVLINK], [[], [], []], [NVLINK, [], []]]},
    "available": [0, 1, 2],
    "required": [],
    "size": 2,
    "policy": "bestEffort",
    "acceptable": [[0, 2]],
}


def passed(folder: Path, case: dict[str, object]) -> bool:
    file = folder / "cases.jsonl"
    file.write_text(json.dumps(case) + "\n")
    (result,) = suites()["gpuallocator"](file)
    return result.passed


def links(cell: object) -> dict[str, object]:
    """Three GPUs: an NVLink between the first and the last, this cell elsewhere."""
    return {"gpus": 3, "links": [[cell, cell, NVLINK], [cell, cell, cell], [NVLINK, cell, cell]]}


@pytest.mark.parametrize(
    "changes",
    [{}, {"required": None}, {"topology": links(None)}, {"topology": links(["P2PLinkUnknown"])}],
)
def test_what_is_null_or_unknown_counts_for_nothing(tmp_path: Path, changes: dict[str, object]) -> None:
    assert passed(tmp_path, {**CASE, **changes})
    assert not passed(tmp_path, {**CASE, **changes, "acceptable": [[0, 1]]})


def test_no_acceptable_answer_means_that_none_is_given(tmp_path: Path) -> None:
    assert passed(tmp_path, {**CASE, "size": 4, "acceptable": []})
    assert not passed(tmp_path, {**CASE, "acceptable": []})


def test_without_acceptable_answers_the_expected_one_is_compared(tmp_path: Path) -> None:
    unlisted = {key: each for key, each in CASE.items() if key != "acceptable"}

    assert passed(tmp_path, {**unlisted, "expect": [0, 2]})
    assert not passed(tmp_path, {**unlisted, "expect": [0, 1]})
    assert passed(tmp_path, {**unlisted, "size": 4, "expect": None})
    assert not passed(tmp_path, unlisted)
