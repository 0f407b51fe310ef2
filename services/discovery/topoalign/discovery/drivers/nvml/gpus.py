"""
One GPU, from NVML and /sys together.

NVML has its identity; the files have its place, since they show the bridges above it and NVML does not. For the NUMA
node the files take precedence: they come from the kernel, while NVML's affinity can name every node of the machine.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from ctypes import Structure, byref, c_uint
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple
from uuid import UUID

from msgspec.structs import replace

from topoalign.core.model.errors import quoted
from topoalign.core.model.events import DeviceHealth
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.mig import MigDevice, MigPlacement, MigProfile
from topoalign.core.model.topology.model import Fabric, Gpu, Topology
from topoalign.core.model.topology.topology_checks import LARGEST_MEMORY
from topoalign.discovery.drivers.health import HEALTHY, unhealthy
from topoalign.discovery.drivers.nvml.library import (
    MOST_NVLINKS,
    NOT_FOUND,
    NOT_TOLD,
    NVLINK_COUNT,
    RECOVERY_ACTION,
    REMAPPING_FAILED,
    REMAPPING_PENDING,
    CallFailed,
    Handle,
    Library,
)

# NVLinks: each GPU reports where its end leads, and pairs are made of two ends.
#
# An end leads to another GPU, whose PCI address it reports, or to an NVSwitch, behind which every other GPU on the
# switch is reached. The number of NVLinks of a pair is that of its direct links if it has any, else the smaller of both
# GPUs' links to the switch, which is what `nvidia-smi topo -m` prints. Example: GPUs with 12 and 11 links to the switch
# are a pair with NV11. In a virtual machine the switch may be hidden, so an end that leads to an unknown device counts
# as a switch (both rules: HAMi, as in its pull request 2103).
#
# Reading is one pass per GPU and not per pair; on a slow driver the difference is half a second.


GPU_KIND = 0
NPU_KIND = 1
SWITCH_KIND = 2
"""nvmlIntNvLinkDeviceType_t."""


class End(NamedTuple):
    """Where an NVLink leads."""

    address: str | None
    """PCI address. None: not reported."""
    kind: int | None
    """GPU_KIND, NPU_KIND, SWITCH_KIND, or another number. None: not reported."""
    up: bool = True
    """False: the GPU has the link, but it is not enabled; where it leads is not read."""


DOWN = End(None, None, up=False)


@dataclass(frozen=True)
class NvLinks:
    """The NVLinks of a machine."""

    pairs: Mapping[tuple[DeviceID, DeviceID], int]
    """Of each pair that has any, in the order of the GPUs."""
    to_switch: Mapping[DeviceID, int]
    findings: tuple[str, ...]
    down: Mapping[DeviceID, int] = field(default_factory=dict)
    """GPU -> its links that are not up."""

    def counted(self, gpu: Gpu) -> Gpu:
        """The GPU with the numbers of its NVLinks."""
        return replace(gpu, nvswitch_links=self.to_switch.get(gpu.id, 0), nvlinks_down=self.down.get(gpu.id, 0))


def read_ends(nvml: Library, device: Handle) -> list[End]:
    """
    The NVLinks of a GPU. Raises CallFailed.

    NVML answers "invalid argument" or "not supported" for a link that the GPU does not have, so such a link is not down.
    """
    count = nvml.fields(device, (NVLINK_COUNT,)).get(NVLINK_COUNT, MOST_NVLINKS)
    ends = []
    for link in range(min(count, MOST_NVLINKS)):
        if (enabled := nvml.nvlink_enabled(device, link)) is not None:
            up = enabled and End(nvml.nvlink_remote(device, link), nvml.nvlink_remote_kind(device, link))
            ends.append(up or DOWN)
    return ends


def paired(ends: Mapping[DeviceID, Sequence[End]], addresses: Mapping[DeviceID, str]) -> NvLinks:
    """The NVLinks of GPUs, from what each of them says, and their PCI addresses as far as known."""
    at = {address: gpu for gpu, address in addresses.items()}
    direct: Counter[tuple[DeviceID, DeviceID]] = Counter()
    to_switch: Counter[DeviceID] = Counter()
    down = {gpu: sum(not end.up for end in own) for gpu, own in ends.items()}
    for gpu, own in ends.items():
        for end in own:
            peer = at.get(end.address) if end.address is not None else None
            if peer is not None and peer != gpu:
                direct[gpu, peer] += 1
            elif end.up and end.kind not in (GPU_KIND, NPU_KIND):
                to_switch[gpu] += 1
    pairs = {}
    findings = []
    for a, b in combinations(ends, 2):
        there = direct[a, b]
        back = direct[b, a]
        if there != back:
            findings.append(f"{a} sees {there} NVLinks to {b}, which sees {back}: the smaller number is used")
        count = min(there, back) if there or back else min(to_switch[a], to_switch[b])
        if count:
            pairs[a, b] = count
    return NvLinks(pairs=pairs, to_switch=dict(to_switch), findings=tuple(findings), down=down)


# What a GPU in MIG mode can be divided into, and where its instances are.
#
# NVML counts the profiles of all architectures; a GPU has some of them. Where instances can be, and where they are, it
# tells to privileged users alone: without the right to know there are no profiles, and no instance has a placement.
# Drivers that do not name profiles do not tell of them in this way, and have none here.
#
# Source: nvidia-ml-py 13.615.71, nvmlGpuInstanceProfileInfo_v2_t; HAMi 4707fb02 for the cores of a profile.


KINDS = 18
"""NVML_GPU_INSTANCE_PROFILE_COUNT: the profiles that NVML counts."""
MOST_PLACEMENTS = 64
"""Of one profile: eight times what GPUs have."""

NAMED = re.compile(r"(?:\d+c\.)?\d+g\.\d+gb(?:[+-][a-z.]+)*")
"""The profile in the name of an instance, or in that of a profile: `1g.10gb+me`."""


class Slices(Structure):
    """nvmlGpuInstancePlacement_t."""

    _fields_ = (("start", c_uint), ("size", c_uint))


def read_profiles(nvml: Library, device: Handle, total: int | None) -> tuple[MigProfile, ...]:
    """
    The profiles of a GPU with this much memory (bytes), in NVML's order. Empty: the driver does not tell. Raises CallFailed.
    """
    asked = (nvml.maybe("nvmlDeviceGetGpuInstanceProfileInfo", device, kind) for kind in range(KINDS))
    infos = [info for info in asked if info is not None]
    whole = max((int(info.multiprocessorCount) for info in infos), default=0)
    found: dict[str, MigProfile] = {}
    for info in infos:
        places = read_placements(nvml, device, info.id)
        memory = int(info.memorySizeMB) << 20
        slices = int(info.sliceCount)
        named = NAMED.search(info.name)
        name = named[0] if named else profile_name(slices, slices, memory, total)
        if not places or name in found:
            continue
        cores = -(-int(info.multiprocessorCount) * 100 // whole) if whole else 0
        found[name] = MigProfile(name=name, memory=memory, slices=slices, cores=cores, placements=places)
    return tuple(found.values())


def read_placements(nvml: Library, device: Handle, profile: int) -> tuple[MigPlacement, ...]:
    """Where an instance of the profile with this id of NVML can be; empty: the driver does not tell. Raises CallFailed."""
    places = (Slices * MOST_PLACEMENTS)()
    count = c_uint(MOST_PLACEMENTS)
    call = "nvmlDeviceGetGpuInstancePossiblePlacements"
    if nvml.maybe(call, device, profile, places, byref(count)) is None:
        return ()
    return tuple(MigPlacement(start=place.start, size=place.size) for place in places[: count.value])


def read_placement(nvml: Library, device: Handle, gpu_instance: int) -> MigPlacement | None:
    """The slices of the GPU instance with this id; None: the driver does not tell. Raises CallFailed."""
    try:
        instance = nvml.maybe("nvmlDeviceGetGpuInstanceById", device, gpu_instance)
        info = None if instance is None else nvml.maybe("nvmlGpuInstanceGetInfo", instance)
    except CallFailed as error:
        if error.code == NOT_FOUND:  # not every container may see all instances
            return None
        raise
    return None if info is None else MigPlacement(start=info.placement.start, size=info.placement.size)


def profile_name(gpu_slices: int, compute_slices: int, memory: int, total: int | None) -> str:
    """
    `1g.10gb`, or `1c.2g.20gb` for a part of a GPU instance, where the driver does not name it. `memory`, `total`: bytes of
    the instance and of the GPU.

    NVIDIA names the memory by eighths of the whole, rounded up (go-nvlib, mig_profile).
    """
    gib = 1 << 30
    whole = -(-(total or memory) // gib)
    eighths = -(-memory * 8 // (total or memory)) if memory else 0
    part = f"{compute_slices}c." if compute_slices != gpu_slices else ""
    return f"{part}{gpu_slices}g.{round(whole * eighths / 8)}gb"


# The NVLink fabric of a GPU, as nvmlDeviceGetGpuFabricInfoV reports it. Constants: NVML as in nvidia-ml-py 13.615.71.


NOT_STARTED = 1
IN_PROGRESS = 2
COMPLETED = 3
"""nvmlGpuFabricState_t; 0 is not supported. Only `COMPLETED` has a status, a cluster and a health."""
TRUE = 1
"""Of a field of the healthMask that is a yes or no; 0 is not supported, 2 is false."""
CONFIGURED = 1
"""The largest value of the field INCORRECT_CONFIGURATION that is no error; 0 is not supported."""


def joined_fabric(info: Any) -> Fabric | None:
    """The NVLink domain that the GPU has joined; None for no domain, or one within the node, whose cluster is all zeros."""
    if info is None or info.state != COMPLETED or info.status != 0 or not any(info.clusterUuid):
        return None
    return Fabric(cluster=str(UUID(bytes=bytes(info.clusterUuid))), clique=int(info.cliqueId))


def fabric_state(info: Any) -> str:
    """`Gpu.fabric_state`; empty if the fabric is in order or not supported."""
    if info is None or info.state not in (NOT_STARTED, IN_PROGRESS, COMPLETED):
        return ""
    if info.state != COMPLETED:
        return "not-started" if info.state == NOT_STARTED else "in-progress"
    if info.status != 0:
        return "failed"
    health = int(getattr(info, "healthMask", 0))
    degraded_bandwidth = health & 0x3 == TRUE
    route_unhealthy = health >> 4 & 0x3 == TRUE
    incorrect_configuration = health >> 8 & 0xF > CONFIGURED
    return "degraded" if degraded_bandwidth or route_unhealthy or incorrect_configuration else ""


RECOVERY = {
    1: "the driver asks for a reset of the GPU",
    2: "the driver asks for a reboot of the node",
    3: "the driver asks for its peer-to-peer traffic to be drained",
    4: "the driver asks for it to be drained and reset",
    5: "the driver asks for its IMEX domain to be recovered",
}
"""Values of the field `RECOVERY_ACTION`; 0 is none."""
RESETS = {1, 2, 4}
"""Those of them that a reset follows."""

MOST_READS = 4
"""Of the MIG instances of a GPU; where they change during each of these, the last one counts."""
_INSTANCE = re.compile(r"[A-Za-z0-9_.:/-]{1,96}")


class Judged(NamedTuple):
    """One GPU of a reading, with its health and findings."""

    gpu: Gpu
    health: DeviceHealth
    findings: tuple[str, ...]
    awaits_reset: bool = False
    answers: bool = True
    """Whether it told all that it was asked."""


Profiles = dict[DeviceID, tuple[MigProfile, ...]]
"""GPU -> what it can be divided into: it never changes, and takes some twenty calls."""


def read_gpu(nvml: Library, index: int, uuid: DeviceID, device: Handle, files: Topology, profiles: Profiles) -> Judged:
    """
    All of a GPU but its NVLinks. `profiles`: those that are known, to which new ones are added. Raises CallFailed if
    something is wrong with it.
    """
    address = nvml.pci(device)
    seen = next((gpu for gpu in files.gpus if address is not None and gpu.pci == address), Gpu(id=uuid, index=index))
    nodes = set(files.node_ids)
    cpus = {cpu.id for cpu in files.cpus}
    memory = nvml.memory(device)
    memory_node = nvml.memory_node(device)
    mig, odd = read_mig(nvml, device, memory) if nvml.mig_enabled(device) else (None, ())
    if mig is not None and uuid not in profiles:
        profiles[uuid] = read_profiles(nvml, device, memory)
    fabric = nvml.fabric(device)
    gpu = Gpu(
        id=uuid,
        index=index,
        name=nvml.name(device),
        minor=nvml.minor(device),
        pci=address,
        bridge=seen.bridge,
        memory=memory if memory is not None and memory <= LARGEST_MEMORY else seen.memory,
        cpu_affinity=among(cpus, nvml.cpu_affinity(device, max(cpus, default=0))) or seen.cpu_affinity,
        numa_affinity=seen.numa_affinity or among(nodes, nvml.memory_affinity(device, max(nodes, default=0))),
        memory_node=memory_node if memory_node in nodes else seen.memory_node,
        fabric=joined_fabric(fabric),
        fabric_state=fabric_state(fabric),
        mig=mig,
        mig_profiles=profiles[uuid] if mig is not None else (),
    )
    health, findings, awaits_reset = judge(nvml, index, device)
    return Judged(gpu, health, (*odd, *findings), awaits_reset)


def among(known: Collection[int], ids: tuple[int, ...]) -> tuple[int, ...]:
    """Those of these NUMA node ids that the machine has."""
    return tuple(i for i in ids if i in known)


def judge(nvml: Library, index: int, device: Handle) -> tuple[DeviceHealth, tuple[str, ...], bool]:
    """
    Whether the driver itself wants the GPU taken out of use, what is odd, and whether it wants a reset. Rows that wait to
    be remapped are only reported: NVIDIA lets a GPU work on until its next reset.
    """
    fields = nvml.fields(device, (RECOVERY_ACTION, REMAPPING_FAILED, REMAPPING_PENDING))
    findings = (f"GPU {index} has memory rows to remap at its next reset",) if fields.get(REMAPPING_PENDING) else ()
    action = fields.get(RECOVERY_ACTION, 0)
    if action:
        return (
            unhealthy(RECOVERY.get(action, f"the driver asks for recovery action {action}")),
            findings,
            action in RESETS,
        )
    if fields.get(REMAPPING_FAILED):
        return unhealthy("a defective memory row could not be remapped"), findings, False
    return HEALTHY, findings, False


def read_mig(nvml: Library, device: Handle, total: int | None) -> tuple[tuple[MigDevice, ...], tuple[str, ...]]:
    """
    The MIG instances of a GPU with this much memory, and what was odd about them. Raises CallFailed.

    NVML gives them by an index that it does not promise to keep when another one goes, and handles may become those of
    others (nvml.h, nvmlDeviceGetMigDeviceHandleByIndex). So what changed while it was read is read again, at most
    `MOST_READS` times.
    """
    uuids = uuid_by_index(nvml, device)
    for _ in range(MOST_READS):
        found = read_instances(nvml, device, total)
        before = uuids
        uuids = uuid_by_index(nvml, device)
        if uuids == before:
            break
    return found


def uuid_by_index(nvml: Library, device: Handle) -> dict[int, str]:
    """The uuids of the MIG instances of a GPU that tell them, by their index. Raises CallFailed."""
    found = {}
    for index, handle in nvml.mig_handles(device).items():
        try:
            found[index] = nvml.uuid(handle)
        except CallFailed as error:
            if error.code not in {NOT_FOUND, *NOT_TOLD}:
                raise
    return found


def read_instances(nvml: Library, device: Handle, total: int | None) -> tuple[tuple[MigDevice, ...], tuple[str, ...]]:
    """As `read_mig`, of instances that do not change meanwhile."""
    instances: list[MigDevice] = []
    findings = []
    for index, handle in nvml.mig_handles(device).items():
        try:
            instance = read_instance(nvml, device, index, handle, total)
            if not _INSTANCE.fullmatch(instance.uuid) or instance.uuid in {other.uuid for other in instances}:
                findings.append(f"a MIG instance is left out: {quoted([instance.uuid])} names no device, or two")
            else:
                instances.append(instance)
        except CallFailed as error:
            if error.code not in {NOT_FOUND, *NOT_TOLD}:  # one that is not found has been destroyed meanwhile
                raise
            findings.append(f"a MIG instance that does not tell all of itself is left out: {error}")
    return tuple(sorted(instances, key=lambda mig: (mig.gpu_instance, mig.compute_instance))), tuple(findings)


def read_instance(nvml: Library, device: Handle, index: int, handle: Handle, total: int | None) -> MigDevice:
    """One MIG instance of a GPU. `total`: bytes of the whole GPU's memory. Raises CallFailed."""
    size = nvml.mig_size(handle)
    gpu_instance, compute_instance = nvml.mig_ids(handle)
    named = NAMED.search(size.name)
    return MigDevice(
        uuid=DeviceID(nvml.uuid(handle)),
        profile=named[0] if named else profile_name(size.gpu_slices, size.compute_slices, size.memory, total),
        gpu_instance=gpu_instance,
        compute_instance=compute_instance,
        memory=size.memory,
        index=index,
        placement=read_placement(nvml, device, gpu_instance),
    )
