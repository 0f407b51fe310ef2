"""A case of the suites `gaia/…` passes only with what is expected; one that cannot be read has failed."""

import json
from pathlib import Path
from typing import Any

import pytest

from topoalign.tools.conformance import suites

MACHINE = {
    "minors": [0, 1],
    "total_memory_bytes": [2**30, 2**30],
    "multi_gpu_board": [0, 0],
    "levels": [[0, 10], [10, 0]],
}
FREE = {"used_cores": 0, "used_memory_blocks": 0, "processes": 0}
EVALUATORS: dict[str, Any] = {
    "id": "t",
    "via": "dispatch",
    "evaluator": "fragment",
    "topology": MACHINE,
    "occupancy": [FREE, FREE],
    "request": {"cores": 100, "memory_blocks": 0},
    "expect": {"devices": [0], "any_of": [[0]], "tie": False, "error": None},
}
SHAPE: dict[str, Any] = {
    "id": "t",
    "topology": MACHINE,
    "expect": {
        "root_members": [0, 1],
        "nodes": [
            {"level": 10, "members": [0, 1], "parent_members": [0, 1], "depth": 1},
            {"level": 0, "members": [0], "parent_members": [0, 1], "depth": 2},
            {"level": 0, "members": [1], "parent_members": [0, 1], "depth": 2},
        ],
    },
}
STATE = {"cores": [0, 100], "memory_bytes": [0, 2**30], "available": 1, "available_minors": [1]}
OPS: dict[str, Any] = {
    "id": "t",
    "topology": MACHINE,
    "ops": [{"op": "occupy", "minor": 0, "cores": 100, "memory_blocks": 1}],
    "expect_after_each_op": [STATE],
}
PROMISE = {
    "gpu_pod": True,
    "node": "a",
    "predicate_gpu_idx": {"0": "0,1"},
    "failed": {"b": "no GPU device"},
    "tried_in_order": ["a"],
}
ADMISSION: dict[str, Any] = {
    "id": "t",
    "nodes": [
        {"name": "a", "capacity_cores": 200, "capacity_memory_blocks": 8, "pods": []},
        {"name": "b", "capacity_cores": 0, "capacity_memory_blocks": 0, "pods": []},
    ],
    "pod": {"containers": [{"cores": 200, "memory_blocks": 0}]},
    "expect": PROMISE,
}
CASES = {"evaluators": EVALUATORS, "tree_shape": SHAPE, "tree_ops": OPS, "admission": ADMISSION}


def passed(folder: Path, suite: str, changes: dict[str, object]) -> bool:
    file = folder / f"{suite}.jsonl"
    file.write_text(json.dumps({**CASES[suite], **changes}) + "\n")
    (result,) = suites()[f"gaia/{suite}"](file)
    return result.passed


@pytest.mark.parametrize("suite", sorted(CASES))
def test_a_case_with_the_answer_that_is_expected_passes(tmp_path: Path, suite: str) -> None:
    assert passed(tmp_path, suite, {})


@pytest.mark.parametrize(
    ("suite", "changes"),
    [
        ("evaluators", {"expect": {"devices": [1], "any_of": [[1]]}}),
        ("evaluators", {"expect": {"error": "no-free-node"}}),
        ("evaluators", {"request": {"cores": 0, "memory_blocks": 0}}),
        ("tree_shape", {"expect": {**SHAPE["expect"], "root_members": [0]}}),
        ("tree_shape", {"expect": {**SHAPE["expect"], "nodes": SHAPE["expect"]["nodes"][:2]}}),
        ("tree_ops", {"expect_after_each_op": [{**STATE, "available": 2}]}),
        ("tree_ops", {"expect_after_each_op": []}),
        ("admission", {"expect": {**PROMISE, "predicate_gpu_idx": {"0": "1,0"}}}),
        ("admission", {"expect": {**PROMISE, "failed": {}}}),
        ("admission", {"expect": {"gpu_pod": False}}),
    ],
)
def test_a_case_with_another_answer_fails(tmp_path: Path, suite: str, changes: dict[str, object]) -> None:
    assert not passed(tmp_path, suite, changes)


@pytest.mark.parametrize(
    ("suite", "changes"),
    [
        ("evaluators", {"evaluator": "random"}),
        ("evaluators", {"occupancy": [FREE]}),
        ("evaluators", {"topology": {**MACHINE, "levels": [[0, 10]]}}),
        ("tree_shape", {"topology": {**MACHINE, "minors": [0]}}),
        ("tree_ops", {"ops": [{"op": "reset", "minor": 0, "cores": 1, "memory_blocks": 1}]}),
        ("admission", {"pod": {"containers": [{"cores": "1", "memory_blocks": 0}]}}),
    ],
)
def test_a_line_that_is_no_case_is_a_failed_case(tmp_path: Path, suite: str, changes: dict[str, object]) -> None:
    assert not passed(tmp_path, suite, changes)


def test_errors_pass_under_the_name_of_the_cases(tmp_path: Path) -> None:
    nothing: dict[str, object] = {
        "request": {"cores": 0, "memory_blocks": 0},
        "evaluator": "",
        "expect": {"error": "zero-request"},
    }
    direct: dict[str, object] = {"via": "evaluator", "evaluator": "link", "request": {"cores": 300, "memory_blocks": 0}}

    assert passed(tmp_path, "evaluators", nothing)
    assert passed(tmp_path, "evaluators", {**direct, "expect": {"error": "no-free-node"}})
    assert passed(tmp_path, "evaluators", {**direct, "evaluator": "share", "expect": {"error": "no-free-node"}})
