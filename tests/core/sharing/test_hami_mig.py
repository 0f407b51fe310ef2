"""Which MIG instances several shares of one card become, against sets of slices."""

import hami_reference as reference
from hami_support import A100
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.model.byte_sizes import MIB
from topoalign.core.model.topology.mig import MigPlacement, MigProfile
from topoalign.core.state.share_amounts import find_instances

some_profiles = st.permutations(A100).flatmap(lambda all_: st.integers(0, len(all_)).map(lambda n: tuple(all_[:n])))


@given(some_profiles, st.sets(st.integers(0, 7)), st.lists(st.sampled_from([0, 128, 256, 512]), max_size=9))
def test_several_instances_never_overlap(some: tuple[MigProfile, ...], taken: set[int], memories: list[int]) -> None:
    card = reference.Card("a", profiles=some, slices=frozenset(taken))

    found = find_instances(
        some, [MigPlacement(start=each, size=1) for each in taken], [each * MIB for each in memories]
    )

    assert reference.has_place(card, memories) == (found is not None)
    assert found is None or len(memories) == len(found)
    slices = [each for _, at in found or () for each in range(at.start, at.start + at.size)]
    assert len({*slices, *taken}) == len(slices) + len(taken)


def test_two_shares_of_one_card_are_side_by_side() -> None:
    found = find_instances(A100, [], [100 * MIB, 100 * MIB])

    assert found is not None
    assert [("1g.5gb", 6), ("1g.5gb", 5)] == [(profile.name, at.start) for profile, at in found]
