"""
Chooses the CPUs that are kept for the system: the listed ones, or a number of CPUs that the CPU manager selects.

The kubelet takes them from all CPUs of the machine in the way in which containers are given theirs, options included
(kubelet v1.36.3, CPU manager, policy static).
"""

from functools import lru_cache

from topoalign.core.cpu_assignment import take
from topoalign.core.model.requests import AdmissionRules, CpuOption, Mode
from topoalign.core.model.topology.cpu_topology import CpuTopology
from topoalign.core.model.topology.cpuset import parse_cpuset
from topoalign.core.model.topology.model import Topology


def read_reserved_cpus(topology: Topology, rules: AdmissionRules) -> frozenset[int]:
    """Ids of the CPUs kept for the system. Raises ValueError for a bad list; NotEnoughCpus, TooMuchWork as `take`."""
    if rules.reserved_cpus.strip():
        return parse_cpuset(rules.reserved_cpus)
    if not rules.reserved_cpu_count:
        return frozenset()
    return choose_reserved_cpus(topology.cpu_topology, rules.reserved_cpu_count, rules.cpu_options, rules.mode)


@lru_cache(maxsize=64)
def choose_reserved_cpus(cpus: CpuTopology, count: int, options: frozenset[CpuOption], mode: Mode) -> frozenset[int]:
    """The CPUs that the CPU manager keeps by its own choice. Cached: each decision asks for them several times."""
    return take(cpus, cpus.node_of.keys(), count, options, mode)
