"""
Builds the answer to Allocate: how a container gets its devices.

The device list strategies are those of NVIDIA's device plugin, and several may be configured at once. Each names exactly the
allocated devices, each once and by its base: for a share, the GPU that is shared. NICs and their virtual functions are
always passed as device nodes, and so are GPUs whose driver names their device nodes (`Gpu.device_nodes`).

The same devices get the same answer, byte for byte, as long as configuration and hardware are the same, because the kubelet
may repeat a call. Only the name of HAMi-core's file differs, because it must not be predictable.

Sources: k8s-device-plugin v0.20.0, internal/plugin/server.go; sriov-network-device-plugin v3.7, which names the variable of
PCI addresses; kubelet v1.36.3, devicemanager, for what is merged over the resources of a container.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from topoalign.allocator.allocate.co_allocation import reported_co_allocated
from topoalign.allocator.containers import cdi, host_files
from topoalign.allocator.containers.host_files import ContainerUnready, HostRoot
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.errors import quoted
from topoalign.core.model.holdings import base_of
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.device_sets import DeviceSet
from topoalign.core.model.topology.mig import MigDevice
from topoalign.core.model.topology.model import Gpu, Nic, Topology, VirtualFunction
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.plugin_config.configuration import Configuration

if TYPE_CHECKING:  # most nodes share nothing by MPS, and have no limiter
    from topoalign.allocator.containers.hami_core.slot_edits import HamiCoreEdits
    from topoalign.allocator.containers.mps import MpsEdits
    from topoalign.allocator.containers.vcuda.unit_edits import VcudaEdits

GPUS_VARIABLE = "NVIDIA_VISIBLE_DEVICES"
CHANNELS_VARIABLE = "NVIDIA_IMEX_CHANNELS"
NICS_VARIABLE = "TOPOALIGN_NICS"
LIST_DIRECTORY = "/var/run/nvidia-container-devices"
"""Where NVIDIA's runtime looks for a list of devices that a container cannot write itself."""
EMPTY_FILE = "/dev/null"

RDMA_CM = "/dev/infiniband/rdma_cm"
CDI = frozenset({"cdi-annotations", "cdi-cri"})


class VisibleDevice(NamedTuple):
    """A GPU or one of its MIG instances that a container gets, with the name that the container sees."""

    base: DeviceID
    name: str
    """Its uuid or its index, as configured."""
    gpu: Gpu
    instance: MigDevice | None


class NicFunction(NamedTuple):
    """A NIC or a virtual function that a container gets: its RDMA name, PCI address and verbs device."""

    name: str
    """Of its RDMA device; empty where it has none."""
    pci: str | None
    verbs: str | None


class ResponseWriter(NamedTuple):
    """Builds the answers to Allocate by one configuration and the state of the host at one moment."""

    configuration: Configuration = Configuration()
    dev: HostRoot = HostRoot("/", Path("/"))
    shared: tuple[str, ...] = ()
    """The device nodes that all GPUs share."""
    channels: tuple[int, ...] = ()
    """IMEX channels."""
    extras: tuple[str, ...] = ()
    """CDI classes of which every container gets the one device."""
    minors: Mapping[host_files.Instance, int] = MappingProxyType({})
    """Of the capabilities of MIG instances."""
    mps: "MpsEdits | None" = None
    """None: nothing of the resource is shared by MPS."""
    vcuda: "VcudaEdits | None" = None
    """None: no units of the resource are limited."""
    hami_core: "HamiCoreEdits | None" = None
    """None: no slots of the resource are limited."""

    def responses(
        self, topology: Topology, resource: ResourceName, containers: Iterable[Iterable[DeviceID]]
    ) -> list[v1beta1.ContainerAllocateResponse]:
        """Returns `response` for each container, before anything is recorded. Ignores ids that are not offered."""
        by_base = topology.offers_by_base
        return [
            self.response(topology, resource, [base for base in bases_of(devices) if base in by_base])
            for devices in containers
        ]

    def response(
        self, topology: Topology, resource: ResourceName, devices: Iterable[DeviceID]
    ) -> v1beta1.ContainerAllocateResponse:
        """
        Builds the answer for a container with these devices, in this order. All shares of a device name it once.

        Raises ContainerUnready for a device that the node no longer has, or that the configured strategy cannot pass.
        """
        visible: list[VisibleDevice] = []
        functions: list[NicFunction] = []
        for base in bases_of(devices):
            check_device_name(base)
            if (found := host_files.gpu_and_instance(topology, base)) is not None:
                visible.append(VisibleDevice(base, self.name_of(base, *found), *found))
            elif (function := function_of(topology, base)) is not None:
                functions.append(function)
            else:
                raise ContainerUnready(f"{base} is not on this node any more", "let the pod be created again")
        response = v1beta1.ContainerAllocateResponse()
        if nvidia := [each for each in visible if not each.gpu.device_nodes]:
            self.add_visible_devices(response, nvidia)
        paths = dict.fromkeys(path for each in visible for path in each.gpu.device_nodes)
        response.devices += [device_node(path, path) for path in paths]
        if self.mps is not None:
            self.mps.add(response, topology, [each.base for each in visible])
        if functions:
            add_functions(response, resource, functions)
        response.envs = dict(sorted(response.envs.items()))
        return response

    def add_co_allocated(
        self,
        response: v1beta1.ContainerAllocateResponse,
        topology: Topology,
        allocation: Allocation,
        named: Mapping[ResourceName, Sequence[DeviceID]],
    ) -> None:
        """
        Adds the co-allocated devices to the answer for an allocation, as an Allocate of their own resource would. `named`:
        resource -> all devices of the container, also those of other answers, which the variables must name.
        """
        for name, ids in named.items():
            co_allocated = {
                each for resource, own in reported_co_allocated(allocation) if resource == name for each in own
            }
            nodes = [function_of(topology, each) for each in ids if each in co_allocated]
            add_functions(response, name, [f for f in nodes if f is not None])
            add_names(response, name, [f for each in ids if (f := function_of(topology, base_of(each))) is not None])
        bases = sorted(
            {base_of(each) for ids in named.values() for each in ids}, key=partial(hardware_position, topology)
        )
        if names := [f.name for base in bases if (f := function_of(topology, base)) is not None and f.name]:
            response.envs[NICS_VARIABLE] = ",".join(names)
        strategies = frozenset(self.configuration.flags.plugin.device_list_strategy)
        found = [(base, host_files.gpu_and_instance(topology, base)) for base in bases]
        gpus = [(base, each) for base, each in found if each is not None and not each[0].device_nodes]
        if gpus and "envvar" in strategies and "volume-mounts" not in strategies:  # mounts and CDI names add up
            response.envs[GPUS_VARIABLE] = ",".join(self.name_of(base, *each) for base, each in gpus)
        response.envs = dict(sorted(response.envs.items()))

    def name_of(self, base: DeviceID, gpu: Gpu, instance: MigDevice | None) -> str:
        """Returns the uuid or the index of a device, by `deviceIDStrategy`. Raises ContainerUnready for an unknown index."""
        if self.configuration.flags.plugin.device_id_strategy == "uuid":
            return base
        index = cdi.index_of(gpu, instance)
        if index is None:
            raise ContainerUnready(f"the index of MIG instance {base} is not known", "use deviceIDStrategy uuid")
        return index

    def add_visible_devices(
        self, response: v1beta1.ContainerAllocateResponse, visible: Sequence[VisibleDevice]
    ) -> None:
        """
        Adds GPUs and MIG instances to an answer, by every strategy in `deviceListStrategy`.

        If both `envvar` and `volume-mounts` are in it, the variable points to the mounts.
        """
        flags = self.configuration.flags
        strategies = frozenset(self.configuration.flags.plugin.device_list_strategy)
        names = [each.name for each in visible]
        if strategies & CDI:
            self.add_by_cdi(response, visible, strategies)
        if strategies <= CDI:
            return
        if "envvar" in strategies:
            response.envs[GPUS_VARIABLE] = ",".join(names)
            if self.channels:
                response.envs[CHANNELS_VARIABLE] = ",".join(map(str, self.channels))
        if "volume-mounts" in strategies:
            response.envs[GPUS_VARIABLE] = LIST_DIRECTORY
            listed = (*names, *(f"imex/{channel}" for channel in self.channels))
            response.mounts = [
                v1beta1.Mount(container_path=f"{LIST_DIRECTORY}/{name}", host_path=EMPTY_FILE) for name in listed
            ]
        if flags.plugin.pass_device_specs:
            paths = [
                path for each in visible for path in host_files.device_node_paths(each.gpu, each.instance, self.minors)
            ]
            paths += [*self.shared, *map(host_files.of_channel, self.channels)]
            response.devices += [device_node(path, self.dev.on_host(path)) for path in dict.fromkeys(paths)]
        for name in cdi.extras(self.configuration):
            response.envs[f"NVIDIA_{name.upper()}"] = "enabled"

    def add_by_cdi(
        self, response: v1beta1.ContainerAllocateResponse, visible: Sequence[VisibleDevice], strategies: Collection[str]
    ) -> None:
        """
        Adds the CDI names of these devices, the IMEX channels and the extras to an answer, as annotations or in the CDI
        field.

        Raises ContainerUnready for a device that the specification lacks, because its device nodes are not known.
        """
        for each in visible:
            host_files.device_node_paths(each.gpu, each.instance, self.minors)  # raises if the specification lacks it
        devices = [
            *(cdi.qualified_cdi_name(cdi.GPUS, each.name) for each in visible),
            *(cdi.qualified_cdi_name(cdi.CHANNELS, str(channel)) for channel in self.channels),
            *(cdi.qualified_cdi_name(kind, cdi.ALL) for kind in self.extras),
        ]
        if "cdi-annotations" in strategies:
            response.annotations = cdi.cdi_annotation(self.configuration.flags.plugin.cdi_annotation_prefix, devices)
        if "cdi-cri" in strategies:
            response.cdi_devices = [v1beta1.CdiDevice(name=name) for name in devices]


def bases_of(devices: Iterable[DeviceID]) -> Iterable[DeviceID]:
    """Returns the ids of these devices without the numbers of shares, each once."""
    return devices.bases if isinstance(devices, DeviceSet) else dict.fromkeys(map(base_of, devices))


def add_functions(
    response: v1beta1.ContainerAllocateResponse, resource: ResourceName, functions: Sequence[NicFunction]
) -> None:
    """
    Adds NICs and virtual functions to an answer: their names and PCI addresses as variables, their verbs devices and the
    connection manager as device nodes. NICs of a described machine have no device nodes.
    """
    add_names(response, resource, functions)
    paths = [f"/dev/infiniband/{function.verbs}" for function in functions if function.verbs is not None]
    response.devices += [device_node(path, path) for path in (*paths, *([RDMA_CM] if paths else []))]


def add_names(
    response: v1beta1.ContainerAllocateResponse, resource: ResourceName, functions: Sequence[NicFunction]
) -> None:
    """Sets the variables of an answer that name NICs and virtual functions."""
    if names := [function.name for function in functions if function.name]:
        response.envs[NICS_VARIABLE] = ",".join(names)
    if addresses := [function.pci for function in functions if function.pci is not None]:
        response.envs[address_variable(resource)] = ",".join(addresses)


def hardware_position(topology: Topology, base: DeviceID) -> tuple[int, int]:
    """Returns a sort key in the hardware's order: each GPU before its MIG instances, each NIC before its functions."""
    gpus = [(gpu.id, *(instance.uuid for instance in gpu.mig or ())) for gpu in topology.gpus]
    nics = [(nic.id, *(DeviceID(function.pci) for function in nic.virtual_functions)) for nic in topology.nics]
    groups: list[tuple[DeviceID, ...]] = [*gpus, *nics]
    return next(((place, group.index(base)) for place, group in enumerate(groups) if base in group), (len(groups), 0))


def function_of(topology: Topology, base: DeviceID) -> NicFunction | None:
    """Returns the NIC or virtual function that a device id without its share (`base`) names; None for any other device."""
    nic: Nic | None = topology.nic_by_id.get(topology.card_of(base))
    if nic is None:
        return None
    if nic.id == base:
        return NicFunction(nic.id, nic.pci, nic.verbs)
    virtual: VirtualFunction = next(each for each in nic.virtual_functions if each.pci == base)
    return NicFunction(virtual.name, virtual.pci, virtual.verbs)


def address_variable(resource: ResourceName) -> str:
    """The variable of a resource's PCI addresses: `PCIDEVICE_TOPOALIGN_IO_NIC` for topoalign.io/nic."""
    return f"PCIDEVICE_{re.sub('[^A-Z0-9]', '_', resource.upper())}"


def device_node(container_path: str, host_path: str) -> v1beta1.DeviceSpec:
    """A device node of the host that the container may read and write at this path."""
    return v1beta1.DeviceSpec(container_path=container_path, host_path=host_path, permissions="rw")


def check_device_name(base: DeviceID) -> None:
    """Raises ContainerUnready for an id that could be read as two, as a path, or as another line of an environment."""
    if not cdi.NAME.fullmatch(base):
        raise ContainerUnready(
            f"the device id {quoted([base])} cannot be passed to a container",
            "device ids are letters, digits and `_ . : -`; see what discovery reads it from",
        )
