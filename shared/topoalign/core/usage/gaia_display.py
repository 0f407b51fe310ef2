"""
Renders a node as gpu-manager (Gaia) displays it: the tree of its GPUs as text, and who uses them.

The tree is that of Gaia's evaluators (`core.sharing.gaia.pcie_tree`). Each node has a line below its parent:

    ROOT:1
    |---PHB (aval: 1, pids: [], usedMemory: 0, totalMemory: 0, allocatableCores: 0, allocatableMemory: 0)
    |   |---GPU0 (pids: [71 72], usedMemory: 1073741824, totalMemory: 85899345920, allocatableCores: 0, allocatableMemory: 0)
    |   |---GPU1 (pids: [], usedMemory: 0, totalMemory: 85899345920, allocatableCores: 100, allocatableMemory: 85899345920)

`aval` is the number of GPUs below a node of which no container holds a part. Memory is in bytes. The used memory is
that of the processes. If the amounts of a GPU in units or slots are scaled, more can be allocatable than the GPU has.
Nothing of a GPU is allocatable if it must not be allocated. Nodes are sorted by level, `aval` and first GPU.

Unknown values are 0, because the format has no other value. A GPU in MIG mode is partitioned into instances and not by
cores, so nothing of it is allocatable here. Source: gpu-manager 8cd842ed, device/nvidia (tree, node), display.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from topoalign.core.model.byte_sizes import MIB
from topoalign.core.model.holdings import Amount
from topoalign.core.model.topology.device_offers import CORES
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.core.sharing.gaia.evaluators import tree_root
from topoalign.core.sharing.gaia.pcie_tree import GaiaTreeNode, GpuTree, build_free_tree
from topoalign.core.sharing.shared_gpus import SharedGpu
from topoalign.core.state.fold import NodeState
from topoalign.core.state.gpu_partitioning import GpuPartitioning, partitioning_by_gpu
from topoalign.core.usage.attribution import DeviceShares, HolderUse, NodeShares

LABELS = {10: "PIX", 20: "PXB", 30: "PHB", 40: "CPU", 50: "SYS"}
"""Level -> name of a node of the tree."""


def graph_of(state: NodeState, shares: NodeShares) -> str:
    """The tree of a node's GPUs as text. Each line ends with a newline."""
    gpus = state.hardware.gpus
    rows = defaultdict[str, list[DeviceShares]](list)  # GPU -> its row and those of its instances
    for row in shares.devices:
        rows[row.gpu].append(row)
    shared = [_to_shared_gpu(state, gpu, rows[gpu.id]) for gpu in gpus]
    tree = build_free_tree(tree_root(state.hardware), shared)
    divided = partitioning_by_gpu(state)
    texts = [
        _gpu_text(gpu, _remaining_amount(gpu, share, divided[gpu.id], healthy=healthy), rows[gpu.id])
        for gpu, share, healthy in zip(gpus, shared, (state.health_of(gpu.id).usable for gpu in gpus), strict=True)
    ]
    lines = [f"ROOT:{tree.available(tree.root) if gpus else 0}\n"]
    for node, depth in _walk_with_depth(tree, tree.root):
        text = texts[node.members[0]]
        if node.children:
            amounts = "pids: [], usedMemory: 0, totalMemory: 0, allocatableCores: 0, allocatableMemory: 0"
            text = f"{LABELS[node.level]} (aval: {tree.available(node)}, {amounts})"
        lines.append(f"{'|   ' * depth}|---{text}\n")
    return "".join(lines)


def _walk_with_depth(tree: GpuTree, node: GaiaTreeNode, depth: int = 0) -> Iterator[tuple[GaiaTreeNode, int]]:
    order = sorted(
        node.children,
        key=lambda child: (
            child.level,  # GPUs first, then the nearest nodes,
            tree.available(child),  # the fullest,
            child.members,  # the lowest index
        ),
    )
    for child in order:
        yield child, depth
        yield from _walk_with_depth(tree, child, depth + 1)


def _gpu_text(gpu: Gpu, left: Amount, rows: Iterable[DeviceShares]) -> str:
    uses = [use for row in rows for use in (*(each.use for each in row.holders), *(each.use for each in row.others))]
    processes = [process for use in uses for process in use.processes]
    pids = " ".join(str(pid) for pid in sorted({process.pid for process in processes}))
    used = sum(process.memory or 0 for process in processes)
    return (
        f"GPU{gpu.index} (pids: [{pids}], usedMemory: {used}, totalMemory: {gpu.memory or 0}, "
        f"allocatableCores: {left.cores}, allocatableMemory: {left.memory})"
    )


def _remaining_amount(gpu: Gpu, share: SharedGpu, division: GpuPartitioning, *, healthy: bool) -> Amount:
    # for a GPU in time slices, the free amount of the whole GPU, because a slice has no amount; in MIG mode, nothing
    if gpu.mig is not None or not healthy:
        return Amount(cores=0, memory=0)
    if division.left.whole or division.offered.slices:
        return share.left
    return Amount(cores=division.left.cores, memory=division.left.memory)


def _to_shared_gpu(state: NodeState, gpu: Gpu, rows: Sequence[DeviceShares]) -> SharedGpu:
    holders = [holder for row in rows for holder in row.holders]
    is_whole = bool(gpu.mig) or any(holder.cores == CORES for holder in holders)
    return SharedGpu(
        device=gpu.id,
        index=gpu.index,
        minor=gpu.index if gpu.minor is None else gpu.minor,
        model=gpu.name,
        offered=Amount(cores=CORES, memory=gpu.memory or 0),
        held=Amount(
            cores=sum(holder.cores or 0 for holder in holders), memory=sum(holder.memory or 0 for holder in holders)
        ),
        sharers=len(holders),
        usable=state.health_of(gpu.id).usable and not is_whole,
    )


def usages_of(hardware: Topology, shares: NodeShares) -> dict[str, dict[str, Any]]:
    """
    UID of a pod -> its GPUs and its use of them, with the fields of Gaia's message ContainerStat. Containers whose
    owner or pod UID is unknown are omitted. Memory is in MiB, utilization in percent of the last second.
    """
    pods: dict[str, dict[str, Any]] = {}
    given = defaultdict[tuple[str, str], list[HolderUse]](list)
    for row in shares.devices:
        gpu = hardware.gpu_by_id[row.gpu]
        for holder in row.holders:
            if not holder.pod_uid or holder.owner is None:
                continue
            name = holder.owner.container
            # Gaia takes `user` and `cluster` from the pod's manifest, which the node does not know
            new = {"stat": {}, "project": holder.owner.namespace, "user": "", "cluster": "", "spec": {}}
            pod = pods.setdefault(holder.pod_uid, new)
            pod["stat"].setdefault(name, {"dev": []})["dev"].append(
                {
                    "id": bus_id(gpu.pci),
                    "card_idx": str(gpu.index),
                    "gpu": float(holder.use.utilization or 0),
                    "mem": float((holder.use.memory or 0) // MIB),
                    "pids": [process.pid for process in holder.use.processes],
                    "device_mem": float((row.memory or 0) // MIB),
                }
            )
            given[holder.pod_uid, name].append(holder)
    for (uid, container), holders in given.items():
        cores = sum(holder.cores or 0 for holder in holders)
        memory = sum(holder.memory or 0 for holder in holders)
        pods[uid]["spec"][container] = {"gpu": cores / CORES, "mem": float(memory // MIB)}
    return pods


def bus_id(pci: str | None) -> str:
    """A PCI address of sysfs in NVML's form: upper case, and a domain of eight digits. Empty: unknown."""
    if pci is None:
        return ""
    domain, _, rest = pci.partition(":")
    return f"{domain:0>8}:{rest}".upper()
