"""
Checks of the kubelet: its socket, directory and configuration, its merge of hints, and the allocator that serves it.

The checks change nothing: locks are read from /proc, and sockets are only connected to.
"""

import os
import re
import socket
import stat
from contextlib import suppress
from pathlib import Path

from topoalign.cli.doctor.check_results import CheckResult, Subject, Verdict, failure_finding, ok, warning_finding
from topoalign.core.model.errors import NotFound, TopoalignError, clean, quoted
from topoalign.core.model.holdings import unit_kind
from topoalign.core.model.ids import CPU, MEMORY, DeviceID, ResourceName
from topoalign.core.model.requests import AdmissionRules, Policy
from topoalign.core.model.topology.cpuset import format_cpuset
from topoalign.core.policy import POLICIES
from topoalign.core.policy.merge.merge_time import longest, warn_of_combinations
from topoalign.kubelet.files import kubelet_configuration
from topoalign.kubelet.grpc.unix_sockets import BUSY, server_of
from topoalign.machines.reader_rules import hugepages_resource

SOCKETS = "topoalign-*.sock"

PROC_LOCKS = Path("/proc/locks")


def kubelet(subject: Subject) -> CheckResult | None:
    """Whether the kubelet accepts connections and its directory is writable and safe. None without --kubelet-dir."""
    if subject.kubelet_dir is None:
        return None
    path = subject.kubelet_dir / "kubelet.sock"
    remedy = "check that the kubelet runs, check --kubelet-dir, mount the directory into the container, and run as root"
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            return failure_finding(f"{path} is not a socket", remedy)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(2)
            sock.connect(os.fspath(path))
    except OSError as error:
        return failure_finding(f"{path}: {error.strerror or clean(str(error))}", remedy)
    if not os.access(subject.kubelet_dir, os.W_OK):
        return failure_finding(f"{subject.kubelet_dir} is not writable, so no socket can be put there", remedy)
    if subject.kubelet_dir.stat().st_mode & stat.S_IWOTH:
        detail = f"every user may write in {subject.kubelet_dir}, and create a socket there"
        return warning_finding(detail, "chmod o-w: only root needs to write there")
    return ok(f"{path} answers")


def check_kubelet_configuration(subject: Subject) -> CheckResult | None:
    """Whether what-if can predict this kubelet; None if neither the file nor the kubelet's directory was given."""
    path = subject.configuration_file
    if path is None:
        return None
    try:
        rules = kubelet_configuration.load_configuration(path)
    except NotFound as error:
        remedy = "give its path with --kubelet-config"
        return warning_finding(f"{error.finding}; what-if uses topoalign's own settings instead", remedy)
    except TopoalignError as error:
        return failure_finding(error.finding, error.remedy)
    ids = subject.numa_nodes
    if ids is not None and rules.policy is not Policy.NONE and len(ids) > rules.max_allowable_numa_nodes:
        most = rules.max_allowable_numa_nodes
        return failure_finding(
            f"{len(ids)} NUMA nodes, and policy {rules.policy} does not start on more than {most}",
            f"set topologyManagerPolicyOptions max-allowable-numa-nodes to {len(ids)} or more",
        )
    compares = rules.prefer_closest_numa_nodes and not POLICIES[rules.policy].single_node
    if compares and ids and max(ids) >= len(ids):
        finding = (
            f"the kubelet panics with prefer-closest-numa-nodes on NUMA nodes {format_cpuset(ids)}, whose ids have gaps"
        )
        return failure_finding(finding, "remove prefer-closest-numa-nodes from topologyManagerPolicyOptions")
    options = "".join(f" {option}" for option in sorted(rules.cpu_options))
    managers = f"CPU manager {rules.cpu_manager}{options}, memory manager {rules.memory_manager}"
    return ok(f"policy {rules.policy}, scope {rules.scope}, {managers}")


MERGE_REMEDY = (
    "ask for fewer resources in one container, use policy single-numa-node, which merges hints of single NUMA nodes alone, "
    "or a firmware setting with fewer NUMA nodes (NPS, SNC)"
)


def kubelet_merge(subject: Subject) -> CheckResult | None:
    """Estimates the kubelet's merge of hints for a container that requests all resources; None if it does not merge."""
    rules = subject.kubelet_rules
    nodes = len(subject.numa_nodes or ())
    if rules is None or not nodes or not POLICIES[rules.policy].asks or nodes > rules.max_allowable_numa_nodes:
        return None
    on_nodes = count_resource_nodes(subject, rules, nodes)
    found = warn_of_combinations({name: longest(few, rules.policy) for name, few in on_nodes.items()})
    if found is not None:
        return warning_finding(f"for a container that asks for everything {found}", MERGE_REMEDY)
    return ok(f"{len(on_nodes)} resources on {nodes} NUMA nodes are merged without delay")


def count_resource_nodes(subject: Subject, rules: AdmissionRules, nodes: int) -> dict[ResourceName, int]:
    """Resource -> the maximum number of NUMA nodes that it can be on. Devices are assumed to be on different nodes."""
    devices = subject.registered_devices
    found = {ResourceName(name): min(nodes, len(ids)) for name, ids in devices.items() if ids}
    if rules.cpu_manager == "static":
        found[CPU] = nodes
    if rules.memory_manager == "Static":
        found[MEMORY] = nodes
        found.update(dict.fromkeys(list_hugepages(subject), nodes))
    return found


def list_hugepages(subject: Subject) -> list[ResourceName]:
    """The hugepage resources of which any NUMA node has pages."""
    sizes = set()
    for file in (subject.sysfs_root / "devices/system/node").glob("node*/hugepages/hugepages-*kB/nr_hugepages"):
        with suppress(OSError, ValueError):
            if int(file.read_text()):
                sizes.add(int(file.parent.name.removeprefix("hugepages-").removesuffix("kB")))
    return [hugepages_resource(kib << 10) for kib in sorted(sizes)]


def scheduler_for_units(subject: Subject) -> CheckResult | None:
    """Recommends topoalign's scheduler if the checkpoint has units of GPUs. No file shows which scheduler is used."""
    devices = subject.registered_devices
    names = [name for name, ids in devices.items() if any(unit_kind(DeviceID(each)) for each in ids)]
    if len(names) < 2:
        return None
    return CheckResult(
        verdict=Verdict.OK,
        detail=f"GPUs are in units: the kubelet asks for {quoted(names)} one after the other. Without a reservation a pod "
        "may be refused (ShareSplit) although it fits",
        remedy="let topoalign's scheduler bind the pods that ask for both: it reserves them together",
    )


def check_allocator(subject: Subject) -> CheckResult:
    """Checks that the process that holds the lock of the state directory, and no other, serves the kubelet."""
    holder = lock_holder(subject.state_dir / "lock", PROC_LOCKS)
    served: set[int] = set()
    for path in subject.kubelet_dir.glob(SOCKETS) if subject.kubelet_dir is not None else ():
        peer = server_of(path)
        if peer is not None and peer is not BUSY:
            served.add(peer.pid)
    others = served - {holder}
    if others and holder is not None:
        detail = f"process {holder} has {subject.state_dir}, and process {min(others)} serves {subject.kubelet_dir}"
        return failure_finding(f"two allocators on one node: {detail}", "stop one of them: a node has one allocator")
    if others:
        return failure_finding(
            f"process {min(others)} serves {subject.kubelet_dir}, and no process has the lock of {subject.state_dir}",
            "it uses another state directory: give it with --state-dir, and start no second allocator here",
        )
    if holder is None:
        return ok(f"no allocator runs with {subject.state_dir}")
    if subject.kubelet_dir is not None and not served:
        return warning_finding(
            f"process {holder} runs, and serves no resource in {subject.kubelet_dir}", "see its log and /readyz"
        )
    return ok(f"process {holder} runs; to replace it, start another one with --take-over")


def lock_holder(lock: Path, locks: Path) -> int | None:
    """The process that holds a lock on this file; None if no process does, or it is not visible here."""
    try:
        inode = lock.stat().st_ino
        lines = locks.read_text()
    except OSError:
        return None
    found = re.search(rf"^\d+: FLOCK .* WRITE (-?\d+) \S+:{inode} ", lines, re.MULTILINE)
    return int(found[1]) if found else None


def state_directory(subject: Subject) -> CheckResult:
    """Whether this user can write to the state directory, or create it in its nearest existing parent."""
    path = subject.state_dir
    nearest = next(parent for parent in (path, *path.parents) if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        remedy = "run as root, as the allocator does; or create it for this user, or set TOPOALIGN_STATE_DIR"
        whose = "" if nearest == path else f"{path}: "
        return failure_finding(f"{whose}{nearest} is not a directory that this user may write to", remedy)
    return ok(str(path) if nearest == path else f"{path} (to be created in {nearest})")
