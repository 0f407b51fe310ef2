"""
The building blocks of catalogue machines.

A `Board` has the CPUs and the memory; a `HostBridge` is a PCIe host bridge with the devices below it, behind switches or
directly on its root ports. `build_machine` numbers CPUs as Linux does (all first threads, then all second ones), numbers
PCI addresses as firmware does (depth first), and derives every link from the resulting positions of the devices.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations, count
from typing import Literal

from msgspec.structs import replace

from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.model import Cpu, Gpu, Nic, NicPort, NumaNode, Topology
from topoalign.machines import pcie

GBIT = 10**9


PcieDevice = Literal["gpu", "nic"]
GPU: PcieDevice = "gpu"
NIC: PcieDevice = "nic"


class Switch:
    """A PCIe switch: an upstream port, and a downstream port for each switch or device below."""

    def __init__(self, *below: "Switch | PcieDevice") -> None:
        self.below = below


@dataclass(frozen=True)
class HostBridge:
    """A host bridge near one NUMA node, with a root port for each switch or device below."""

    node: int
    below: tuple[Switch | PcieDevice, ...]
    domain: int = 0


@dataclass(frozen=True, kw_only=True)
class Board:
    """The CPUs and the memory of a machine; all sockets are identical."""

    sockets: int
    cores: int
    """Cores of each socket."""
    threads: int
    """Threads of each core."""
    memory: int
    """Bytes of each NUMA node."""
    nodes_per_socket: int = 1
    cores_per_cache: int | None = None
    """Cores that share a last-level cache. None: all of the socket."""
    hugepages: Mapping[ResourceName, int] = field(default_factory=dict)
    """Bytes of each NUMA node, out of its memory."""
    near: int = 12
    """Distance to another node of the same socket."""
    far: int = 21
    """Distance to a node of another socket."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The kind of GPU, and the kind of NIC."""

    name: str
    memory: int
    """Bytes."""
    rate: int = 100 * GBIT
    """Bits per second of a NIC's port."""


@dataclass(frozen=True)
class Slot:
    """The position of a device in the machine."""

    device: PcieDevice
    address: str
    chain: pcie.Chain
    node: int


NVLinks = Mapping[tuple[int, int], int]
"""Indices of two GPUs, the smaller first -> NVLinks between them."""


def all_pairs(gpus: int, nvlinks: int) -> NVLinks:
    """The NVLinks of GPUs on an NVSwitch: every GPU reaches every other one with all its NVLinks."""
    return dict.fromkeys(combinations(range(gpus), 2), nvlinks)


def build_machine(
    board: Board, roots: tuple[HostBridge, ...] = (), model: Model | None = None, nvlinks: NVLinks | None = None
) -> Topology:
    """The machine. Its GPUs and NICs are numbered in the order of the roots."""
    cpus = _build_cpus(board)
    slots = list(_slots(roots))
    gpus = tuple(_build_gpu(i, slot, model, cpus) for i, slot in enumerate(s for s in slots if s.device == GPU))
    nics = tuple(_build_nic(i, slot, model) for i, slot in enumerate(s for s in slots if s.device == NIC))
    chains = {slot.address: slot.chain for slot in slots}
    bonded = {(gpus[a].id, gpus[b].id): bond for (a, b), bond in (nvlinks or {}).items()}
    devices: list[Gpu | Nic] = [*gpus, *nics]
    links = pcie.link_devices(devices, {each.id: chains[each.pci or ""] for each in devices}, one_node=False)
    count_of_nodes = board.sockets * board.nodes_per_socket
    socket_of = [node // board.nodes_per_socket for node in range(count_of_nodes)]
    distances = tuple(
        tuple(
            10 if a == b else board.near if socket_of[a] == socket_of[b] else board.far for b in range(count_of_nodes)
        )
        for a in range(count_of_nodes)
    )
    return Topology(
        cpus=cpus,
        nodes=tuple(
            NumaNode(id=node, memory=board.memory, hugepages=dict(board.hugepages)) for node in range(count_of_nodes)
        ),
        distances=distances,
        bridges=pcie.collect_bridges(slot.chain for slot in slots),
        gpus=gpus,
        nics=nics,
        links=tuple(replace(link, fabric_links=bonded.get((link.a, link.b), 0)) for link in links),
    )


def _build_cpus(board: Board) -> tuple[Cpu, ...]:
    total = board.sockets * board.cores
    return tuple(
        Cpu(
            id=core + thread * total,
            core=core,
            socket=core // board.cores,
            node=core * board.nodes_per_socket // board.cores,
            uncore=core // (board.cores_per_cache or board.cores),
        )
        for thread in range(board.threads)
        for core in range(total)
    )


def _slots(roots: tuple[HostBridge, ...]) -> Iterator[Slot]:
    buses = {root.domain: count() for root in roots}
    for root in roots:
        bus = buses[root.domain]
        while (number := next(bus)) % 8:  # firmware leaves bus numbers free between host bridges
            pass
        host = f"pci{root.domain:04x}:{number:02x}"
        for i, thing in enumerate(root.below, start=1):
            port = f"{root.domain:04x}:{number:02x}:{i:02x}.0"
            yield from _below(thing, (host, port), root, bus)


def _below(thing: Switch | PcieDevice, chain: pcie.Chain, root: HostBridge, buses: Iterator[int]) -> Iterator[Slot]:
    address = f"{root.domain:04x}:{next(buses):02x}:00.0"
    if isinstance(thing, str):
        yield Slot(thing, address, chain, root.node)
        return
    inner = next(buses)
    for i, below in enumerate(thing.below):
        port = f"{root.domain:04x}:{inner:02x}:{i:02x}.0"
        yield from _below(below, (*chain, address, port), root, buses)


def _build_gpu(index: int, slot: Slot, model: Model | None, cpus: tuple[Cpu, ...]) -> Gpu:
    return Gpu(
        id=DeviceID(f"GPU-{index}"),
        index=index,
        name=model.name if model is not None else "",
        minor=index,
        pci=slot.address,
        bridge=slot.chain[-1],
        memory=model.memory if model is not None else None,
        cpu_affinity=tuple(cpu.id for cpu in cpus if cpu.node == slot.node),
        numa_affinity=(slot.node,),
    )


def _build_nic(index: int, slot: Slot, model: Model | None) -> Nic:
    rate = model.rate if model is not None else None
    return Nic(
        id=DeviceID(f"mlx5_{index}"),
        index=index,
        pci=slot.address,
        bridge=slot.chain[-1],
        numa_affinity=(slot.node,),
        ports=(NicPort(number=1, link_layer="InfiniBand", state="ACTIVE", rate=rate),),
    )
