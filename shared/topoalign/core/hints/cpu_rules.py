"""
On which machines the CPU manager starts (kubelet v1.36.3, CPU manager, policy static).
"""

from topoalign.core.model.errors import NoFit, clean
from topoalign.core.model.requests import AdmissionRules, CpuOption
from topoalign.core.model.topology.cpuset import format_cpuset, parse_cpuset
from topoalign.core.model.topology.model import Topology


class CpuManagerWouldNotStart(NoFit):
    """The rules are sound, but not on this machine: the kubelet would not start there."""

    code = "CpuManagerWouldNotStart"


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
