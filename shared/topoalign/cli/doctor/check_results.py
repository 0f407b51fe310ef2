"""The types of `topoalign doctor`: the subject of the checks, and their findings."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path

import msgspec

from topoalign.core.model.errors import StateFault, TopoalignError
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.cpuset import parse_cpuset
from topoalign.kubelet.files import device_checkpoint, kubelet_configuration


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


def ok(detail: str) -> CheckResult:
    """A finding without a problem."""
    return CheckResult(verdict=Verdict.OK, detail=detail)


def warning_finding(detail: str, remedy: str) -> CheckResult:
    """A finding about something that works, but perhaps not as expected."""
    return CheckResult(verdict=Verdict.WARNING, detail=detail, remedy=remedy)


def failure_finding(detail: str, remedy: str) -> CheckResult:
    """A finding about something that does not work; with `--fail-on-findings`, the exit code is 6."""
    return CheckResult(verdict=Verdict.FAILURE, detail=detail, remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The directories and settings that the checks examine, and what several checks read from them."""

    nats: str | None
    kubelet_dir: Path | None
    kubelet_config: Path | None
    state_dir: Path
    sysfs_root: Path
    node: str

    @cached_property
    def numa_nodes(self) -> frozenset[int] | None:
        """The ids of the NUMA nodes. None if they cannot be read; the check `NUMA nodes` reports that."""
        try:
            return parse_cpuset((self.sysfs_root / "devices/system/node/online").read_text())
        except (OSError, ValueError):
            return None

    @property
    def configuration_file(self) -> Path | None:
        """The kubelet's configuration file; None if neither the file nor the kubelet's directory was given."""
        if self.kubelet_config is None and self.kubelet_dir is not None:
            return self.kubelet_dir.parent / "config.yaml"
        return self.kubelet_config

    @cached_property
    def kubelet_rules(self) -> AdmissionRules | None:
        """The rules of the kubelet's configuration file; None if it cannot be read."""
        path = self.configuration_file
        try:
            return None if path is None else kubelet_configuration.load_configuration(path)
        except TopoalignError:
            return None

    @cached_property
    def registered_devices(self) -> dict[str, list[str]]:
        """The kubelet's device resources, and the devices of each; empty without a readable checkpoint."""
        try:
            data = None if self.kubelet_dir is None else device_checkpoint.load_devices(self.kubelet_dir)
        except StateFault:
            return {}
        return dict(sorted(data.registered_devices.items())) if data is not None else {}
