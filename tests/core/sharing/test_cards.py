"""What is left of a card: never less than nothing, and nothing beside a whole holder."""

import msgspec
from hami_support import shared_gpu
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.model.holdings import Amount

EMPTY = shared_gpu(0, 8, all_slots=4)
held = st.integers(0, 200)


@given(cores=held, memory=held, slots=held)
def test_what_is_held_and_what_is_left_make_the_card(cores: int, memory: int, slots: int) -> None:
    card = msgspec.structs.replace(EMPTY, held=Amount(cores=cores, memory=memory), sharers=slots)

    assert Amount(cores=max(100, cores) - cores, memory=max(8, memory) - memory) == card.left
    assert 4 == card.slots + slots
    assert (cores == slots == 0) == card.unused


@given(cores=held, memory=held, slots=held)
def test_a_whole_holder_leaves_nothing(cores: int, memory: int, slots: int) -> None:
    card = msgspec.structs.replace(EMPTY, held=Amount(cores=cores, memory=memory), sharers=slots, usable=False)

    assert (Amount(cores=0, memory=0), False) == (card.left, card.unused)
