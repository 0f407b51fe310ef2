"""
Reads a machine from the files of /sys and /proc: of the running host, or of a tree that was captured on another one.

Nothing is kept between calls, and no content makes it fail, except that there must be CPUs. GPUs are NVIDIA's display
devices in the order of their PCI addresses, which is that of `nvidia-smi`. If NVIDIA's driver is loaded, their uuid and
the NUMA node of their memory come from /proc; without it the id of a GPU is `GPU-<PCI address>`. Files do not show
NVLinks.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from topoalign.core.model.errors import clean
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.model import Gpu, Nic, Topology
from topoalign.core.model.topology.topology_checks import LARGEST_MEMORY, MOST_GPUS
from topoalign.machines import pcie, sysfs_nics
from topoalign.machines.possible import check_possible
from topoalign.machines.sysfs_cpus import cpus_of_nodes, online_cpus, read_cpus, read_numa_nodes
from topoalign.machines.sysfs_files import Tree, open_tree, parse_number
from topoalign.machines.sysfs_pci import (
    DEVICES,
    DISPLAY_CLASSES,
    NVIDIA,
    device_path,
    list_addresses,
    local_cpus,
    nearest_numa_nodes,
)

__all__ = [
    "Tree",
    "is_named_by_address",
    "read_cpus",
    "read_gpus",
    "read_nics",
    "read_numa_nodes",
    "read_sysfs",
    "topology_with",
]

DRIVER = "proc/driver/nvidia/gpus"

_UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def read_sysfs(root: Path | Tree) -> Topology:
    """The machine whose /sys and /proc are below the root. Raises InvalidMachine if it has no CPUs."""
    return topology_with(root, read_gpus(root))


def topology_with(root: Path | Tree, gpus: tuple[Gpu, ...]) -> Topology:
    """Reads the machine with these GPUs: a driver that knows more about GPUs than the files passes its own."""
    tree = open_tree(root)
    nodes, distances = read_numa_nodes(tree)
    nics = read_nics(tree)
    devices: list[Gpu | Nic] = [*gpus, *nics]
    attached = [pcie.Attached(device.id, _read_chain(tree, device.pci), device.numa_affinity) for device in devices]
    topology = Topology(
        cpus=read_cpus(tree),
        nodes=nodes,
        distances=distances,
        bridges=pcie.collect_bridges(place.chain for place in attached),
        gpus=gpus,
        nics=nics,
        links=pcie.link_devices(attached, one_node=len(nodes) == 1),
    )
    return check_possible(topology, "the tree")


def read_gpus(root: Path | Tree) -> tuple[Gpu, ...]:
    """The NVIDIA GPUs, by PCI address."""
    tree = open_tree(root)
    nodes = cpus_of_nodes(tree, online_cpus(tree))
    there = [address for address in list_addresses(tree) if _is_gpu(tree, address)][:MOST_GPUS]
    return tuple(_read_gpu(tree, index, address, nodes) for index, address in enumerate(there))


def read_nics(root: Path | Tree) -> tuple[Nic, ...]:
    """The RDMA-capable NICs, by name."""
    tree = open_tree(root)
    return sysfs_nics.nics(tree, cpus_of_nodes(tree, online_cpus(tree)))


def _read_chain(tree: Tree, address: str | None) -> pcie.Chain:
    return () if address is None else pcie.chain_of(device_path(tree, address))


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
    chain = _read_chain(tree, address)
    online = frozenset[int]().union(*nodes.values())
    cpus = local_cpus(tree, address) & online or frozenset[int]().union(*(nodes[node] for node in near))
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
    """Lines such as `Node:      255`."""
    lines = (line.partition(":") for line in (tree.text(path) or "").splitlines())
    return {key.strip(): value.strip() for key, colon, value in lines if colon}
