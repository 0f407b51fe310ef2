"""
Takes CPUs from a set as the kubelet's CPU manager does (kubelet v1.36.3, policy static).

The options of the policy choose the algorithm: packed, spread over the cores, within one last-level cache where that
fits, or distributed evenly over NUMA nodes. The CPUs that are kept for the system are taken by the same algorithm
(`system_cpus`).
"""

from collections.abc import Set

from topoalign.core.cpu_assignment.distributed import take_distributed
from topoalign.core.cpu_assignment.packed import take_packed
from topoalign.core.model.requests import CpuOption, Mode
from topoalign.core.model.topology.cpu_topology import CpuTopology
from topoalign.core.profile import profile_of


def take(cpus: CpuTopology, available: Set[int], count: int, options: Set[CpuOption], mode: Mode) -> frozenset[int]:
    """Takes `count` of the available CPUs by the options of the CPU manager. Raises NotEnoughCpus and TooMuchWork."""
    if count <= 0:
        return frozenset()
    by_averages = profile_of(mode).counts_averages
    if CpuOption.DISTRIBUTE_ACROSS_NUMA in options:
        group = cpus.cpus_per_core if CpuOption.FULL_PCPUS_ONLY in options else 1
        return take_distributed(cpus, available, count, group, by_averages=by_averages)
    return take_packed(
        cpus,
        available,
        count,
        spread=CpuOption.DISTRIBUTE_ACROSS_CORES in options,
        prefer_uncore=CpuOption.PREFER_UNCORE in options,
        by_averages=by_averages,
    )
