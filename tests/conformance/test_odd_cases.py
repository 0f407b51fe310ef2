"""One odd case never ends a run: it has failed, and the sums of all cases come last."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from topoalign.cli import root
from topoalign.tools.conformance import suites
from topoalign.tools.conformance.suite import CaseResult

Case = dict[str, Any]

MERGE: Case = {
    "id": "m",
    "numa_nodes": [0, 8],
    "distances": [[10, 20], [20, 10]],
    "policy": "restricted",
    "options": {"prefer_closest_numa_nodes": True},
    "providers": [{"example.com/a": [{"nodes": [0], "preferred": True}, {"nodes": [8], "preferred": True}]}],
    "expect": {"nodes": [0], "preferred": True, "admit": True},
}


def run(folder: Path, suite: str, *lines: str) -> list[CaseResult]:
    file = folder / "cases.jsonl"
    file.write_text("\n".join(lines))
    return list(suites()[suite](file))


def first(vectors: Path, suite: str, meant: Callable[[Case], object] = bool) -> Case:
    """The first published case of a suite that is so."""
    lines = (vectors / f"{suite}.jsonl").read_text().splitlines()
    return next(case for case in map(json.loads, lines) if meant(case))


def test_empty_lines_are_skipped_and_lines_without_a_case_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Empty lines are ignored, and lines that are no case are failed cases."""
    good = json.dumps(MERGE)
    negative = {**MERGE, "id": "negative", "providers": [{"a": [{"nodes": [-1], "preferred": True}]}]}
    strange = {**MERGE, "id": "strange", "options": {"nobody_knows": True}}
    file = tmp_path / "merge.jsonl"
    file.write_text(
        "\n".join([good, "", "{", "[" * 5_000, '"x"', json.dumps(negative), json.dumps(strange), good, "\r"])
    )

    status = root.run_command_line(["conformance", "--json", "kubelet/merge", str(file)])

    *failed, sums = map(json.loads, capsys.readouterr().out.splitlines())
    assert (1, 2, 5) == (status, sums["passed"], sums["failed"])
    numbered = [f"line {number} of merge.jsonl" for number in (3, 4, 5)]
    assert [*numbered, "negative", "strange"] == [case["id"] for case in failed]
    assert "ValueError" in failed[3]["got"] and "nobody_knows" in failed[4]["got"]


@pytest.mark.parametrize(
    ("distances", "passes"),
    [
        ([[10, 20], [20, 10]], True),
        ([[10, *[99] * 7, 20], [20, *[99] * 7, 10]], True),
        ([[10, 20, 30], [20, 10, 30]], False),
        ([[10, 20]], False),
    ],
)
def test_a_row_of_distances_is_read_by_id_if_long_enough(
    tmp_path: Path, distances: list[list[int]], passes: bool
) -> None:
    """On sparse node ids a row of distances is read by id if it is long enough, else by position."""
    assert [passes] == [
        case.passed for case in run(tmp_path, "kubelet/merge", json.dumps({**MERGE, "distances": distances}))
    ]


def test_what_a_case_may_leave_out_has_a_default(tmp_path: Path, vectors: Path) -> None:
    shutil.copy(vectors / "kubelet/cpu_topologies.json", tmp_path)
    merge = first(vectors, "kubelet/merge", lambda case: not case["options"].get("prefer_closest_numa_nodes"))
    failing = first(
        vectors, "kubelet/device_allocate", lambda case: not case["plugin"]["fails"] and not case["reusable"]
    )
    hints = first(vectors, "kubelet/device_hints", lambda case: not case["reusable"] and not case["already_allocated"])
    take = first(vectors, "kubelet/cpu_take", lambda case: case["options"] in ({}, {"group_size": 1}))
    admission = first(vectors, "kubelet/admission", lambda case: case["config"]["reserved_cpus"])
    for case, *left_out in (
        (merge, "distances", "options"),
        (failing["plugin"], "fails"),
        (failing, "reusable"),
        (hints, "reusable", "already_allocated"),
        (take, "options"),
        (admission["config"], "reserved_cpu_count"),
    ):
        for name in left_out:
            case.pop(name, None)

    for suite, case in (
        ("merge", merge),
        ("device_allocate", failing),
        ("device_hints", hints),
        ("cpu_take", take),
        ("admission", admission),
    ):
        (result,) = run(tmp_path, f"kubelet/{suite}", json.dumps(case))
        assert (suite, result.expected) == (suite, result.got)


def test_a_device_requested_without_limit_is_ignored_as_in_the_kubelet(tmp_path: Path, vectors: Path) -> None:
    """The kubelet reads limits of devices alone, and so does the decision."""

    def container(case: Case) -> Case:
        step = next(step for step in case["steps"] if step["op"] == "admit")
        found: Case = step["pod"]["containers"][0]
        return found

    case = first(vectors, "kubelet/admission", lambda case: "example.com/b" not in container(case)["limits"])
    container(case)["requests"]["example.com/b"] = 1

    (result,) = run(tmp_path, "kubelet/admission", json.dumps(case))

    assert result.expected == result.got


@pytest.mark.parametrize("suite", ["kubelet/memory_hints", "kubelet/memory_allocate"])
def test_memory_cases_say_what_is_reusable_and_must_say_it_right(tmp_path: Path, vectors: Path, suite: str) -> None:
    case = first(vectors, suite, lambda case: case["reusable"])
    unsaid = {name: value for name, value in case.items() if name != "reusable"}

    wrong = run(tmp_path, suite, json.dumps({**case, "reusable": []}), json.dumps(case), json.dumps(unsaid))

    assert [False, True, True] == [result.passed for result in wrong]
    assert "reusable" in str(wrong[0].got)


def test_a_memory_case_of_a_node_without_memory_runs(tmp_path: Path, vectors: Path) -> None:
    case = first(vectors, "kubelet/memory_hints", lambda case: case["expect"]["hints"])
    for node in case["numa_nodes"]:
        del node["resources"]["memory"]
    case["expect"]["hints"] = {}

    assert [True] == [result.passed for result in run(tmp_path, "kubelet/memory_hints", json.dumps(case))]


def test_an_expectation_without_an_outcome_fails_its_file_alone(tmp_path: Path) -> None:
    (tmp_path / "expected.json").write_text(json.dumps({"a": {"outcome": "refuse"}, "b": {}, "c": 7}))
    (tmp_path / "a").write_text("no matrix")

    results = list(suites()["nvidia_smi_topo"](tmp_path))

    assert [("a", True), ("b", False), ("c", False)] == [(result.id, result.passed) for result in results]
