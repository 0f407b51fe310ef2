"""
Which settings of the CPU manager can be meant, and on which machines (kubelet v1.36.3, CPU manager, policy static).

The kubelet does not start with options that contradict one another. A decision made with them would be one that no kubelet
ever makes, so it is refused here, too.
"""

from topoalign.core.model.errors import InvalidField, NoFit, clean
from topoalign.core.model.requests import AdmissionRules, CpuOption
from topoalign.core.model.topology.cpuset import format_cpuset, parse_cpuset
from topoalign.core.model.topology.model import Topology
from topoalign.core.policy import POLICIES

CONFLICTS = (
    (CpuOption.FULL_PCPUS_ONLY, CpuOption.DISTRIBUTE_ACROSS_CORES),
    (CpuOption.DISTRIBUTE_ACROSS_NUMA, CpuOption.DISTRIBUTE_ACROSS_CORES),
    (CpuOption.PREFER_UNCORE, CpuOption.DISTRIBUTE_ACROSS_CORES),
    (CpuOption.PREFER_UNCORE, CpuOption.DISTRIBUTE_ACROSS_NUMA),
)
"""Options that the kubelet does not start with together."""


class CpuManagerWouldNotStart(NoFit):
    """The rules are sound, but not on this machine: the kubelet would not start there."""

    code = "CpuManagerWouldNotStart"


def check_cpu_rules(rules: AdmissionRules) -> None:
    """Raises InvalidField for settings of the CPU manager that no kubelet would start with."""
    try:
        parse_cpuset(rules.reserved_cpus)
    except ValueError as error:
        raise InvalidField("rules.reserved_cpus", clean(str(error)), "list CPUs as the kernel does: 0-3,8") from error
    if rules.reserved_cpu_count < 0:
        raise InvalidField("rules.reserved_cpu_count", f"{rules.reserved_cpu_count} is below 0", "use 0 or more CPUs")
    if rules.cpu_options and rules.cpu_manager == "none":
        raise InvalidField(
            "rules.cpu_options",
            "the kubelet does not start with options for the CPU manager none",
            "leave the options out, or set cpu_manager to static",
        )
    for one, other in CONFLICTS:
        if {one, other} <= rules.cpu_options:
            raise InvalidField(
                "rules.cpu_options",
                f"the kubelet does not start with both {one.value} and {other.value}",
                "leave one of them out",
            )
    if CpuOption.ALIGN_BY_SOCKET in rules.cpu_options and POLICIES[rules.policy].single_node:
        raise InvalidField(
            "rules.cpu_options",
            f"the kubelet does not start with {CpuOption.ALIGN_BY_SOCKET.value} under policy {rules.policy.value}",
            "leave the option out, or use policy restricted or best-effort",
        )


def check_cpu_manager_starts(topology: Topology, rules: AdmissionRules) -> None:
    """Raises CpuManagerWouldNotStart. A machine of which no CPUs are known is not judged."""
    if not topology.cpus or rules.cpu_manager == "none":
        return
    cpus = topology.cpu_topology
    unknown = parse_cpuset(rules.reserved_cpus) - cpus.node_of.keys()
    if unknown:
        raise CpuManagerWouldNotStart(
            f"reserved_cpus names CPUs that the machine does not have, {clean(format_cpuset(unknown))}: "
            "the kubelet does not start",
            f"reserve some of CPUs {clean(format_cpuset(cpus.node_of))}",
        )
    if not rules.reserved_cpus.strip() and rules.reserved_cpu_count > len(cpus.node_of):
        raise CpuManagerWouldNotStart(
            f"reserved_cpu_count is {rules.reserved_cpu_count}, and the machine has {len(cpus.node_of)} CPUs: "
            "the kubelet does not start",
            "reserve fewer CPUs",
        )
    if CpuOption.ALIGN_BY_SOCKET in rules.cpu_options and cpus.sockets > cpus.nodes:
        raise CpuManagerWouldNotStart(
            f"cpu_options has {CpuOption.ALIGN_BY_SOCKET.value}, and the machine has more sockets ({cpus.sockets}) than "
            f"NUMA nodes with CPUs ({cpus.nodes}): the kubelet does not start",
            "leave the option out on this machine",
        )
