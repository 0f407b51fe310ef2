"""
Takes CPUs from a set as the kubelet's CPU manager does (kubelet v1.36.3, policy static).

The options of the policy select the algorithm: packed, spread over the cores, within one last-level cache if the CPUs
fit, or distributed evenly over NUMA nodes. The CPUs that are reserved for the system are taken by the same algorithm.
"""

from collections.abc import Set
from functools import lru_cache

from topoalign.core.cpu_assignment.distributed import take_distributed
from topoalign.core.cpu_assignment.packed import take_packed
from topoalign.core.model.requests import AdmissionRules, CpuOption, Mode
from topoalign.core.model.topology.cpu_topology import CpuTopology
from topoalign.core.model.topology.cpuset import parse_cpuset
from topoalign.core.model.topology.model import Topology
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


def read_reserved_cpus(topology: Topology, rules: AdmissionRules) -> frozenset[int]:
    """
    Ids of the CPUs that are reserved for the system: the listed ones, or a number of CPUs that the CPU manager takes
    from all CPUs in the same way as for containers. Raises ValueError for an invalid list, and the errors of `take`.
    """
    if rules.reserved_cpus.strip():
        return parse_cpuset(rules.reserved_cpus)
    if not rules.reserved_cpu_count:
        return frozenset()
    return _choose_reserved_cpus(topology.cpu_topology, rules.reserved_cpu_count, rules.cpu_options, rules.mode)


@lru_cache(maxsize=64)  # each decision needs them several times
def _choose_reserved_cpus(cpus: CpuTopology, count: int, options: frozenset[CpuOption], mode: Mode) -> frozenset[int]:
    return take(cpus, cpus.node_of.keys(), count, options, mode)
