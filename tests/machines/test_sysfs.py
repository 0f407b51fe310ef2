"""A machine out of files: of a captured tree, of made-up ones with every oddity, packed or not."""

import io
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine_support import packed, unpacked

from topoalign.core.model.errors import InvalidMachine
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.topology.device_links import PcieClass
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.topology_checks import validate
from topoalign.machines.sysfs_files import Tree
from topoalign.machines.sysfs_machine import read_sysfs
from topoalign.tools.machine_formats.sysfs_archive import MOST_BYTES, Archive, read_archive

CPU, NODE = "sys/devices/system/cpu", "sys/devices/system/node"
PCI = "sys/devices/pci0000:00"

TWO_SOCKETS = {
    f"{CPU}/online": "1-7",  # cpu0 is offline
    **{f"{CPU}/cpu{i}/topology/thread_siblings_list": f"{i % 4},{i % 4 + 4}" for i in range(8)},
    **{f"{CPU}/cpu{i}/topology/physical_package_id": f"{i % 2}" for i in range(8)},
    **{f"{CPU}/cpu{i}/cache/index{level}/level": f"{level}" for i in range(8) for level in (2, 3)},
    **{f"{CPU}/cpu{i}/cache/index{level}/type": "Unified" for i in range(8) for level in (2, 3)},
    **{f"{CPU}/cpu{i}/cache/index3/id": f"{i % 2 * 7}" for i in range(8)},
    f"{NODE}/online": "0,8",
    f"{NODE}/node0/cpulist": "0,2,4,6",
    f"{NODE}/node8/cpulist": "1,3,5,7",
    f"{NODE}/node0/meminfo": "Node 0 MemTotal:       16777216 kB\nNode 0 MemFree: 1 kB",
    f"{NODE}/node8/meminfo": "Node 8 MemTotal:       33554432 kB",
    f"{NODE}/node8/hugepages/hugepages-2048kB/nr_hugepages": "512",
    f"{NODE}/node8/hugepages/hugepages-1048576kB/nr_hugepages": "0",
    f"{NODE}/node0/distance": "10 21",
    f"{NODE}/node8/distance": "21 10",
    f"{PCI}/0000:00:01.0/numa_node": "8",
    f"{PCI}/0000:00:01.0/0000:01:00.0/class": "0x060400",
    f"{PCI}/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0/class": "0x030200",
    f"{PCI}/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0/vendor": "0x10de",
    f"{PCI}/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0/numa_node": "-1",
    f"{PCI}/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.0/numa_node": "8",
    f"{PCI}/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.0/net/eth2/mtu": "9000",
    f"{PCI}/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.0/infiniband_verbs/uverbs0/dev": "231:192",
    f"{PCI}/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.0/infiniband/mlx5_10/ports/1/state": "4: ACTIVE",
    f"{PCI}/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.0/infiniband/mlx5_10/ports/1/rate": "400 Gb/sec (4X NDR)",
    f"{PCI}/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.0/infiniband/mlx5_10/ports/1/link_layer": "InfiniBand",
    f"{PCI}/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.1/infiniband/mlx5_11/fw_ver": "1",
    f"{PCI}/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.1/infiniband_verbs/uverbs7/dev": "231:199",
    "sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0/local_cpulist": "0,2",
    "sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0/infiniband/mlx5_2/fw_ver": "1",
    "sys/devices/pci0000:80/0000:80:02.0/0000:82:00.0/class": "0x030000",
    "sys/devices/pci0000:80/0000:80:02.0/0000:82:00.0/vendor": "0x1a03",
    "sys/devices/virtual/infiniband/rxe0/fw_ver": "1",
    "proc/driver/nvidia/gpus/0000:03:00.0/information": "Model: \t\t NVIDIA H100\n"
    "GPU UUID: \t GPU-12345678-1234-1234-1234-123456789abc\nDevice Minor: \t 5",
}

SWITCH = "../../../devices/pci0000:00/0000:00:01.0/0000:01:00.0"
LINKS = {
    "sys/bus/pci/devices/0000:03:00.0": f"{SWITCH}/0000:02:00.0/0000:03:00.0",
    "sys/bus/pci/devices/0000:04:00.0": f"{SWITCH}/0000:02:01.0/0000:04:00.0",
    "sys/bus/pci/devices/0000:04:00.1": f"{SWITCH}/0000:02:01.0/0000:04:00.1",
    "sys/bus/pci/devices/0000:81:00.0": "../../../devices/pci0000:80/0000:80:01.0/0000:81:00.0",
    "sys/bus/pci/devices/0000:82:00.0": "../../../devices/pci0000:80/0000:80:02.0/0000:82:00.0",
    f"{PCI}/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.0/virtfn0": "../0000:04:00.1",
    f"{PCI}/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.1/physfn": "../0000:04:00.0",
    "sys/class/infiniband/mlx5_10": "../../bus/pci/devices/0000:04:00.0/infiniband/mlx5_10",
    "sys/class/infiniband/mlx5_11": "../../bus/pci/devices/0000:04:00.1/infiniband/mlx5_11",
    "sys/class/infiniband/mlx5_2": "../../devices/pci0000:80/0000:80:01.0/0000:81:00.0/infiniband/mlx5_2",
    "sys/class/infiniband/rxe0": "../../devices/virtual/infiniband/rxe0",
    f"{PCI}/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.0/infiniband/mlx5_10/device": "../..",
    f"{PCI}/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.1/infiniband/mlx5_11/device": "../..",
    "sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0/infiniband/mlx5_2/device": "../..",
}


@pytest.fixture(params=["folder", "archive"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Topology:
    if request.param == "folder":
        return read_sysfs(Tree(unpacked(tmp_path, TWO_SOCKETS, LINKS)))
    return read_archive(packed(TWO_SOCKETS, LINKS))


def test_offline_cpus_are_left_out_and_siblings_share_the_lowest(machine: Topology) -> None:
    """Offline CPUs are left out, and siblings share the lowest online CPU as their core."""
    found = [(cpu.id, cpu.core, cpu.socket, cpu.node, cpu.uncore) for cpu in machine.cpus]

    assert [(i, {4: 4}.get(i, i if i < 4 else i - 4), i % 2, i % 2 * 8, i % 2 * 7) for i in range(1, 8)] == found


def test_nodes_have_memory_hugepages_and_distances(machine: Topology) -> None:
    pages = {ResourceName("hugepages-2Mi"): 1 << 30, ResourceName("hugepages-1Gi"): 0}
    assert [(0, 16 << 30, {}), (8, 32 << 30, pages)] == [
        (node.id, node.memory, node.hugepages) for node in machine.nodes
    ]
    assert ((10, 21), (21, 10)) == machine.distances


def test_a_gpu_has_what_its_driver_and_the_bridges_above_it_tell(machine: Topology) -> None:
    (gpu,) = machine.gpus

    assert ("GPU-12345678-1234-1234-1234-123456789abc", "NVIDIA H100", 5) == (gpu.id, gpu.name, gpu.minor)
    assert ("0000:03:00.0", "0000:02:00.0", (8,)) == (gpu.pci, gpu.bridge, gpu.numa_affinity)
    assert (1, 3, 5, 7) == gpu.cpu_affinity


def test_a_nic_has_its_ports_names_and_virtual_functions(machine: Topology) -> None:
    first, second = machine.nics

    assert ("mlx5_2", "mlx5_10") == (first.id, second.id)
    assert ((0,), (8,)) == (first.numa_affinity, second.numa_affinity)
    assert (("eth2",), "uverbs0") == (second.netdevs, second.verbs)
    assert [(1, "ACTIVE", 400 * 10**9, "InfiniBand")] == [
        (port.number, port.state, port.rate, port.link_layer) for port in second.ports
    ]
    assert [("0000:04:00.1", "mlx5_11", "uverbs7")] == [(vf.pci, vf.name, vf.verbs) for vf in second.virtual_functions]


def test_links_follow_from_where_the_devices_sit(machine: Topology) -> None:
    gpu, far, near = machine.gpus[0].id, machine.nics[0].id, machine.nics[1].id

    assert PcieClass.PIX == machine.link_by_pair[gpu, near].pcie
    assert PcieClass.SYS == machine.link_by_pair[gpu, far].pcie
    assert "0000:01:00.0" in {bridge.address for bridge in machine.bridges}


def test_the_saved_power9_tree_is_the_machine_it_was(vectors: Path) -> None:
    path = vectors / "sysfs_trees" / "power9-nvidiagpunumanodes.tar.bz2"
    machine = read_archive(io.BytesIO(path.read_bytes()))

    assert "2 sockets, 8 NUMA nodes, CPUs 0-15,88-103, 6 GPUs, 0 NICs" == machine.describe()
    assert (0, 8, 250, 251, 252, 253, 254, 255) == machine.node_ids
    assert {0: frozenset(range(16)), 8: frozenset(range(88, 104))} == machine.cpus_by_node
    assert [(0,)] * 3 + [(8,)] * 3 == [gpu.numa_affinity for gpu in machine.gpus]
    assert [255, 254, 253, 252, 251, 250] == [gpu.memory_node for gpu in machine.gpus]
    assert {0x3F0000000} == {gpu.memory for gpu in machine.gpus}
    assert [0] * 4 + [4] * 4 == [cpu.core for cpu in machine.cpus[:8]]
    assert [0] * 8 + [8] * 8 == [cpu.uncore for cpu in machine.cpus[:16]]
    assert 129839104 << 10 == machine.nodes[0].memory
    assert machine.distances is not None
    assert (10, 40, 80, 80, 80, 80, 80, 80) == machine.distances[0]


def test_a_missing_distance_file_leaves_distances_unknown(tmp_path: Path) -> None:
    files = {name: text for name, text in TWO_SOCKETS.items() if name != f"{NODE}/node8/distance"}

    assert read_sysfs(Tree(unpacked(tmp_path, files, LINKS))).distances is None


def test_a_device_whose_node_is_unknown_is_not_on_node_0(tmp_path: Path) -> None:
    device = "sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0"
    files = TWO_SOCKETS | {f"{device}/local_cpulist": "0-7", f"{device}/numa_node": "-1"}

    assert () == read_sysfs(Tree(unpacked(tmp_path, files, LINKS))).nics[0].numa_affinity


def test_on_a_host_with_one_node_a_device_without_a_node_is_on_it(tmp_path: Path) -> None:
    device = "sys/bus/pci/devices/0000:01:00.0"
    files = {f"{CPU}/online": "0-3", f"{NODE}/node0/cpulist": "0-3", f"{NODE}/online": "0"}
    files |= {
        f"{device}/class": "0x030000",
        f"{device}/vendor": "0x10de",
        f"{device}/numa_node": "-1",
        f"{device}/local_cpulist": "0-3",
    }

    assert (0,) == read_sysfs(Tree(unpacked(tmp_path, files, {}))).gpus[0].numa_affinity


def test_a_kernel_without_numa_has_one_node_with_all_memory(tmp_path: Path) -> None:
    files = {f"{CPU}/cpu{i}/online": f"{i % 2}" for i in range(4)} | {"proc/meminfo": "MemTotal:   1024 kB"}
    machine = read_sysfs(Tree(unpacked(tmp_path, files, {})))

    assert [1, 3] == [cpu.id for cpu in machine.cpus]
    assert [(0, 1 << 20)] == [(node.id, node.memory) for node in machine.nodes]


def test_a_tree_without_cpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidMachine, match="no CPU that is online"):
        read_sysfs(Tree(tmp_path))


def test_links_out_of_the_tree_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("0-3")
    files = {f"{CPU}/cpu5/online": "1", f"{NODE}/online": "0"}
    links = {f"{CPU}/online": str(tmp_path / "outside"), f"{NODE}/node0": "../../../../../.."}
    machine = read_sysfs(Tree(unpacked(tmp_path / "tree", files, links)))

    assert [5] == [cpu.id for cpu in machine.cpus]


ODD = st.sampled_from(
    ["", "-1", "x", "0-", "0-65535", "99999999999", "\x00", "4: ", "0x", "ffffffff," * 40, "10 20 30", "Node: 9"]
)


@given(
    st.dictionaries(st.sampled_from(sorted(TWO_SOCKETS)), ODD | st.none(), max_size=12),
    st.sets(st.sampled_from(sorted(LINKS))),
)
def test_no_content_of_files_breaks_the_reader(changes: dict[str, str | None], lost: set[str]) -> None:
    files = {name: text for name, text in {**TWO_SOCKETS, **changes}.items() if text is not None}
    archive = packed(files, {name: target for name, target in LINKS.items() if name not in lost}, "w:", "")
    try:
        validate(read_archive(archive))
    except InvalidMachine as error:
        assert f"{CPU}/online" in changes, error


@pytest.mark.parametrize("mode", ["w:", "w:gz", "w:bz2", "w:xz"])
def test_an_archive_is_read_however_it_is_packed(mode: str) -> None:
    assert 7 == len(read_archive(packed(TWO_SOCKETS, LINKS, mode)).cpus)


def test_links_of_an_archive_stay_in_it() -> None:
    links = {
        "sys/a": "/etc/hostname",
        "sys/b": "../../../etc/hostname",
        "sys/c": "c",
        "sys/d": "devices",
        "sys/e/f": "../d",
    }
    tree = Archive(packed({f"{CPU}/online": "0", "../../etc/evil": "1", "sys/devices/x": "yes"}, links))

    assert [None, None, None] == [tree.real(name) for name in ("sys/a", "sys/b", "sys/c")]
    assert "yes" == tree.text("sys/e/f/x") == tree.text("sys/d/x")


@pytest.mark.parametrize(
    "raw", [b"BZh", b"BZh91AY&SY" + bytes(50), b"\x1f\x8b" + bytes(50), b"\xfd7zXZ\x00" + bytes(50)]
)
def test_a_broken_archive_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidMachine, match="cannot be unpacked"):
        read_archive(io.BytesIO(raw))


def test_an_archive_cut_short_is_refused() -> None:
    raw = packed(TWO_SOCKETS, LINKS).getvalue()

    with pytest.raises(InvalidMachine, match="cannot be unpacked"):
        read_archive(io.BytesIO(raw[: len(raw) // 2]))


def test_an_archive_that_grows_beyond_measure_is_refused() -> None:
    with pytest.raises(InvalidMachine, match="more than 128 MiB"):
        read_archive(packed({"sys/large": bytes(MOST_BYTES)}, {}))


@pytest.mark.skipif(not os.path.isdir("/sys/devices/system/cpu"), reason="no Linux")
def test_the_host_that_runs_this_test_is_a_machine() -> None:
    machine = read_sysfs(Tree(Path("/")))

    validate(machine)
    assert machine.cpus
