"""What `topoalign simulate` reads, and what it says of a run."""

from random import Random

import pytest

from topoalign.core.model.byte_sizes import GIB
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.ids import CPU, GPU, MEMORY
from topoalign.tools.simulate.load import Shape, pods_of, read_shape


def test_a_shape_says_how_many_pods_ask_for_what() -> None:
    assert Shape(count=3, limits={GPU: 2, CPU: 8, MEMORY: 16 * GIB}) == read_shape("3:gpus=2,cpus=8,memory=16")


COUNTS = ("", ":gpus=1", "0:gpus=1", "-1:gpus=1", "100001:gpus=1", "\N{FULLWIDTH DIGIT THREE}:gpus=1")
AMOUNTS = ("3", "3:", "3:gpus=0", "3:gpus=1.5", "3:gpus=1e3", "3:gpus=1,", "3:gpus=1000000000", "3:gpus=" + "9" * 5000)


@pytest.mark.parametrize("text", [*COUNTS, *AMOUNTS, "3:tpus=1", "3:gpus=1,gpus=2"])
def test_what_is_no_shape_is_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(InvalidField) as refusal:
        read_shape(text)

    assert "as 100:gpus=2" in refusal.value.remedy
    assert len(str(refusal.value)) < 300


def test_a_seed_repeats_the_order_of_the_pods() -> None:
    shapes = [read_shape("5:gpus=1"), read_shape("5:gpus=2")]
    orders = [[pod["metadata"]["name"] for pod in pods_of(shapes, Random(seed))] for seed in (1, 1, 2)]

    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])
