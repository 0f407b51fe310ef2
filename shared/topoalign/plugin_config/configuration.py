"""
The configuration of a device plugin, as types with the fields of its file.

Names, nesting and defaults are those of NVIDIA's device plugin v0.20.0, version `v1`, in snake case. `nics` and
`health` are topoalign's own, and so is the behaviour of fields that NVIDIA's plugin has in its schema and ignores. A
configuration is complete: fields that the file leaves out have their defaults. `topoalign.plugin_config.file` reads the
file and reports its errors.
"""

from typing import Annotated, Literal

import msgspec

from topoalign.core.model.topology.device_offers import LimitedBy

MigStrategy = Literal["none", "single", "mixed", "dynamic"]
DeviceList = Literal["envvar", "volume-mounts", "cdi-annotations", "cdi-cri"]
Packing = Literal["distributed", "packed"]

MOST_REPLICAS = 2_500
"""Maximum number of shares of one device. Users of NVIDIA's plugin configure as many; one more digit is a typo."""

Index = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Xid = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Wait = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
"""Seconds; the upper bound also refuses `nan` and `inf`."""


class ConfigurationSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """A mapping of the file. An unknown key is refused."""


class PluginFlags(ConfigurationSection, frozen=True, kw_only=True):
    """How a container receives its devices."""

    pass_device_specs: bool = False
    """Passes device nodes to the runtime, so that a container keeps them when systemd or the CPU manager updates it."""
    device_list_strategy: tuple[DeviceList, ...] = ("envvar",)
    """How the runtime receives the list of devices. The file may give one strategy, or a list."""
    device_id_strategy: Literal["uuid", "index"] = msgspec.field(default="uuid", name="deviceIDStrategy")
    """How devices are named in that list."""
    cdi_annotation_prefix: str = "cdi.k8s.io/"
    nvidia_cdi_hook_path: str = msgspec.field(default="", name="nvidiaCDIHookPath")
    """The hook path in the CDI file; formerly `nvidiaCTKPath`. Empty: where nvidia-ctk or nvidia-cdi-hook is found."""
    container_driver_root: str = "/driver-root"
    """The path of the driver root in this container."""
    shared_devices_allocation_policy: Packing = "distributed"
    """Which shares and MIG instances are preferred: those of the least used GPUs, or of the most used ones."""

    @property
    def by_variable_alone(self) -> bool:
        """Whether NVIDIA_VISIBLE_DEVICES is the only list of a container's GPUs (`core.demand.device_lists`)."""
        return {*self.device_list_strategy} == {"envvar"}


class Flags(ConfigurationSection, frozen=True, kw_only=True):
    """The section `flags`."""

    mig_strategy: MigStrategy = "none"
    """
    `none`: MIG is ignored. `single`: each instance is a `nvidia.com/gpu`. `mixed`: each profile is a separate resource.
    `dynamic`: a slot of a GPU in MIG mode becomes an instance when a container gets it.
    """
    nvidia_driver_root: str = "/"
    """The driver's root on the host."""
    nvidia_dev_root: str = ""
    """The root of the driver's device nodes. Empty: the driver root."""
    mps_root: str = ""
    """Directory on the host with the pipes of the MPS daemons. Needed if MPS shares or limits devices."""
    vcuda_root: str = ""
    """Directory on the host for the files of the limiter `vcuda`. Needed if `sharing.limiter` is `vcuda`."""
    vcuda_libraries: str = ""
    """Directory on the host with the library of `vcuda` for containers. Empty: containers have their own copy."""
    hami_root: str = ""
    """Directory on the host where `topoalign hook install` puts HAMi-core. Needed if `sharing.limiter` is `hami-core`."""
    gdrcopy_enabled: bool = False
    gds_enabled: bool = False
    mofed_enabled: bool = False
    plugin: PluginFlags = PluginFlags()


class GpuEntry(ConfigurationSection, frozen=True, kw_only=True):
    """Selects GPUs by one of three selectors, and names their resource or excludes them."""

    pattern: str = ""
    """Part of the product name, `*` for anything: `A100`, `*H100*80GB*`."""
    uuids: tuple[str, ...] = ()
    indexes: tuple[Index, ...] = ()
    """Indexes of `nvidia-smi`. A GPU can have another index after a reboot, so prefer uuids."""
    name: str = ""
    """Name of the resource; without a domain it is in `nvidia.com/`."""
    exclude: bool = False
    """Whether the GPUs and their MIG instances are not offered."""


class MigEntry(ConfigurationSection, frozen=True, kw_only=True):
    """Selects MIG instances by one of two selectors, and names their resource or excludes them."""

    pattern: str = ""
    """The whole profile, `*` for anything: `1g.10gb`, `3g.*`."""
    uuids: tuple[str, ...] = ()
    """Uuids of instances."""
    name: str = ""
    exclude: bool = False


class ResourcesSection(ConfigurationSection, frozen=True, kw_only=True):
    """Assigns devices to resources: the first matching entry decides. Other devices have their default resource."""

    gpus: tuple[GpuEntry, ...] = ()
    mig: tuple[MigEntry, ...] = ()
    """Used under the strategies `single` and `mixed`."""


class NicEntry(ConfigurationSection, frozen=True, kw_only=True):
    """Selects NICs by one of two selectors, and names their resource or excludes them."""

    names: tuple[str, ...] = ()
    """RDMA devices, `*` for anything: `mlx5_0`, `mlx5_bond_*`."""
    pci: tuple[str, ...] = ()
    """PCI addresses, `*` for anything: `0000:0c:00.*`."""
    name: str = ""
    """Name of the resource; without a domain it is in `topoalign.io/`."""
    virtual_functions: bool = False
    """Whether their SR-IOV virtual functions are offered instead of the NICs."""
    exclude: bool = False


Chosen = Literal["all"] | Annotated[int, msgspec.Meta(ge=1, le=65_535)] | tuple[str | Index, ...]
"""Devices of a resource: all, the first N, or a list of indexes, `<GPU>:<MIG instance>` and uuids."""


class SharedResource(ConfigurationSection, frozen=True, kw_only=True):
    """A resource whose devices are shared, by the strategy of its section."""

    name: str
    """The name of the resource without sharing."""
    rename: str = ""
    """The resource of its shares. Empty: `rename_by_default` decides."""
    devices: Chosen = "all"
    """The devices that are shared. The others stay whole."""
    replicas: Annotated[int, msgspec.Meta(ge=1, le=MOST_REPLICAS)]
    """Number of shares of each device. 1: the device stays whole, under the name of the shares."""


class TimeSlicing(ConfigurationSection, frozen=True, kw_only=True):
    """The section `sharing.timeSlicing`."""

    rename_by_default: bool = False
    """Shares are called `<name>.shared`."""
    fail_requests_greater_than_one: bool = False
    """A container can request at most one share, because two shares would not be twice as much."""
    resources: tuple[SharedResource, ...] = ()


class Mps(ConfigurationSection, frozen=True, kw_only=True):
    """The section `sharing.mps`: GPUs that MPS shares, with an equal part of memory and threads for each client."""

    rename_by_default: bool = False
    """Shares are called `<name>.shared`."""
    fail_requests_greater_than_one: bool = True
    """A container can request at most one share, because two shares would not be twice as much."""
    resources: tuple[SharedResource, ...] = ()
    """Each has 2 to 48 replicas: an MPS server accepts no more clients."""


class Units(ConfigurationSection, frozen=True, kw_only=True):
    """
    GPUs of which containers request amounts: hundredths of the computing time, and blocks of 256 MiB of the memory.
    Each GPU is then offered as two resources.
    """

    name: str = "nvidia.com/gpu"
    """The resource of the GPUs without sharing."""
    devices: Chosen = "all"
    """The devices that are shared. The others stay whole."""
    cores: str = "tencent.com/vcuda-core"
    """The resource of units of computing time, 100 for each GPU."""
    memory: str = "tencent.com/vcuda-memory"
    """The resource of memory blocks: one for each whole block of a GPU's memory."""


class GpuSlots(ConfigurationSection, frozen=True, kw_only=True):
    """
    GPUs that are offered in slots. A container requests a slot for each GPU from the kubelet. In addition, it requests
    an amount of each GPU, by resources that the kubelet does not see.
    """

    name: str = "nvidia.com/gpu"
    """The resource of the GPUs without sharing, and of their slots."""
    replicas: Annotated[int, msgspec.Meta(ge=2, le=MOST_REPLICAS)] = 10
    """Slots of each GPU: the maximum number of containers on it."""
    memory: str = "nvidia.com/gpumem"
    """The resource by which MiB of each GPU are requested."""
    percentage: str = "nvidia.com/gpumem-percentage"
    """The resource by which hundredths of the memory of each GPU are requested."""
    cores: str = "nvidia.com/gpucores"
    """The resource by which hundredths of the computing time of each GPU are requested."""
    priority: str = "nvidia.com/priority"
    """The resource by which a container requests high (0) or low (1) priority."""
    memory_scaling: Annotated[float, msgspec.Meta(ge=0.1, le=100)] = 1.0
    """Memory of each GPU that can be allocated, as a multiple of its memory."""
    core_scaling: Annotated[float, msgspec.Meta(ge=1, le=100)] = 1.0
    """Computing time of each GPU that can be allocated, as a multiple of 100."""
    numa_topology: bool = False
    """Whether slots are listed with their GPUs' NUMA nodes. The Topology Manager then counts them by NUMA node."""
    priorities: bool = False
    """Containers of low priority wait while one of high priority computes on their GPU. Needs the limiter `hami-core`."""


class SharingSection(ConfigurationSection, frozen=True, kw_only=True):
    """The section `sharing`. A resource has only one sharing strategy."""

    time_slicing: TimeSlicing = TimeSlicing()
    mps: Mps = Mps()
    units: Units | None = None
    """None: no GPU is offered in units."""
    limiter: LimitedBy = "none"
    """The limiter of containers: none, Gaia's library for units (`vcuda`), HAMi-core for slots, or MPS for both."""
    slots: GpuSlots | None = None
    """None: no GPU is offered in slots."""


class Imex(ConfigurationSection, frozen=True, kw_only=True):
    """Channels over which processes of several nodes share GPU memory."""

    channel_ids: tuple[Annotated[int, msgspec.Meta(ge=0, le=2047)], ...] = msgspec.field(default=(), name="channelIDs")
    required: bool = False
    """Whether a missing channel is an error. If not, it is left out."""


class Health(ConfigurationSection, frozen=True, kw_only=True):
    """Which errors make a device unhealthy, and when it is offered again."""

    ignored_xids: tuple[Xid, ...] | None = msgspec.field(default=None, name="ignoredXIDs")
    """XIDs after which a GPU stays healthy. None: those that do not concern the GPU, by NVIDIA's catalogue."""
    quiet_seconds: Wait = 300.0
    """Seconds without an error, after a reading that finds the device healthy, before it is offered again."""
    hold_down_seconds: Wait = 1.0
    """Minimum seconds between two announcements of a device's health: later changes are announced together at their end."""


class Configuration(ConfigurationSection, frozen=True, kw_only=True):
    """The whole file."""

    version: Literal["v1"] = "v1"
    flags: Flags = Flags()
    resources: ResourcesSection = ResourcesSection()
    sharing: SharingSection = SharingSection()
    imex: Imex = Imex()
    nics: tuple[NicEntry, ...] = ()
    health: Health = Health()


class ConfigurationFinding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A field of a configuration that has no effect on this node, or in this program."""

    field: str
    """Path in the file, `sharing.timeSlicing.resources[0]`."""
    finding: str
    remedy: str = ""
    severe: bool = False
    """Whether the configuration requests something that is not offered."""

    def __str__(self) -> str:
        return f"{self.field}: {self.finding}"


class Findings(list[ConfigurationFinding]):
    """Collects findings."""

    def add(self, field: str, finding: str, remedy: str = "", *, severe: bool = False) -> None:
        """Adds a finding about a field of the configuration."""
        self.append(ConfigurationFinding(field=field, finding=finding, remedy=remedy, severe=severe))
