"""Which NICs are local to a GPU, and which are near."""

import pytest
from decision_support import machine

from topoalign.core.model.ids import DeviceID
from topoalign.core.placement.gpus.bandwidth import NicLocality, Nics, count_nics, nic_locality
from topoalign.machines import load_machine


@pytest.mark.parametrize(
    ("name", "nic", "local", "near"),
    [
        pytest.param("hgx-h100", 0, {0}, {0, 1, 2, 3}, id="PIX to one GPU, and on the NUMA node of four"),
        pytest.param("dgx2", 0, {0, 1, 2, 3}, set(range(8)), id="PIX to two GPUs, PXB to two more"),
        pytest.param("gb200-tray", 0, {0, 1}, {0, 1}, id="on Grace the GPUs of its CPU, although the path is SYS"),
        pytest.param("8x-l40s", 0, set(), {0, 1, 2, 3}, id="a host bridge is near, and not local"),
    ],
)
def test_a_nic_is_local_behind_the_same_switches_or_at_the_same_grace(
    name: str, nic: int, local: set[int], near: set[int]
) -> None:
    topology = load_machine(name).topology

    found = nic_locality(topology, [*topology.nic_by_id][nic])

    assert (local, near) == ({*found.local}, {*found.near})


def test_no_more_nics_count_than_are_wanted() -> None:
    free = [NicLocality(frozenset({0}), frozenset({0, 1})) for _ in range(3)]

    assert [(2, 2), (0, 2), (0, 0)] == [count_nics(Nics(2, free), members) for members in ((0,), (1,), (2,))]
    assert (0, 0) == count_nics(Nics(0, free), (0,))


def test_a_nic_that_the_machine_lacks_is_local_to_none() -> None:
    assert NicLocality(frozenset(), frozenset()) == nic_locality(machine(), DeviceID("mlx5_99"))
