"""Which MIG instance a share becomes, against sets of slices."""

import hami_reference as reference
import pytest
from hami_support import A100, profiles
from hypothesis import given, settings
from hypothesis import strategies as st

from topoalign.core.sharing.hami.mig import Placement, find_instance, find_instances, find_placement

some_profiles = st.permutations(A100).flatmap(lambda all_: st.integers(0, len(all_)).map(lambda n: tuple(all_[:n])))


@settings(max_examples=300, deadline=None)
@given(some_profiles, st.sets(st.integers(0, 7)), st.sampled_from([0, 1, 128, 200, 256, 512, 600, 1024, 1025]))
def test_the_smallest_instance_with_a_place_is_made(
    some: tuple[reference.Profile, ...], taken: set[int], memory: int
) -> None:
    expected = reference.place_instance(some, frozenset(taken), memory)

    found = find_instance(profiles(some), [Placement(each, 1) for each in taken], memory)

    assert expected == (
        None
        if found is None
        else (
            next(each for each in some if each.name == found.profile.name),
            found.placement.start,
            found.placement.size,
        )
    )


@settings(max_examples=200, deadline=None)
@given(some_profiles, st.sets(st.integers(0, 7)), st.lists(st.sampled_from([0, 128, 256, 512]), max_size=9))
def test_several_instances_never_overlap(
    some: tuple[reference.Profile, ...], taken: set[int], memories: list[int]
) -> None:
    occupied = [Placement(each, 1) for each in taken]
    card = reference.Card("a", profiles=some, slices=frozenset(taken))

    found = find_instances(profiles(some), occupied, memories)

    assert reference.has_place(card, memories) == (found is not None)
    slices = [
        each for one in found or () for each in range(one.placement.start, one.placement.start + one.placement.size)
    ]
    assert len({*slices, *taken}) == len(slices) + len(taken)


def test_an_a100_fills_from_both_ends() -> None:
    by_name = {each.name: each for each in profiles(A100)}
    occupied: list[Placement] = []
    for name in ("3g.20gb", "2g.10gb", "1g.5gb", "1g.5gb"):
        placement = find_placement(by_name[name], occupied)
        assert placement is not None
        occupied.append(placement)

    assert [4, 0, 3, 2] == [each.start for each in occupied]


@pytest.mark.parametrize(("memory", "name"), [(100, "1g.5gb"), (129, "2g.10gb"), (300, "3g.20gb"), (1000, "7g.40gb")])
def test_memory_decides_on_the_profile(memory: int, name: str) -> None:
    found = find_instance(profiles(A100), [], memory)

    assert found is not None
    assert name == found.profile.name


def test_of_profiles_with_equal_memory_the_one_with_fewer_slices_is_made() -> None:
    found = find_instance(profiles(tuple(reversed(A100))), [Placement(4, 4)], 512)

    assert found is not None
    assert ("3g.20gb", 0) == (found.profile.name, found.placement.start)
