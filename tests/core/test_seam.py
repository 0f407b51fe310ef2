"""The weakest seam of sets of GPUs: by hand-made machines, and against a reference that tries every division."""

from itertools import combinations
from random import Random

import msgspec
import pytest
from seam_reference import naive_seam

from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.device_links import Link, PcieClass
from topoalign.core.model.topology.model import Fabric, Gpu, Topology
from topoalign.core.placement.gpus.bandwidth import Links, Seam, gpu_links, minimum_cut, weakest_seam
from topoalign.core.placement.preference import seam_of, set_scorer
from topoalign.machines import load_machine
from topoalign.machines.nvidia_smi_print import print_matrix
from topoalign.tools.machine_formats.nvidia_smi import read_pasted_matrix

PATHS = (10, 20, 30, 40, 50, 60)


def random_links(chance: Random) -> Links:
    """Up to seven GPUs: no NVLinks, few or many, of which some end at an NVSwitch."""
    count = chance.randint(1, 7)
    nvlinks = chance.choice([(0,), (0, 0, 0, 1), (0, 1, 2, 6), (1, 2, 3), (18,)])
    table = [[0] * count for _ in range(count)]
    switch = [chance.choice([0, 9, 18]) for _ in range(count)] if chance.random() < 0.3 else []
    for a, b in combinations(range(count), 2):
        linked = min(switch[a], switch[b]) if switch and switch[a] and switch[b] else chance.choice(nvlinks)
        table[a][b] = table[b][a] = 100 * linked + chance.choice(PATHS)
    return Links(table, [(None, links) for links in switch])


def test_the_seam_is_the_weakest_of_all_divisions() -> None:
    """Ten thousand sets of machines without structure."""
    chance = Random(36)
    for _ in range(10_000):
        links = random_links(chance)
        members = sorted(chance.sample(range(len(links.strength)), chance.randint(1, len(links.strength))))

        expected = naive_seam(links.strength, members, [count for _, count in links.switch])

        assert expected == weakest_seam(links, members), (links, members)


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ((0, 1, 2, 3), "4 NVLinks, 80 GB/s"),
        ((0, 1, 4, 5), "2 NVLinks, 40 GB/s"),
        ((0, 3), "2 NVLinks, 40 GB/s"),
        ((0, 1), "1 NVLink, 20 GB/s"),
        ((0, 5), "PCIe across sockets"),
        ((0, 1, 5), "1 NVLink, 20 GB/s"),
        ((2,), "one GPU"),
        (tuple(range(8)), "6 NVLinks, 120 GB/s"),
    ],
)
def test_seams_of_a_dgx_1(gpus: tuple[int, ...], expected: str) -> None:
    volta = load_machine("dgx1-volta").topology

    assert expected == seam_of(volta, [DeviceID(f"GPU-{gpu}") for gpu in gpus])


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (PcieClass.PSB, "PCIe on one board"),
        (PcieClass.PIX, "PCIe through one switch"),
        (PcieClass.PXB, "PCIe through several switches"),
        (PcieClass.PHB, "PCIe through a host bridge"),
        (PcieClass.NODE, "PCIe within a NUMA node"),
        (PcieClass.SYS, "PCIe across sockets"),
        (None, "PCIe across sockets"),
    ],
)
def test_a_seam_without_nvlinks_is_named_by_its_path(path: PcieClass | None, expected: str) -> None:
    ids = [DeviceID("GPU-a"), DeviceID("GPU-b")]
    pair = Topology(
        gpus=tuple(Gpu(id=each, index=i) for i, each in enumerate(ids)),
        links=(Link(a=ids[0], b=ids[1], pcie=path),) if path else (),
    )

    assert expected == seam_of(pair, ids)


def on_switch(*links: int, fabrics: tuple[Fabric | None, ...] = ()) -> Topology:
    """GPUs with so many links to an NVSwitch."""
    gpus = tuple(
        Gpu(id=DeviceID(f"GPU-{i}"), index=i, switch_links=count, fabric=fabrics[i] if fabrics else None)
        for i, count in enumerate(links)
    )
    pairs = [(a, b) for a, b in combinations(gpus, 2) if min(a.switch_links, b.switch_links)]
    return Topology(
        gpus=gpus, links=tuple(Link(a=a.id, b=b.id, fabric_links=min(a.switch_links, b.switch_links)) for a, b in pairs)
    )


def test_at_an_nvswitch_the_gpu_with_the_fewest_links_decides() -> None:
    """Also of a pasted matrix, which does not name the links to the switch: 63 NVLinks to seven peers must end at one."""
    board = on_switch(9, 18, 18, 18, 18, 18, 18, 18)
    unnamed = msgspec.structs.replace(
        board, gpus=tuple(msgspec.structs.replace(gpu, switch_links=0) for gpu in board.gpus)
    )

    for machine in (board, unnamed):
        links = gpu_links(machine)
        assert (Seam(9), Seam(18)) == (weakest_seam(links, (0, 1, 2)), weakest_seam(links, (1, 2, 3, 4)))
    assert Seam(0, 10) == weakest_seam(gpu_links(on_switch(0, 18, 18)), (0, 1, 2))


def test_a_pasted_matrix_has_the_seams_of_its_machine() -> None:
    for name in ("dgx1-volta", "hgx-h100", "8x-nvlink-pairs"):
        machine = load_machine(name).topology
        pasted = read_pasted_matrix(print_matrix(machine))
        every = range(len(machine.gpus))

        for size in (2, 3, 4, 8):
            for members in combinations(every, size):
                assert weakest_seam(gpu_links(machine), members) == weakest_seam(gpu_links(pasted), members)


def test_a_fabric_that_keeps_gpus_apart_connects_them_by_pcie_alone() -> None:
    cliques = tuple(Fabric(cluster="c", clique=number) for number in (1, 1, 2))
    links = gpu_links(on_switch(18, 18, 18, fabrics=cliques))

    assert (Seam(18), Seam(0, 10)) == (weakest_seam(links, (0, 1)), weakest_seam(links, (0, 1, 2)))


def test_a_gpu_without_a_fabric_reaches_a_fabric_by_the_switch() -> None:
    """The fabric of one GPU is not known; where it could not be set up, the GPU has no NVLink."""
    tray = Fabric(cluster="c", clique=1)
    board = on_switch(18, 9, 18, fabrics=(None, tray, tray))
    failed = msgspec.structs.replace(
        board, gpus=(msgspec.structs.replace(board.gpus[0], fabric_state="failed"), *board.gpus[1:])
    )

    assert Seam(9) == weakest_seam(gpu_links(board), (0, 1, 2))
    assert Seam(0, 10) == weakest_seam(gpu_links(failed), (0, 1, 2))
    assert Seam(9) == weakest_seam(gpu_links(failed), (1, 2))


def test_a_mesh_that_lacks_a_link_is_no_switch() -> None:
    """Eight GPUs with three NVLinks a pair; one pair has none."""
    gpus = tuple(Gpu(id=DeviceID(f"GPU-{i}"), index=i) for i in range(8))
    links = tuple(
        Link(a=a.id, b=b.id, fabric_links=0 if (a.index, b.index) == (0, 1) else 3) for a, b in combinations(gpus, 2)
    )
    found = gpu_links(Topology(gpus=gpus, links=links))

    assert [Seam(0, 10), Seam(3), Seam(3), Seam(6)] == [
        weakest_seam(found, members) for members in ((0, 1), (0, 2), (0, 1, 2), (2, 3, 4))
    ]


def test_gpus_of_one_numa_node_are_never_across_sockets() -> None:
    """nvidia-smi prints SYS between the GPUs of one Grace."""
    gpus = tuple(Gpu(id=DeviceID(f"GPU-{i}"), index=i, numa_affinity=(i // 2,)) for i in range(3))
    links = tuple(Link(a=a.id, b=b.id, pcie=PcieClass.SYS) for a, b in combinations(gpus, 2))
    found = gpu_links(Topology(gpus=gpus, links=links))

    assert (Seam(0, 20), Seam(0, 10)) == (weakest_seam(found, (0, 1)), weakest_seam(found, (1, 2)))


def test_seventy_two_gpus_and_machines_without_gpus_have_a_seam() -> None:
    clique = [[0 if a == b else 110 for b in range(72)] for a in range(72)]

    assert Seam(71) == weakest_seam(Links(clique, ()), range(72))
    assert Seam(0) == weakest_seam(gpu_links(Topology()), ())


def test_any_nvlink_is_stronger_than_any_pcie_path() -> None:
    assert Seam(1) > Seam(0, 60) > Seam(0, 10)
    assert Seam(1).bandwidth("NVIDIA RTX A6000") == 12.0


def test_the_minimum_cut_of_two_cliques_is_what_joins_them() -> None:
    """Two groups of four with five links a pair, joined by three links."""
    table = [[0 if a == b else 5 if a // 4 == b // 4 else 0 for b in range(8)] for a in range(8)]
    for a, b in ((0, 4), (1, 6), (2, 5)):
        table[a][b] = table[b][a] = 1

    assert 3 == minimum_cut(table)


def test_models_of_several_kinds_have_no_bandwidth() -> None:
    mixed = msgspec.structs.replace(
        on_switch(18, 18),
        gpus=tuple(
            msgspec.structs.replace(gpu, name=name)
            for gpu, name in zip(
                on_switch(18, 18).gpus, ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"), strict=True
            )
        ),
    )

    assert "18 NVLinks" == set_scorer(mixed).describe((0, 1))
    assert "18 NVLinks, 371 GB/s" == set_scorer(load_machine("hgx-h100").topology).describe((0, 1))
