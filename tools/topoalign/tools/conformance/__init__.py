"""
`topoalign conformance`: runs published case files through the functions that the services use.

Cases compare exactly, or have a ratio that must be large enough; ratios are summed up before the last line. The last line is
always `N passed, N failed`, and the exit code is 0 only if no case failed.
"""

import errno
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from statistics import fmean

import click

from topoalign.cli import output
from topoalign.cli.exit_codes import FAILURE
from topoalign.core.model.errors import clean
from topoalign.tools.conformance.suite import CaseResult, RatedResult, Suite
from topoalign.tools.progress import show_progress


@click.command()
@click.argument("suite", required=False)
@click.argument("files", nargs=-1, metavar="FILE...", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one object per failed case, and one with the sums.")
def conformance(suite: str | None, files: tuple[Path, ...], as_json: bool) -> int | None:
    """
    Run the cases of FILEs through the functions that the services use. Without arguments: the names of the suites.

    \b
    Examples:
      topoalign conformance kubelet/merge merge.jsonl
      topoalign conformance nvidia_smi_topo nvidia_smi_topo/
    """
    known = suites()
    if suite is None:
        for name in known:
            output.print_line(name)
        return None
    if suite not in known:
        raise click.UsageError(f"no suite {suite!r}: there are {', '.join(known)}")
    if not files:
        raise click.UsageError(f"no file: `topoalign conformance {suite} FILE...` names the cases to run")
    for file in files:
        if not file.exists():
            raise FileNotFoundError(errno.ENOENT, "no such file or folder", str(file))
        if not file.is_file() and not file.is_dir():  # a pipe would be waited for without end
            raise OSError(errno.EINVAL, "neither a file nor a folder", str(file))
    passed, failed = run(chain.from_iterable(known[suite](file) for file in files), suite, as_json)
    if as_json:
        output.print_json_line({"suite": suite, "passed": passed, "failed": failed})
    else:
        output.print_line(f"{passed} passed, {failed} failed")
    return FAILURE if failed else None


def suites() -> dict[str, Suite]:
    """All suites by name."""
    from topoalign.tools.conformance import (  # most commands need none
        gaia,
        gpuallocator,
        hami,
        hami_decisions,
        hami_texts,
        koordinator,
        kubelet,
        nccl,
        nvidia_smi_topo,
        openb,
    )

    modules = (gaia, gpuallocator, hami, hami_decisions, hami_texts, koordinator, kubelet, nccl, nvidia_smi_topo, openb)
    return dict(sorted((name, suite) for module in modules for name, suite in module.SUITES.items()))


def run(cases: Iterable[CaseResult], label: str, as_json: bool) -> tuple[int, int]:
    """Counts the cases that passed and failed, prints those that failed, and sums up ratios."""
    passed = failed = 0
    ratios: dict[str, list[float]] = defaultdict(list)
    for case in show_progress(cases, label):
        if isinstance(case, RatedResult):
            ratios[case.group].append(case.ratio)
        if case.passed:
            passed += 1
            continue
        failed += 1
        if as_json:
            output.print_json_line({"id": case.id, "expected": repr(case.expected), "got": repr(case.got)})
        else:
            output.print_line(f"{clean(case.id, 200)}: expected {clean(repr(case.expected), 1000)}")
            output.print_line(f"{' ' * len(clean(case.id, 200))}  got      {clean(repr(case.got), 1000)}")
    if ratios:
        show_ratios(ratios, as_json)
    return passed, failed


def show_ratios(ratios: dict[str, list[float]], as_json: bool) -> None:
    """Prints for each group, and for all, the shares within 1 % and 10 % of the best, the mean and the worst ratio."""
    rows = [(name, figures(some)) for name, some in ratios.items()]
    if len(rows) > 1:
        rows.append(("all", figures([*chain.from_iterable(ratios.values())])))
    if as_json:
        for name, row in rows:
            output.print_json_line({"group": name, **row})
        return
    output.columns(
        ("", "CASES", "WITHIN 1 %", "WITHIN 10 %", "MEAN", "WORST"), [(name, *row.values()) for name, row in rows]
    )


def figures(ratios: list[float]) -> dict[str, float]:
    """What is shown of some ratios, rounded to 4 digits."""
    return {
        "cases": len(ratios),
        "within_1_percent": round(sum(ratio >= 0.99 for ratio in ratios) / len(ratios), 4),
        "within_10_percent": round(sum(ratio >= 0.90 for ratio in ratios) / len(ratios), 4),
        "mean": round(fmean(ratios), 4),
        "worst": round(min(ratios), 4),
    }
