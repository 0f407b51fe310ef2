"""
Compares the benchmarks of this tree with those of another revision, run in turn on the same machine.

`python -m topoalign.tools.bench_compare [--rounds N] BASE [NAME...]` checks BASE out into a temporary folder and runs
`topoalign bench --json` there and here, N times each, every run in a process of its own. What slows the machine down for a
while slows both down. For each case and figure it prints the median of both and their ratio: p50_ms of 4 before and 3 now
is a ratio of 0.75. A figure that only one of them has is left out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parents[3]
ROOMS = ("shared", "tools", "services/allocator", "services/discovery", "services/hinting", "services/registry")
TIME_LIMIT_SECONDS = 1800

Figures = dict[tuple[str, str, str], list[float]]
"""(benchmark, case, figure) -> its values, one for each run."""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compare the benchmarks of this tree with those of another revision.")
    parser.add_argument("base", help="a revision, such as origin/main")
    parser.add_argument("names", nargs="*", help="benchmarks; without any, all of them")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        subprocess.run(["git", "worktree", "add", "--detach", "--quiet", base, asked.base], cwd=HERE, check=True)
        try:
            compare(base, HERE, asked.names, asked.rounds)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", base], cwd=HERE, check=True)


def compare(base: Path, here: Path, names: Sequence[str], rounds: int) -> None:
    """Runs both trees in turn, the first one changing, and prints the table."""
    found: tuple[Figures, Figures] = defaultdict(list), defaultdict(list)
    for number in range(rounds):
        pair = list(zip((base, here), found, strict=True))
        for tree, figures in pair if number % 2 == 0 else reversed(pair):
            label = "base" if tree is base else "here"
            print(f"round {number + 1} of {rounds}: {label}", file=sys.stderr, flush=True)
            add(figures, run(tree, names))
    before, now = found
    print(f"{'benchmark':<18} {'case':<44} {'figure':<14} {'base':>12} {'here':>12} {'ratio':>7}")
    for key in before:
        if key in now:
            one, other = median(before[key]), median(now[key])
            ratio = f"{other / one:7.2f}" if one else "      -"
            print(f"{key[0]:<18} {key[1]:<44} {key[2]:<14} {one:>12.4f} {other:>12.4f} {ratio}")


def run(tree: Path, names: Sequence[str]) -> list[Mapping[str, Any]]:
    """The output of `topoalign bench --json` of a tree, one item for each benchmark."""
    module, function = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["scripts"]["topoalign"].split(
        ":"
    )
    path = os.pathsep.join(str(tree / room) for room in ROOMS)
    program = f"import sys; from {module} import {function} as main; sys.argv[0] = 'topoalign'; main()"
    ended = subprocess.run(
        [sys.executable, "-c", program, "bench", "--json", *names],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIME_LIMIT_SECONDS,
        check=True,
    )
    return [json.loads(line) for line in ended.stdout.splitlines()]


def add(figures: Figures, output: Sequence[Mapping[str, Any]]) -> None:
    """Adds what one run measured; counts of repetitions are no figures."""
    for bench in output:
        for case in bench["cases"]:
            for name, value in case.items():
                if isinstance(value, float) or (isinstance(value, int) and name != "n"):
                    figures[bench["name"], str(case["case"]), name].append(float(value))


if __name__ == "__main__":
    main()
