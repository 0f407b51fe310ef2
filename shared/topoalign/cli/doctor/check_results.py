"""The types of `topoalign doctor`: the subject of the checks, and their findings."""

from enum import StrEnum
from pathlib import Path

import msgspec


class Verdict(StrEnum):
    """The result of a check, as the command prints it."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check."""

    check: str = ""
    verdict: Verdict
    detail: str
    remedy: str = ""


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """The directories and settings that the checks examine."""

    nats: str | None
    kubelet_dir: Path | None
    kubelet_config: Path | None
    state_dir: Path
    sysfs_root: Path
    node: str


def ok(detail: str) -> CheckResult:
    """A finding without a problem."""
    return CheckResult(verdict=Verdict.OK, detail=detail)


def warning_finding(detail: str, remedy: str) -> CheckResult:
    """A finding that works, but perhaps not as expected."""
    return CheckResult(verdict=Verdict.WARNING, detail=detail, remedy=remedy)


def failure_finding(detail: str, remedy: str) -> CheckResult:
    """A finding that stops something from working; `--fail-on-findings` turns it into exit code 6."""
    return CheckResult(verdict=Verdict.FAILURE, detail=detail, remedy=remedy)
