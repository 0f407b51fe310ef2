"""A case of the suite `hami/nrt_score` passes only with the scores and the best node that are expected."""

import json
from pathlib import Path

import pytest

from topoalign.tools.conformance import suites

NODES = {"a": [{"numa": 0, "available": {"cpu": 4}, "distances": {}}], "b": [{"numa": 0, "available": {"cpu": 8}}]}
POD = {"strategy": "LeastAllocated", "policy": "single-numa-node", "scope": "container", "qos": "Guaranteed"}
CASE: dict[str, object] = {
    "id": "t",
    "kind": "nrt_score",
    "input": {**POD, "containers": [{"cpu": 2}], "nodes": NODES},
    "expect": {"scores": {"a": 50, "b": 75}, "best": "b"},
}


def passed(folder: Path, changes: dict[str, object]) -> bool:
    file = folder / "nrt_score.jsonl"
    file.write_text(json.dumps({**CASE, **changes}) + "\n")
    (result,) = suites()["hami/nrt_score"](file)
    return result.passed


def test_the_scores_and_the_best_node_count(tmp_path: Path) -> None:
    assert passed(tmp_path, {})
    assert passed(tmp_path, {"expect": {"scores": {"a": 50, "b": 75}}})
    assert not passed(tmp_path, {"expect": {"scores": {"a": 50, "b": 75}, "best": "a"}})
    assert not passed(tmp_path, {"expect": {"scores": {"a": 50, "b": 74}}})


def test_any_of_several_best_nodes_may_be_named(tmp_path: Path) -> None:
    nodes = {"a": NODES["a"], "b": NODES["a"]}
    same = {"input": {**POD, "containers": [{"cpu": 2}], "nodes": nodes}}

    for best in nodes:
        assert passed(tmp_path, {**same, "expect": {"scores": {"a": 50, "b": 50}, "best": best}})


def test_init_containers_count_beside_those_of_the_pod(tmp_path: Path) -> None:
    """In scope pod an init container that asks for more than all others sets what is needed."""
    asked = {**POD, "scope": "pod", "containers": [{"cpu": 1}], "init_containers": [{"cpu": 2}], "nodes": NODES}

    assert passed(tmp_path, {"input": asked})


@pytest.mark.parametrize(
    "wrong", [{"strategy": "Random"}, {"containers": 1}, {"max_numa_nodes": "8"}, {"nodes": {"a": 1}}]
)
def test_a_line_that_is_no_case_is_a_failed_case(tmp_path: Path, wrong: dict[str, object]) -> None:
    asked = {**POD, "containers": [{"cpu": 2}], "nodes": NODES}

    assert not passed(tmp_path, {"input": {**asked, **wrong}})
