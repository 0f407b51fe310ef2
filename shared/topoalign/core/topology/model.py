"""
What a node consists of, as found by discovery or described by a person.

Everything is frozen, and everything is on the wire as it stands here: `TopologyDiscovered` carries a `Topology`. NUMA ids
are the kernel's: they may be sparse and beyond 63, and a NUMA node may have no CPUs (GPU memory, CXL). A device whose NUMA
node is unknown says so with an empty `numa_affinity`; that is not node 0.
"""

from collections.abc import Mapping
from functools import cached_property

import msgspec

from topoalign.core.ids import GPU, NIC, DeviceID, ResourceName
from topoalign.core.topology.cpus import CpuTopology, cpu_topology
from topoalign.core.topology.cpuset import format_cpuset
from topoalign.core.topology.links import Link


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """One logical CPU that is online."""

    id: int
    core: int
    """The lowest CPU id of its physical core; siblings share it."""
    socket: int
    node: int
    """NUMA node id."""
    uncore: int
    """Id of its last-level cache; the socket's id where the kernel tells no cache (as the kubelet does)."""


class NumaNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One NUMA node. It has memory, CPUs, both or neither."""

    id: int
    memory: int | None = None
    """Bytes in all, hugepages included. None: not known, as in a pasted matrix."""
    hugepages: dict[ResourceName, int] = {}
    """Bytes per size, under the name of the resource: {"hugepages-2Mi": 1073741824}."""


class PciBridge(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One PCIe bridge or switch port on the way from a host bridge to a device."""

    address: str
    """`0000:07:00.0`, or `pci0000:00` for a host bridge, as sysfs writes them."""
    parent: str | None = None
    """Address of the bridge above it. None: this is a host bridge."""


class Fabric(msgspec.Struct, frozen=True, kw_only=True):
    """The NVLink domain beyond the node that a GPU belongs to (NVL72): GPUs with equal fabric reach one another."""

    cluster: str
    """uuid of the NVLink cluster."""
    clique: int


class MigDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One MIG instance of a GPU."""

    uuid: DeviceID
    profile: str
    """As NVIDIA names it: `1g.10gb`."""
    gpu_instance: int
    compute_instance: int
    memory: int
    """Bytes."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One GPU."""

    id: DeviceID
    """Its uuid, `GPU-…`. A described machine without uuids uses `GPU-<index>`."""
    index: int
    """NVML's index: the order of `nvidia-smi`. May change when another GPU is lost."""
    name: str = ""
    minor: int | None = None
    """/dev/nvidia<minor>. Not always the index."""
    pci: str | None = None
    """PCI address in sysfs form, `0000:07:00.0`."""
    bridge: str | None = None
    """Address of the `PciBridge` right above it. None: unknown."""
    memory: int | None = None
    """Bytes."""
    cpu_affinity: tuple[int, ...] = ()
    """The nearest CPUs as the driver reports them, which may be cut short."""
    numa_affinity: tuple[int, ...] = ()
    """The nearest NUMA nodes as the driver reports them. Empty: unknown."""
    memory_node: int | None = None
    """NUMA node of the GPU's own memory, where the kernel shows it as one (Grace)."""
    nvswitch_links: int = 0
    """NVLinks that end at an NVSwitch."""
    fabric: Fabric | None = None
    mig: tuple[MigDevice, ...] | None = None
    """Its MIG instances; None where MIG is off."""


class NicPort(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One port of a NIC."""

    number: int
    link_layer: str = ""
    """`InfiniBand` or `Ethernet`."""
    state: str = ""
    """`ACTIVE`, `DOWN`, … as the kernel words it."""
    rate: int | None = None
    """Bits per second."""


class VirtualFunction(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An SR-IOV virtual function of a NIC."""

    pci: str
    name: str = ""
    """RDMA device name, where it has one."""


class Nic(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One RDMA-capable NIC."""

    id: DeviceID
    """Its RDMA device name, `mlx5_0`: stable for as long as the node is up, and what people call it."""
    index: int
    """Position in `nvidia-smi topo -m`: NIC<index>."""
    pci: str | None = None
    bridge: str | None = None
    """Address of the `PciBridge` right above it. None: unknown."""
    numa_affinity: tuple[int, ...] = ()
    """Empty: unknown."""
    netdevs: tuple[str, ...] = ()
    verbs: str | None = None
    """Name under /dev/infiniband, `uverbs0`. None: a described machine, nothing to hand to a container."""
    ports: tuple[NicPort, ...] = ()
    virtual_functions: tuple[VirtualFunction, ...] = ()


class PluginDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device that somebody else's device plugin lists; it takes part in the kubelet's hints and so in predictions."""

    id: DeviceID
    resource: ResourceName
    nodes: tuple[int, ...] | None
    """As listed to the kubelet: None without topology, () with a topology that names no node."""


class Topology(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """A whole node. Lists are ordered: CPUs and NUMA nodes by id, GPUs and NICs by index, links by their devices."""

    cpus: tuple[Cpu, ...] = ()
    nodes: tuple[NumaNode, ...] = ()
    distances: tuple[tuple[int, ...], ...] | None = None
    """ACPI SLIT, row and column i belonging to `nodes[i]`; 10 is local. None: not known."""
    bridges: tuple[PciBridge, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    links: tuple[Link, ...] = ()
    others: tuple[PluginDevice, ...] = ()

    @cached_property
    def devices(self) -> Mapping[ResourceName, Mapping[DeviceID, tuple[int, ...] | None]]:
        """Resource -> device -> the NUMA nodes it is listed with to the kubelet, None without topology."""
        devices: dict[ResourceName, dict[DeviceID, tuple[int, ...] | None]] = {}
        for gpu in self.gpus:
            devices.setdefault(GPU, {})[gpu.id] = self.listed_nodes(gpu.numa_affinity)
        for nic in self.nics:
            devices.setdefault(NIC, {})[nic.id] = self.listed_nodes(nic.numa_affinity)
        for other in self.others:
            devices.setdefault(other.resource, {})[other.id] = other.nodes
        return devices

    def listed_nodes(self, affinity: tuple[int, ...]) -> tuple[int, ...] | None:
        """
        The one node a device is listed with: the first of its affinity that has CPUs, else the first.

        GB200 reports fifteen nodes for a GPU. Listed with all of them, two GPUs would give the kubelet 2^30 subsets to
        look at; the CPUs and the memory a pod can get there are all on one (spec/kubelet.md section 3).
        """
        if not affinity:
            return None
        return (next((node for node in affinity if self.cpus_by_node.get(node)), affinity[0]),)

    @cached_property
    def cpus_by_node(self) -> Mapping[int, frozenset[int]]:
        """NUMA node id -> its CPUs. A node without CPUs is absent."""
        by_node: dict[int, set[int]] = {}
        for cpu in self.cpus:
            by_node.setdefault(cpu.node, set()).add(cpu.id)
        return {node: frozenset(cpus) for node, cpus in sorted(by_node.items())}

    @cached_property
    def cpu_topology(self) -> CpuTopology:
        return cpu_topology(self.cpus)

    @cached_property
    def node_ids(self) -> tuple[int, ...]:
        return tuple(node.id for node in self.nodes)

    @cached_property
    def gpu_by_id(self) -> Mapping[DeviceID, Gpu]:
        return {gpu.id: gpu for gpu in self.gpus}

    @cached_property
    def nic_by_id(self) -> Mapping[DeviceID, Nic]:
        return {nic.id: nic for nic in self.nics}

    @cached_property
    def link_by_pair(self) -> Mapping[tuple[DeviceID, DeviceID], Link]:
        """Both orders of each pair."""
        both = {(link.a, link.b): link for link in self.links}
        both.update({(link.b, link.a): link for link in self.links})
        return both

    def describe(self) -> str:
        """One line for people: `2 sockets, 8 NUMA nodes, CPUs 0-255, 8 GPUs, 10 NICs`."""
        counts = [
            (len({cpu.socket for cpu in self.cpus}), "socket"),
            (len(self.nodes), "NUMA node"),
            (len(self.gpus), "GPU"),
            (len(self.nics), "NIC"),
        ]
        sockets, nodes, gpus, nics = (f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counts)
        cpus = format_cpuset(cpu.id for cpu in self.cpus)
        return f"{sockets}, {nodes}, CPUs {cpus or 'unknown'}, {gpus}, {nics}"
