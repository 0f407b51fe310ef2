"""Which CPUs are taken."""

import pytest
from decision_support import machine
from hypothesis import given, settings
from hypothesis import strategies as st

from topoalign.core.placement.cpus import NotEnoughCpus, choose_cpus, take
from topoalign.core.topology.cpuset import format_cpuset

TWO = machine(nodes=2, cores=4).cpu_topology
"""CPUs 0-3 and 8-11 on node 0, 4-7 and 12-15 on node 1; 0 and 8 are siblings."""


@settings(max_examples=300, deadline=None)
@given(st.sets(st.sampled_from(range(16))), st.integers(0, 16))
def test_a_take_is_as_large_as_asked_and_breaks_at_most_one_whole_core(available: set[int], count: int) -> None:
    """Whole cores are taken as whole cores, and single CPUs come from cores that are broken already, if there are any."""
    if count > len(available):
        with pytest.raises(NotEnoughCpus):
            take(TWO, available, count)
        return

    taken = take(TWO, available, count)

    whole = [core for core in TWO.in_core.values() if core <= available]
    split = [core for core in whole if core & taken and not core <= taken]
    assert count == len(taken)
    assert taken <= available
    assert len(split) <= 1
    assert len([core for core in whole if core <= taken]) == min(len(whole), count // 2)


def test_a_whole_numa_node_is_taken_whole() -> None:
    """Node 0 is broken, so eight CPUs are node 1 and not what is lowest."""
    assert "4-7,12-15" == format_cpuset(take(TWO, set(range(1, 16)), 8))


def test_what_is_broken_already_is_used_up_first() -> None:
    """CPU 5's sibling is in use, so a single CPU comes from that core."""
    assert {5} == take(TWO, set(range(16)) - {13}, 1)


@settings(max_examples=100, deadline=None)
@given(st.sets(st.sampled_from(range(16)), min_size=4), st.integers(1, 4), st.sampled_from([0b01, 0b10, 0b11, None]))
def test_cpus_of_the_affinity_come_first(allocatable: set[int], count: int, affinity: int | None) -> None:
    chosen = choose_cpus(TWO, allocatable, count, affinity)

    inside = {cpu for cpu in allocatable if affinity is None or affinity >> TWO.node_of[cpu] & 1}
    assert count == len(chosen)
    assert chosen <= allocatable
    assert min(count, len(inside)) == len(chosen & inside)


def test_too_few_cpus_say_how_many_there_are() -> None:
    with pytest.raises(NotEnoughCpus, match="5 requested, 2 can be given"):
        choose_cpus(TWO, {0, 1}, 5, 0b1)
