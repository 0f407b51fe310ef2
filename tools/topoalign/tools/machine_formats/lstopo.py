"""
Reads a machine from the XML of hwloc's lstopo, of its versions 1, 2 and 3.

Objects are nested: a CPU (PU) in its core, caches and package. In version 2, a NUMA node is a memory child of the
object that it is local to, so a CPU belongs to the NUMA node of its nearest ancestor that has one. In version 1, a NUMA
node is an ancestor of its CPUs. PCI devices are children of their bridges, and bridges of the object that they are
local to: a package if hwloc knows it, else the Machine. In the second case the NUMA node is not known if the machine
has several.

GPUs are NVIDIA's display devices. Their id is the uuid that NVML reported to lstopo, else `GPU-<PCI address>`; their
index is that of NVML or CUDA, else the order of PCI addresses. Each OpenFabrics device of a PCI device is a NIC. A
virtual function cannot be recognised here and is a NIC of its own. NVLinks are not read.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import product
from typing import IO, Literal

from topoalign.core.model.errors import InvalidMachine, clean
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.cpuset import LARGEST_ID
from topoalign.core.model.topology.model import Cpu, Gpu, Nic, NicPort, NumaNode, Topology
from topoalign.core.model.topology.topology_checks import MOST_CPUS, MOST_GPUS, MOST_NICS, MOST_NODES
from topoalign.machines import pcie
from topoalign.machines.reader_rules import check_possible, hugepage_totals, number_sockets
from topoalign.machines.sysfs_files import natural, parse_number
from topoalign.tools.machine_formats.lstopo_xml import EXPORT_AGAIN, Element, read_elements

PACKAGES = ("Package", "Socket")
GPU_MEMORY = "GPUMemory"
"""hwloc's subtype of a NUMA node that is a GPU's own memory."""

_SHARED_CACHE = re.compile(r"L[3-9]Cache")
_MEANS_LATENCY = 1 << 2
"""Bit of hwloc's kind of distances (HWLOC_DISTANCES_KIND_MEANS_LATENCY)."""

Distances = tuple[tuple[int, ...], ...]


class Cores:
    """The CPUs of an export, and the objects around each of them."""

    def __init__(self, root: Element) -> None:
        """Raises InvalidMachine for no CPU, a duplicate one, or too many."""
        elements = list(root.all())
        self.nodes = _by_index([e for e in elements if e.type == "NUMANode"], MOST_NODES)
        self._units = _by_index([e for e in elements if e.type == "PU"], MOST_CPUS)
        if not self._units:
            raise InvalidMachine("the topology has no CPUs (objects of type PU)", EXPORT_AGAIN)
        self._memory: dict[int, int | None] = {}
        self._near: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        """Id of an object -> the CPUs and NUMA nodes that devices in it are local to."""
        self._machine = next((e for e in elements if e.type == "Machine"), root)
        self.node_of = {cpu: self._home(unit) for cpu, unit in self._units.items()}

    def cpus(self) -> tuple[Cpu, ...]:
        """All CPUs, by ascending id. A core, and a cache without an os_index, has the id of its lowest CPU."""
        cores = self._lowest(lambda unit: next((place for place in unit.above() if place.type == "Core"), None))
        caches = self._lowest(_cache)
        cache_ids = {cpu: parse_number(cache.get("os_index")) for cpu in caches if (cache := _cache(self._units[cpu]))}
        uncores = {cpu: cache_id for cpu, cache_id in cache_ids.items() if cache_id is not None}
        if len(uncores) < len(caches):
            uncores = caches
        packages: dict[int, tuple[int | None, int]] = {}  # CPU -> hwloc's id, and a key
        for cpu, unit in self._units.items():
            package = next((place for place in unit.above() if place.type in PACKAGES), None)
            outside = (None, 0)  # CPUs outside of packages are on one extra socket
            packages[cpu] = outside if package is None else (parse_number(package.get("os_index")), id(package))
        sockets = number_sockets(packages)
        return tuple(
            Cpu(
                id=cpu,
                core=cores.get(cpu, cpu),
                socket=sockets[cpu],
                node=self.node_of[cpu],
                uncore=uncores.get(cpu, sockets[cpu]),
            )
            for cpu in sorted(self._units)
        )

    def numa_nodes(self) -> tuple[NumaNode, ...]:
        """All NUMA nodes, by id. A machine without any has node 0 with all its memory."""
        if not self.nodes:
            return (_parse_node(0, self._machine, None),)
        # hwloc writes no `local_memory` for a node that has none, so where other nodes have some, this one has 0
        default_memory = 0 if any(element.get("local_memory") for element in self.nodes.values()) else None
        return tuple(_parse_node(node, element, default_memory) for node, element in sorted(self.nodes.items()))

    def near(self, device: Element) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """
        The CPUs and NUMA nodes that a device is local to; both empty if it is equally near to all of several NUMA
        nodes.
        """
        place = next(e for e in device.above() if e.type not in ("Bridge", "PCIDev"))
        if id(place) not in self._near:
            cpus = tuple(sorted(os_index(element) for element in place.all() if element.type == "PU"))
            nodes = {self.node_of[cpu] for cpu in cpus}
            is_unknown = len(nodes) > 1 and nodes == set(self.node_of.values())
            self._near[id(place)] = ((), ()) if is_unknown else (cpus, tuple(sorted(nodes)))
        return self._near[id(place)]

    def memory_node(self, address: str) -> int | None:
        """The NUMA node that is the memory of the GPU at this address."""
        for node, element in self.nodes.items():
            if element.get("subtype") == GPU_MEMORY and element.info("PCIBusID").lower() == address:
                return node
        return None

    def _home(self, unit: Element) -> int:
        """
        The nearest ancestor that is a NUMA node or has one as memory child; the lowest NUMA node if there is none.
        """
        for place in unit.above():
            if place.type == "NUMANode":
                return os_index(place)
            attached = self._attached(place)
            if attached is not None:
                return attached
        return min(self.nodes, default=0)

    def _attached(self, place: Element) -> int | None:
        # the lowest NUMA node among its memory children; GPU memory only if there is no other
        if id(place) not in self._memory:
            caches = [child for child in place.children if child.type == "MemCache"]
            nodes = [child for around in (place, *caches) for child in around.children if child.type == "NUMANode"]
            nodes = [node for node in nodes if not any(child.type for child in node.children)]
            ranked = sorted((node.get("subtype") == GPU_MEMORY, os_index(node)) for node in nodes)
            self._memory[id(place)] = ranked[0][1] if ranked else None
        return self._memory[id(place)]

    def _lowest(self, around: Callable[[Element], Element | None]) -> dict[int, int]:
        """CPU -> the lowest CPU in the same object that `around` returns; only CPUs with such an object."""
        places = {cpu: place for cpu, unit in sorted(self._units.items()) if (place := around(unit)) is not None}
        lowest: dict[int, int] = {}
        for cpu, place in places.items():
            lowest.setdefault(id(place), cpu)
        return {cpu: lowest[id(place)] for cpu, place in places.items()}


def os_index(element: Element) -> int:
    """The OS index of a CPU or node. Raises InvalidMachine if it has none."""
    index = parse_number(element.get("os_index"))
    if index is None:
        raise InvalidMachine(f"an object {clean(element.type)} has no os_index", EXPORT_AGAIN)
    return index


def _by_index(elements: Sequence[Element], most: int) -> dict[int, Element]:
    if len(elements) > most:
        finding = f"{len(elements)} objects of type {elements[0].type}; at most {most} are supported"
        raise InvalidMachine(finding, EXPORT_AGAIN)
    found: dict[int, Element] = {}
    for element in elements:
        if found.setdefault(os_index(element), element) is not element:
            raise InvalidMachine(f"two objects {element.type} have os_index {os_index(element)}", EXPORT_AGAIN)
    return found


def read_distances(root: Element, nodes: Sequence[NumaNode]) -> Distances | None:
    """The latencies between the nodes, in their order. None if the file has none that fit."""
    numa_nodes = [element for element in root.all() if element.type == "NUMANode"]
    ids = [node.id for node in nodes]
    for element in root.all():
        values = None
        if element.tag == "distances2":  # hwloc 2: ids and values as text, perhaps in several pieces
            indexes, values_text = (
                " ".join(child.text for child in element.children if child.tag == tag).split()
                for tag in ("indexes", "u64values")
            )
            kind = parse_number(element.get("kind")) or 0
            if element.get("type") == "NUMANode" and kind & _MEANS_LATENCY:
                values = _pairs(list(map(parse_number, indexes)), list(map(parse_number, values_text)))
        elif element.tag == "distances":  # hwloc 1: a multiple of a base for each pair, in the document's order
            values = _old_distances(element, numa_nodes)
        if values is not None and all((a, b) in values for a in ids for b in ids):
            return tuple(tuple(values[a, b] for b in ids) for a in ids)
    return None


def _old_distances(element: Element, nodes: Sequence[Element]) -> dict[tuple[int, int], int] | None:
    try:
        base = float(element.get("latency_base"))
        values = [round(float(child.get("value")) * base) for child in element.children if child.tag == "latency"]
    except (ValueError, OverflowError):
        return None
    return _pairs([os_index(node) for node in nodes], values)


def _pairs(ids: Sequence[int | None], values: Sequence[int | None]) -> dict[tuple[int, int], int] | None:
    known = [value for value in values if value is not None and 1 <= value <= LARGEST_ID]
    if len(values) != len(ids) ** 2 or len(known) != len(values):
        return None
    return {
        (a, b): value for (a, b), value in zip(product(ids, ids), known, strict=True) if a is not None and b is not None
    }


def _parse_node(node: int, element: Element, default_memory: int | None) -> NumaNode:
    """`default_memory`: its memory if the document does not contain it."""
    memory = parse_number(element.get("local_memory")) if element.get("local_memory") else default_memory
    sizes = {
        parse_number(page.get("size")) or 0: parse_number(page.get("count"))
        for page in element.children
        if page.tag == "page_type"
    }
    base = min(sizes, default=0)
    pages = {size: count for size, count in sizes.items() if size > base and count is not None}
    return NumaNode(id=node, memory=memory, hugepages=hugepage_totals(pages, memory))


def _cache(unit: Element) -> Element | None:
    # the outermost of level 3 or more; hwloc 1 writes the level as depth
    shared = [
        place
        for place in unit.above()
        if _SHARED_CACHE.fullmatch(place.type)
        or (place.type == "Cache" and (parse_number(place.get("depth")) or 0) >= 3)
    ]
    return shared[-1] if shared else None


_MAJOR = re.compile(r"([0-9]{1,4})(?:\.|$)")
_NVIDIA = re.compile(r"03(?:00|02) \[10de:")
_UUID = re.compile(r"GPU-[0-9A-Za-z-]{1,64}")
_HOST_BRIDGE = re.compile(r"([0-9a-f]{4,8}):\[([0-9a-f]{2})-[0-9a-f]{2}\]")
_PORT_STATE = re.compile(r"Port([0-9]{1,3})State")
_STATES = {"1": "DOWN", "2": "INIT", "3": "ARMED", "4": "ACTIVE", "5": "ACTIVE_DEFER"}
"""As the kernel names the port states of InfiniBand."""
_KIBIBYTES = re.compile(r"([0-9]{1,15})(?:KiB)?")
"""hwloc versions before 3 write no unit."""


def read_lstopo(source: IO[bytes]) -> Topology:
    """Reads the machine from an XML file. Raises InvalidMachine."""
    root = read_elements(source)
    version = _MAJOR.match(root.get("version"))  # hwloc 1 writes none
    cores = Cores(root)
    devices = [element for element in root.all() if element.type == "PCIDev" and _pci_address(element)]
    gpus = _parse_gpus([element for element in devices if _NVIDIA.match(element.get("pci_type"))], cores)
    nics = _parse_nics(devices, cores, int(version[1]) if version else 1)
    nodes = cores.numa_nodes()
    if len(gpus) > MOST_GPUS or len(nics) > MOST_NICS:
        finding = f"{len(gpus)} GPUs and {len(nics)} NICs: a machine has at most {MOST_GPUS} and {MOST_NICS}"
        raise InvalidMachine(finding, EXPORT_AGAIN)
    bridges = {_pci_address(element): _bridges_above(element) for element in devices}
    placed: list[Gpu | Nic] = [*gpus, *nics]
    chains = {each.id: bridges[each.pci or ""] for each in placed}
    topology = Topology(
        cpus=cores.cpus(),
        nodes=nodes,
        distances=read_distances(root, nodes),
        bridges=pcie.collect_bridges(chains.values()),
        gpus=gpus,
        nics=nics,
        links=pcie.link_devices(placed, chains, one_node=len(nodes) == 1),
    )
    return check_possible(topology, "the topology", EXPORT_AGAIN)


def _parse_gpus(elements: Sequence[Element], cores: Cores) -> tuple[Gpu, ...]:
    elements = sorted(elements, key=_pci_address)[: MOST_GPUS + 1]  # the caller refuses more than MOST_GPUS
    gpus = [_parse_gpu(element, index, cores) for element, index in zip(elements, _indices(elements), strict=True)]
    return tuple(sorted(gpus, key=lambda gpu: gpu.index))


def _indices(elements: Sequence[Element]) -> list[int]:
    # NVML's indices if each GPU has another one, else CUDA's, else positions
    for prefix in ("nvml", "cuda"):
        names = [[device.get("name") for device in _os_devices(element)] for element in elements]
        found = [[parse_number(name[4:]) for name in each if name.startswith(prefix)] for each in names]
        indices = [each[0] for each in found if each and each[0] is not None]
        if len(set(indices)) == len(elements):
            return indices
    return list(range(len(elements)))


def _parse_gpu(element: Element, index: int, cores: Cores) -> Gpu:
    facts = {info.get("name"): info.get("value") for info in element.all() if info.tag == "info"}
    address = _pci_address(element)
    chain = _bridges_above(element)
    cpus, nodes = cores.near(element)
    uuid = facts.get("NVIDIAUUID", "")
    kibibytes = _KIBIBYTES.fullmatch(facts.get("CUDAGlobalMemorySize", ""))
    return Gpu(
        id=DeviceID(uuid if _UUID.fullmatch(uuid) else f"GPU-{address}"),
        index=index,
        name=clean(facts.get("GPUModel") or facts.get("PCIDevice") or "", 128),
        pci=address,
        bridge=chain[-1] if chain else None,
        memory=None if kibibytes is None else int(kibibytes[1]) << 10,
        cpu_affinity=cpus,
        numa_affinity=nodes,
        memory_node=cores.memory_node(address),
    )


def _parse_nics(elements: Sequence[Element], cores: Cores, version: int) -> tuple[Nic, ...]:
    # a NIC for each OpenFabrics device, in the natural order of their names
    kinds = [
        (device, _network_kind(device, version), element) for element in elements for device in _os_devices(element)
    ]
    netdevs: dict[str, set[str]] = {}
    for device, kind, element in kinds:
        if kind == "interface":
            netdevs.setdefault(_pci_address(element), set()).add(clean(device.get("name")))
    named = [(device, element) for device, kind, element in kinds if kind == "rdma"]
    named.sort(key=lambda pair: natural(pair[0].get("name")))
    return tuple(_parse_nic(device, element, index, cores, netdevs) for index, (device, element) in enumerate(named))


def _parse_nic(
    device: Element, element: Element, index: int, cores: Cores, netdevs: Mapping[str, Collection[str]]
) -> Nic:
    chain = _bridges_above(element)
    states = [(_PORT_STATE.fullmatch(info.get("name")), info.get("value")) for info in device.children]
    return Nic(
        id=DeviceID(device.get("name")),
        index=index,
        pci=_pci_address(element),
        bridge=chain[-1] if chain else None,
        numa_affinity=cores.near(element)[1],
        netdevs=tuple(sorted(netdevs.get(_pci_address(element), ()))),
        ports=tuple(NicPort(number=int(port[1]), state=_STATES.get(state, "")) for port, state in states if port),
    )


def _pci_address(element: Element) -> str:
    address = element.get("pci_busid").lower()
    return address if pcie.is_address(address) else ""


def _bridges_above(element: Element) -> pcie.Chain:
    # empty if the file left some out
    bridges = [place for place in element.above() if place.type == "Bridge"]
    chain = tuple(_bridge(place) for place in reversed(bridges))
    return chain if chain and chain[0].startswith("pci") and all(chain) else ()


def _bridge(place: Element) -> str:
    # a host bridge is named by the domain and the first of its buses
    if _pci_address(place):
        return _pci_address(place)
    buses = _HOST_BRIDGE.fullmatch(place.get("bridge_pci").lower())
    return f"pci{buses[1]}:{buses[2]}" if buses else ""


def _os_devices(element: Element) -> list[Element]:
    return [child for child in element.children if child.type == "OSDev"]


def _network_kind(device: Element, version: int) -> Literal["", "interface", "rdma"]:
    kind = parse_number(device.get("osdev_type")) or 0
    # From 3.0 on it is a set of bits: 1 storage, 2 memory, 4 GPU, 8 co-processor, 16 network, 32 OpenFabrics, 64 DMA. An
    # RDMA device is 16 + 32 = 48, and a CXL memory device with persistent memory is 1 + 2 = 3.
    if version >= 3:
        return "rdma" if kind & 32 else "interface" if kind & 16 else ""
    # Before, it is one number: 0 block, 1 GPU, 2 network, 3 OpenFabrics, 4 DMA, 5 co-processor. A BXI interface is 3 as
    # well, although it has no RDMA device; from 3.0 on it is only network.
    if device.get("subtype") == "BXI" or kind == 2:
        return "interface"
    return "rdma" if kind == 3 else ""
