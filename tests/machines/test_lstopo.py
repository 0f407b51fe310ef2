"""lstopo's XML: what of it becomes a machine, and what is refused before it can do harm."""

import io
import tracemalloc
from pathlib import Path

import pytest

from topoalign.core.model.errors import InvalidMachine
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.topology.device_links import PcieClass
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.topology_checks import validate
from topoalign.tools.machine_formats.lstopo import read_lstopo
from topoalign.tools.machine_formats.lstopo_xml import DEEPEST, MOST_BYTES, MOST_ELEMENTS

HEAD = '<?xml version="1.0"?>\n<!DOCTYPE topology SYSTEM "hwloc2.dtd">\n'
PU = '<object type="Core"><object type="PU" os_index="{0}"/><object type="PU" os_index="{1}"/></object>'

VERSION_1 = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc.dtd">
<topology>
  <object type="Machine" os_index="0" cpuset="0x0000000f">
    <distances nbobjs="2" relative_depth="1" latency_base="10.000000">
      <latency value="1.000000"/><latency value="2.100000"/><latency value="2.100000"/><latency value="1.000000"/>
    </distances>
    <object type="NUMANode" os_index="1" local_memory="8589934592">
      <page_type size="4096" count="1966080"/><page_type size="2097152" count="256"/>
      <object type="Socket" os_index="4"><object type="Cache" depth="3" cache_size="8388608">
        <object type="Cache" depth="2"><object type="Core" os_index="0">
          <object type="PU" os_index="0"/><object type="PU" os_index="2"/></object></object>
      </object></object>
      <object type="Bridge" bridge_type="0-1" depth="0" bridge_pci="0000:[00-03]">
        <object type="Bridge" bridge_type="1-1" depth="1" bridge_pci="0000:[01-01]" pci_busid="0000:00:01.0">
          <object type="PCIDev" pci_busid="0000:01:00.0" pci_type="0302 [10de:06d2] [10de:0774] a3">
            <object type="OSDev" name="nvml1" osdev_type="1"/></object></object>
        <object type="Bridge" bridge_type="1-1" depth="1" bridge_pci="0000:[02-02]" pci_busid="0000:00:02.0">
          <object type="PCIDev" pci_busid="0000:02:00.0" pci_type="0300 [10DE:06d2] [10de:0774] a3"/>
          <object type="PCIDev" pci_busid="0000:02:00.1" pci_type="0300 [10de:06d2] [10de:0774] a3">
            <object type="OSDev" name="nvml0" osdev_type="1"/></object></object>
        <object type="PCIDev" pci_busid="0000:00:1f.0" pci_type="0300 [1a03:2000] [1a03:2000] 00"/>
      </object>
    </object>
    <object type="NUMANode" os_index="3" local_memory="4294967296">
      <object type="Socket" os_index="5"><object type="Core"><object type="PU" os_index="1"/></object>
      <object type="Core"><object type="PU" os_index="3"/></object></object>
    </object>
    <object type="Bridge" bridge_type="0-1" depth="0" bridge_pci="0000:[80-83]">
      <object type="PCIDev" pci_busid="0000:81:00.0" pci_type="0207 [15b3:1017] [15b3:0003] 00">
        <object type="OSDev" name="mlx5_0" osdev_type="3">
          <info name="Port1State" value="4"/><info name="Port2State" value="1"/></object>
        <object type="OSDev" name="ib0" osdev_type="2"/></object>
    </object>
  </object>
</topology>
"""


def read(text: str) -> Topology:
    return read_lstopo(io.BytesIO(text.encode()))


def test_version_1_is_read() -> None:
    machine = read(VERSION_1)

    assert [(0, 0, 4, 1, 0), (1, 1, 5, 3, 5), (2, 0, 4, 1, 0), (3, 3, 5, 3, 5)] == [
        (cpu.id, cpu.core, cpu.socket, cpu.node, cpu.uncore) for cpu in machine.cpus
    ]
    assert [(1, 8 << 30), (3, 4 << 30)] == [(node.id, node.memory) for node in machine.nodes]
    assert {ResourceName("hugepages-2Mi"): 512 << 20} == machine.nodes[0].hugepages
    assert ((10, 21), (21, 10)) == machine.distances
    assert ["GPU-0000:02:00.1", "GPU-0000:01:00.0"] == [gpu.id for gpu in machine.gpus]
    assert [(1,), (1,)] == [gpu.numa_affinity for gpu in machine.gpus]
    assert PcieClass.PHB == machine.links[0].pcie


def test_a_nic_beside_the_whole_machine_is_near_no_node_in_particular() -> None:
    nic = read(VERSION_1).nics[0]

    assert ("mlx5_0", "0000:81:00.0", (), ("ib0",)) == (nic.id, nic.pci, nic.numa_affinity, nic.netdevs)
    assert [(1, "ACTIVE"), (2, "DOWN")] == [(port.number, port.state) for port in nic.ports]


def test_a_dual_gpu_machine_of_version_2_is_read(vectors: Path) -> None:
    with (vectors / "lstopo_xml" / "cts1-pascal.xml").open("rb") as file:
        machine = read_lstopo(file)

    assert "2 sockets, 2 NUMA nodes, CPUs 0-71, 2 GPUs, 1 NIC" == machine.describe()
    assert {
        0: frozenset([*range(18), *range(36, 54)]),
        1: frozenset([*range(18, 36), *range(54, 72)]),
    } == machine.cpus_by_node
    assert [(0, 0), (18, 1)] == [(cpu.core, cpu.node) for cpu in (machine.cpus[36], machine.cpus[54])]
    assert [134756204544, 135268511744] == [node.memory for node in machine.nodes]
    assert ((10, 21), (21, 10)) == machine.distances
    assert "GPU-affad486-897e-9778-18e8-26a7127927a8" == machine.gpus[0].id
    assert ("Tesla P100-PCIE-16GB", 17071734784, (0,)) == (
        machine.gpus[0].name,
        machine.gpus[0].memory,
        machine.gpus[0].numa_affinity,
    )
    assert [PcieClass.PIX] * 3 == [link.pcie for link in machine.links]
    assert "0000:03:04.0" == machine.gpus[0].bridge


def test_an_eight_gpu_machine_of_version_2_is_read(vectors: Path) -> None:
    with (vectors / "lstopo_xml" / "g4dnmetal.xml").open("rb") as file:
        machine = read_lstopo(file)

    assert "2 sockets, 2 NUMA nodes, CPUs 0-95, 8 GPUs, 1 NIC" == machine.describe()
    assert [*range(8)] == [gpu.index for gpu in machine.gpus]
    assert [(0,)] * 4 + [(1,)] * 4 == [gpu.numa_affinity for gpu in machine.gpus]
    assert {ResourceName("hugepages-2Mi"): 5281 << 21, ResourceName("hugepages-1Gi"): 0} == machine.nodes[0].hugepages
    labels = [machine.link_by_pair[machine.gpus[0].id, gpu.id].label for gpu in machine.gpus[1:]]
    assert ["PHB", "NODE", "NODE", "SYS", "SYS", "SYS", "SYS"] == labels


def test_a_machine_without_numa_nodes_has_one() -> None:
    machine = read(f'{HEAD}<topology><object type="Machine" local_memory="4096">{PU.format(0, 1)}</object></topology>')

    assert [(0, 4096)] == [(node.id, node.memory) for node in machine.nodes]
    assert [0, 0] == [cpu.node for cpu in machine.cpus]


@pytest.mark.parametrize("ids", [("", ""), ("3", "3"), ("70000", "1"), ("", "0")])
def test_packages_without_a_usable_id_of_their_own_are_counted(ids: tuple[str, str]) -> None:
    cpus = [PU.format(2, 3), PU.format(0, 1)]
    packages = [f'<object type="Package" os_index="{i}">{inside}</object>' for i, inside in zip(ids, cpus, strict=True)]
    machine = read(f'{HEAD}<topology version="3.0"><object type="Machine">{"".join(packages)}</object></topology>')

    assert [0, 0, 1, 1] == [cpu.socket for cpu in machine.cpus]


def test_cpus_outside_of_all_packages_are_on_a_socket_of_their_own() -> None:
    package = f'<object type="Package" os_index="0">{PU.format(0, 1)}</object>'
    machine = read(f"{HEAD}<topology><object>{package}{PU.format(2, 3)}</object></topology>")

    assert [0, 0, 1, 1] == [cpu.socket for cpu in machine.cpus]


def test_a_gpus_own_memory_is_no_home_of_cpus() -> None:
    text = f"""{HEAD}<topology version="2.0"><object type="Machine"><object type="Package" os_index="0">
      <object type="NUMANode" os_index="0" subtype="GPUMemory" local_memory="1">
        <info name="PCIBusID" value="0004:04:00.0"/></object>
      <object type="NUMANode" os_index="8" local_memory="2"/>{PU.format(0, 1)}
      <object type="Bridge" bridge_type="0-1" bridge_pci="0004:[00-04]">
      <object type="PCIDev" pci_busid="0004:04:00.0" pci_type="0302 [10de:1db1] [10de:1212] a1"/></object>
      </object></object></topology>"""
    machine = read(text)

    assert [8, 8] == [cpu.node for cpu in machine.cpus]
    assert 0 == machine.gpus[0].memory_node


BOMB = "".join(
    ['<!DOCTYPE topology [<!ENTITY a "aaaaaaaaaa">']
    + [f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in zip("abcdefgh", "bcdefghi", strict=True)]
    + ["]><topology><object>&i;</object></topology>"]
)


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        (BOMB, "declares an entity"),
        ('<!DOCTYPE t [<!ENTITY x SYSTEM "file:///etc/passwd">]><topology>&x;</topology>', "declares an entity"),
        ('<!DOCTYPE t [<!ENTITY % x SYSTEM "http://192.0.2.1/x.dtd"> %x;]><topology/>', "declares an entity"),
        (f"<topology>{'<object>' * (DEEPEST + 1)}", f"nested deeper than {DEEPEST}"),
        (f"<topology>{'<other>' * 100_000}", f"nested deeper than {DEEPEST}"),
        (f"<topology>{'<info/>' * MOST_ELEMENTS}</topology>", f"more than {MOST_ELEMENTS} elements"),
        (f"<topology><!--{' ' * MOST_BYTES}--></topology>", "larger than 32 MiB"),
        ("<html><body/></html>", "is a 'html', not a topology"),
        ("<topology><object", "no XML"),
        ("<topology></wrong>", "line 1, column 13: no XML: mismatched tag"),
        ("", "the document is empty"),
        ('<?xml version="1.0" encoding="klingon"?><topology/>', "no XML"),
        (f"{HEAD}<topology/>", "has no CPUs"),
        (f"{HEAD}<topology>{PU.format(1, 1)}</topology>", "two objects PU have os_index 1"),
        (f"{HEAD}<topology>{PU.format('x', 1)}</topology>", "an object PU has no os_index"),
        (f"{HEAD}<topology>{PU.format(0, 99999)}</topology>", "of no possible machine"),
        (
            f"{HEAD}<topology>{''.join(PU.format(i, i + 1) for i in range(0, 9000, 2))}</topology>",
            "at most 8192 are supported",
        ),
    ],
)
def test_a_hostile_document_is_refused(text: str, finding: str) -> None:
    with pytest.raises(InvalidMachine, match=finding) as caught:
        read(text)
    assert str(caught.value).isprintable()


def test_an_entity_bomb_is_refused_before_it_expands() -> None:
    tracemalloc.start()
    with pytest.raises(InvalidMachine):
        read(BOMB)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 1_000_000


def test_odd_values_are_left_out_and_break_nothing() -> None:
    odd = VERSION_1.replace('latency value="2.100000"', 'latency value="inf"').replace('"4294967296"', '"-1"')
    odd = odd.replace("0000:[00-03]", "nowhere").replace('count="256"', f'count="{9**30}"')
    machine = read(odd)

    validate(machine)
    assert machine.distances is None
    assert machine.nodes[1].memory is None
    assert () == machine.links
    assert {} == machine.nodes[0].hugepages
