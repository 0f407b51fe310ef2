"""
Reads a machine from the files of /sys and /proc: of the running host, or of a tree that was captured on another one.

The NUMA node of a device is its own `numa_node`. If the kernel does not know it (-1), it is that of the first bridge
above that has one; otherwise, it is the one node that contains all CPUs of the device's `local_cpulist`. If that list
spans several nodes, the node is unknown.

A virtual function of a NIC is listed with the NIC to which it belongs. It is a NIC of its own only if the NIC itself is
missing, as in a virtual machine. Software RDMA devices, which have no PCI device, are left out.

No state is kept between calls, and reading fails only if the tree has no CPUs. GPUs are NVIDIA's display devices in the
order of their PCI addresses, which is that of `nvidia-smi`. If NVIDIA's driver is loaded, their uuid and the NUMA node
of their memory come from /proc; without it the id of a GPU is `GPU-<PCI address>`. The files do not show NVLinks.
"""

import re
from collections.abc import Mapping
from pathlib import PurePosixPath

from topoalign.core.model.errors import clean
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.model import Gpu, Nic, NicPort, Topology, VirtualFunction
from topoalign.core.model.topology.topology_checks import LARGEST_MEMORY, MOST_GPUS, MOST_NICS
from topoalign.machines import pcie
from topoalign.machines.reader_rules import check_possible
from topoalign.machines.sysfs_cpus import cpus_of_nodes, online_cpus, read_cpus, read_numa_nodes
from topoalign.machines.sysfs_files import Tree, natural, parse_number

DEVICES = "sys/bus/pci/devices"

NVIDIA = 0x10DE
DISPLAY_CLASSES = (0x0300, 0x0302)
"""VGA controller and 3D controller: what a GPU is on PCI."""
DRIVER = "proc/driver/nvidia/gpus"

_UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
RDMA_CLASS = "sys/class/infiniband"

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_RATE = re.compile(r"([0-9]{1,6})(?:\.([0-9]))? Gb/sec")


def read_sysfs(tree: Tree) -> Topology:
    """The machine with these /sys and /proc. Raises InvalidMachine if it has no CPUs."""
    return topology_with(tree, read_gpus(tree))


def topology_with(tree: Tree, gpus: tuple[Gpu, ...]) -> Topology:
    """Reads the machine with these GPUs: a driver that knows more about GPUs than the files passes its own."""
    nodes, distances = read_numa_nodes(tree)
    nics = _read_nics(tree)
    devices: list[Gpu | Nic] = [*gpus, *nics]
    chains = {each.id: pcie.chain_of(device_path(tree, each.pci)) for each in devices if each.pci is not None}
    topology = Topology(
        cpus=read_cpus(tree),
        nodes=nodes,
        distances=distances,
        bridges=pcie.collect_bridges(chains.values()),
        gpus=gpus,
        nics=nics,
        links=pcie.link_devices(devices, chains, one_node=len(nodes) == 1),
    )
    return check_possible(topology, "the tree")


def read_gpus(tree: Tree) -> tuple[Gpu, ...]:
    """The NVIDIA GPUs, by PCI address."""
    nodes = cpus_of_nodes(tree, online_cpus(tree))
    there = [name for name in tree.names(DEVICES) if pcie.is_address(name) and _is_gpu(tree, name)][:MOST_GPUS]
    return tuple(_read_gpu(tree, index, address, nodes) for index, address in enumerate(there))


def _is_gpu(tree: Tree, address: str) -> bool:
    kind = tree.number(f"{DEVICES}/{address}/class", 16)
    if kind is None or kind >> 8 not in DISPLAY_CLASSES:
        return False
    vendor = tree.number(f"{DEVICES}/{address}/vendor", 16)
    return vendor == NVIDIA if vendor is not None else address in tree.names(DRIVER)


def _read_gpu(tree: Tree, index: int, address: str, nodes: Mapping[int, frozenset[int]]) -> Gpu:
    facts = _facts(tree, f"{DRIVER}/{address}/information")
    memory = _facts(tree, f"{DRIVER}/{address}/numa_status")
    near = nearest_numa_nodes(tree, address, nodes)
    chain = pcie.chain_of(device_path(tree, address))
    online = frozenset[int]().union(*nodes.values())
    cpus = _local_cpus(tree, address) & online or frozenset[int]().union(*(nodes[node] for node in near))
    memory_node = parse_number(memory.get("Node", ""))
    size = parse_number(memory.get("Size", ""), 16)
    uuid = facts.get("GPU UUID", "")
    return Gpu(
        id=DeviceID(uuid if _UUID.fullmatch(uuid) else f"GPU-{address}"),
        index=index,
        name=clean(facts.get("Model", ""), 128),
        minor=parse_number(facts.get("Device Minor", "")),
        pci=address,
        bridge=chain[-1] if chain else None,
        memory=size if size is not None and size <= LARGEST_MEMORY else None,
        cpu_affinity=tuple(sorted(cpus)),
        numa_affinity=near,
        memory_node=memory_node if memory_node in nodes else None,
    )


def is_named_by_address(gpu: Gpu) -> bool:
    """Whether this GPU has its PCI address as id because no driver has reported its uuid."""
    return gpu.id == f"GPU-{gpu.pci}"


def _facts(tree: Tree, path: str) -> dict[str, str]:
    # lines such as `Node:      255`
    lines = (line.partition(":") for line in (tree.text(path) or "").splitlines())
    return {key.strip(): value.strip() for key, colon, value in lines if colon}


def _read_nics(tree: Tree) -> tuple[Nic, ...]:
    # in the natural order of their names, which is that of `nvidia-smi`
    nodes = cpus_of_nodes(tree, online_cpus(tree))
    names = sorted(filter(_NAME.fullmatch, tree.names(RDMA_CLASS)), key=natural)
    devices = {name: tree.real(f"{RDMA_CLASS}/{name}/device") for name in names}
    physical = {name: at.name for name, at in devices.items() if at is not None and pcie.is_address(at.name)}
    owned = {vf for address in physical.values() for vf in _virtual_addresses(tree, address)}
    own = [(name, address) for name, address in physical.items() if address not in owned]
    return tuple(_read_nic(tree, index, name, address, nodes) for index, (name, address) in enumerate(own[:MOST_NICS]))


def _read_nic(tree: Tree, index: int, name: str, address: str, nodes: Mapping[int, frozenset[int]]) -> Nic:
    device = f"{DEVICES}/{address}"
    chain = pcie.chain_of(device_path(tree, address))
    verbs = tree.names(f"{device}/infiniband_verbs") or tree.names(f"{RDMA_CLASS}/{name}/device/infiniband_verbs")
    netdevs = tree.names(f"{device}/net") or tree.names(f"{RDMA_CLASS}/{name}/device/net")
    ports = [port for text in tree.names(f"{RDMA_CLASS}/{name}/ports") if (port := parse_number(text)) is not None]
    return Nic(
        id=DeviceID(name),
        index=index,
        pci=address,
        bridge=chain[-1] if chain else None,
        numa_affinity=nearest_numa_nodes(tree, address, nodes),
        netdevs=tuple(netdevs),
        verbs=next(iter(verbs), None),
        ports=tuple(_port(tree, f"{RDMA_CLASS}/{name}/ports", port) for port in sorted(ports)),
        virtual_functions=tuple(
            VirtualFunction(
                pci=vf,
                name=next(iter(tree.names(f"{DEVICES}/{vf}/infiniband")), ""),
                verbs=next(iter(tree.names(f"{DEVICES}/{vf}/infiniband_verbs")), None),
            )
            for vf in _virtual_addresses(tree, address)
        ),
    )


def _virtual_addresses(tree: Tree, address: str) -> list[str]:
    links = sorted((name for name in tree.names(f"{DEVICES}/{address}") if name.startswith("virtfn")), key=natural)
    places = [tree.real(f"{DEVICES}/{address}/{name}") for name in links]
    return [place.name for place in places if place is not None and pcie.is_address(place.name)]


def _port(tree: Tree, folder: str, port: int) -> NicPort:
    rate = _RATE.match(tree.text(f"{folder}/{port}/rate") or "")
    return NicPort(
        number=port,
        link_layer=clean(tree.text(f"{folder}/{port}/link_layer") or "", 32),
        state=clean((tree.text(f"{folder}/{port}/state") or "").partition(":")[2].strip(), 32),
        rate=None if rate is None else int(rate[1]) * 10**9 + int(rate[2] or 0) * 10**8,
    )


def device_path(tree: Tree, address: str) -> PurePosixPath:
    """The device's directory below /sys/devices; below /sys/bus if the tree has it there instead of a link."""
    return tree.real(f"{DEVICES}/{address}") or PurePosixPath(DEVICES, address)


def nearest_numa_nodes(tree: Tree, address: str, nodes: Mapping[int, frozenset[int]]) -> tuple[int, ...]:
    """The NUMA node nearest to a device, of these nodes with their CPUs; () if unknown."""
    path = device_path(tree, address)
    for place in (path, *path.parents):
        if not (place == path or pcie.is_address(place.name) or place.name.startswith("pci")):
            break
        node = tree.number(f"{place}/numa_node")
        if node is not None and node in nodes:
            return (node,)
    local = _local_cpus(tree, address)
    near = [node for node, cpus in nodes.items() if cpus & local]
    return tuple(near) if len(near) == 1 else ()


def _local_cpus(tree: Tree, address: str) -> frozenset[int]:
    device = f"{DEVICES}/{address}"
    return tree.ids(f"{device}/local_cpulist") or tree.mask(f"{device}/local_cpus") or frozenset()
