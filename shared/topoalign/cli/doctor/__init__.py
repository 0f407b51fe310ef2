"""
`topoalign doctor`: checks this machine for common problems, and prints a remedy for each finding.

A finding is ok, a warning (it works, but perhaps not as expected) or a failure. Failures do not change the exit code;
with `--fail-on-findings` they do, for use in scripts.
"""

import ctypes
import platform
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from topoalign.cli import link, options, output, this_machine
from topoalign.cli.doctor.check_results import CheckResult, Subject, Verdict, failure_finding, ok, warning_finding
from topoalign.cli.doctor.kubelets import (
    check_allocator,
    check_kubelet_configuration,
    kubelet,
    kubelet_merge,
    scheduler_for_units,
    state_directory,
)
from topoalign.cli.doctor.state_files import cpu_manager_state, device_manager_state, memory_manager_state
from topoalign.cli.exit_codes import FINDINGS, REMEDIES
from topoalign.core.model.errors import BusUnavailable, TopoalignError, clean
from topoalign.runtime.nats_server import find_nats_server

KUBELET_NUMA_LIMIT = 8
"""NUMA nodes above which the kubelet refuses to start with a topology policy, unless configured otherwise (v1.36.3)."""

NVML = "libnvidia-ml.so.1"
STATE_DIR = Path("/var/lib/topoalign")


@click.command()
@click.option(
    "--nats", envvar="TOPOALIGN_NATS_URL", metavar="URL", help="URL of the NATS to test.  [default: that of `up`]"
)
@click.option("--kubelet-dir", metavar="DIR", type=options.PATH, help="The kubelet's device plugin directory to test.")
@click.option(
    "--kubelet-config",
    metavar="FILE",
    type=options.PATH,
    envvar="TOPOALIGN_KUBELET_CONFIG",
    help="The kubelet's configuration file.  [default: config.yaml above --kubelet-dir]",
)
@click.option(
    "--state-dir",
    metavar="DIR",
    type=options.PATH,
    default=STATE_DIR,
    envvar="TOPOALIGN_STATE_DIR",
    show_default=True,
    help="Directory of the allocator's journal.",
)
@click.option("--sysfs-root", type=options.PATH, default=Path("/sys"), show_default=True, hidden=True)
@click.option(
    "--node",
    envvar="TOPOALIGN_NODE",
    metavar="NODE",
    default=lambda: socket.gethostname().lower(),
    help="Name of this node.  [default: host name]",
)
@click.option("--fail-on-findings", is_flag=True, help="End with exit code 6 if a check failed.")
@options.JSON
def doctor(fail_on_findings: bool, as_json: bool, **subject: Any) -> int | None:
    """
    Check this machine, and print a remedy for each problem.

    \b
    Examples:
      topoalign doctor
      topoalign doctor --kubelet-dir /var/lib/kubelet/device-plugins --fail-on-findings
    """
    findings = tuple(examine(Subject(**subject)))
    failed = any(finding.verdict is Verdict.FAILURE for finding in findings)
    if as_json:
        output.print_json({"ok": not failed, "findings": findings})
    else:
        colour = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILURE: "red"}
        for finding in findings:
            verdict = click.style(f"{finding.verdict:<8}", fg=colour[finding.verdict])
            output.print_line(f"{verdict} {finding.check:<20} {clean(finding.detail, 300)}")
            if finding.remedy:
                output.print_line(f"{'':<8} {'':<20} do: {clean(finding.remedy, 300)}")
    return FINDINGS if failed and fail_on_findings else None


def examine(subject: Subject) -> Iterator[CheckResult]:
    """Runs all checks, one after the other."""
    for name, check in CHECKS.items():
        try:
            finding = check(subject)
        except OSError as error:  # a directory that this user cannot read does not stop the other checks
            remedy = REMEDIES.get(error.errno or 0, "give another path")
            finding = failure_finding(f"{error.filename}: {error.strerror}", remedy)
        if finding is not None:
            yield msgspec.structs.replace(finding, check=name)


def python(subject: Subject) -> CheckResult:
    """The version and path of the Python interpreter; always ok."""
    return ok(f"{platform.python_version()} at {sys.executable}")


def node_name(subject: Subject) -> CheckResult:
    """Whether the node's name is valid in Kubernetes: a DNS subdomain in lower case."""
    name = subject.node
    if not name or len(name) > 253 or name != clean(name, 253):
        return failure_finding(f"{clean(name)!r} is not a name", "set TOPOALIGN_NODE to the Kubernetes node's name")
    if name != name.lower():
        remedy = "Kubernetes node names are lower case: set TOPOALIGN_NODE if this one differs"
        return warning_finding(f"{name} has upper-case letters", remedy)
    return ok(name)


def numa_nodes(subject: Subject) -> CheckResult:
    """The number of online NUMA nodes, and whether it is above the kubelet's default limit of 8 (v1.36.3)."""
    if subject.numa_nodes is None:
        detail = f"no list of NUMA nodes can be read in {subject.sysfs_root}"
        return warning_finding(detail, "mount /sys into the container, or describe the machine with --machine")
    count = len(subject.numa_nodes)
    if count > KUBELET_NUMA_LIMIT and subject.kubelet_rules is None:  # else "kubelet config" checks this
        return warning_finding(
            f"{count}, and the kubelet's topology manager refuses more than {KUBELET_NUMA_LIMIT}",
            f"set the kubelet's topologyManagerPolicyOptions max-allowable-numa-nodes to {count} or more",
        )
    return ok(str(count))


def nvml(subject: Subject) -> CheckResult:
    """Whether the library of NVIDIA's driver can be loaded."""
    reason = why_no_driver()
    if reason is not None:
        remedy = "without an NVIDIA driver use --machine; in a container, run it with the NVIDIA runtime"
        return warning_finding(f"{NVML} does not load: {reason}", remedy)
    return ok(f"{NVML} loads")


def hardware(subject: Subject) -> CheckResult:
    """Checks what discovery would find here."""
    try:
        inventory = this_machine.read_inventory()
    except TopoalignError as error:
        return warning_finding(error.finding, error.remedy)
    machine = this_machine.configured_machine()
    found = inventory.topology.describe()
    if machine:
        found += f" (described by TOPOALIGN_MACHINE: {clean(machine, 200)})"
    if inventory.findings:
        detail = f"{found}; {'; '.join(inventory.findings)}"
        return warning_finding(detail, "the devices named here are not offered, or only in part")
    return ok(found)


def why_no_driver() -> str | None:
    """Why the NVIDIA driver's library cannot be used here; None if it can."""
    try:
        ctypes.CDLL(NVML)
    except OSError as error:
        return clean(str(error))
    return None


def nats_server(subject: Subject) -> CheckResult:
    """Whether the `nats-server` program is found, which only `topoalign up` without --nats starts."""
    try:
        return ok(str(find_nats_server()))
    except TopoalignError as error:
        return warning_finding(f"{error.finding}; only `up` without --nats needs it", error.remedy)


def nats(subject: Subject) -> CheckResult:
    """Whether NATS answers, with the version, permissions and stores that a service needs."""
    try:
        detail = link.self_test(link.locate_bus(subject.nats)[0])
    except link.NothingRuns as error:
        return warning_finding(error.finding, error.remedy)
    except BusUnavailable as error:
        return failure_finding(
            error.finding, "check that nats-server runs there and can be reached, or give --nats URL"
        )
    except TopoalignError as error:
        return failure_finding(error.finding, error.remedy)
    return ok(detail)


CHECKS: dict[str, Callable[[Subject], CheckResult | None]] = {
    "Python": python,
    "node name": node_name,
    "NUMA nodes": numa_nodes,
    "NVML": nvml,
    "hardware": hardware,
    "nats-server": nats_server,
    "NATS": nats,
    "kubelet": kubelet,
    "kubelet config": check_kubelet_configuration,
    "kubelet merge": kubelet_merge,
    "units": scheduler_for_units,
    "CPU manager state": cpu_manager_state,
    "memory manager state": memory_manager_state,
    "device checkpoint": device_manager_state,
    "state directory": state_directory,
    "allocator": check_allocator,
}
"""Name -> check, which returns None if there is nothing to check."""
