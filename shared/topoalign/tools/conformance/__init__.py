"""
`topoalign conformance`: runs published case files through the functions that the services use.

Cases compare exactly. The last line is always `N passed, N failed`, and the exit code is 0 only if no case failed.
"""

import errno
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import click

from topoalign.cli import output
from topoalign.cli.errors import FAILURE, unknown
from topoalign.core.model.errors import clean
from topoalign.tools.conformance.suite import CaseResult, Suite


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
            output.say(name)
        return None
    if suite not in known:
        raise unknown("suite", suite, known)
    if not files:
        raise click.UsageError(f"no file: `topoalign conformance {suite} FILE...` names the cases to run")
    for file in files:
        if not file.exists():
            raise FileNotFoundError(errno.ENOENT, "no such file or folder", str(file))
        if not file.is_file() and not file.is_dir():  # a pipe would be waited for without end
            raise OSError(errno.EINVAL, "neither a file nor a folder", str(file))
    passed, failed = run(chain.from_iterable(known[suite](file) for file in files), suite, as_json)
    if as_json:
        output.line({"suite": suite, "passed": passed, "failed": failed})
    else:
        output.say(f"{passed} passed, {failed} failed")
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
        nvidia_smi_topo,
    )

    modules = (gaia, gpuallocator, hami, hami_decisions, hami_texts, koordinator, kubelet, nvidia_smi_topo)
    return dict(sorted((name, suite) for module in modules for name, suite in module.SUITES.items()))


def run(cases: Iterable[CaseResult], label: str, as_json: bool) -> tuple[int, int]:
    """Counts the cases that passed and failed, and prints those that failed."""
    passed = failed = 0
    for case in output.progress(cases, label):
        if case.passed:
            passed += 1
            continue
        failed += 1
        if as_json:
            output.line({"id": case.id, "expected": repr(case.expected), "got": repr(case.got)})
        else:
            output.say(f"{clean(case.id, 200)}: expected {clean(repr(case.expected), 1000)}")
            output.say(f"{' ' * len(clean(case.id, 200))}  got      {clean(repr(case.got), 1000)}")
    return passed, failed
