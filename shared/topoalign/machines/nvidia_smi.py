"""
Reads a machine from the output of `nvidia-smi topo -m`.

A matrix has less information than a machine. Missing information is derived:

- CPUs are the union of the CPU affinities, with one thread per core. The CPUs of one NUMA node count as one socket and
  one last-level cache, and the output does not show this socket (`sockets_known`). A CPU belongs to the first node of
  the NUMA affinity in the same row; if several GPUs list it, to that of the first GPU.
- If the column NUMA Affinity is missing, GPUs with equal CPU affinities are on one node, because the driver prints the
  CPUs of the GPU's node; the nodes are numbered in the order of their lowest CPU.
- If the column exists but has `N/A` or nothing, the GPU's node is unknown. If no GPU's node is known, CPUs are put on
  nodes as if the column were missing; else CPUs that are listed only with unknown nodes are left out.
- Memory is unknown. The node of a GPU's own memory (GPU NUMA ID) exists and has no CPUs.
- A NIC is near the nodes of the nearest GPU that it reaches without leaving the NUMA node (PIX before PXB, NODE at
  most), of several the first.
- `NV4` states the number of NVLinks of a pair and hides its PCIe path. GPUs have no uuid: their id is `GPU-<index>`.
"""

from collections.abc import Mapping, Sequence

from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.device_links import PcieClass
from topoalign.core.model.topology.model import Cpu, Gpu, Nic, NumaNode, Topology
from topoalign.machines.nvidia_smi_lines import COPY_AGAIN, parse_affinity, parse_link
from topoalign.machines.nvidia_smi_matrix import Matrix, read_matrix
from topoalign.machines.nvidia_smi_print import print_matrix
from topoalign.machines.reader_rules import check_possible

__all__ = ["Matrix", "print_matrix", "read_matrix", "read_pasted_matrix", "topology_of"]

Nodes = tuple[int, ...]
NEAREST_FIRST = tuple(PcieClass)
WITHIN_A_NODE = frozenset(PcieClass) - {PcieClass.SYS}


def read_pasted_matrix(text: str) -> Topology:
    """Reads the machine from a pasted matrix. Raises InvalidMachine with line and column."""
    return topology_of(read_matrix(text))


def topology_of(matrix: Matrix) -> Topology:
    """Makes a machine from a matrix. Raises InvalidMachine if there can be no such machine."""
    cpu_lists = {gpu: parse_affinity((matrix.cpu_affinity or {}).get(gpu, "")) for gpu in matrix.gpus}
    affinities = (
        _number_nodes(cpu_lists)
        if matrix.numa_affinity is None
        else {gpu: tuple(sorted(parse_affinity(text))) for gpu, text in matrix.numa_affinity.items()}
    )
    memory_nodes = {gpu: min(parse_affinity(text), default=None) for gpu, text in (matrix.gpu_numa_id or {}).items()}
    cpus = _read_cpus(matrix.gpus, cpu_lists, affinities)
    nodes = {cpu.node for cpu in cpus}.union(*affinities.values())
    nodes.update(node for node in memory_nodes.values() if node is not None)
    gpus = tuple(
        Gpu(
            id=DeviceID(f"GPU-{label.removeprefix('GPU')}"),
            index=int(label.removeprefix("GPU")),
            cpu_affinity=tuple(sorted(cpu_lists[label])),
            numa_affinity=affinities[label],
            memory_node=memory_nodes.get(label),
        )
        for label in matrix.gpus
    )
    ids = {label: gpu.id for label, gpu in zip(matrix.gpus, gpus, strict=True)}
    ids |= {label: DeviceID(matrix.name(label)) for label in matrix.nics}
    links = [parse_link(ids[a], ids[b], cell) for a, b, cell in matrix.pairs()]
    topology = Topology(
        cpus=cpus,
        nodes=tuple(NumaNode(id=node) for node in sorted(nodes)),
        gpus=gpus,
        nics=_read_nics(matrix, ids, affinities),
        links=tuple(link for link in links if link is not None),
        sockets_known=False,
        nodes_known=any(map(parse_affinity, (matrix.numa_affinity or {}).values())),
    )
    return check_possible(topology, "the matrix", COPY_AGAIN)


def _number_nodes(cpu_lists: Mapping[str, frozenset[int]]) -> dict[str, Nodes]:
    # equal lists of CPUs are one node, in the order of their lowest CPU
    distinct = sorted({cpus for cpus in cpu_lists.values() if cpus}, key=sorted)
    return {gpu: (distinct.index(cpus),) if cpus else () for gpu, cpus in cpu_lists.items()}


def _read_cpus(
    gpus: Sequence[str], cpu_lists: Mapping[str, frozenset[int]], affinities: Mapping[str, Nodes]
) -> tuple[Cpu, ...]:
    if not any(affinities.values()):
        affinities = _number_nodes(cpu_lists)
    node_of: dict[int, int] = {}
    for gpu in gpus:
        for node in affinities[gpu][:1]:
            node_of |= {cpu: node_of.get(cpu, node) for cpu in cpu_lists[gpu]}
    socket_of = {node: position for position, node in enumerate(sorted(set(node_of.values())))}
    return tuple(
        Cpu(id=cpu, core=cpu, socket=socket_of[node], node=node, uncore=socket_of[node])
        for cpu, node in sorted(node_of.items())
    )


def _read_nics(matrix: Matrix, ids: Mapping[str, DeviceID], affinities: Mapping[str, Nodes]) -> tuple[Nic, ...]:
    near: dict[str, tuple[int, Nodes]] = {}
    for a, b, cell in matrix.pairs():
        if a in affinities and b not in affinities and cell in WITHIN_A_NODE:
            distance = NEAREST_FIRST.index(PcieClass(cell))
            if b not in near or distance < near[b][0]:
                near[b] = distance, affinities[a]
    return tuple(
        Nic(
            id=ids[nic],
            index=int(nic.removeprefix("NIC")) if matrix.nics_are_numbered else position,
            numa_affinity=near[nic][1] if nic in near else (),
        )
        for position, nic in enumerate(matrix.nics)
    )
