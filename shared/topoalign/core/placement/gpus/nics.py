"""
Counts how many of the NICs that a container asks for are local to its GPUs.

A NIC is local to a GPU if nothing but PCIe switches is between them (PIX, PXB) or, on Grace, if both are at the same CPU.
One local GPU is enough for a set: NCCL's PXN moves the data of the other members through it. A NIC that is local to none is
near if it is on the NUMA node of a member. Example of one NIC near each of GPU-0 to GPU-3:

    wanted 2, free near GPU-1 and GPU-3: the set GPU-0, GPU-1 has 1 local NIC, GPU-1, GPU-3 has 2
"""

from collections.abc import Sequence
from typing import NamedTuple

from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.device_links import PcieClass
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.queries import pcie_class, share_node

THROUGH_SWITCHES = (PcieClass.PSB, PcieClass.PIX, PcieClass.PXB)


class NicLocality(NamedTuple):
    """Of one NIC."""

    local: frozenset[int]
    """The GPUs that it is local to, by their positions."""
    near: frozenset[int]
    """The same and the GPUs on its NUMA node."""


class Nics(NamedTuple):
    """The NICs that a container could get."""

    wanted: int
    free: Sequence[NicLocality]


NO_NICS = Nics(0, ())


def count_nics(nics: Nics, members: Sequence[int]) -> tuple[int, int]:
    """How many of the wanted NICs can be local to a member of the set, and how many near."""
    if not nics.wanted:
        return 0, 0
    local = sum(not nic.local.isdisjoint(members) for nic in nics.free)
    near = sum(not nic.near.isdisjoint(members) for nic in nics.free)
    return min(local, nics.wanted), min(near, nics.wanted)


def nic_locality(topology: Topology, nic: DeviceID) -> NicLocality:
    """The GPUs of the machine that a NIC is local to, and near."""
    local = set()
    near = set()
    for position, gpu in enumerate(topology.gpus):
        path = pcie_class(topology, nic, gpu.id)
        same_node = share_node(topology, nic, gpu.id)
        if path in THROUGH_SWITCHES or (gpu.memory_node is not None and same_node):
            local.add(position)
        if path is not PcieClass.SYS or same_node:
            near.add(position)
    return NicLocality(frozenset(local), frozenset(near | local))
