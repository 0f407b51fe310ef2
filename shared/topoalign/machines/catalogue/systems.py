"""NVIDIA's own machines, machines of other makers with NVIDIA's boards, and servers without NVSwitch."""

from collections.abc import Mapping
from itertools import combinations

import msgspec

from topoalign.core.model.byte_sizes import GIB, MIB
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.topology.device_links import PcieClass
from topoalign.core.model.topology.model import Fabric, NumaNode, Topology
from topoalign.machines.catalogue.build import (
    GBIT,
    GPU,
    NIC,
    Board,
    HostBridge,
    Model,
    PcieDevice,
    Switch,
    all_pairs,
    build_machine,
)

QUAD = {(0, 1): 1, (0, 2): 1, (0, 3): 2, (1, 2): 2, (1, 3): 1, (2, 3): 2}
"""The NVLinks between the four GPUs of a socket."""
ACROSS = {(0, 4): 2, (1, 5): 2, (2, 6): 1, (3, 7): 1}
HYBRID_CUBE_MESH = {**QUAD, **{(a + 4, b + 4): nvlinks for (a, b), nvlinks in QUAD.items()}, **ACROSS}
"""Six NVLinks per GPU: to the three others on its socket, and to the GPU at the same position on the other socket."""


def dgx1_volta() -> Topology:
    """8 V100 in a hybrid cube mesh; each of four PLX switches has two GPUs and a NIC."""
    pairs = (Switch(GPU, GPU, NIC), Switch(GPU, GPU, NIC))
    return build_machine(
        Board(sockets=2, cores=20, threads=2, memory=256 * GIB),
        (HostBridge(0, pairs), HostBridge(1, pairs)),
        Model(name="Tesla V100-SXM2-32GB", memory=32_768 * MIB),
        HYBRID_CUBE_MESH,
    )


def dgx2() -> Topology:
    """16 V100 on NVSwitch; each pair of GPUs shares a PCIe switch with a NIC, and two pairs share a switch above."""
    four = (Switch(Switch(GPU, GPU, NIC), Switch(GPU, GPU, NIC)),)
    topology = build_machine(
        Board(sockets=2, cores=24, threads=2, memory=768 * GIB),
        (HostBridge(0, four), HostBridge(0, four), HostBridge(1, four), HostBridge(1, four)),
        Model(name="Tesla V100-SXM3-32GB", memory=32_768 * MIB),
        all_pairs(16, 6),
    )
    return _on_nvswitch(topology, 6)


def dgx_a100() -> Topology:
    """8 A100 on NVSwitch, and two EPYC 7742 with four NUMA nodes each; the GPUs are near the nodes 3, 1, 7 and 5."""
    # each device is behind its own switch, so the nearest ones are PXB; NICs 8 and 9 are for storage
    quarter = (Switch(Switch(GPU), Switch(GPU), Switch(NIC), Switch(NIC)),)
    topology = build_machine(
        Board(
            sockets=2,
            cores=64,
            threads=2,
            nodes_per_socket=4,
            cores_per_cache=4,
            memory=128 * GIB,
            hugepages={ResourceName("hugepages-2Mi"): 2 * GIB},
            far=32,
        ),
        (
            HostBridge(3, quarter),
            HostBridge(1, quarter),
            HostBridge(7, quarter),
            HostBridge(5, quarter),
            HostBridge(4, (Switch(NIC, NIC),)),
        ),
        Model(name="NVIDIA A100-SXM4-40GB", memory=40_960 * MIB, rate=200 * GBIT),
        all_pairs(8, 12),
    )
    return _on_nvswitch(topology, 12)


def hgx_h100() -> Topology:
    """8 H100 on NVSwitch, each with a NIC on its own PCIe switch; NICs 8 and 9 are for storage, one per socket."""
    hugepages = {ResourceName("hugepages-2Mi"): 8 * GIB, ResourceName("hugepages-1Gi"): 64 * GIB}
    return _hgx(Model(name="NVIDIA H100 80GB HBM3", memory=81_559 * MIB, rate=400 * GBIT), hugepages)


def hgx_b200(of_gpu_0: int = 18) -> Topology:
    """8 B200 on NVSwitch, with NICs as on an HGX H100; `of_gpu_0`: how many of the 18 NVLinks of GPU 0 are up."""
    return _hgx(Model(name="NVIDIA B200", memory=183_359 * MIB, rate=400 * GBIT), {}, of_gpu_0)


def _hgx(model: Model, hugepages: Mapping[ResourceName, int], of_gpu_0: int = 18) -> Topology:
    own = (Switch(GPU, NIC),)
    topology = build_machine(
        Board(sockets=2, cores=56, threads=2, memory=1024 * GIB, hugepages=hugepages),
        (*[HostBridge(0, own)] * 4, *[HostBridge(1, own)] * 4, HostBridge(0, (NIC,)), HostBridge(1, (NIC,))),
        model,
        {(a, b): 18 if a else of_gpu_0 for a, b in combinations(range(8), 2)},
    )
    gpus = _on_nvswitch(topology, 18).gpus
    first = msgspec.structs.replace(gpus[0], switch_links=of_gpu_0, links_down=18 - of_gpu_0)
    return msgspec.structs.replace(topology, gpus=(first, *gpus[1:]))


GB200_NODES = 34
GB200_HBM_NODES = (2, 10, 18, 26)
"""Each GPU's memory is a NUMA node; the seven nodes after it are reserved for its MIG instances and are empty."""
GB200_NEAR = ((0, *range(3, 10), *range(11, 18)), (1, *range(19, 26), *range(27, 34)))
"""For each Grace, the nodes that its GPUs report as near."""


def gb200_tray() -> Topology:
    """4 GB200 of an NVL72: two Grace CPUs, 34 NUMA nodes, and NVLinks that continue to the other trays."""
    nic = (NIC,)
    nics = (Switch(NIC, NIC),)
    gpu = (GPU,)
    domains: dict[int, tuple[Switch | PcieDevice, ...]] = {0x0: nic, 0x2: nic, 0x6: nics, 0x8: gpu, 0x9: gpu}
    roots = tuple(
        HostBridge(socket, below, 0x10 * socket + domain) for socket in (0, 1) for domain, below in domains.items()
    )
    topology = build_machine(
        Board(sockets=2, cores=72, threads=1, memory=489_960 * MIB, far=40),
        roots,
        Model(name="NVIDIA GB200", memory=188_416 * MIB, rate=400 * GBIT),
        all_pairs(4, 18),
    )
    fabric = Fabric(cluster="00000000-0000-4000-8000-000000000072", clique=1)
    gpus = [
        msgspec.structs.replace(gpu, numa_affinity=GB200_NEAR[gpu.index // 2], memory_node=node, fabric=fabric)
        for gpu, node in zip(topology.gpus, GB200_HBM_NODES, strict=True)
    ]
    memory = {0: 489_960 * MIB, 1: 489_823 * MIB} | dict.fromkeys(GB200_HBM_NODES, 188_416 * MIB)
    topology = msgspec.structs.replace(
        topology,
        gpus=tuple(gpus),
        nodes=tuple(NumaNode(id=node, memory=memory.get(node, 0)) for node in range(GB200_NODES)),
        distances=tuple(tuple(_grace_distance(a, b) for b in range(GB200_NODES)) for a in range(GB200_NODES)),
        # Every host bridge is a PCI domain of its own, and nvidia-smi prints SYS between them even on one Grace.
        links=tuple(
            msgspec.structs.replace(link, pcie=PcieClass.SYS) if link.pcie is PcieClass.NODE else link
            for link in topology.links
        ),
    )
    return _on_nvswitch(topology, 18)


def _grace_distance(a: int, b: int) -> int:
    """10 to itself, 40 between the CPUs, 80 to memory on the same module, 120 to that of the other."""
    if a == b:
        return 10
    if a < 2 and b < 2:
        return 40
    return 80 if _module(a) == _module(b) else 120


def _module(node: int) -> int:
    return node if node < 2 else (node - 2) // 16


def _on_nvswitch(topology: Topology, nvlinks: int) -> Topology:
    gpus = tuple(msgspec.structs.replace(gpu, switch_links=nvlinks) for gpu in topology.gpus)
    return msgspec.structs.replace(topology, gpus=gpus)


def two_socket_8xpcie() -> Topology:
    """8 PCIe GPUs without NVLink: per socket, two pairs with a switch each, and a NIC on its own root port."""
    half = (Switch(GPU, GPU), Switch(GPU, GPU), NIC)
    return build_machine(
        Board(sockets=2, cores=18, threads=2, memory=64_345 * MIB),
        (HostBridge(0, half), HostBridge(1, half)),
        Model(name="Tesla T4", memory=15_360 * MIB),
    )


def nvlink_pairs() -> Topology:
    """8 GPUs in pairs with four NVLinks; the GPUs of a pair share a host bridge, and each socket has a NIC."""
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
    """8 L40S without NVLink: per socket, two pairs with a switch each, and a NIC on its own root port."""
    half = (Switch(GPU, GPU), Switch(GPU, GPU), NIC)
    return build_machine(
        Board(sockets=2, cores=32, threads=2, memory=512 * GIB),
        (HostBridge(0, half), HostBridge(1, half)),
        Model(name="NVIDIA L40S", memory=46_068 * MIB),
    )


def rtx4090_8x() -> Topology:
    """8 GeForce RTX 4090 without NVLink, four per socket, each on its own host bridge; one NIC on the first socket."""
    return build_machine(
        Board(sockets=2, cores=32, threads=2, memory=256 * GIB, far=32),
        (*[HostBridge(0, (GPU,))] * 4, *[HostBridge(1, (GPU,))] * 4, HostBridge(0, (NIC,))),
        Model(name="NVIDIA GeForce RTX 4090", memory=24_564 * MIB),
    )


def a100_missing_bridge() -> Topology:
    """4 A100 PCIe, two per socket; 12 NVLinks connect the GPUs of the first socket, and none those of the second."""
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
