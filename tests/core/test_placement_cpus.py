"""Which CPUs a container gets, with each option of the CPU manager."""

import pytest
from decision_support import machine
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.cpu_assignment import read_reserved_cpus, take
from topoalign.core.cpu_assignment.packed import NotEnoughCpus, take_packed
from topoalign.core.model.requests import AdmissionRules, CpuOption, Mode
from topoalign.core.model.topology.cpu_topology import CpuTopology
from topoalign.core.model.topology.cpuset import format_cpuset
from topoalign.core.model.topology.model import Cpu, Topology
from topoalign.core.placement.exclusive_cpus import NotEnoughCores, SplitCore, allocate_cpus, choose_cpus

TWO = machine(nodes=2, cores=4).cpu_topology
"""CPUs 0-3 and 8-11 on node 0, 4-7 and 12-15 on node 1; 0 and 8 are siblings."""

PAIRS = Topology(
    cpus=tuple(Cpu(id=cpu, core=cpu // 2 * 2, socket=cpu // 16, node=cpu // 8, uncore=cpu // 4) for cpu in range(32))
)
"""Two sockets of two NUMA nodes of two caches of two cores of two threads; siblings are neighbours."""

PLAIN = AdmissionRules(mode=Mode.KUBELET)


def rules(*options: CpuOption, reserved_cpus: str = "", reserved_cpu_count: int = 0) -> AdmissionRules:
    return AdmissionRules(
        mode=Mode.KUBELET,
        cpu_options=frozenset(options),
        reserved_cpus=reserved_cpus,
        reserved_cpu_count=reserved_cpu_count,
    )


@given(st.sets(st.sampled_from(range(16))), st.integers(0, 16))
def test_a_take_is_as_large_as_asked_and_breaks_at_most_one_whole_core(available: set[int], count: int) -> None:
    """Whole cores are taken as whole cores, and single CPUs come from cores that are broken already, if there are any."""
    if count > len(available):
        with pytest.raises(NotEnoughCpus):
            take_packed(TWO, available, count)
        return

    taken = take_packed(TWO, available, count)

    whole = [core for core in TWO.in_core.values() if core <= available]
    split = [core for core in whole if core & taken and not core <= taken]
    assert count == len(taken)
    assert taken <= available
    assert len(split) <= 1
    assert len([core for core in whole if core <= taken]) == min(len(whole), count // 2)


def test_a_whole_numa_node_is_taken_whole() -> None:
    """Node 0 is broken, so eight CPUs are node 1 and not what is lowest."""
    assert "4-7,12-15" == format_cpuset(take_packed(TWO, set(range(1, 16)), 8))


def test_what_is_broken_already_is_used_up_first() -> None:
    """CPU 5's sibling is in use, so a single CPU comes from that core."""
    assert {5} == take_packed(TWO, set(range(16)) - {13}, 1)


@given(st.sets(st.sampled_from(range(16)), min_size=4), st.integers(1, 4), st.sampled_from([0b01, 0b10, 0b11, None]))
def test_cpus_of_the_affinity_come_first(allocatable: set[int], count: int, affinity: int | None) -> None:
    chosen = choose_cpus(TWO, allocatable, count, affinity, PLAIN)

    inside = {cpu for cpu in allocatable if affinity is None or affinity >> TWO.node_of[cpu] & 1}
    assert count == len(chosen)
    assert chosen <= allocatable
    assert min(count, len(inside)) == len(chosen & inside)


def test_too_few_cpus_say_how_many_there_are() -> None:
    with pytest.raises(NotEnoughCpus, match="5 requested, 2 can be given"):
        choose_cpus(TWO, {0, 1}, 5, 0b1, PLAIN)


def test_spread_over_cores_a_container_gets_one_thread_of_each() -> None:
    """
    Spread over the cores, a container gets one thread of each core and not both of one. The threads of a core of this
    machine are numbered apart, so ascending ids are different cores.
    """
    spread = rules(CpuOption.DISTRIBUTE_ACROSS_CORES)

    assert {0, 1, 2} == choose_cpus(TWO, set(range(16)), 3, 0b1, spread)
    assert {0, 8, 1} == choose_cpus(TWO, set(range(16)), 3, 0b1, PLAIN)


def test_a_request_that_fits_in_one_last_level_cache_is_kept_within_it() -> None:
    """Packed, a whole core of the first cache and a single CPU of the second make three; the second has three by itself."""
    free = {0, 1, 4, 6, 7}

    assert {0, 1, 4} == choose_cpus(PAIRS.cpu_topology, free, 3, 0b0001, PLAIN)
    assert {4, 6, 7} == choose_cpus(PAIRS.cpu_topology, free, 3, 0b0001, rules(CpuOption.PREFER_UNCORE))


def test_distributed_over_numa_nodes_each_gives_the_same_number() -> None:
    """Ten CPUs need two nodes of eight: packed they are eight and two, distributed five and five."""
    both = rules(CpuOption.DISTRIBUTE_ACROSS_NUMA)

    assert [8, 2] == [len(choose_cpus(TWO, set(range(16)), 10, 0b11, PLAIN) & TWO.in_node[n]) for n in (0, 1)]
    assert [5, 5] == [len(choose_cpus(TWO, set(range(16)), 10, 0b11, both) & TWO.in_node[n]) for n in (0, 1)]


def test_distributed_with_whole_cores_no_core_is_split_between_containers() -> None:
    cores = rules(CpuOption.DISTRIBUTE_ACROSS_NUMA, CpuOption.FULL_PCPUS_ONLY)

    taken = choose_cpus(TWO, set(range(16)), 10, 0b11, cores)

    assert [6, 4] == [len(taken & TWO.in_node[n]) for n in (0, 1)]
    assert all(core <= taken or not core & taken for core in TWO.in_core.values())


def test_aligned_by_socket_missing_cpus_come_from_the_same_socket() -> None:
    """
    Aligned by socket, the CPUs that the node lacks come from the rest of its socket. Node 2 has three free CPUs; the
    other node of its socket comes before the emptier nodes of the other socket.
    """
    free = {0, 1, 2, 3, 16, 18, 20} | set(range(24, 32))
    affinity = 0b0100

    assert {16, 18, 20, 0} == choose_cpus(PAIRS.cpu_topology, free, 4, affinity, PLAIN)
    by_socket = choose_cpus(PAIRS.cpu_topology, free, 4, affinity, rules(CpuOption.ALIGN_BY_SOCKET))
    assert by_socket <= free & set(range(16, 32))


def test_with_whole_cores_only_a_request_that_splits_one_is_refused() -> None:
    with pytest.raises(SplitCore, match="3 CPUs requested with full-pcpus-only, and a core has 2"):
        allocate_cpus(TWO, set(range(16)), set(), set(), 3, None, rules(CpuOption.FULL_PCPUS_ONLY))


def test_with_whole_cores_only_siblings_of_reserved_cpus_do_not_count() -> None:
    """
    With whole cores only, the siblings of reserved CPUs do not count as free. Fifteen CPUs are not reserved, but CPU 8
    shares its core with one that is.
    """
    whole = rules(CpuOption.FULL_PCPUS_ONLY)

    assert 14 == len(allocate_cpus(TWO, set(range(16)), {0}, set(), 14, None, whole))
    with pytest.raises(NotEnoughCores, match=r"16 CPUs requested .* 14 are left"):
        allocate_cpus(TWO, set(range(16)), {0}, set(), 16, None, whole)


def test_with_whole_cores_only_cpus_of_init_containers_are_not_free() -> None:
    """
    With whole cores only, CPUs left by init containers do not count as free. Without the option the same container gets
    them: the kubelet's check looks at the shared pool alone.
    """
    shared, left = {6, 7, 14, 15}, {0, 8, 1, 9}

    assert 8 == len(allocate_cpus(TWO, shared, set(), left, 8, None, PLAIN))
    with pytest.raises(NotEnoughCores):
        allocate_cpus(TWO, shared, set(), left, 8, None, rules(CpuOption.FULL_PCPUS_ONLY))


def test_a_number_of_reserved_cpus_is_taken_with_the_containers_options() -> None:
    """A number of reserved CPUs is taken with the same options as the CPUs of containers."""

    def per_node(*options: CpuOption) -> list[int]:
        kept = read_reserved_cpus(PAIRS, rules(*options, reserved_cpu_count=10))
        return [len(kept & PAIRS.cpus_by_node[node]) for node in range(4)]

    assert [8, 2, 0, 0] == per_node()
    assert [5, 5, 0, 0] == per_node(CpuOption.DISTRIBUTE_ACROSS_NUMA)
    assert [6, 4, 0, 0] == per_node(CpuOption.DISTRIBUTE_ACROSS_NUMA, CpuOption.FULL_PCPUS_ONLY)


def test_reserved_cpus_that_are_named_go_before_their_number() -> None:
    assert {7, 9} == read_reserved_cpus(PAIRS, rules(reserved_cpus="7,9", reserved_cpu_count=4))


def test_only_kubelet_mode_gives_a_used_cpu_where_a_sibling_is_offline() -> None:
    """
    Where a sibling is offline, only mode `kubelet` gives away a CPU that is in use. Three CPUs on two cores make one
    per core on average, so the kubelet holds core 0, of which one CPU is in use, to be free and takes all of it. In
    mode `best` no CPU is given to two containers.
    """
    odd = CpuTopology(Cpu(id=cpu, core=core, socket=0, node=0, uncore=0) for cpu, core in ((0, 0), (1, 0), (2, 2)))

    assert {0, 1} == take(odd, {0, 2}, 2, frozenset(), Mode.KUBELET)
    assert {0, 2} == take(odd, {0, 2}, 2, frozenset(), Mode.BEST)
