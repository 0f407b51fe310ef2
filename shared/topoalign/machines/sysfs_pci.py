"""
Reads PCI devices from /sys/bus/pci: their place in the tree, and the NUMA node that is near.

The NUMA node is the device's own `numa_node`; if the kernel does not know it (-1), that of the first bridge above that
has one; else the one node that holds all CPUs of its `local_cpulist`. If that list spans several nodes, the node is
unknown.
"""

from collections.abc import Mapping
from pathlib import PurePosixPath

from topoalign.machines import pcie
from topoalign.machines.sysfs_files import Tree

DEVICES = "sys/bus/pci/devices"

NVIDIA = 0x10DE
DISPLAY_CLASSES = (0x0300, 0x0302)
"""VGA controller and 3D controller: what a GPU is on PCI."""


def list_addresses(tree: Tree) -> list[str]:
    """The PCI addresses of all devices, sorted."""
    return [name for name in tree.names(DEVICES) if pcie.is_address(name)]


def device_path(tree: Tree, address: str) -> PurePosixPath:
    """The device's directory below /sys/devices; below /sys/bus if the tree has it there instead of a link."""
    return tree.real(f"{DEVICES}/{address}") or PurePosixPath(DEVICES, address)


def nearest_numa_nodes(tree: Tree, address: str, nodes: Mapping[int, frozenset[int]]) -> tuple[int, ...]:
    """The node near a device, of these nodes with their CPUs; () if unknown."""
    path = device_path(tree, address)
    for place in (path, *path.parents):
        if not (place == path or pcie.is_address(place.name) or place.name.startswith("pci")):
            break
        node = tree.number(f"{place}/numa_node")
        if node is not None and node in nodes:
            return (node,)
    local = local_cpus(tree, address)
    near = [node for node, cpus in nodes.items() if cpus & local]
    return tuple(near) if len(near) == 1 else ()


def local_cpus(tree: Tree, address: str) -> frozenset[int]:
    """The ids of the CPUs near a device; empty if the kernel does not list them."""
    device = f"{DEVICES}/{address}"
    return tree.ids(f"{device}/local_cpulist") or tree.mask(f"{device}/local_cpus") or frozenset()
