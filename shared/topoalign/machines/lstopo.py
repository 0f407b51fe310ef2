"""
Reads a machine from the XML of hwloc's lstopo, of its versions 1, 2 and 3.

Objects are nested: a CPU (PU) in its core, caches and package. In version 2 memory is a child of the object that it is
near to, so a CPU is on the node of the nearest enclosing object that has one; in version 1 a NUMA node encloses its
CPUs. PCI devices are nested in their bridges, and bridges in the object that they are near to: a package if it is
known, else the whole machine, which leaves the NUMA node open on a machine of several nodes.

GPUs are NVIDIA's display devices. Their id is the uuid that NVML reported to lstopo, else `GPU-<PCI address>`; their
index is that of NVML or CUDA, else the order of PCI addresses. NICs are the OpenFabrics devices of PCI devices
(`lstopo_osdev`). A virtual function cannot be recognised here and is a NIC of its own. NVLinks are not read.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import IO

from topoalign.core.model.errors import InvalidMachine, clean
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.model import Gpu, Nic, NicPort, Topology
from topoalign.core.model.topology.validate import MOST_GPUS, MOST_NICS
from topoalign.machines import pcie
from topoalign.machines.lstopo_cpus import GPU_MEMORY, Cores, read_distances
from topoalign.machines.lstopo_osdev import Kind, kinds_of, major_version, os_devices
from topoalign.machines.lstopo_xml import EXPORT_AGAIN, Element, read_elements
from topoalign.machines.possible import possible
from topoalign.machines.sysfs_files import number
from topoalign.machines.sysfs_nics import natural

_NVIDIA = re.compile(r"03(?:00|02) \[10de:")
_UUID = re.compile(r"GPU-[0-9A-Za-z-]{1,64}")
_HOST_BRIDGE = re.compile(r"([0-9a-f]{4,8}):\[([0-9a-f]{2})-[0-9a-f]{2}\]")
_PORT_STATE = re.compile(r"Port([0-9]{1,3})State")
_STATES = {"1": "DOWN", "2": "INIT", "3": "ARMED", "4": "ACTIVE", "5": "ACTIVE_DEFER"}
"""As the kernel names the port states of InfiniBand."""
_KIBIBYTES = re.compile(r"([0-9]{1,15})(?:KiB)?")
"""Before hwloc 3 without the unit."""


def read_lstopo(source: IO[bytes]) -> Topology:
    """The machine of an XML file. Raises InvalidMachine."""
    root = read_elements(source)
    cores = Cores(root)
    near = Nearness(cores)
    devices = [element for element in root.all() if element.type == "PCIDev" and _address(element)]
    gpus = _gpus([element for element in devices if _NVIDIA.match(element.get("pci_type"))], near)
    nics = _nics(devices, near, major_version(root))
    nodes = cores.numa_nodes()
    if len(gpus) > MOST_GPUS or len(nics) > MOST_NICS:
        finding = f"{len(gpus)} GPUs and {len(nics)} NICs: a machine has at most {MOST_GPUS} and {MOST_NICS}"
        raise InvalidMachine(finding, EXPORT_AGAIN)
    chains = {_address(element): _chain(element) for element in devices}
    attached = [pcie.Attached(gpu.id, chains[gpu.pci or ""], gpu.numa_affinity) for gpu in gpus]
    attached += [pcie.Attached(nic.id, chains[nic.pci or ""], nic.numa_affinity) for nic in nics]
    topology = Topology(
        cpus=cores.cpus(),
        nodes=nodes,
        distances=read_distances(root, nodes),
        bridges=pcie.bridges(place.chain for place in attached),
        gpus=gpus,
        nics=nics,
        links=pcie.links(attached, one_node=len(nodes) == 1),
    )
    return possible(topology, "the topology", EXPORT_AGAIN)


class Nearness:
    """The CPUs and NUMA nodes that a device is near to, found once for each object that devices stand in."""

    def __init__(self, cores: Cores) -> None:
        self._cores = cores
        self._all = set(cores.node_of.values())
        self._known: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def of(self, device: Element) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """CPUs and nodes; neither if the device is as near to every node of several."""
        place = next(e for e in device.above() if e.type not in ("Bridge", "PCIDev"))
        if id(place) not in self._known:
            cpus = self._cores.inside(place)
            nodes = {self._cores.node_of[cpu] for cpu in cpus}
            unknown = nodes == self._all and len(nodes) > 1
            self._known[id(place)] = ((), ()) if unknown else (cpus, tuple(sorted(nodes)))
        return self._known[id(place)]

    def memory_node(self, address: str) -> int | None:
        """The NUMA node that is the memory of the GPU at this address."""
        for node, element in self._cores.nodes.items():
            if element.get("subtype") == GPU_MEMORY and element.info("PCIBusID").lower() == address:
                return node
        return None


def _gpus(elements: Sequence[Element], near: Nearness) -> tuple[Gpu, ...]:
    elements = sorted(elements, key=_address)[: MOST_GPUS + 1]  # one too many is refused all the same
    gpus = [_gpu(element, index, near) for element, index in zip(elements, _indices(elements), strict=True)]
    return tuple(sorted(gpus, key=lambda gpu: gpu.index))


def _indices(elements: Sequence[Element]) -> list[int]:
    """NVML's, else CUDA's, else positions: whichever numbers all of them."""
    for prefix in ("nvml", "cuda"):
        names = [[device.get("name") for device in os_devices(element)] for element in elements]
        found = [[number(name[4:]) for name in each if name.startswith(prefix)] for each in names]
        indices = [each[0] for each in found if each and each[0] is not None]
        if len(set(indices)) == len(elements):
            return indices
    return list(range(len(elements)))


def _gpu(element: Element, index: int, near: Nearness) -> Gpu:
    facts = {info.get("name"): info.get("value") for info in element.all() if info.tag == "info"}
    address = _address(element)
    chain = _chain(element)
    cpus, nodes = near.of(element)
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
        memory_node=near.memory_node(address),
    )


def _nics(elements: Sequence[Element], near: Nearness, version: int) -> tuple[Nic, ...]:
    """A NIC for each OpenFabrics device, in the natural order of their names."""
    kinds = [(device, kinds_of(device, version), element) for element in elements for device in os_devices(element)]
    netdevs: dict[str, set[str]] = {}
    for device, kind, element in kinds:
        if Kind.NETWORK in kind and Kind.OPENFABRICS not in kind:
            netdevs.setdefault(_address(element), set()).add(clean(device.get("name")))
    named = [(device, element) for device, kind, element in kinds if Kind.OPENFABRICS in kind]
    named.sort(key=lambda pair: natural(pair[0].get("name")))
    return tuple(_nic(device, element, index, near, netdevs) for index, (device, element) in enumerate(named))


def _nic(device: Element, element: Element, index: int, near: Nearness, netdevs: Mapping[str, Collection[str]]) -> Nic:
    chain = _chain(element)
    states = [(_PORT_STATE.fullmatch(info.get("name")), info.get("value")) for info in device.children]
    return Nic(
        id=DeviceID(device.get("name")),
        index=index,
        pci=_address(element),
        bridge=chain[-1] if chain else None,
        numa_affinity=near.of(element)[1],
        netdevs=tuple(sorted(netdevs.get(_address(element), ()))),
        ports=tuple(NicPort(number=int(port[1]), state=_STATES.get(state, "")) for port, state in states if port),
    )


def _address(element: Element) -> str:
    """The PCI address; "" if it has none."""
    address = element.get("pci_busid").lower()
    return address if pcie.is_address(address) else ""


def _chain(element: Element) -> pcie.Chain:
    """The bridges around a PCI device; empty if the file left some out."""
    bridges = [place for place in element.above() if place.type == "Bridge"]
    chain = tuple(_bridge(place) for place in reversed(bridges))
    return chain if chain and chain[0].startswith("pci") and all(chain) else ()


def _bridge(place: Element) -> str:
    """Address of a bridge; a host bridge is named by the domain and the first of its buses."""
    if _address(place):
        return _address(place)
    buses = _HOST_BRIDGE.fullmatch(place.get("bridge_pci").lower())
    return f"pci{buses[1]}:{buses[2]}" if buses else ""
