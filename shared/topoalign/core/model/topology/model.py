"""
Describes the hardware of a node, as found by discovery or written by a person.

All types are frozen and are published on the bus as defined here: `TopologyDiscovered` contains a `Topology`. NUMA ids
are those of the kernel: they can be sparse and larger than 63, and some nodes have no CPUs (GPU memory, CXL). An empty
`numa_affinity` means unknown, not node 0. These objects cannot form reference cycles, so the garbage collector skips
them (`gc=False`). A large cluster has a million of them.
"""

from collections.abc import Mapping
from functools import cached_property

import msgspec

from topoalign.core.model.holdings import base_of
from topoalign.core.model.ids import GPU, NIC, DeviceID, ResourceName
from topoalign.core.model.topology.cpu_topology import CpuTopology, invert_groups
from topoalign.core.model.topology.cpuset import format_cpuset
from topoalign.core.model.topology.derived_tables import Viewed
from topoalign.core.model.topology.device_links import Link
from topoalign.core.model.topology.device_offers import Kind, Offer
from topoalign.core.model.topology.device_sets import OfferedDevices
from topoalign.core.model.topology.mig import MigDevice, MigProfile


class Cpu(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One logical CPU that is online."""

    id: int
    """The kernel's number of the CPU."""
    core: int
    """The lowest CPU id of its physical core; siblings share it."""
    socket: int
    """The kernel's id of its physical package."""
    node: int
    """NUMA node id."""
    uncore: int
    """Id of its last-level cache, or the socket's id if the kernel reports no cache (as in the kubelet)."""


class NumaNode(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """One NUMA node. It has memory, CPUs, both or neither."""

    id: int
    """The kernel's number of the node."""
    memory: int | None = None
    """Bytes in total, including hugepages. None: unknown, as in a pasted matrix."""
    hugepages: dict[ResourceName, int] = {}
    """Resource of each page size -> bytes: {"hugepages-2Mi": 1073741824}."""


class PciBridge(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """One PCIe bridge or switch port on the path from a host bridge to a device."""

    address: str
    """`0000:07:00.0`, or `pci0000:00` for a host bridge, as sysfs writes them."""
    parent: str | None = None
    """Address of the bridge above it. None: this is a host bridge."""


class Fabric(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The NVLink domain of a GPU beyond its node (NVL72). GPUs with equal `Fabric` can reach one another."""

    cluster: str
    """uuid of the NVLink cluster."""
    clique: int
    """Number of the clique within the cluster."""


class Gpu(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """One GPU."""

    id: DeviceID
    """Its uuid: `GPU-…` for NVIDIA GPUs. A described machine without uuids uses `GPU-<index>`."""
    index: int
    """The driver's index: for NVIDIA GPUs, that of `nvidia-smi`. It can change when another GPU is lost."""
    name: str = ""
    """The vendor's product name: `NVIDIA H100 80GB HBM3`. Empty: unknown."""
    minor: int | None = None
    """The number of /dev/nvidia<minor>. It can differ from the index."""
    device_nodes: tuple[str, ...] = ()
    """The device nodes that containers need for it: `/dev/kfd`. Empty: it is passed to containers like NVIDIA GPUs."""
    pci: str | None = None
    """PCI address in sysfs form, `0000:07:00.0`."""
    bridge: str | None = None
    """Address of the `PciBridge` directly above it. None: unknown."""
    memory: int | None = None
    """Bytes."""
    cpu_affinity: tuple[int, ...] = ()
    """The nearest CPUs as reported by the driver. The list can be incomplete."""
    numa_affinity: tuple[int, ...] = ()
    """The nearest NUMA nodes as reported by the driver. Empty: unknown."""
    memory_node: int | None = None
    """NUMA node of the GPU's own memory, which the kernel reports only with Grace. None: it reports none."""
    switch_links: int = 0
    """Fabric links (NVLink, xGMI) that end at a switch, such as an NVSwitch."""
    links_down: int = 0
    """Fabric links of the GPU that are not up: they have failed, or lead nowhere, as on a board without a bridge."""
    fabric_state: str = ""
    """`not-started`, `in-progress`, `failed` or `degraded`. Empty: its NVLink fabric is in order, or it has none."""
    fabric: Fabric | None = None
    """None: it has no NVLink beyond the node, or has not joined a domain."""
    mig: tuple[MigDevice, ...] | None = None
    """Its MIG instances. None: MIG is off."""
    mig_profiles: tuple[MigProfile, ...] = ()
    """The MIG profiles that it offers. Empty: MIG is off, or the driver does not report it, for example without root."""


class NicPort(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """One port of a NIC."""

    number: int
    """From 1."""
    link_layer: str = ""
    """`InfiniBand` or `Ethernet`."""
    state: str = ""
    """`ACTIVE`, `DOWN`, … as reported by the kernel."""
    rate: int | None = None
    """Bits per second."""


class VirtualFunction(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """An SR-IOV virtual function of a NIC."""

    pci: str
    """PCI address in sysfs form; it is also the id under which the function is handed out."""
    name: str = ""
    """RDMA device name. Empty: it has none."""
    verbs: str | None = None
    """Name under /dev/infiniband, `uverbs7`. None: it has none, or this is a described machine."""


class Nic(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """One RDMA-capable NIC."""

    id: DeviceID
    """Its RDMA device name, `mlx5_0`. It is the usual name of the NIC, and stable until the node reboots."""
    index: int
    """Position in `nvidia-smi topo -m`: NIC<index>."""
    pci: str | None = None
    """PCI address in sysfs form. None: unknown."""
    bridge: str | None = None
    """Address of the `PciBridge` directly above it. None: unknown."""
    numa_affinity: tuple[int, ...] = ()
    """The nearest NUMA nodes. Empty: unknown."""
    netdevs: tuple[str, ...] = ()
    """Names of its network interfaces, `ens1f0np0`."""
    verbs: str | None = None
    """Name under /dev/infiniband, `uverbs0`. None: a described machine, so containers get no device node."""
    ports: tuple[NicPort, ...] = ()
    """Its ports, by number."""
    virtual_functions: tuple[VirtualFunction, ...] = ()
    """Its SR-IOV virtual functions, by PCI address."""


class PluginDevice(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A device that another device plugin lists. The kubelet's hints, and therefore the predictions, depend on it."""

    id: DeviceID
    """The id that the plugin lists."""
    resource: ResourceName
    """The resource under which it is listed."""
    nodes: tuple[int, ...] | None
    """The NUMA nodes with which it is listed. None: without topology; (): with an empty topology."""


class Topology(Viewed, frozen=True, kw_only=True, omit_defaults=True):
    """The hardware of a node. CPUs and NUMA nodes are ordered by id, GPUs and NICs by index, links by device."""

    cpus: tuple[Cpu, ...] = ()
    """Every logical CPU that is online."""
    nodes: tuple[NumaNode, ...] = ()
    """Every NUMA node."""
    distances: tuple[tuple[int, ...], ...] | None = None
    """The ACPI SLIT. Row and column i belong to `nodes[i]`; 10 is local. None: unknown."""
    bridges: tuple[PciBridge, ...] = ()
    """Every PCIe bridge between a host bridge and a GPU or NIC."""
    gpus: tuple[Gpu, ...] = ()
    """Every GPU."""
    nics: tuple[Nic, ...] = ()
    """Every RDMA-capable NIC."""
    links: tuple[Link, ...] = ()
    """The links between pairs of devices. A pair without a known link is missing."""
    others: tuple[PluginDevice, ...] = ()
    """Devices of other device plugins."""
    offers: tuple[Offer, ...] | None = None
    """The devices that are offered to the kubelet. None: whole GPUs and NICs under their default resource names."""
    sockets_known: bool = True
    """False: the sockets are unknown, as in a pasted matrix. If so, the CPUs of one NUMA node count as one socket."""
    nodes_known: bool = True
    """False: the NUMA nodes are unknown. If so, the CPUs of each distinct CPU list of the GPUs count as one node."""

    @cached_property
    def devices(self) -> Mapping[ResourceName, OfferedDevices]:
        """Resource -> the devices that are handed out under it."""
        devices: dict[ResourceName, OfferedDevices] = {}
        for offer in self.offered:
            listed = devices.setdefault(offer.resource, OfferedDevices())
            for base in offer.devices:
                gpu = self.gpu_by_id.get(self.parent_of(base)) or self.nic_by_id.get(self.parent_of(base))
                nodes = self.listed_nodes(gpu.numa_affinity) if gpu is not None else None
                listed.update(dict.fromkeys(offer.handed_out(base), nodes if offer.has_numa_topology else None))
                if nodes is not None and not offer.has_numa_topology:
                    listed.unlisted_nodes[base] = nodes
        for other in self.others:
            devices.setdefault(other.resource, OfferedDevices())[other.id] = other.nodes
        return devices

    @cached_property
    def offered(self) -> tuple[Offer, ...]:
        """`offers`, or the default offers if it is None. Offers without devices are omitted."""
        if self.offers is not None:
            return tuple(offer for offer in self.offers if offer.devices)
        usual = {GPU: tuple(self.gpu_by_id), NIC: tuple(self.nic_by_id)}
        return tuple(Offer(resource=resource, devices=devices) for resource, devices in usual.items() if devices)

    @cached_property
    def offers_of(self) -> Mapping[ResourceName, tuple[Offer, ...]]:
        """Resource -> its offers, for the resources that topoalign offers."""
        found: dict[ResourceName, tuple[Offer, ...]] = {}
        for offer in self.offered:
            found[offer.resource] = (*found.get(offer.resource, ()), offer)
        return found

    @cached_property
    def offers_by_base(self) -> Mapping[DeviceID, tuple[Offer, ...]]:
        """Device without the number of a share -> its offers. A GPU in units has two, other devices have one."""
        found: dict[DeviceID, tuple[Offer, ...]] = {}
        for offer in self.offered:
            for base in offer.devices:
                found[base] = (*found.get(base, ()), offer)
        return found

    def kind_of(self, resource: ResourceName) -> Kind:
        """The kind of devices of a resource. It determines how they are chosen."""
        offers = self.offers_of.get(resource, ())
        bases = {base for offer in offers for base in offer.devices}
        if offers and not any(offer.shared for offer in offers):
            return "gpu" if bases <= self.gpu_by_id.keys() else "nic" if bases <= self.nic_by_id.keys() else "part"
        by_amounts: tuple[Kind, ...] = tuple("slot" if each.slots else "unit" for each in offers if each.by_amounts)
        return by_amounts[0] if by_amounts else "part" if offers else "other"

    def parent_of(self, device: DeviceID) -> DeviceID:
        """The GPU or NIC of which a device is a part; the device without share number if it is not a known part."""
        base = base_of(device)
        return self.parents.get(base, base)

    @cached_property
    def parents(self) -> Mapping[DeviceID, DeviceID]:
        """MIG instance or virtual function -> the GPU or NIC that it is a part of."""
        parts = {instance.uuid: gpu.id for gpu in self.gpus for instance in gpu.mig or ()}
        return parts | {DeviceID(each.pci): nic.id for nic in self.nics for each in nic.virtual_functions}

    def listed_nodes(self, affinity: tuple[int, ...]) -> tuple[int, ...] | None:
        """
        The single NUMA node with which a device is listed: the first of its affinity that has CPUs, or the first if
        none has CPUs. None: the affinity is unknown.
        """
        # with all fifteen nodes that a GB200 reports, the kubelet would have to try 2^30 subsets for two GPUs
        if not affinity:
            return None
        return (next((node for node in affinity if self.cpus_by_node.get(node)), affinity[0]),)

    @cached_property
    def cpus_by_node(self) -> Mapping[int, frozenset[int]]:
        """NUMA node id -> its CPUs. Nodes without CPUs are omitted."""
        return invert_groups({cpu.id: cpu.node for cpu in self.cpus}) if self.shape is self else self.shape.cpus_by_node

    @cached_property
    def cpu_topology(self) -> CpuTopology:
        """The CPUs grouped by core, last-level cache, socket and NUMA node."""
        return CpuTopology(self.cpus) if self.shape is self else self.shape.cpu_topology

    @cached_property
    def node_ids(self) -> tuple[int, ...]:
        """Ids of all NUMA nodes, in the order of `nodes`."""
        return tuple(node.id for node in self.nodes)

    @cached_property
    def gpu_by_id(self) -> Mapping[DeviceID, Gpu]:
        """GPU id -> the GPU, in the order of `gpus`."""
        return {gpu.id: gpu for gpu in self.gpus}

    @cached_property
    def nic_by_id(self) -> Mapping[DeviceID, Nic]:
        """NIC id -> the NIC, in the order of `nics`."""
        return {nic.id: nic for nic in self.nics} if self.shape is self else self.shape.nic_by_id

    @cached_property
    def link_by_pair(self) -> Mapping[tuple[DeviceID, DeviceID], Link]:
        """Pair of device ids -> their link. Both orders of each pair are keys."""
        return {pair: link for link in self.links for pair in ((link.a, link.b), (link.b, link.a))}

    def describe(self) -> str:
        """Summarises the node: `2 sockets, 8 NUMA nodes, CPUs 0-255, 8 GPUs, 10 NICs`. Omits unknown numbers."""
        sockets = self.cpu_topology.sockets
        counts = {"socket": sockets, "NUMA node": len(self.nodes), "GPU": len(self.gpus), "NIC": len(self.nics)}
        known = {"socket": self.sockets_known, "NUMA node": self.nodes_known}
        texts = [f"{n} {noun}{'' if n == 1 else 's'}" for noun, n in counts.items() if known.get(noun, True)]
        return ", ".join([*texts[:-2], f"CPUs {format_cpuset(cpu.id for cpu in self.cpus) or 'unknown'}", *texts[-2:]])
