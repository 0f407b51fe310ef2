"""The machines of the catalogue hang together and are what their names promise."""

import pytest

from topoalign.core.model.topology.device_links import PcieClass
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.topology_checks import validate
from topoalign.machines import catalogue, document
from topoalign.machines.nvidia_smi_print import print_matrix
from topoalign.tools.machine_formats.nvidia_smi import read_pasted_matrix


@pytest.mark.parametrize("name", catalogue.names())
def test_each_machine_is_valid_and_survives_its_own_json(name: str) -> None:
    machine = catalogue.machine(name)

    validate(machine)
    assert (
        machine
        == document.decode_machine(
            document.encode_machine(document.Machine(name=name, topology=machine)), "other"
        ).topology
    )


@pytest.mark.parametrize("name", [name for name in catalogue.names() if name != "cpu-only"])
def test_the_matrix_of_each_machine_reads_as_the_same_links(name: str) -> None:
    text = print_matrix(catalogue.machine(name))

    assert text == print_matrix(read_pasted_matrix(text))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("dgx1-volta", "2 sockets, 2 NUMA nodes, CPUs 0-79, 8 GPUs, 4 NICs"),
        ("dgx2", "2 sockets, 2 NUMA nodes, CPUs 0-95, 16 GPUs, 8 NICs"),
        ("dgx-a100", "2 sockets, 8 NUMA nodes, CPUs 0-255, 8 GPUs, 10 NICs"),
        ("hgx-h100", "2 sockets, 2 NUMA nodes, CPUs 0-223, 8 GPUs, 10 NICs"),
        ("hgx-b200", "2 sockets, 2 NUMA nodes, CPUs 0-223, 8 GPUs, 10 NICs"),
        ("8x-l40s", "2 sockets, 2 NUMA nodes, CPUs 0-127, 8 GPUs, 2 NICs"),
        ("8x-rtx4090", "2 sockets, 2 NUMA nodes, CPUs 0-127, 8 GPUs, 1 NIC"),
        ("a100-missing-bridge", "2 sockets, 2 NUMA nodes, CPUs 0-111, 4 GPUs, 2 NICs"),
        ("gb200-tray", "2 sockets, 34 NUMA nodes, CPUs 0-143, 4 GPUs, 8 NICs"),
        ("two-socket-8xpcie", "2 sockets, 2 NUMA nodes, CPUs 0-71, 8 GPUs, 2 NICs"),
        ("8x-nvlink-pairs", "2 sockets, 2 NUMA nodes, CPUs 0-127, 8 GPUs, 2 NICs"),
        ("epyc-nps4-4gpu", "1 socket, 4 NUMA nodes, CPUs 0-127, 4 GPUs, 2 NICs"),
        ("cpu-only", "2 sockets, 2 NUMA nodes, CPUs 0-127, 0 GPUs, 0 NICs"),
    ],
)
def test_each_machine_has_the_shape_of_the_real_one(name: str, shape: str) -> None:
    assert shape == catalogue.machine(name).describe()


def nvlinks(machine: Topology, a: int, b: int) -> int:
    return machine.link_by_pair[machine.gpus[a].id, machine.gpus[b].id].fabric_links


def test_every_v100_of_a_dgx1_has_six_nvlinks() -> None:
    machine = catalogue.machine("dgx1-volta")

    assert {6} == {sum(nvlinks(machine, a, b) for b in range(8) if a != b) for a in range(8)}
    assert [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)] == [
        (a, b) for a in range(8) for b in range(a + 1, 8) if nvlinks(machine, a, b) == 2
    ]


@pytest.mark.parametrize(
    ("name", "links"), [("dgx2", 6), ("dgx-a100", 12), ("hgx-h100", 18), ("hgx-b200", 18), ("gb200-tray", 18)]
)
def test_behind_nvswitch_every_pair_has_all_nvlinks(name: str, links: int) -> None:
    machine = catalogue.machine(name)

    assert {links} == {nvlinks(machine, a.index, b.index) for a in machine.gpus for b in machine.gpus if a != b}
    assert {links} == {gpu.switch_links for gpu in machine.gpus}


@pytest.mark.parametrize(("name", "of_gpu_0"), [("hgx-b200-gpu0-off", 0), ("hgx-b200-gpu0-half", 9)])
def test_pairs_of_a_degraded_gpu_have_its_number_of_nvlinks(name: str, of_gpu_0: int) -> None:
    machine = catalogue.machine(name)

    assert [of_gpu_0] * 7 == [nvlinks(machine, 0, b) for b in range(1, 8)]
    assert {18} == {nvlinks(machine, a, b) for a in range(1, 8) for b in range(1, 8) if a != b}
    assert (of_gpu_0, 18 - of_gpu_0) == (machine.gpus[0].switch_links, machine.gpus[0].links_down)


def test_every_h100_has_a_nic_on_its_own_switch() -> None:
    machine = catalogue.machine("hgx-h100")

    near = [
        [nic.id for nic in machine.nics if machine.link_by_pair[gpu.id, nic.id].pcie is PcieClass.PIX]
        for gpu in machine.gpus
    ]
    assert [[f"mlx5_{i}"] for i in range(8)] == near


def test_a_gb200_has_its_memory_as_numa_nodes_without_cpus() -> None:
    machine = catalogue.machine("gb200-tray")

    assert [2, 10, 18, 26] == [gpu.memory_node for gpu in machine.gpus]
    assert [188416 << 20] * 4 == [machine.nodes[node].memory for node in (2, 10, 18, 26)]
    assert {0: frozenset(range(72)), 1: frozenset(range(72, 144))} == machine.cpus_by_node
    assert 1 == len({gpu.fabric for gpu in machine.gpus})


def test_cpus_are_counted_as_linux_does() -> None:
    machine = catalogue.machine("dgx-a100")

    assert (5, 5, 0, 0, 1) == tuple(
        getattr(machine.cpus[5], name) for name in ("id", "core", "socket", "node", "uncore")
    )
    assert (133, 5) == (machine.cpus[133].id, machine.cpus[133].core)
    assert {32} == {len(cpus) for cpus in machine.cpus_by_node.values()}
    assert machine.distances is not None
    assert (10, 12, 12, 12, 32, 32, 32, 32) == machine.distances[0]
    assert 1 << 40 == sum(node.memory or 0 for node in machine.nodes)
