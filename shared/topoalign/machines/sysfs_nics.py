"""
Reads RDMA-capable NICs from /sys/class/infiniband.

A virtual function is listed with the NIC to which it belongs. It is a NIC of its own only if the NIC itself is missing,
as in a virtual machine. Software RDMA devices, which have no PCI device, are left out.
"""

import re
from collections.abc import Mapping

from topoalign.core.model.errors import clean
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.model import Nic, NicPort, VirtualFunction
from topoalign.core.model.topology.topology_checks import MOST_NICS
from topoalign.machines import pcie
from topoalign.machines.sysfs_files import Tree, parse_number
from topoalign.machines.sysfs_pci import DEVICES, device_path, nearest_numa_nodes

CLASS = "sys/class/infiniband"

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_RATE = re.compile(r"([0-9]{1,6})(?:\.([0-9]))? Gb/sec")


def nics(tree: Tree, nodes: Mapping[int, frozenset[int]]) -> tuple[Nic, ...]:
    """The NICs in the natural order of their names, which is that of `nvidia-smi`."""
    names = sorted(filter(_NAME.fullmatch, tree.names(CLASS)), key=natural)
    physical = {name: address for name in names if (address := _read_address(tree, name)) is not None}
    owned = {vf for address in physical.values() for vf in _virtual_addresses(tree, address)}
    own = [(name, address) for name, address in physical.items() if address not in owned]
    return tuple(_read_nic(tree, index, name, address, nodes) for index, (name, address) in enumerate(own[:MOST_NICS]))


def natural(name: str) -> list[tuple[int, str]]:
    """Sorts mlx5_2 before mlx5_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]{1,18})", name) if part]


def _read_nic(tree: Tree, index: int, name: str, address: str, nodes: Mapping[int, frozenset[int]]) -> Nic:
    device = f"{DEVICES}/{address}"
    chain = pcie.chain_of(device_path(tree, address))
    verbs = tree.names(f"{device}/infiniband_verbs") or tree.names(f"{CLASS}/{name}/device/infiniband_verbs")
    netdevs = tree.names(f"{device}/net") or tree.names(f"{CLASS}/{name}/device/net")
    return Nic(
        id=DeviceID(name),
        index=index,
        pci=address,
        bridge=chain[-1] if chain else None,
        numa_affinity=nearest_numa_nodes(tree, address, nodes),
        netdevs=tuple(netdevs),
        verbs=next(iter(verbs), None),
        ports=tuple(_port(tree, f"{CLASS}/{name}/ports", port) for port in _ports(tree, name)),
        virtual_functions=tuple(
            VirtualFunction(
                pci=vf,
                name=next(iter(tree.names(f"{DEVICES}/{vf}/infiniband")), ""),
                verbs=next(iter(tree.names(f"{DEVICES}/{vf}/infiniband_verbs")), None),
            )
            for vf in _virtual_addresses(tree, address)
        ),
    )


def _read_address(tree: Tree, name: str) -> str | None:
    device = tree.real(f"{CLASS}/{name}/device")
    return device.name if device is not None and pcie.is_address(device.name) else None


def _virtual_addresses(tree: Tree, address: str) -> list[str]:
    links = sorted((name for name in tree.names(f"{DEVICES}/{address}") if name.startswith("virtfn")), key=natural)
    places = [tree.real(f"{DEVICES}/{address}/{name}") for name in links]
    return [place.name for place in places if place is not None and pcie.is_address(place.name)]


def _ports(tree: Tree, name: str) -> list[int]:
    return sorted(port for text in tree.names(f"{CLASS}/{name}/ports") if (port := parse_number(text)) is not None)


def _port(tree: Tree, folder: str, port: int) -> NicPort:
    rate = _RATE.match(tree.text(f"{folder}/{port}/rate") or "")
    return NicPort(
        number=port,
        link_layer=clean(tree.text(f"{folder}/{port}/link_layer") or "", 32),
        state=clean((tree.text(f"{folder}/{port}/state") or "").partition(":")[2].strip(), 32),
        rate=None if rate is None else int(rate[1]) * 10**9 + int(rate[2] or 0) * 10**8,
    )
