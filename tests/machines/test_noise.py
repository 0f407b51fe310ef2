"""Refusing noise costs time in proportion to its length and memory close to none: shown by `topoalign bench parse`."""

import tracemalloc

import pytest

from topoalign.core.model.errors import InvalidMachine
from topoalign.tools.bench.parse import KINDS
from topoalign.tools.machine_formats.nvidia_smi import read_pasted_matrix


@pytest.mark.parametrize("kind", KINDS)
def test_ten_megabytes_of_noise_are_refused_with_little_memory(kind: str) -> None:
    """Ten megabytes of noise are refused without being copied many times."""
    text = KINDS[kind]()

    tracemalloc.start()
    with pytest.raises(InvalidMachine):
        read_pasted_matrix(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 3 * len(text) + 4_000_000
