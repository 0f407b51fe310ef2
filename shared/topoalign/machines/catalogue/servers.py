"""Servers of several makers without NVSwitch: PCIe servers, pairs with an NVLink bridge, and one-socket servers."""

from topoalign.core.model.ids import ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.machines.catalogue.build import (
    GBIT,
    GIB,
    GPU,
    MIB,
    NIC,
    Board,
    HostBridge,
    Model,
    build_machine,
    pcie_switch,
)


def two_socket_8xpcie() -> Topology:
    """8 PCIe GPUs without NVLink: two pairs a socket, a switch to each pair, and a NIC on a root port of its own."""
    half = (pcie_switch(GPU, GPU), pcie_switch(GPU, GPU), NIC)
    return build_machine(
        Board(sockets=2, cores=18, threads=2, memory=64_345 * MIB),
        (HostBridge(0, half), HostBridge(1, half)),
        Model(name="Tesla T4", memory=15_360 * MIB),
    )


def nvlink_pairs() -> Topology:
    """8 GPUs bridged two and two by four NVLinks; the GPUs of a pair share a host bridge, and a NIC is on each socket."""
    pair = (GPU, GPU)
    return build_machine(
        Board(sockets=2, cores=32, threads=2, cores_per_cache=8, memory=256 * GIB, far=32),
        (
            HostBridge(0, pair),
            HostBridge(0, pair),
            HostBridge(1, pair),
            HostBridge(1, pair),
            HostBridge(0, (NIC,)),
            HostBridge(1, (NIC,)),
        ),
        Model(name="NVIDIA RTX A6000", memory=49_140 * MIB),
        {(0, 1): 4, (2, 3): 4, (4, 5): 4, (6, 7): 4},
    )


def l40s_8x() -> Topology:
    """8 L40S without NVLink: two pairs a socket, a switch to each pair, and a NIC on a root port of its own."""
    half = (pcie_switch(GPU, GPU), pcie_switch(GPU, GPU), NIC)
    return build_machine(
        Board(sockets=2, cores=32, threads=2, memory=512 * GIB),
        (HostBridge(0, half), HostBridge(1, half)),
        Model(name="NVIDIA L40S", memory=46_068 * MIB),
    )


def rtx4090_8x() -> Topology:
    """8 GeForce RTX 4090 without NVLink, four a socket, each on a host bridge of its own; one NIC on the first socket."""
    return build_machine(
        Board(sockets=2, cores=32, threads=2, memory=256 * GIB, far=32),
        (*[HostBridge(0, (GPU,))] * 4, *[HostBridge(1, (GPU,))] * 4, HostBridge(0, (NIC,))),
        Model(name="NVIDIA GeForce RTX 4090", memory=24_564 * MIB),
    )


def a100_missing_bridge() -> Topology:
    """4 A100 PCIe, two a socket; the GPUs of the first socket are bridged by 12 NVLinks, those of the second are not."""
    return build_machine(
        Board(sockets=2, cores=28, threads=2, memory=256 * GIB),
        (*[HostBridge(0, (GPU,))] * 2, *[HostBridge(1, (GPU,))] * 2, HostBridge(0, (NIC, NIC))),
        Model(name="NVIDIA A100 80GB PCIe", memory=81_920 * MIB),
        {(0, 1): 12},
    )


def epyc_nps4_4gpu() -> Topology:
    """One EPYC with four NUMA nodes, a GPU on each; NICs next to the first and the third."""
    return build_machine(
        Board(sockets=1, cores=64, threads=2, nodes_per_socket=4, cores_per_cache=8, memory=128 * GIB),
        (HostBridge(0, (GPU, NIC)), HostBridge(1, (GPU,)), HostBridge(2, (GPU, NIC)), HostBridge(3, (GPU,))),
        Model(name="NVIDIA A100 80GB PCIe", memory=81_920 * MIB, rate=200 * GBIT),
    )


def cpu_only() -> Topology:
    """Two sockets, no GPU."""
    pages = {ResourceName("hugepages-1Gi"): 16 * GIB}
    return build_machine(Board(sockets=2, cores=32, threads=2, memory=128 * GIB, hugepages=pages))
