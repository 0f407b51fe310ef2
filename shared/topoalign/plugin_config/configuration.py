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
"""Of one device, as many as are asked of NVIDIA's plugin; a number with a digit too many is refused."""

Index = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Xid = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Wait = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
"""Seconds; the upper bound also refuses `nan` and `inf`."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """A mapping of the file. A key that it does not know is refused."""


class PluginFlags(Section, frozen=True, kw_only=True):
    """What a container is told of its devices."""

    pass_device_specs: bool = False
    """Device nodes are named to the runtime: a container then keeps them when systemd or the CPU manager touch it."""
    device_list_strategy: tuple[DeviceList, ...] = ("envvar",)
    """How the runtime is told which devices. The file may give one, or a list."""
    device_id_strategy: Literal["uuid", "index"] = msgspec.field(default="uuid", name="deviceIDStrategy")
    """What they are called there."""
    cdi_annotation_prefix: str = "cdi.k8s.io/"
    nvidia_cdi_hook_path: str = msgspec.field(default="", name="nvidiaCDIHookPath")
    """Of the hook that the CDI file names; `nvidiaCTKPath` is an older name of the same. Empty: where it is found."""
    container_driver_root: str = "/driver-root"
    """Where this container has the driver root."""
    shared_devices_allocation_policy: Packing = "distributed"
    """Which shares and MIG instances are preferred: of the cards least used, or of those most used."""

    @property
    def by_variable_alone(self) -> bool:
        """Whether NVIDIA_VISIBLE_DEVICES is the only list of a container's GPUs (`core.demand.device_lists`)."""
        return {*self.device_list_strategy} == {"envvar"}


class Flags(Section, frozen=True, kw_only=True):
    """The section `flags`."""

    mig_strategy: MigStrategy = "none"
    """
    MIG ignored; every instance as `nvidia.com/gpu`; each profile as a resource of its own; or a slot of a GPU in MIG mode
    becomes an instance when a container gets it.
    """
    nvidia_driver_root: str = "/"
    """The driver's root on the host."""
    nvidia_dev_root: str = ""
    """That of its device nodes. Empty: the driver root."""
    mps_root: str = ""
    """Directory on the host where the daemons of MPS have their pipes. Needed where they share devices."""
    vcuda_root: str = ""
    """Directory on the host for what the limiter `vcuda` writes. Needed where `sharing.limiter` is that."""
    vcuda_libraries: str = ""
    """Directory on the host with its library, for containers. Empty: they have it in another way."""
    hami_root: str = ""
    """Directory on the host where `topoalign hook install` puts HAMi-core. Needed where `sharing.limiter` is that."""
    gdrcopy_enabled: bool = False
    gds_enabled: bool = False
    mofed_enabled: bool = False
    plugin: PluginFlags = PluginFlags()


class GpuChoice(Section, frozen=True, kw_only=True):
    """GPUs, chosen in one of three ways, and what becomes of them: a resource of this name, or nothing at all."""

    pattern: str = ""
    """Part of the product name, `*` for anything: `A100`, `*H100*80GB*`."""
    uuids: tuple[str, ...] = ()
    indexes: tuple[Index, ...] = ()
    """As `nvidia-smi` counts them: another GPU may have the number after a reboot, so prefer uuids."""
    name: str = ""
    """Of the resource; without a domain it is in `nvidia.com/`."""
    exclude: bool = False
    """Not offered at all, nor its MIG instances."""


class MigChoice(Section, frozen=True, kw_only=True):
    """MIG instances, chosen in one of two ways, and what becomes of them."""

    pattern: str = ""
    """The whole profile, `*` for anything: `1g.10gb`, `3g.*`."""
    uuids: tuple[str, ...] = ()
    """Of instances."""
    name: str = ""
    exclude: bool = False


class Resources(Section, frozen=True, kw_only=True):
    """Which devices make up which resource: the first entry that fits a device decides; without any it has its usual one."""

    gpus: tuple[GpuChoice, ...] = ()
    mig: tuple[MigChoice, ...] = ()
    """Looked at under the strategies `single` and `mixed`."""


class NicChoice(Section, frozen=True, kw_only=True):
    """NICs, chosen in one of two ways, and what becomes of them."""

    names: tuple[str, ...] = ()
    """RDMA devices, `*` for anything: `mlx5_0`, `mlx5_bond_*`."""
    pci: tuple[str, ...] = ()
    """PCI addresses, `*` for anything: `0000:0c:00.*`."""
    name: str = ""
    """Of the resource; without a domain it is in `topoalign.io/`."""
    virtual_functions: bool = False
    """Their SR-IOV virtual functions are offered, and not they themselves."""
    exclude: bool = False


Chosen = Literal["all"] | Annotated[int, msgspec.Meta(ge=1, le=65_535)] | tuple[str | Index, ...]
"""Which devices of a resource: all, so many of the first, or these: an index, `<GPU>:<MIG instance>`, a uuid."""


class SharedResource(Section, frozen=True, kw_only=True):
    """A resource whose devices are shared, in the way of the section that it is in."""

    name: str
    """As it is called when it is not shared."""
    rename: str = ""
    """What its shares are called. Empty: as `rename_by_default` says."""
    devices: Chosen = "all"
    """Which of them. The others stay whole."""
    replicas: Annotated[int, msgspec.Meta(ge=1, le=MOST_REPLICAS)]
    """Shares that each device is offered as. 1: it stays whole, under the name that they would have."""


class TimeSlicing(Section, frozen=True, kw_only=True):
    """The section `sharing.timeSlicing`."""

    rename_by_default: bool = False
    """Shares are called `<name>.shared`."""
    fail_requests_greater_than_one: bool = False
    """A container gets one share at most: two would not be twice as much."""
    resources: tuple[SharedResource, ...] = ()


class Mps(Section, frozen=True, kw_only=True):
    """The section `sharing.mps`: GPUs that are shared by MPS, each user limited to an equal part of memory and threads."""

    rename_by_default: bool = False
    """Shares are called `<name>.shared`."""
    fail_requests_greater_than_one: bool = True
    """A container gets one share at most: two would not be twice as much."""
    resources: tuple[SharedResource, ...] = ()
    """2 to 48 replicas each: an MPS server has no more clients."""


class Units(Section, frozen=True, kw_only=True):
    """
    GPUs of which a container asks for an amount: hundredths of the computing time, and blocks of 256 MiB of the memory. Each
    GPU is two resources then.
    """

    name: str = "nvidia.com/gpu"
    """The resource that the GPUs are when they are not shared."""
    devices: Chosen = "all"
    """Which of them. The others stay whole."""
    cores: str = "tencent.com/vcuda-core"
    """What units of computing time are called, 100 a GPU."""
    memory: str = "tencent.com/vcuda-memory"
    """What blocks of memory are called, as many as a GPU has whole ones."""


class GpuSlots(Section, frozen=True, kw_only=True):
    """
    GPUs that are offered in slots. A container asks the kubelet for slots of so many GPUs, and beside that, in resources
    that no kubelet sees, for an amount of each.
    """

    name: str = "nvidia.com/gpu"
    """The resource: what the GPUs are when they are not shared, and what their slots are."""
    replicas: Annotated[int, msgspec.Meta(ge=2, le=MOST_REPLICAS)] = 10
    """Slots of each GPU, which is as many containers as can have some of it."""
    memory: str = "nvidia.com/gpumem"
    """By what MiB of each GPU are asked for."""
    percentage: str = "nvidia.com/gpumem-percentage"
    """By what hundredths of the memory of each GPU are asked for."""
    cores: str = "nvidia.com/gpucores"
    """By what hundredths of the computing time of each GPU are asked for."""
    priority: str = "nvidia.com/priority"
    """By what a container says that it is of high (0) or low (1) priority."""
    memory_scaling: Annotated[float, msgspec.Meta(ge=0.1, le=100)] = 1.0
    """Memory that is given of each GPU, as a multiple of what it has."""
    core_scaling: Annotated[float, msgspec.Meta(ge=1, le=100)] = 1.0
    """Computing time that is given of each GPU, as a multiple of 100."""
    numa_topology: bool = False
    """List slots to the kubelet with the NUMA nodes of their GPUs: its Topology Manager then counts slots by NUMA node."""
    priorities: bool = False
    """Containers of low priority wait while one of high priority computes on their GPU. Needs the limiter `hami-core`."""


class Sharing(Section, frozen=True, kw_only=True):
    """The section `sharing`. A resource is shared in one way only."""

    time_slicing: TimeSlicing = TimeSlicing()
    mps: Mps = Mps()
    units: Units | None = None
    """None: no GPU is offered in units."""
    limiter: LimitedBy = "none"
    """What limits containers: nothing, Gaia's library to their units (`vcuda`), HAMi-core to their slots, or MPS to both."""
    slots: GpuSlots | None = None
    """None: no GPU is offered in slots."""


class Imex(Section, frozen=True, kw_only=True):
    """Channels over which processes of several nodes share GPU memory."""

    channel_ids: tuple[Annotated[int, msgspec.Meta(ge=0, le=2047)], ...] = msgspec.field(default=(), name="channelIDs")
    required: bool = False
    """Whether a channel that is not there is an error, and not left out."""


class Health(Section, frozen=True, kw_only=True):
    """When a device that was ill is offered again, and what makes it ill."""

    ignored_xids: tuple[Xid, ...] | None = msgspec.field(default=None, name="ignoredXIDs")
    """XIDs after which a GPU stays healthy. None: those that do not concern the GPU, by NVIDIA's catalogue."""
    quiet_seconds: Wait = 300.0
    """How long nothing may have happened to a device before it is trusted again, after a reading that finds it well."""
    hold_down_seconds: Wait = 1.0
    """How long what was announced stands at least: what happens meanwhile is announced at once at its end."""


class Configuration(Section, frozen=True, kw_only=True):
    """The whole file."""

    version: Literal["v1"] = "v1"
    flags: Flags = Flags()
    resources: Resources = Resources()
    sharing: Sharing = Sharing()
    imex: Imex = Imex()
    nics: tuple[NicChoice, ...] = ()
    health: Health = Health()
