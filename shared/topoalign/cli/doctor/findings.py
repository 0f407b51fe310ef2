"""The types of `topoalign doctor`: the subject of the checks, and their findings."""

from enum import StrEnum
from pathlib import Path

import msgspec


class Verdict(StrEnum):
    """The result of a check, as the command prints it."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one check found."""

    check: str = ""
    verdict: Verdict
    detail: str
    remedy: str = ""


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What the checks look at."""

    nats: str | None
    kubelet_dir: Path | None
    kubelet_config: Path | None
    state_dir: Path
    sysfs_root: Path
    node: str


def ok(detail: str) -> Finding:
    """A finding without a problem."""
    return Finding(verdict=Verdict.OK, detail=detail)


def warning(detail: str, remedy: str) -> Finding:
    """A finding that works, but perhaps not as expected."""
    return Finding(verdict=Verdict.WARNING, detail=detail, remedy=remedy)


def failure(detail: str, remedy: str) -> Finding:
    """A finding that stops something from working; `--fail-on-findings` turns it into exit code 6."""
    return Finding(verdict=Verdict.FAILURE, detail=detail, remedy=remedy)
