"""Which GPUs and NICs are preferred, against a walk over every way to split the free GPUs."""

from collections.abc import Collection
from itertools import combinations
from random import Random

import pytest
from decision_support import machine
from hypothesis import given, settings
from hypothesis import strategies as st
from partition_reference import walked

from topoalign.core.model.ids import GPU, NIC, DeviceID, ResourceName
from topoalign.core.model.topology.model import NicPort, PluginDevice, Topology
from topoalign.core.placement.gpus.device_policy import BestEffort, GpuChoice
from topoalign.core.placement.gpus.seam import Scores, SetScorer
from topoalign.core.placement.preference import PLACEMENTS, choose_gpu_set, prefer


def by_walk(scores: Scores, free: tuple[int, ...], required: Collection[int], size: int) -> tuple[int, ...]:
    """The best set of full size with the required ones, of all splits with the most points, the lowest of equals."""
    return walked(scores, free, required, size)[0]


@st.composite
def scores_of(draw: st.DrawFn, most: int = 7) -> Scores:
    n = draw(st.integers(2, most))
    table = [[0] * n for _ in range(n)]
    for a, b in combinations(range(n), 2):
        table[a][b] = table[b][a] = draw(st.sampled_from([10, 20, 50, 110, 250]))
    return table


@settings(max_examples=200, deadline=None)
@given(scores_of(), st.data())
def test_best_effort_is_the_best_set_of_a_best_split(scores: Scores, data: st.DataObject) -> None:
    free = tuple(sorted(data.draw(st.sets(st.sampled_from(range(len(scores))), min_size=2))))
    size = data.draw(st.integers(2, len(free)))
    required = data.draw(st.sets(st.sampled_from(free), max_size=size))

    assert by_walk(scores, free, required, size) == BestEffort().choose(
        GpuChoice(SetScorer(scores), free, sorted(required), size)
    )


def test_eight_gpus_are_split_as_a_walk_splits_them() -> None:
    """All sizes of the machine that matters most, with and without a required GPU."""
    random = Random(7)
    table = [[0] * 8 for _ in range(8)]
    for a, b in combinations(range(8), 2):
        table[a][b] = table[b][a] = random.choice([10, 20, 50, 110, 250])

    for size in range(2, 8):
        for required in ([], [5]):
            expected = by_walk(table, tuple(range(8)), {*required}, size)
            assert expected == BestEffort().choose(GpuChoice(SetScorer(table), range(8), required, size))


def test_the_answer_has_no_hole_where_the_small_rest_is_linked_best() -> None:
    """go-gpuallocator 876e7b7 answers with the padded set here: two GPUs and a hole, which crashes the plugin."""
    linked = {(0, 1), (4, 5), (6, 7)}
    scores = [[0 if a == b else 1250 if (min(a, b), max(a, b)) in linked else 10 for b in range(8)] for a in range(8)]

    assert 3 == len(BestEffort().choose(GpuChoice(SetScorer(scores), [0, 1, 4, 5, 6], [], 3)))


@pytest.mark.parametrize("policy", sorted(PLACEMENTS))
@pytest.mark.parametrize(
    ("available", "required", "size"),
    [
        pytest.param([0, 1], [], 0, id="size 0"),
        pytest.param([0, 1], [], -1, id="size below 0"),
        pytest.param([0, 1], [], 3, id="more than there are"),
        pytest.param([], [], 1, id="none available"),
        pytest.param([0, 1], [2], 1, id="a required one is not available"),
        pytest.param([0, 1, 2], [0, 1], 1, id="more required than asked for"),
        pytest.param([0, 0], [], 1, id="one twice"),
        pytest.param([0, 1], [1, 1], 2, id="a required one twice"),
        pytest.param([0, 9], [], 1, id="one that is not there"),
    ],
)
def test_misuse_gets_no_preference(policy: str, available: list[int], required: list[int], size: int) -> None:
    scores = [[0] * 4] * 4

    assert () == choose_gpu_set(PLACEMENTS[policy], GpuChoice(SetScorer(scores), available, required, size))


@settings(max_examples=50, deadline=None)
@given(st.permutations([f"GPU-{i}" for i in range(4)]), st.integers(1, 4), st.sampled_from(["best-effort", "simple"]))
def test_the_order_in_which_devices_are_handed_in_has_no_say(order: list[str], size: int, placement: str) -> None:
    topology = machine()
    gpus = [DeviceID(gpu) for gpu in order]

    expected = prefer(topology, GPU, sorted(gpus), [sorted(gpus)[1]], size, placement)

    assert expected == prefer(topology, GPU, gpus, [sorted(gpus)[1]], size, placement)


def ids(*names: str) -> list[DeviceID]:
    return [DeviceID(name) for name in names]


def test_gpus_on_one_switch_are_preferred_and_simple_does_not_care() -> None:
    topology = machine(gpus=(0, 1, 0, 1))
    every = ids("GPU-3", "GPU-2", "GPU-1", "GPU-0")

    assert ("GPU-0", "GPU-2") == prefer(topology, GPU, every, [], 2, "best-effort")
    assert ("GPU-0", "GPU-1") == prefer(topology, GPU, every, [], 2, "simple")
    assert ("GPU-0", "GPU-3") == prefer(topology, GPU, every, ids("GPU-3"), 2, "static-dgx1-volta")


def test_nics_are_preferred_near_the_gpus_and_with_a_link() -> None:
    topology = machine(nics=(0, 1, 1))
    down = (NicPort(number=1, state="DOWN"),)
    broken = Topology(
        cpus=topology.cpus,
        nodes=topology.nodes,
        gpus=topology.gpus,
        links=topology.links,
        nics=(topology.nics[0], type(topology.nics[1])(id=DeviceID("mlx5_1"), index=1, ports=down), topology.nics[2]),
    )
    nics = ids("mlx5_2", "mlx5_1", "mlx5_0")

    assert ("mlx5_1",) == prefer(topology, NIC, nics, [], 1, "best-effort", near=ids("GPU-3"))
    assert ("mlx5_2",) == prefer(broken, NIC, nics, [], 1, "best-effort", near=ids("GPU-3"))
    assert ("mlx5_0",) == prefer(broken, NIC, nics, [], 1, "best-effort")


def test_devices_of_others_are_preferred_as_they_are_listed() -> None:
    fpga = ResourceName("example.com/fpga")
    others = tuple(PluginDevice(id=DeviceID(f"f{i}"), resource=fpga, nodes=None) for i in range(3))

    assert ("f0", "f2") == prefer(machine(others=others), fpga, ids("f1", "f0", "f2"), ids("f2"), 2, "best-effort")
    assert () == prefer(machine(), fpga, ids("f1"), [], 1, "best-effort")
