"""
Builds Allocate responses. Each `EditProvider` makes some of the edits of a container.

The device list strategies are those of NVIDIA's device plugin, and several can be configured at the same time. NICs and
their virtual functions are always passed as device nodes, and so are GPUs whose driver reports its nodes
(`Gpu.device_nodes`). The kubelet can repeat a call. The same devices then get the same response, except for the random
name of HAMi-core's file.

Sources: k8s-device-plugin v0.20.0, internal/plugin/server.go; sriov-network-device-plugin v3.7, for the variable of PCI
addresses; kubelet v1.36.3, devicemanager, for how the responses for a container's resources are merged.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from topoalign.allocator.allocate.claims import reported_co_allocated
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
    """The name of its RDMA device; empty if it has none."""
    pci: str | None
    verbs: str | None


class ContainerDevices(NamedTuple):
    """The devices of one container in an Allocate call, as input of the edit providers."""

    hardware: Topology
    resource: ResourceName
    gpus: Sequence[VisibleDevice]
    """Without GPUs that are passed by their own device nodes."""
    nodes: Sequence[str]
    """The own device nodes of GPUs (`Gpu.device_nodes`)."""
    functions: Sequence[NicFunction]
    allocation: Allocation
    named: Mapping[ResourceName, Sequence[DeviceID]]
    """Resource -> all devices of the container, including those of other responses (`AllocatorPort.named`)."""


class EditProvider(msgspec.Struct, frozen=True):
    """Makes some of the edits of a container: its environment, mounts, device nodes or CDI names."""

    def check(self, hardware: Topology, gpus: Sequence[VisibleDevice]) -> None:
        """Raises ContainerUnready for GPUs that a container could not use. Called before anything is recorded."""

    def edit(self, response: v1beta1.ContainerAllocateResponse, devices: ContainerDevices) -> None:
        """Adds the edits to the response for a container. Raises ContainerUnready and StateFault."""
        raise NotImplementedError  # abstract; every provider defines it


class DeviceLists(EditProvider, frozen=True):
    """Lists GPUs by `deviceListStrategy`. With both `envvar` and `volume-mounts` the variable points to the mounts."""

    configuration: Configuration = Configuration()
    dev: HostRoot = HostRoot("/", Path("/"))
    shared: tuple[str, ...] = ()
    """The device nodes that all GPUs share."""
    channels: tuple[int, ...] = ()
    """IMEX channels."""
    minors: Mapping[host_files.Instance, int] = MappingProxyType({})
    """Minor numbers of the capabilities of MIG instances."""

    @property
    def strategies(self) -> frozenset[str]:
        """`deviceListStrategy`, without the CDI strategies."""
        return frozenset(self.configuration.flags.plugin.device_list_strategy) - CDI

    def check(self, hardware: Topology, gpus: Sequence[VisibleDevice]) -> None:
        """Raises ContainerUnready for unknown device nodes."""
        if self.strategies and self.configuration.flags.plugin.pass_device_specs:
            self.node_paths(gpus)

    def edit(self, response: v1beta1.ContainerAllocateResponse, devices: ContainerDevices) -> None:
        """Adds variables, mounts and device nodes. Raises ContainerUnready."""
        strategies = self.strategies
        if devices.gpus and strategies:
            self._add_gpus(response, devices.gpus, strategies)
        # The kubelet keeps only one value per variable, so the variable names the GPUs of all responses. Mounts and CDI
        # names are merged.
        found = [visible_device(devices.hardware, base, self) for base in named_bases(devices)]
        named = [each for each in found if each is not None and not each.gpu.device_nodes]
        if named and "envvar" in strategies and "volume-mounts" not in strategies:
            response.envs[GPUS_VARIABLE] = ",".join(each.name for each in named)

    def _add_gpus(
        self, response: v1beta1.ContainerAllocateResponse, gpus: Sequence[VisibleDevice], strategies: Collection[str]
    ) -> None:
        names = [each.name for each in gpus]
        if "envvar" in strategies:
            response.envs[GPUS_VARIABLE] = ",".join(names)
            if self.channels:
                response.envs[CHANNELS_VARIABLE] = ",".join(map(str, self.channels))
        if "volume-mounts" in strategies:
            response.envs[GPUS_VARIABLE] = LIST_DIRECTORY
            listed = (*names, *(f"imex/{channel}" for channel in self.channels))
            response.mounts += [
                v1beta1.Mount(container_path=f"{LIST_DIRECTORY}/{name}", host_path=EMPTY_FILE) for name in listed
            ]
        if self.configuration.flags.plugin.pass_device_specs:
            paths = [*self.node_paths(gpus), *self.shared, *map(host_files.of_channel, self.channels)]
            response.devices += [device_node(path, self.dev.on_host(path)) for path in dict.fromkeys(paths)]
        for name in cdi.extras(self.configuration):
            response.envs[f"NVIDIA_{name.upper()}"] = "enabled"

    def node_paths(self, gpus: Iterable[VisibleDevice]) -> list[str]:
        """Returns the paths of the device nodes of these GPUs alone. Raises ContainerUnready if they are unknown."""
        return [path for each in gpus for path in host_files.device_node_paths(each.gpu, each.instance, self.minors)]

    def name_of(self, base: DeviceID, gpu: Gpu, instance: MigDevice | None) -> str:
        """Returns the uuid or the index of a device, by `deviceIDStrategy`. Raises ContainerUnready for an unknown index."""
        if self.configuration.flags.plugin.device_id_strategy == "uuid":
            return base
        index = cdi.index_of(gpu, instance)
        if index is None:
            raise ContainerUnready(f"the index of MIG instance {base} is not known", "use deviceIDStrategy uuid")
        return index


class CdiNames(EditProvider, frozen=True):
    """Passes the CDI names of GPUs, IMEX channels and extras to the runtime, in annotations or in the CDI field."""

    lists: DeviceLists
    extras: tuple[str, ...]
    """CDI classes. Every container gets the only device of each."""

    def check(self, hardware: Topology, gpus: Sequence[VisibleDevice]) -> None:
        """Raises ContainerUnready for unknown device nodes, because the specification does not contain such devices."""
        self.lists.node_paths(gpus)

    def edit(self, response: v1beta1.ContainerAllocateResponse, devices: ContainerDevices) -> None:
        """Adds the qualified names. Raises ContainerUnready."""
        if not devices.gpus:
            return
        self.lists.node_paths(devices.gpus)
        plugin = self.lists.configuration.flags.plugin
        names = [
            *(cdi.qualified_cdi_name(cdi.GPUS, each.name) for each in devices.gpus),
            *(cdi.qualified_cdi_name(cdi.CHANNELS, str(channel)) for channel in self.lists.channels),
            *(cdi.qualified_cdi_name(kind, cdi.ALL) for kind in self.extras),
        ]
        if "cdi-annotations" in plugin.device_list_strategy:
            response.annotations = cdi.cdi_annotation(plugin.cdi_annotation_prefix, names)
        if "cdi-cri" in plugin.device_list_strategy:
            response.cdi_devices = [v1beta1.CdiDevice(name=name) for name in names]


class OwnNodes(EditProvider, frozen=True):
    """Adds the device nodes of GPUs whose driver reports them. NVIDIA's strategies do not apply to these GPUs."""

    def edit(self, response: v1beta1.ContainerAllocateResponse, devices: ContainerDevices) -> None:
        """Adds each node at the path that it has on the host."""
        response.devices += [device_node(path, path) for path in devices.nodes]


class NicEdits(EditProvider, frozen=True):
    """Adds NICs and virtual functions, requested or co-allocated, with the variables that name all of them."""

    def edit(self, response: v1beta1.ContainerAllocateResponse, devices: ContainerDevices) -> None:
        """Adds device nodes and variables. Co-allocated devices get those of an Allocate of their own resource."""
        hardware = devices.hardware
        co_allocated = (each for _, ids in reported_co_allocated(devices.allocation) for each in ids)
        own = [*devices.functions, *functions_of(hardware, co_allocated)]
        # NICs of a described machine have no device nodes.
        paths = [f"/dev/infiniband/{function.verbs}" for function in own if function.verbs is not None]
        response.devices += [device_node(path, path) for path in (*paths, *([RDMA_CM] if paths else []))]
        named = {name: functions_of(hardware, map(base_of, ids)) for name, ids in devices.named.items()}
        for resource, functions in ({devices.resource: devices.functions} | named).items():
            if addresses := [function.pci for function in functions if function.pci is not None]:
                # Named as by sriov-network-device-plugin: PCIDEVICE_TOPOALIGN_IO_NIC for topoalign.io/nic.
                variable = f"PCIDEVICE_{re.sub('[^A-Z0-9]', '_', resource.upper())}"
                response.envs[variable] = ",".join(addresses)
        all_named = functions_of(hardware, named_bases(devices)) or devices.functions
        if names := [function.name for function in all_named if function.name]:
            response.envs[NICS_VARIABLE] = ",".join(names)


class ResponseWriter(NamedTuple):
    """Builds Allocate responses from one configuration and one snapshot of the host's state."""

    lists: DeviceLists = DeviceLists()
    providers: tuple[EditProvider, ...] = (DeviceLists(), OwnNodes(), NicEdits())
    """In the order in which they edit a response."""

    def check(self, topology: Topology, containers: Iterable[Iterable[DeviceID]]) -> None:
        """Checks that each container could use its devices; ignores unknown ids. Raises ContainerUnready."""
        by_base = topology.offers_by_base
        for devices in containers:
            gpus, _, _ = self._read_devices(topology, [base for base in bases_of(devices) if base in by_base])
            for provider in self.providers if gpus else ():
                provider.check(topology, gpus)

    def response(
        self,
        topology: Topology,
        resource: ResourceName,
        allocation: Allocation,
        named: Mapping[ResourceName, Sequence[DeviceID]] = MappingProxyType({}),
    ) -> v1beta1.ContainerAllocateResponse:
        """Builds the response for a container. Raises ContainerUnready for a device that cannot be passed."""
        # A slot that became a MIG instance is passed as the instance.
        ids = [allocation.instances.get(each, each) for each in allocation.from_kubelet[resource]]
        gpus, nodes, functions = self._read_devices(topology, bases_of(ids))
        devices = ContainerDevices(topology, resource, gpus, nodes, functions, allocation, named)
        response = v1beta1.ContainerAllocateResponse()
        for provider in self.providers:
            provider.edit(response, devices)
        response.envs = dict(sorted(response.envs.items()))
        return response

    def _read_devices(
        self, topology: Topology, bases: Iterable[DeviceID]
    ) -> tuple[list[VisibleDevice], list[str], list[NicFunction]]:
        """Returns the GPUs, the own device nodes of other GPUs, and the NICs. Raises ContainerUnready for other devices."""
        gpus: list[VisibleDevice] = []
        nodes: dict[str, None] = {}
        functions: list[NicFunction] = []
        for base in bases:
            if not cdi.NAME.fullmatch(base):  # it could be read as two ids, a path, or another line of an environment
                raise ContainerUnready(
                    f"the device id {quoted([base])} cannot be passed to a container",
                    "device ids are letters, digits and `_ . : -`; see what discovery reads it from",
                )
            if (gpu := visible_device(topology, base, self.lists)) is not None:
                if gpu.gpu.device_nodes:
                    nodes.update(dict.fromkeys(gpu.gpu.device_nodes))
                else:
                    gpus.append(gpu)
            elif (function := function_of(topology, base)) is not None:
                functions.append(function)
            else:
                raise ContainerUnready(f"{base} is not on this node any more", "let the pod be created again")
        return gpus, [*nodes], functions


def visible_device(topology: Topology, base: DeviceID, lists: DeviceLists) -> VisibleDevice | None:
    """Returns a GPU or MIG instance with the name that a container sees; None for any other device."""
    found = host_files.gpu_and_instance(topology, base)
    return None if found is None else VisibleDevice(base, lists.name_of(base, *found), *found)


def named_bases(devices: ContainerDevices) -> list[DeviceID]:
    """Returns the bases of these devices: GPUs before their MIG instances, NICs before their virtual functions."""
    bases = {base_of(each) for ids in devices.named.values() for each in ids}
    hardware = devices.hardware
    gpus = [(gpu.id, *(instance.uuid for instance in gpu.mig or ())) for gpu in hardware.gpus]
    nics = [(nic.id, *(DeviceID(function.pci) for function in nic.virtual_functions)) for nic in hardware.nics]
    groups: list[tuple[DeviceID, ...]] = [*gpus, *nics]
    return [each for group in groups for each in group if each in bases]


def bases_of(devices: Iterable[DeviceID]) -> Iterable[DeviceID]:
    """Returns the ids of these devices without share numbers and duplicates."""
    return devices.bases if isinstance(devices, DeviceSet) else dict.fromkeys(map(base_of, devices))


def functions_of(topology: Topology, bases: Iterable[DeviceID]) -> list[NicFunction]:
    """Returns the NICs and virtual functions among these devices."""
    return [function for base in bases if (function := function_of(topology, base)) is not None]


def function_of(topology: Topology, base: DeviceID) -> NicFunction | None:
    """Returns the NIC or virtual function of a device id without a share number (`base`); None for any other device."""
    nic: Nic | None = topology.nic_by_id.get(topology.parent_of(base))
    if nic is None:
        return None
    if nic.id == base:
        return NicFunction(nic.id, nic.pci, nic.verbs)
    virtual: VirtualFunction = next(each for each in nic.virtual_functions if each.pci == base)
    return NicFunction(virtual.name, virtual.pci, virtual.verbs)


def device_node(container_path: str, host_path: str) -> v1beta1.DeviceSpec:
    """A device node that the container can read and write."""
    return v1beta1.DeviceSpec(container_path=container_path, host_path=host_path, permissions="rw")
