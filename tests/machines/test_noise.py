"""Refusing noise costs time in proportion to its length and memory close to none: shown by `topoalign bench parse`."""

import tracemalloc

import pytest

from topoalign.core.model.errors import InvalidMachine
from topoalign.tools.bench import parse
from topoalign.tools.machine_formats.nvidia_smi import read_pasted_matrix

NOISE = 2_000_000
"""Characters: enough to tell copies of the text from what is needed for any text."""


@pytest.mark.parametrize("kind", parse.KINDS)
def test_megabytes_of_noise_are_refused_with_little_memory(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megabytes of noise are refused without being copied many times."""
    monkeypatch.setattr(parse, "NOISE", NOISE)
    text = parse.KINDS[kind]()

    tracemalloc.start()
    with pytest.raises(InvalidMachine):
        read_pasted_matrix(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < max(3.4 * len(text), 4_000_000)
