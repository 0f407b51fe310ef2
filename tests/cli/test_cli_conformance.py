"""`conformance` shows each failed case with what was expected and what came, and `bench` what was measured."""

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from topoalign.cli import root
from topoalign.core.model.errors import Undecodable
from topoalign.tools import bench, conformance
from topoalign.tools.conformance.suite import CaseResult


def numbers(path: Path) -> Iterator[CaseResult]:
    """A suite of its own: each line holds a number that is to be even."""
    for at, line in enumerate(path.read_text().splitlines(), 1):
        if not line.isdigit():
            raise Undecodable(f"line {at}", "not a number")
        yield CaseResult(f"case-{at}", 0, int(line) % 2)


@pytest.fixture(autouse=True)
def suites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "suites", lambda: {"numbers/even": numbers})


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.jsonl"
    path.write_text("2\n4\n")
    return path


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    path = tmp_path / "bad.jsonl"
    path.write_text("2\n3\n")
    return path


def test_all_passed_ends_with_0(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = root.run_command_line(["conformance", "numbers/even", str(good)])

    assert (0, "2 passed, 0 failed\n") == (status, capsys.readouterr().out)


def test_each_failed_case_is_shown_and_the_sums_of_all_files_come_last(
    good: Path, bad: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = root.run_command_line(["conformance", "numbers/even", str(good), str(bad)])

    assert 1 == status
    assert ["case-2: expected 0", "        got      1", "3 passed, 1 failed"] == capsys.readouterr().out.splitlines()


def test_as_json_a_failed_case_is_an_object_and_so_are_the_sums(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root.run_command_line(["conformance", "--json", "numbers/even", str(bad)])

    case, sums = map(json.loads, capsys.readouterr().out.splitlines())
    assert {"id": "case-2", "expected": "0", "got": "1"} == case
    assert {"suite": "numbers/even", "passed": 1, "failed": 1} == sums


def test_a_file_that_is_no_case_file_is_invalid_input_and_never_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text("2\nx\n")

    statuses = [
        root.run_command_line(["conformance", "numbers/even", str(path)])
        for path in (broken, tmp_path / "missing", tmp_path)
    ]

    out, err = capsys.readouterr()
    assert ([5, 3, 1], "") == (statuses, out)
    assert "line 2 cannot be decoded" in err
    assert "missing: no such file or folder" in err


def test_without_arguments_the_suites_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == root.run_command_line(["conformance"])
    assert "numbers/even\n" == capsys.readouterr().out


def test_every_benchmark_has_cases() -> None:
    assert bench.benchmarks()
    for module in bench.benchmarks().values():
        assert callable(import_module(f"topoalign.tools.bench.{module}").cases)


def test_bench_prints_an_object_per_benchmark_or_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "quick_one.py").write_text(
        "def cases():\n    yield {'case': 'a', 'n': 3, 'p50_ms': 0.12345}\n    yield {'case': 'b', 'n': 4, 'rss_mb': 7}\n"
    )
    monkeypatch.setattr(bench, "__path__", [str(tmp_path)])

    statuses = (root.run_command_line(["bench", "quick-one", "--json"]), root.run_command_line(["bench"]))

    as_json, *table = capsys.readouterr().out.splitlines()
    assert (0, 0) == statuses
    assert {
        "name": "quick-one",
        "cases": [{"case": "a", "n": 3, "p50_ms": 0.12345}, {"case": "b", "n": 4, "rss_mb": 7}],
    } == json.loads(as_json)
    assert ["quick-one", "case  n  p50_ms  rss_mb", "a     3  0.123   -", "b     4  -       7", ""] == table
