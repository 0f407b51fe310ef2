"""
`topoalign doctor`: looks at what people get stuck on, and says what to do about each finding.

A finding is ok, a warning (it works, but not as you may expect) or a failure. Failures alone do not change the exit code,
so that the command can be run to look; `--fail-on-findings` makes it a gate.
"""

import ctypes
import os
import platform
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path

import click
import msgspec

from topoalign.cli import output, running
from topoalign.cli.errors import FINDINGS
from topoalign.core.errors import NotFound, TopoalignError, clean
from topoalign.core.requests import AdmissionRules, Policy
from topoalign.core.topology.cpuset import parse_cpuset

KUBELET_NUMA_LIMIT = 8
"""NUMA nodes above which the kubelet refuses to start with a topology policy, unless told otherwise (v1.36.3)."""

NVML = "libnvidia-ml.so.1"


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one check found."""

    check: str
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


def host_name() -> str:
    return socket.gethostname().lower()


@click.command()
@click.option("--nats", envvar="TOPOALIGN_NATS_URL", metavar="URL", help="NATS to test.  [default: that of `up`]")
@click.option("--kubelet-dir", type=click.Path(path_type=Path), help="The kubelet's device plugin directory to test.")
@click.option(
    "--kubelet-config",
    type=click.Path(path_type=Path),
    envvar="TOPOALIGN_KUBELET_CONFIG",
    help="The kubelet's configuration file.  [default: config.yaml above --kubelet-dir]",
)
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    default=Path("/var/lib/topoalign"),
    envvar="TOPOALIGN_STATE_DIR",
    show_default=True,
    help="Where the allocator's journal is to live.",
)
@click.option("--sysfs-root", type=click.Path(path_type=Path), default=Path("/sys"), show_default=True, hidden=True)
@click.option("--node", envvar="TOPOALIGN_NODE", default=host_name, help="Name of this node.  [default: host name]")
@click.option("--fail-on-findings", is_flag=True, help="End with exit code 6 if a check failed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(fail_on_findings: bool, as_json: bool, **given: object) -> int | None:
    """
    What is wrong on this machine, and what to do about it.

    \b
    Examples:
      topoalign doctor
      topoalign doctor --kubelet-dir /var/lib/kubelet/device-plugins --fail-on-findings
    """
    findings = tuple(examine(msgspec.convert(given, Subject)))
    failed = any(finding.verdict is Verdict.FAILURE for finding in findings)
    if as_json:
        output.document({"ok": not failed, "findings": findings})
    else:
        show(findings)
    return FINDINGS if failed and fail_on_findings else None


def show(findings: tuple[Finding, ...]) -> None:
    colour = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILURE: "red"}
    for finding in findings:
        verdict = click.style(f"{finding.verdict:<8}", fg=colour[finding.verdict])
        output.say(f"{verdict} {finding.check:<18} {clean(finding.detail, 300)}")
        if finding.remedy:
            output.say(f"{'':<8} {'':<18} do: {clean(finding.remedy, 300)}")


def examine(subject: Subject) -> Iterator[Finding]:
    """All checks, one after the other."""
    for check in CHECKS:
        finding = check(subject)
        if finding is not None:
            yield finding


def python(subject: Subject) -> Finding:
    return ok("Python", f"{platform.python_version()} at {sys.executable}")


def node_name(subject: Subject) -> Finding:
    """Kubernetes: a node's name is a DNS subdomain, lower case."""
    name = subject.node
    if not name or len(name) > 253 or name != clean(name, 253):
        return failure(
            "node name", f"{clean(name)!r} is not a name", "set TOPOALIGN_NODE to the Kubernetes node's name"
        )
    if name != name.lower():
        remedy = "Kubernetes node names are lower case: set TOPOALIGN_NODE if this one differs"
        return warning("node name", f"{name} has capitals", remedy)
    return ok("node name", name)


def numa_nodes(subject: Subject) -> Finding:
    file = subject.sysfs_root / "devices/system/node/online"
    try:
        count = len(parse_cpuset(file.read_text()))
    except (OSError, ValueError) as error:
        detail = f"{file} cannot be read: {clean(str(error))}"
        return warning("NUMA nodes", detail, "mount /sys into the container, or describe the machine with --machine")
    if count > KUBELET_NUMA_LIMIT and kubelet_rules(subject) is None:  # else its configuration is judged below
        return warning(
            "NUMA nodes",
            f"{count}, and the kubelet's topology manager refuses more than {KUBELET_NUMA_LIMIT}",
            f"set the kubelet's topologyManagerPolicyOptions max-allowable-numa-nodes to {count} or more",
        )
    return ok("NUMA nodes", str(count))


def numa_node_count(subject: Subject) -> int | None:
    """None where it cannot be read; `numa_nodes` has said so."""
    try:
        return len(parse_cpuset((subject.sysfs_root / "devices/system/node/online").read_text()))
    except (OSError, ValueError):
        return None


def nvml(subject: Subject) -> Finding:
    reason = why_no_driver()
    if reason is not None:
        remedy = "without an NVIDIA driver use --machine; in a container, run it with the NVIDIA runtime"
        return warning("NVML", f"{NVML} does not load: {reason}", remedy)
    return ok("NVML", f"{NVML} loads")


def why_no_driver() -> str | None:
    """Why the NVIDIA driver's library cannot be used here; None if it can."""
    try:
        ctypes.CDLL(NVML)
    except OSError as error:
        return clean(str(error))
    return None


def nats_server(subject: Subject) -> Finding:
    from topoalign.runtime.nats_server import find_nats_server  # as below

    try:
        return ok("nats-server", str(find_nats_server()))
    except TopoalignError as error:
        return warning("nats-server", f"{error.finding}; only `up` without --nats needs it", error.remedy)


def nats(subject: Subject) -> Finding:
    up = running.find(os.environ)
    url = subject.nats or (up.nats if up is not None else None)
    if url is None:
        return warning("NATS", "no server to test", "start `topoalign up`, or give --nats URL")
    from topoalign.cli import link  # brings in what talks to NATS; the other checks work without

    try:
        detail = link.self_test(url)
    except TopoalignError as error:
        return failure("NATS", error.finding, error.remedy)
    return ok("NATS", detail)


def kubelet(subject: Subject) -> Finding | None:
    """Only where a kubelet's directory was given."""
    if subject.kubelet_dir is None:
        return None
    path = subject.kubelet_dir / "kubelet.sock"
    remedy = "check --kubelet-dir, mount the directory into the container, and run as root"
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            return failure("kubelet", f"{path} is not a socket", remedy)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(2)
            sock.connect(os.fspath(path))
    except OSError as error:
        return failure("kubelet", f"{path}: {error.strerror or clean(str(error))}", remedy)
    if not os.access(subject.kubelet_dir, os.W_OK):
        return failure("kubelet", f"{subject.kubelet_dir} is not writable, so no socket can be put there", remedy)
    return ok("kubelet", f"{path} answers")


def configuration_file(subject: Subject) -> Path | None:
    """The kubelet's, where it or the kubelet's directory was given."""
    if subject.kubelet_config is None and subject.kubelet_dir is not None:
        return subject.kubelet_dir.parent / "config.yaml"
    return subject.kubelet_config


def kubelet_rules(subject: Subject) -> AdmissionRules | None:
    """None without a configuration file that can be read; `kubelet_configuration` says why."""
    path = configuration_file(subject)
    if path is None:
        return None
    from topoalign.kubelet import configuration  # as below

    try:
        return configuration.load(path)
    except TopoalignError:
        return None


def kubelet_configuration(subject: Subject) -> Finding | None:
    """Only where the file, or a kubelet's directory, was given: whether what-if can say what that kubelet would decide."""
    path = configuration_file(subject)
    if path is None:
        return None
    from topoalign.kubelet import configuration  # brings in YAML; the other checks work without

    name = "kubelet config"
    try:
        rules = configuration.load(path)
    except NotFound as error:
        return warning(name, f"{error.finding}; what-if uses topoalign's own settings instead", "give --kubelet-config")
    except TopoalignError as error:
        return failure(name, error.finding, error.remedy)
    nodes = numa_node_count(subject)
    if nodes is not None and rules.policy is not Policy.NONE and nodes > rules.max_allowable_numa_nodes:
        return failure(
            name,
            f"{nodes} NUMA nodes, and policy {rules.policy} does not start on more than {rules.max_allowable_numa_nodes}",
            f"set topologyManagerPolicyOptions max-allowable-numa-nodes to {nodes} or more",
        )
    options = "".join(f" {option}" for option in sorted(rules.cpu_options))
    managers = f"CPU manager {rules.cpu_manager}{options}, memory manager {rules.memory_manager}"
    return ok(name, f"policy {rules.policy}, scope {rules.scope}, {managers}")


def state_dir(subject: Subject) -> Finding:
    path = subject.state_dir
    nearest = next(parent for parent in (path, *path.parents) if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        remedy = "create it for this user, or set TOPOALIGN_STATE_DIR"
        return failure("state directory", f"{path}: {nearest} is not a directory this user may write to", remedy)
    return ok("state directory", str(path) if nearest == path else f"{path} (to be created in {nearest})")


def ok(check: str, detail: str) -> Finding:
    return Finding(check=check, verdict=Verdict.OK, detail=detail)


def warning(check: str, detail: str, remedy: str) -> Finding:
    return Finding(check=check, verdict=Verdict.WARNING, detail=detail, remedy=remedy)


def failure(check: str, detail: str, remedy: str) -> Finding:
    return Finding(check=check, verdict=Verdict.FAILURE, detail=detail, remedy=remedy)


CHECKS: tuple[Callable[[Subject], Finding | None], ...] = (
    python,
    node_name,
    numa_nodes,
    nvml,
    nats_server,
    nats,
    kubelet,
    kubelet_configuration,
    state_dir,
)
