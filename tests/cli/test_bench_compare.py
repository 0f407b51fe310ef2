"""The comparison of benchmarks of two trees, on two small trees with a `topoalign bench` of their own."""

from pathlib import Path

import pytest

from topoalign.tools.bench_compare import compare

PROJECT = '[project.scripts]\ntopoalign = "toy_bench:main"\n'
PROGRAM = """
def main():
    print('{"name": "toy", "cases": [{"case": "a", "n": 7, "p50_ms": %s}, {"case": "%s", "p50_ms": 1.0}]}')
"""


def tree(folder: Path, milliseconds: str, other: str) -> Path:
    (folder / "shared").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "shared" / "toy_bench.py").write_text(PROGRAM % (milliseconds, other))
    return folder


def test_each_tree_runs_its_own_benchmarks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """4 ms before and 3 ms now is a ratio of 0.75. A case that only one tree has, and counts of runs, are left out."""
    compare(tree(tmp_path / "old", "4.0", "gone"), tree(tmp_path / "new", "3.0", "added"), [], rounds=2)

    (_, row) = capsys.readouterr().out.splitlines()
    assert ["toy", "a", "p50_ms", "4.0000", "3.0000", "0.75"] == row.split()
