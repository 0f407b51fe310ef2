"""
One made-up machine in every form in which a person may describe it: each is read as the same machine.

A `Plan` says what the machine has; `facts_of` says the same of a `Topology`. Neither shares code with the readers.
"""

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from xml.etree.ElementTree import Element, SubElement, tostring

from hypothesis import given, settings
from hypothesis import strategies as st
from machine_support import packed, unpacked

from topoalign.core.model.topology.model import Topology
from topoalign.machines.sysfs_files import Tree
from topoalign.machines.sysfs_machine import read_sysfs
from topoalign.tools.machine_formats.lstopo import read_lstopo
from topoalign.tools.machine_formats.sysfs_archive import read_archive

Facts = dict[str, object]
CLASSES = {"gpu": "0302 [10de:2330]", "nic": "0207 [15b3:1021]", "other": "0502 [8086:0d93]"}
"""Of the kinds of cards: PCI class, vendor and device."""
OS_DEVICES = {"gpu": {"cuda": "gpu"}, "nic": {"eth": "net", "mlx5_": "rdma"}, "other": {"mem": "memory"}}
OSDEV_TYPES = {
    "2.0": {"rdma": 3, "net": 2, "memory": 0, "gpu": 1},
    "3.0": {"rdma": 48, "net": 16, "memory": 3, "gpu": 12},
}


class Card(NamedTuple):
    """A PCI device: its function's bus is its position in the plan plus one."""

    kind: str
    """`gpu`, `nic`, or `other`: a CXL memory device."""
    node: int | None
    switch: bool
    """Whether it sits below a switch, which it shares with the other such cards of its node."""


@dataclass(frozen=True)
class Plan:
    packages: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    """Package -> NUMA node -> core's CPUs: the node with the position p, n has the id `node_ids[p, n]`."""
    node_ids: Mapping[tuple[int, int], int]
    memory: Mapping[int, int]
    """Node -> kibibytes; nodes that are in no package have no CPUs."""
    package_ids: tuple[int | None, ...]
    offline: tuple[int, ...]
    cards: tuple[Card, ...]

    @property
    def homes(self) -> dict[int, list[int]]:
        return {
            self.node_ids[p, n]: sorted(cpu for core in cores for cpu in core)
            for p, nodes in enumerate(self.packages)
            for n, cores in enumerate(nodes)
        }

    def address(self, card: int) -> str:
        return f"{self.host(card)[3:7]}:{card + 1:02x}:00.0"

    def host(self, card: int) -> str:
        node = self.cards[card].node
        return f"pci{0xFFF if node is None else node:04x}:00"

    def chain(self, card: int) -> list[str]:
        """The bridges above a card: a root port, or the ports of a switch."""
        domain = self.host(card)[3:7]
        if self.cards[card].switch:
            return [self.host(card), f"{domain}:00:1f.0", f"{domain}:e0:00.0", f"{domain}:e1:{card:02x}.0"]
        return [self.host(card), f"{domain}:00:{card:02x}.0"]

    def between(self, a: int, b: int) -> str:
        if self.host(a) != self.host(b):
            return "NODE" if {*self.near(self.cards[a])} & {*self.near(self.cards[b])} else "SYS"
        return "PIX" if self.cards[a].switch and self.cards[b].switch else "PHB"

    def near(self, card: Card) -> tuple[int, ...]:
        """A card beside the whole machine is near the only node that has CPUs."""
        if card.node is None:
            return tuple(self.homes) if len(self.homes) == 1 else ()
        return (card.node,)


def facts_of_plan(plan: Plan) -> Facts:
    linked = [i for i, card in enumerate(plan.cards) if card.kind != "other"]
    return {
        "cores": sorted(core for nodes in plan.packages for cores in nodes for core in cores),
        "sockets": sorted(sorted(cpu for cores in nodes for core in cores for cpu in core) for nodes in plan.packages),
        "homes": plan.homes,
        "memory": {node: size << 10 for node, size in plan.memory.items()},
        "gpus": sorted((plan.address(i), plan.near(card)) for i, card in enumerate(plan.cards) if card.kind == "gpu"),
        "nics": sorted(
            (f"mlx5_{i}", plan.address(i), plan.near(card), (f"eth{i}",))
            for i, card in enumerate(plan.cards)
            if card.kind == "nic"
        ),
        "links": sorted(
            (*sorted((plan.address(a), plan.address(b))), plan.between(a, b)) for a, b in combinations(linked, 2)
        ),
    }


def facts_of(topology: Topology) -> Facts:
    cores: dict[int, list[int]] = {}
    sockets: dict[int, list[int]] = {}
    homes: dict[int, list[int]] = {}
    for cpu in topology.cpus:
        cores.setdefault(cpu.core, []).append(cpu.id)
        sockets.setdefault(cpu.socket, []).append(cpu.id)
        homes.setdefault(cpu.node, []).append(cpu.id)
    addresses = {gpu.id: gpu.pci or "" for gpu in topology.gpus} | {nic.id: nic.pci or "" for nic in topology.nics}
    return {
        "cores": sorted(map(tuple, cores.values())),
        "sockets": sorted(sockets.values()),
        "homes": homes,
        "memory": {node.id: node.memory for node in topology.nodes},
        "gpus": sorted((gpu.pci, gpu.numa_affinity) for gpu in topology.gpus),
        "nics": sorted((nic.id, nic.pci, nic.numa_affinity, nic.netdevs) for nic in topology.nics),
        "links": sorted((*sorted((addresses[link.a], addresses[link.b])), link.pcie) for link in topology.links),
    }


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Machines of one to three packages, with gaps in all ids, memory without CPUs, and cards in many places."""
    threads = draw(st.integers(1, 2))
    shape = draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=2), min_size=1, max_size=3))
    count = threads * sum(cores for nodes in shape for cores in nodes)
    ids = draw(st.lists(st.integers(0, 99), min_size=count + 2, max_size=count + 2, unique=True))
    places = [(p, n) for p, nodes in enumerate(shape) for n in range(len(nodes))]
    node_ids = draw(st.lists(st.integers(0, 40), min_size=len(places), max_size=len(places) + 2, unique=True))
    # A CPU that is near a node with CPUs and one without is on the first: the kernel numbers those with CPUs first.
    node_ids = sorted(node_ids[: len(places)]) + [node + 50 for node in node_ids[len(places) :]]
    spare = iter(ids)
    packages = tuple(
        tuple(tuple(tuple(sorted(next(spare) for _ in range(threads))) for _ in range(cores)) for cores in nodes)
        for nodes in shape
    )
    kinds, some = st.sampled_from(["gpu", "nic", "other"]), st.sampled_from([None, *node_ids[: len(places)]])
    numbered = st.lists(st.integers(0, 70_000), min_size=len(shape), max_size=len(shape), unique=True)
    return Plan(
        packages=packages,
        node_ids=dict(zip(places, node_ids, strict=False)),
        memory={node: draw(st.integers(1, 1 << 30)) for node in sorted(node_ids)},
        package_ids=tuple(draw(numbered | st.just([None] * len(shape)) | st.just([3] * len(shape)))),
        offline=tuple(ids[count:]),
        cards=tuple(draw(st.lists(st.builds(Card, kinds, some, st.booleans()), max_size=5))),
    )


def xml_of(plan: Plan, version: str) -> bytes:
    """As `lstopo --of xml` of hwloc 2 or 3 writes it."""
    root = Element("topology", version=version)
    machine = inside(root, "Machine", os_index=0)
    for node in plan.memory:
        if node not in plan.homes:
            inside(machine, "NUMANode", os_index=node, local_memory=plan.memory[node] << 10)
    add_cards(machine, plan, None, version)
    for p, nodes in enumerate(plan.packages):
        number = plan.package_ids[p]
        package = inside(machine, "Package", **({} if number is None else {"os_index": number}))
        for n, cores in enumerate(nodes):
            node, group = plan.node_ids[p, n], inside(package, "Group")
            inside(group, "NUMANode", os_index=node, local_memory=plan.memory[node] << 10)
            for core in cores:
                around = inside(group, "Core")
                for cpu in core:
                    inside(around, "PU", os_index=cpu)
            add_cards(group, plan, node, version)
    return b'<?xml version="1.0"?><!DOCTYPE topology SYSTEM "hwloc2.dtd">' + tostring(root)


def inside(parent: Element, kind: str, **attributes: object) -> Element:
    return SubElement(parent, "object", {"type": kind} | {name: str(value) for name, value in attributes.items()})


def add_cards(parent: Element, plan: Plan, node: int | None, version: str) -> None:
    """The cards near a node, or near none in particular, below their bridges."""
    written: dict[str, Element] = {}
    for i, card in enumerate(plan.cards):
        if card.node != node:
            continue
        above = parent
        for bridge in plan.chain(i):
            if bridge not in written:
                host = bridge.startswith("pci")
                place = {"bridge_pci": f"{bridge[3:7]}:[00-ff]"} if host else {"pci_busid": bridge}
                written[bridge] = inside(above, "Bridge", bridge_type="0-1" if host else "1-1", **place)
            above = written[bridge]
        pci = inside(above, "PCIDev", pci_busid=plan.address(i), pci_type=f"{CLASSES[card.kind]} [0000:0000] a1")
        for name, kind in OS_DEVICES[card.kind].items():
            inside(pci, "OSDev", name=f"{name}{i}", osdev_type=OSDEV_TYPES[version][kind])


def files_of(plan: Plan, masks: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Files and links of a sysfs tree; sets of CPUs as lists, or as masks as older kernels write them."""
    cpus, nodes = "sys/devices/system/cpu", "sys/devices/system/node"
    files = {f"{cpus}/online": as_list(cpu for home in plan.homes.values() for cpu in home)}
    files |= {f"{cpus}/cpu{cpu}/online": "0" for cpu in plan.offline}
    links = {}

    def write(path: str, names: tuple[str, str], ids: Iterable[int]) -> None:
        files[f"{path}/{names[masks]}"] = as_mask(ids) if masks else as_list(ids)

    for p, package in enumerate(plan.packages):
        inside = [cpu for cores in package for core in cores for cpu in core]
        for core in (core for cores in package for core in cores):
            for cpu in core:
                folder = f"{cpus}/cpu{cpu}/topology"
                number = plan.package_ids[p]
                files[f"{folder}/physical_package_id"] = str(-1 if number is None else number)
                write(folder, ("core_siblings_list", "core_siblings"), [*inside, *plan.offline])
                write(folder, ("thread_siblings_list", "thread_siblings"), [*core, *plan.offline])
    for node, size in plan.memory.items():
        files[f"{nodes}/node{node}/meminfo"] = f"Node {node} MemTotal: {size} kB\n"
        write(f"{nodes}/node{node}", ("cpulist", "cpumap"), plan.homes.get(node, ()))
    for i, card in enumerate(plan.cards):
        folder = "/".join(["sys/devices", *plan.chain(i), plan.address(i)])
        links[f"sys/bus/pci/devices/{plan.address(i)}"] = f"../../../../{folder}"
        kind, vendor = CLASSES[card.kind].split(" [")
        files[f"{folder}/class"], files[f"{folder}/vendor"] = f"0x{kind}00", f"0x{vendor[:4]}"
        files[f"{folder}/numa_node"] = str(-1 if card.node is None else card.node)
        write(folder, ("local_cpulist", "local_cpus"), [cpu for home in plan.homes.values() for cpu in home])
        if card.kind == "nic":
            files[f"{folder}/infiniband/mlx5_{i}/fw_ver"] = files[f"{folder}/net/eth{i}/mtu"] = "1"
            links[f"{folder}/infiniband/mlx5_{i}/device"] = "../.."
            links[f"sys/class/infiniband/mlx5_{i}"] = f"../../../{folder}/infiniband/mlx5_{i}"
    return files, links


def as_list(ids: Iterable[int]) -> str:
    return ",".join(map(str, sorted(ids)))


def as_mask(ids: Iterable[int]) -> str:
    bits = f"{sum(1 << one for one in ids):032x}"
    return ",".join(bits[i : i + 8] for i in range(0, 32, 8))


@settings(max_examples=60)
@given(plans(), st.sampled_from(["2.0", "3.0"]))
def test_the_xml_of_hwloc_2_and_3_is_read_as_the_machine_that_it_describes(plan: Plan, version: str) -> None:
    assert facts_of_plan(plan) == facts_of(read_lstopo(io.BytesIO(xml_of(plan, version))))


@settings(max_examples=60)
@given(plans(), st.booleans())
def test_a_packed_sysfs_tree_is_read_as_the_machine_that_it_describes(plan: Plan, masks: bool) -> None:
    assert facts_of_plan(plan) == facts_of(read_archive(packed(*files_of(plan, masks))))


@settings(max_examples=15)
@given(plans(), st.booleans())
def test_a_folder_of_sysfs_is_read_as_the_machine_that_it_describes(plan: Plan, masks: bool) -> None:
    with TemporaryDirectory() as folder:
        topology = read_sysfs(Tree(unpacked(Path(folder), *files_of(plan, masks))))

    assert facts_of_plan(plan) == facts_of(topology)
