"""
Derives the PCIe class between two devices from the bridges above each of them.

A device is at the end of a chain: the host bridge, then every bridge and switch port on the way down. A switch appears
as one upstream port with a downstream port per device, so two devices under one switch share all but their last bridge.

The rule (classes and meanings as in the legend of `nvidia-smi topo -m`; the derivation is inferred, not NVIDIA's):

- different host bridges: NODE if both are on the same NUMA node, else SYS
- only the host bridge is shared: PHB
- at most one bridge of each device below the last shared one: PIX
- otherwise: PXB
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import PurePosixPath

from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.device_links import Link, PcieClass
from topoalign.core.model.topology.model import Gpu, Nic, PciBridge

Chain = tuple[str, ...]
"""Addresses from the host bridge (`pci0000:00`) down to the bridge directly above a device. Empty: unknown."""

_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def between(a: Chain, b: Chain, *, same_node: bool) -> PcieClass:
    """The class of the path between two devices whose chains are both known."""
    if a[0] != b[0]:
        return PcieClass.NODE if same_node else PcieClass.SYS
    shared = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        shared += 1
    if shared == 1:
        return PcieClass.PHB
    return PcieClass.PIX if max(len(a), len(b)) - shared <= 1 else PcieClass.PXB


def link_devices(devices: Sequence[Gpu | Nic], chains: Mapping[DeviceID, Chain], *, one_node: bool) -> tuple[Link, ...]:
    """A link for each pair of devices with known chains. `one_node`: the host has a single NUMA node."""
    found = []
    for a, b in combinations(devices, 2):
        if chains.get(a.id) and chains.get(b.id):
            same_node = one_node or bool(set(a.numa_affinity) & set(b.numa_affinity))
            found.append(Link(a=a.id, b=b.id, pcie=between(chains[a.id], chains[b.id], same_node=same_node)))
    return tuple(found)


def collect_bridges(chains: Iterable[Chain]) -> tuple[PciBridge, ...]:
    """Every bridge of these chains once, parents before children."""
    parents: dict[str, str | None] = {}
    for chain in chains:
        for above, address in zip((None, *chain), chain, strict=False):
            parents.setdefault(address, above)
    return tuple(PciBridge(address=address, parent=parent) for address, parent in parents.items())


def chain_of(path: PurePosixPath) -> Chain:
    """The chain of a device by its path below /sys/devices; empty if that leads through no host bridge."""
    # the device at `…/pci0000:00/0000:00:03.0/0000:04:00.0` is below `0000:00:03.0`
    parts = [part for part in path.parts[:-1] if _HOST_BRIDGE.fullmatch(part) or is_address(part)]
    first = next((i for i, part in enumerate(parts) if part.startswith("pci")), len(parts))
    return tuple(parts[first:])


def is_address(text: str) -> bool:
    """Whether this is a PCI address as sysfs writes them: `0000:07:00.0`."""
    return _ADDRESS.fullmatch(text) is not None
