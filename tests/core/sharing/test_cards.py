"""What is left of a card: never less than nothing, and nothing beside a whole holder."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.model.ids import DeviceID
from topoalign.core.sharing.shared_gpus import SharedGpu

EMPTY = SharedGpu(device=DeviceID("GPU-0"), index=0, minor=0, memory=8, slots=4)
held = st.integers(0, 200)


@given(cores=held, memory=held, slots=held)
def test_what_is_held_and_what_is_left_make_the_card(cores: int, memory: int, slots: int) -> None:
    card = msgspec.structs.replace(EMPTY, cores_held=cores, memory_held=memory, slots_held=slots)

    assert max(100, cores) == card.cores_left + cores
    assert max(8, memory) == card.memory_left + memory
    assert max(4, slots) == card.slots_left + slots
    assert (cores == memory == slots == 0) == card.unused


@given(cores=held, memory=held, slots=held)
def test_a_whole_holder_leaves_nothing(cores: int, memory: int, slots: int) -> None:
    card = msgspec.structs.replace(EMPTY, cores_held=cores, memory_held=memory, slots_held=slots, exclusive=True)

    assert (0, 0, 0, False) == (card.cores_left, card.memory_left, card.slots_left, card.unused)
