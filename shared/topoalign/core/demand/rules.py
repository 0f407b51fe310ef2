"""
Which rules of a node can be meant (kubelet v1.36.3): settings with which no kubelet would start are refused.

A decision made with such rules would be one that no kubelet ever makes. Whether a kubelet starts with them on a given
machine is asked in `core.hints.preconditions`.
"""

from topoalign.core.model.errors import InvalidField, clean
from topoalign.core.model.ids import MEMORY, is_hugepages
from topoalign.core.model.requests import AdmissionRules, CpuOption
from topoalign.core.model.topology.cpuset import parse_cpuset
from topoalign.core.policy import POLICIES

CONFLICTS = (
    (CpuOption.FULL_PCPUS_ONLY, CpuOption.DISTRIBUTE_ACROSS_CORES),
    (CpuOption.DISTRIBUTE_ACROSS_NUMA, CpuOption.DISTRIBUTE_ACROSS_CORES),
    (CpuOption.PREFER_UNCORE, CpuOption.DISTRIBUTE_ACROSS_CORES),
    (CpuOption.PREFER_UNCORE, CpuOption.DISTRIBUTE_ACROSS_NUMA),
)
"""Options that the kubelet does not start with together."""


def check_rules(rules: AdmissionRules) -> None:
    """Raises InvalidField for rules that cannot be meant."""
    check_cpu_rules(rules)
    check_memory_rules(rules)
    if rules.max_allowable_numa_nodes < 8:
        raise InvalidField(
            "rules.max_allowable_numa_nodes",
            f"{rules.max_allowable_numa_nodes} is below 8",
            "use 8 or more, as the kubelet does",
        )


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


def check_memory_rules(rules: AdmissionRules) -> None:
    """Raises InvalidField for amounts that no system can be kept."""
    for node, amounts in rules.reserved_memory.items():
        for resource, size in amounts.items():
            field = f"rules.reserved_memory[{node}][{clean(resource)}]"
            if resource != MEMORY and not is_hugepages(resource):
                raise InvalidField(field, "neither memory nor hugepages", "reserve memory or hugepages-<size> here")
            if size < 0:
                raise InvalidField(field, f"{size} is below 0", "use 0 or more bytes")
