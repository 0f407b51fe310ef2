"""The content of a drawing of a machine, in the order of drawing, without positions."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from topoalign.cli.formatting import binary
from topoalign.core.model.errors import clean
from topoalign.core.model.events import Allocation, DeviceHealth
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.cpuset import format_cpuset
from topoalign.core.model.topology.degraded import degraded_gpus
from topoalign.core.model.topology.model import Gpu, Nic, Topology
from topoalign.core.state.gpu_partitioning import GpuPartitioning
from topoalign.tools.draw.device import DrawnDevice, device_of, list_holders, seams_of
from topoalign.tools.draw.nvlinks import DrawnNvLinks, nvlinks_of
from topoalign.tools.draw.pci_bridges import MEANINGS, PATHS, Child, devices_in, paths_in, pcie_tree

UNKNOWN = (-1,)
"""Stands for the sockets of a NUMA node that are not known."""


@dataclass(frozen=True)
class DrawnNumaNode:
    """A NUMA node with the devices near it."""

    title: str
    facts: tuple[str, ...]
    """CPUs, memory."""
    children: tuple[Child, ...]


@dataclass(frozen=True)
class Group:
    """A socket with its NUMA nodes, or the NUMA nodes without a socket."""

    title: str
    places: tuple[DrawnNumaNode, ...]


@dataclass(frozen=True)
class Diagram:
    """A machine."""

    title: str
    facts: tuple[str, ...]
    """Lines with the totals of the machine."""
    groups: tuple[Group, ...]
    nvlinks: DrawnNvLinks
    holders: tuple[str, ...]
    """The holders of devices: `namespace/pod/container`."""
    seams: dict[str, str]
    """Holder -> its set of GPUs and their weakest seam, of each that holds several whole GPUs."""
    notes: tuple[str, ...]

    @property
    def legend(self) -> list[str]:
        """The legend entry of each holder: `ml/tune/main`, `ml/train/main: 4 GPUs, 18 NVLinks, 371 GB/s`."""
        return [f"{holder}: {self.seams[holder]}" if holder in self.seams else holder for holder in self.holders]

    @property
    def devices(self) -> list[DrawnDevice]:
        """All GPUs and NICs in the order of drawing."""
        return [device for group in self.groups for place in group.places for device in devices_in(place.children)]

    @property
    def names(self) -> dict[DeviceID, str]:
        """Device id -> `GPU0` or `NIC3`."""
        return {device.id: device.name for device in self.devices}


def diagram_of(
    name: str,
    topology: Topology,
    allocations: Iterable[Allocation] = (),
    health: Mapping[DeviceID, DeviceHealth] | None = None,
    divided: Mapping[DeviceID, GpuPartitioning] = {},
) -> Diagram:
    """A machine now. `health`: a device that is not in it is drawn as healthy. `divided`: the GPUs that are partitioned."""
    allocations = tuple(allocations)
    names, holders = list_holders(topology, allocations)
    homes: dict[int | None, list[DrawnDevice]] = {}
    devices: tuple[Gpu | Nic, ...] = (*topology.gpus, *topology.nics)
    for one in devices:
        device = device_of(one, topology, holders, names[one.id], (health or {}).get(one.id), divided.get(one.id))
        homes.setdefault(device.home, []).append(device)
    groups, bare = grouped(topology, homes)
    return Diagram(
        title=clean(name, 120),
        facts=(topology.describe(), *models(topology)),
        groups=groups,
        nvlinks=nvlinks_of(topology),
        holders=tuple(holders),
        seams=seams_of(topology, allocations),
        notes=(*list_path_meanings(groups), *notes(topology, bare)),
    )


def grouped(topology: Topology, homes: Mapping[int | None, list[DrawnDevice]]) -> tuple[tuple[Group, ...], list[int]]:
    """NUMA nodes by the sockets that their CPUs are on; and the nodes that have nothing to draw."""
    parents = {bridge.address: bridge.parent for bridge in topology.bridges}
    sizes = {node.id: node.memory for node in topology.nodes}
    of_gpus = {gpu.memory_node for gpu in topology.gpus}
    sockets: dict[tuple[int, ...], list[DrawnNumaNode]] = {}
    bare = []
    for node in sorted({*sizes, *topology.cpus_by_node, *(home for home in homes if home is not None)}):
        cpus = topology.cpus_by_node.get(node)
        devices = homes.get(node, [])
        on = tuple(sorted(topology.cpu_topology.sockets_of_node.get(node, ())))
        if not cpus and not devices and (node in of_gpus or not sizes.get(node)):
            bare += [] if node in of_gpus else [node]
            continue
        memory = sizes.get(node)
        facts = [f"CPUs {format_cpuset(cpus)}" if cpus else "no CPUs known"]
        facts += [binary(memory)] if memory is not None else []
        title = f"NUMA {node}" if topology.nodes_known else "near these CPUs"
        place = DrawnNumaNode(title, tuple(facts), pcie_tree(devices, parents, topology.link_by_pair))
        sockets.setdefault(on if topology.sockets_known else UNKNOWN, []).append(place)
    if None in homes:
        lost = DrawnNumaNode("NUMA unknown", (), pcie_tree(homes[None], parents, topology.link_by_pair))
        sockets.setdefault(UNKNOWN, []).append(lost)
    order = sorted(sockets, key=lambda on: (on == UNKNOWN, not on, on))
    groups = [Group(socket_title(on), tuple(sockets[on])) for on in order]
    return tuple(groups), bare


def socket_title(sockets: tuple[int, ...]) -> str:
    """The title of a group: its sockets, that it belongs to none, or that sockets are unknown."""
    if sockets == UNKNOWN:
        return "Sockets unknown"
    if not sockets:
        return "On no socket"
    return f"Socket{'s' if len(sockets) > 1 else ''} {format_cpuset(sockets)}"


def models(topology: Topology) -> list[str]:
    """`8 x NVIDIA A100-SXM4-40GB`, in one line."""
    counts = Counter(name for gpu in topology.gpus if (name := clean(gpu.name)))
    known = [f"{count} x {name}" for name, count in counts.items()]
    return [clean(", ".join(known), 200)] if known else []


def list_path_meanings(groups: Iterable[Group]) -> list[str]:
    """Explains the groups that stand for unknown bridges, the nearest first."""
    found = set().union(*(paths_in(place.children) for group in groups for place in group.places))
    return [MEANINGS[path] for path in reversed(PATHS) if path in found]


def notes(topology: Topology, bare: list[int]) -> tuple[str, ...]:
    """A sentence about what is not drawn."""
    sentences = []
    if bare:
        sentences.append(f"NUMA {format_cpuset(bare)}: neither CPUs nor memory now")
    fabrics = {(gpu.fabric.cluster, gpu.fabric.clique) for gpu in topology.gpus if gpu.fabric is not None}
    sentences += [
        f"NVLink reaches beyond this node: cluster {clean(name)}, clique {clique}" for name, clique in sorted(fabrics)
    ]
    names = {gpu.id: f"GPU{gpu.index}" for gpu in topology.gpus}
    sentences += [f"{names[gpu]} is degraded: {finding}" for gpu, finding in degraded_gpus(topology).items()]
    others = Counter(clean(other.resource) for other in topology.others)
    if others:
        listed = ", ".join(f"{count} of {resource}" for resource, count in sorted(others.items()))
        sentences.append(clean(f"Listed by other device plugins: {listed}", 200))
    return tuple(sentences)
