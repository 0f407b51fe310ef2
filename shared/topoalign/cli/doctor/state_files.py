"""
Checks of the kubelet's state files: whether the kubelet can start with them, and what it would lose.

A manager writes its file at each change, and reads it only when the kubelet starts. The CPU and the memory manager
reject a file that is damaged, was written under another policy, or does not fit the machine, and the kubelet exits. The
device manager logs a damaged file and continues without it. It then no longer knows the devices of running containers.

Source: kubelet v1.33 to v1.36.3, cm/cpumanager/state, cm/memorymanager/state, their static policies, and Start of
cm/devicemanager. These releases do not differ in this.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from topoalign.cli import this_machine
from topoalign.cli.doctor.check_results import CheckResult, Subject, failure_finding, ok, warning_finding
from topoalign.core.model.errors import StateFault, TopoalignError, clean, quoted
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.model import Topology
from topoalign.kubelet.files import checkpoint, cpu_checkpoint, device_checkpoint, memory_checkpoint
from topoalign.kubelet.files.cpu_checkpoint import CpuManagerState
from topoalign.kubelet.files.memory_checkpoint import MemoryManagerState
from topoalign.machines import load_machine
from topoalign.machines.sysfs_files import Tree
from topoalign.machines.sysfs_machine import read_sysfs

S = TypeVar("S", CpuManagerState, MemoryManagerState)


def cpu_manager_state(subject: Subject) -> CheckResult | None:
    """The file of the CPU manager. None without the kubelet's directory, or without the file."""
    file = cpu_checkpoint
    rules = subject.kubelet_rules
    policy = None if rules is None else ("cpuManagerPolicy", rules.cpu_manager)
    return _manager_state(subject, file.NAME, policy, file.load_cpu_state, file.check_cpu_state)


def memory_manager_state(subject: Subject) -> CheckResult | None:
    """The file of the memory manager. None without the kubelet's directory, or without the file."""
    file = memory_checkpoint
    rules = subject.kubelet_rules
    policy = None if rules is None else ("memoryManagerPolicy", rules.memory_manager)
    return _manager_state(subject, file.NAME, policy, file.load_memory_state, file.check_memory_state)


def device_manager_state(subject: Subject) -> CheckResult | None:
    """The file of the device manager. None without the kubelet's directory, or without the file."""
    if subject.kubelet_dir is None:
        return None
    path = subject.kubelet_dir / device_checkpoint.NAME
    if not os.path.exists(path):  # False without permission: the check of the kubelet's directory reports that
        return None
    try:
        data = device_checkpoint.load_devices(subject.kubelet_dir)
    except StateFault as error:
        effect = "a kubelet that starts with it does not know which devices containers have, and gives them to others"
        return _damaged(path, error, effect)
    return None if data is None else ok(f"devices of {len(data.pod_device_entries or ())} containers")


def _manager_state(
    subject: Subject,
    name: str,
    policy: tuple[str, str] | None,
    load: Callable[[Path], S | None],
    check: Callable[[S, Topology, AdmissionRules], None],
) -> CheckResult | None:
    """The finding about the file of one manager; `policy`: the field of the kubelet's configuration, and its value."""
    if subject.kubelet_dir is None:
        return None
    path = subject.kubelet_dir.parent / name
    if not os.path.exists(path):  # as above
        return None
    rules = subject.kubelet_rules
    topology = described_or_real(subject)

    def checked() -> S | None:
        state = load(path.parent)
        same_policy = state is not None and policy is not None and policy[1] == state.policy_name
        if state is not None and rules is not None and topology is not None and same_policy:
            check(state, topology, rules)
        return state

    try:
        state = checkpoint.load_settled(checked)
    except StateFault as error:
        return _damaged(path, error, "a kubelet does not start with it")
    except TopoalignError as error:  # the configuration does not fit the machine
        return failure_finding(f"{error.finding}; a kubelet does not start with it", error.remedy)
    if state is None:
        return None
    if policy is not None and policy[1] != state.policy_name:
        written = f"{name} was written under policy {quoted([state.policy_name])}, and {policy[0]} is {policy[1]!r}"
        remedy = f"{_delete(path)}; or set {policy[0]} to {clean(state.policy_name)} again"
        return failure_finding(f"{written}: a kubelet does not start with it", remedy)
    compared = "" if rules is not None and topology is not None else ", not compared with machine and configuration"
    return ok(f"policy {clean(state.policy_name)}{compared}")


def described_or_real(subject: Subject) -> Topology | None:
    """The machine that TOPOALIGN_MACHINE describes, else the one in sysfs; None if it cannot be read."""
    described = this_machine.configured_machine()
    try:
        return load_machine(described).topology if described else read_sysfs(Tree(subject.sysfs_root.parent))
    except TopoalignError:
        return None


def _damaged(path: Path, error: StateFault, effect: str) -> CheckResult:
    if not os.access(path, os.R_OK):
        return warning_finding(error.finding, error.remedy)  # a user who can read it gets the details
    return failure_finding(f"{error.finding}; {effect}", _delete(path))


def _delete(path: Path) -> str:
    return f"drain the node, delete {clean(str(path), 200)} and restart the kubelet"
