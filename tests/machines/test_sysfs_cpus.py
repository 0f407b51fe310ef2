"""CPUs and NUMA nodes out of /sys as kernels of many ages, architectures and hypervisors write it."""

import io
from collections.abc import Iterable
from pathlib import Path

import pytest
from faults_support import THOROUGH
from machine_support import packed

from topoalign.core.model.topology.model import Topology
from topoalign.tools.machine_formats.sysfs_archive import read_archive

CPU, NODE = "sys/devices/system/cpu", "sys/devices/system/node"


def read(files: dict[str, str | bytes]) -> Topology:
    return read_archive(packed(files, {}))


def each(name: str, values: Iterable[object]) -> dict[str, str | bytes]:
    """A file of each CPU."""
    return {f"{CPU}/cpu{cpu}/topology/{name}": str(value) for cpu, value in enumerate(values)}


def sockets(machine: Topology) -> list[int]:
    return [cpu.socket for cpu in machine.cpus]


@pytest.mark.parametrize("end", [b"\0", b"\n\0", b"\n"])
def test_lists_with_null_characters_around_them_are_read(end: bytes) -> None:
    machine = read(
        {
            f"{CPU}/online": b"0-3" + end,
            f"{NODE}/node0/cpulist": b"0-1" + end,
            f"{NODE}/node1/cpulist": b"\0" + b"2-3" + end,
        }
    )

    assert [0, 0, 1, 1] == [cpu.node for cpu in machine.cpus]


def test_packages_without_an_id_are_told_apart_by_their_siblings() -> None:
    ids = each("physical_package_id", [-1] * 4)

    assert [0, 1, 0, 1] == sockets(read(ids | each("core_siblings_list", ["0,2", "1,3", "0,2", "1,3"])))
    assert [0, 1, 0, 1] == sockets(read(ids | each("core_siblings", ["5", "a", "0,00000005", "0,0000000a"])))
    assert [0, 1, 0, 1] == sockets(read(ids | each("package_cpus_list", ["0,2", "1,3", "0,2", "1,3"])))


def test_packages_with_one_id_but_different_siblings_are_different() -> None:
    ids, siblings = each("physical_package_id", [0, 0, 7, 7]), each("core_siblings_list", ["0", "1", "2-3", "2-3"])

    assert [0, 1, 2, 2] == sockets(read(ids | siblings))


def test_packages_with_different_ids_are_different_whatever_their_siblings() -> None:
    machine = read(each("physical_package_id", [4, 4, 9, 9]) | each("core_siblings_list", ["0-3"] * 4))

    assert [4, 4, 9, 9] == sockets(machine)


def test_ids_of_packages_beyond_any_count_are_counted_anew() -> None:
    assert [0, 0, 1, 2] == sockets(read(each("physical_package_id", [196_611, 196_611, 256, 983_041])))


def test_a_machine_whose_kernel_knows_no_packages_has_one_socket() -> None:
    assert [0, 0] == sockets(read({f"{CPU}/online": "0-1"}))


def test_compute_unit_halves_are_two_cores_and_threads_are_one() -> None:
    """The halves of an AMD compute unit are two cores; the threads of a core are one."""
    siblings = each("thread_siblings_list", ["0-1", "0-1", "2-3", "2-3"])

    assert [0, 1, 2, 3] == [cpu.core for cpu in read(siblings | each("core_id", [0, 1, 2, 3])).cpus]
    assert [0, 0, 2, 2] == [cpu.core for cpu in read(siblings | each("core_id", [0, 0, 0, 0])).cpus]
    assert [0, 0, 2, 2] == [cpu.core for cpu in read(siblings | each("core_id", [5, -1])).cpus]


def test_nodes_that_all_list_all_cpus_are_one_node() -> None:
    device = "sys/bus/pci/devices/0000:01:00.0"
    machine = read(
        {
            f"{CPU}/online": "0-7",
            f"{NODE}/online": "0-7",
            **{f"{NODE}/node{i}/cpulist": "0-7" for i in range(8)},
            **{f"{NODE}/node{i}/distance": "10 10 10 10 10 10 10 10" for i in range(8)},
            **{f"{NODE}/node{i}/meminfo": f"Node {i} MemTotal: {i + 1} kB" for i in range(8)},
            f"{device}/class": "0x030200",
            f"{device}/vendor": "0x10de",
            f"{device}/numa_node": "5",
            f"{device}/local_cpulist": "0-7",
        }
    )

    assert [(0, 1024)] == [(node.id, node.memory) for node in machine.nodes]
    assert {0: frozenset(range(8))} == machine.cpus_by_node
    assert ((10,),) == machine.distances
    assert (0,) == machine.gpus[0].numa_affinity


def test_a_cpu_that_two_nodes_list_is_on_the_lower_one_and_both_stay() -> None:
    machine = read(
        {
            f"{CPU}/online": "0-5",
            f"{NODE}/node1/cpulist": "0-1",
            f"{NODE}/node2/cpulist": "",
            f"{NODE}/node3/cpumap": "3f",
            f"{NODE}/node4/cpulist": "4-5",
            **{f"{NODE}/node{i}/distance": f"1{i} 20 30 40" for i in (1, 2, 3, 4)},
        }
    )

    assert {1: frozenset({0, 1}), 3: frozenset({2, 3, 4, 5})} == machine.cpus_by_node
    assert (1, 2, 3) == machine.node_ids, "node 4 lists only CPUs of lower nodes"
    assert ((11, 20, 30), (12, 20, 30), (13, 20, 30)) == machine.distances


def test_cpus_of_an_offline_node_0_move_to_the_lowest_node_with_cpus() -> None:
    """With CPU 0 and node 0 offline, the other CPUs of node 0 are on the lowest node that has CPUs."""
    machine = read(
        {
            f"{CPU}/online": "1-7",
            f"{NODE}/online": "1-2",
            f"{NODE}/node0/cpulist": "0-3",
            f"{NODE}/node1/cpulist": "",
            f"{NODE}/node2/cpulist": "4-7",
        }
    )

    assert {2: frozenset(range(1, 8))} == machine.cpus_by_node
    assert (1, 2) == machine.node_ids


def test_a_cgroup_of_whoever_captured_the_tree_limits_nothing() -> None:
    machine = read(
        {
            f"{CPU}/online": "0-3",
            "proc/self/cgroup": "0::/user.slice",
            "proc/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0",
            "sys/fs/cgroup/user.slice/cpuset.cpus.effective": "1",
            "sys/fs/cgroup/user.slice/cpuset.mems.effective": "0",
        }
    )

    assert [0, 1, 2, 3] == [cpu.id for cpu in machine.cpus]


def test_a_kernel_without_numa_has_one_node_with_all_memory() -> None:
    """A kernel without NUMA has node 0 with all memory and all hugepages."""
    pages = "sys/kernel/mm/hugepages/hugepages"
    machine = read(
        {
            f"{CPU}/online": "0",
            "proc/meminfo": "MemTotal:        4194304 kB",
            f"{pages}-2048kB/nr_hugepages": "512",
            f"{pages}-16777216kB/nr_hugepages": "1",
            f"{pages}-1048576kB/nr_hugepages": "3",
        }
    )

    assert [(0, 4 << 30, {"hugepages-2Mi": 1 << 30, "hugepages-1Gi": 3 << 30})] == [
        (node.id, node.memory, node.hugepages) for node in machine.nodes
    ]


def test_the_saved_trees_of_hwlocs_own_tests_are_read(vectors: Path) -> None:
    """Sockets, cores, CPUs and NUMA nodes as hwloc 3 counts them. The other trees are read in thorough runs."""
    expected = {
        "128arm-2pa2n8cluster4co": (2, 128, 128, 4),
        "128ia64-17n4s2c": (64, 128, 128, 17),
        "16ia64-8n2s": (16, 16, 16, 8),
        "20s390-2g6s4c": (8, 20, 20, 1),
        "256ia64-64n2s2c": (128, 256, 256, 64),
        "256ppc-8n8s4t": (64, 64, 256, 8),
        "64amd64-4s2n4ca2co": (4, 64, 64, 8),
        "offline-cpu0-node0": (2, 17, 17, 1),
        "nvidiagpunumanodes": (2, 8, 32, 8),
    }
    folder = vectors / "hwloc" / "sysfs"
    if not folder.is_dir():
        pytest.skip("no machines of hwloc in the case files")
    trees = {path.name.removesuffix(".tar.bz2"): path for path in folder.glob("*.tar.bz2")}
    for name in trees if THOROUGH else expected:
        machine = read_archive(io.BytesIO(trees[name].read_bytes()))
        counts = machine.cpu_topology

        assert len(machine.cpus) == counts.cpus
        found = (counts.sockets, counts.cores, counts.cpus, len(machine.nodes))
        assert expected.get(name, found) == found, name
