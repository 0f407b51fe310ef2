"""
Chooses a container's exclusive CPUs, once its NUMA affinity is known (kubelet v1.36.3, CPU manager, policy static).

The rule: as many CPUs as possible come from the NUMA nodes of the affinity (with align-by-socket, from all their sockets),
the others from any NUMA node. `topoalign.core.cpu_assignment` chooses among equal CPUs.

If containers get only whole cores (full-pcpus-only), two kinds of requests are refused before that: for a number of
CPUs that would split a core, and for more CPUs than are free on cores without a CPU that is reserved for the system.
"""

from collections.abc import Set

from topoalign.core.cpu_assignment import take
from topoalign.core.cpu_assignment.packed import NotEnoughCpus
from topoalign.core.model.errors import NoFit
from topoalign.core.model.requests import AdmissionRules, CpuOption
from topoalign.core.model.topology.bitmask import Mask
from topoalign.core.model.topology.cpu_topology import CpuTopology
from topoalign.core.profile import profile_of


class NotWholeCores(NoFit):
    """
    Raised when only whole cores can be allocated, and the request does not allow that.

    The kubelet calls it SMTAlignmentError.

    Remedy: Ask for a multiple of the CPUs of a core.
    """


class SplitCore(NotWholeCores):
    """
    Raised for a number of CPUs that would split a core.

    Remedy: Ask for a multiple of the CPUs of a core, or do without `full-pcpus-only`.
    """

    def __init__(self, requested: int, per_core: int) -> None:
        super().__init__(
            f"{requested} CPUs requested with full-pcpus-only, and a core has {per_core}",
            f"ask for a multiple of {per_core} CPUs, or do without full-pcpus-only",
        )


class NotEnoughCores(NotWholeCores):
    """Raised when fewer CPUs than requested are free on cores that can be allocated as a whole."""

    def __init__(self, requested: int, available: int) -> None:
        super().__init__(
            f"{requested} CPUs requested with full-pcpus-only, and {available} are left on cores without a reserved CPU",
            "ask for fewer CPUs, wait until a container with CPUs of its own has ended, or reserve whole cores",
        )


def allocate_cpus(
    cpus: CpuTopology,
    shared: Set[int],
    reserved: Set[int],
    reusable: Set[int],
    count: int,
    affinity: Mask | None,
    rules: AdmissionRules,
) -> frozenset[int]:
    """
    `count` exclusive CPUs for a container, as near to the affinity as possible. `affinity` None: any nodes. `shared`:
    CPUs that no container has exclusively. `reserved`: CPUs for the system. `reusable`: CPUs of the pod's init
    containers that can be reused. Raises SplitCore, NotEnoughCores, NotEnoughCpus, and TooMuchWork as `take` does.
    """
    if CpuOption.FULL_PCPUS_ONLY in rules.cpu_options:
        if cpus.cpus_per_core and count % cpus.cpus_per_core:
            raise SplitCore(count, cpus.cpus_per_core)
        # As in the kubelet, reusable CPUs do not count here, although the container would reuse them.
        whole = count_on_whole_cores(cpus, shared, reserved)
        if count > whole:
            raise NotEnoughCores(count, whole)
    return choose_cpus(cpus, (shared - reserved) | reusable, count, affinity, rules)


def count_on_whole_cores(cpus: CpuTopology, shared: Set[int], reserved: Set[int]) -> int:
    """Number of shared CPUs on cores without a reserved CPU."""
    broken = {cpus.core_of[cpu] for cpu in reserved if cpu in cpus.core_of}
    return sum(cpus.core_of[cpu] not in broken for cpu in shared)


def choose_cpus(
    cpus: CpuTopology, allocatable: Set[int], count: int, affinity: Mask | None, rules: AdmissionRules
) -> frozenset[int]:
    """`count` of the allocatable CPUs, those of the affinity first. Raises NotEnoughCpus and TooMuchWork."""
    near = allocatable & _aligned_cpus(cpus, affinity, rules) if affinity is not None else frozenset()
    inside = take(cpus, near, min(count, len(near)), rules.cpu_options, rules.mode)
    rest = allocatable - inside
    needed = count - len(inside)
    if needed > len(rest):
        raise NotEnoughCpus(count, len(allocatable))
    return inside | take(cpus, rest, needed, rules.cpu_options, rules.mode)


def _aligned_cpus(cpus: CpuTopology, affinity: Mask, rules: AdmissionRules) -> frozenset[int]:
    """All CPUs of the affinity's nodes, or with align-by-socket all CPUs of the sockets of these nodes."""
    nodes = [node for node in cpus.in_node if affinity >> node & 1]
    if CpuOption.ALIGN_BY_SOCKET not in rules.cpu_options or not profile_of(rules.mode).aligns_by_socket:
        return frozenset().union(*(cpus.in_node[node] for node in nodes))
    sockets = frozenset().union(*(cpus.sockets_of_node[node] for node in nodes))
    return frozenset().union(*(cpus.in_socket[socket] for socket in sockets))
