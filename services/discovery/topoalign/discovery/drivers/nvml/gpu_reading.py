"""
Reads one GPU from NVML and /sys together.

NVML reports the identity of the GPU. The files show its place in the PCIe tree, because NVML does not report the
bridges above it. For the NUMA node, the files take precedence: they come from the kernel, while NVML's affinity may
list every node of the machine.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from ctypes import Structure, byref, c_uint
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple
from uuid import UUID

from topoalign.core.model.byte_sizes import GIB
from topoalign.core.model.errors import clean, quoted
from topoalign.core.model.events import HEALTHY, DeviceHealth
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.mig import MigDevice, MigPlacement, MigProfile
from topoalign.core.model.topology.model import Fabric, Gpu, Topology
from topoalign.core.model.topology.topology_checks import LARGEST_MEMORY
from topoalign.discovery.drivers.nvml.nvml_library import (
    MOST_NVLINKS,
    NOT_FOUND,
    NVLINK_COUNT,
    RECOVERY_ACTION,
    REMAPPING_FAILED,
    REMAPPING_PENDING,
    UNREPORTED,
    CallFailed,
    Handle,
    Library,
    sysfs_address,
)
from topoalign.discovery.drivers.reading_health import unhealthy

# NVLinks: each GPU reports the remote ends of its links, and the links of a pair are combined from both reports.
#
# A link leads to another GPU, whose PCI address is reported, or to an NVSwitch, which connects all GPUs that have links
# to it. If two GPUs have direct links, their number is the number of NVLinks of the pair. Otherwise, it is the smaller
# of both GPUs' numbers of links to the switch, as `nvidia-smi topo -m` prints it. Example: GPUs with 12 and 11 links to
# the switch are a pair with NV11. In a virtual machine, the switch may be hidden, so a link to an unknown device counts
# as a link to the switch (both rules: HAMi, as in its pull request 2103).
#
# The links are read once per GPU, not once per pair. With a slow driver, this saves half a second.

NEAREST_NODE = 0
"""NVML_AFFINITY_SCOPE_NODE."""

GPU_KIND = 0
NPU_KIND = 1
SWITCH_KIND = 2
"""nvmlIntNvLinkDeviceType_t."""


class End(NamedTuple):
    """The remote end of an NVLink."""

    address: str | None
    """PCI address. None: not reported."""
    kind: int | None
    """GPU_KIND, NPU_KIND, SWITCH_KIND, or another number. None: not reported."""
    up: bool = True
    """False: the GPU has the link, but it is not enabled, and its remote end is not read."""


DOWN = End(None, None, up=False)


@dataclass(frozen=True)
class NvLinkTable:
    """The NVLinks of a machine."""

    pairs: Mapping[tuple[DeviceID, DeviceID], int]
    """Number of NVLinks of each pair that has any, with the pair in the order of the GPUs."""
    to_switch: Mapping[DeviceID, int]
    findings: tuple[str, ...]
    down: Mapping[DeviceID, int] = field(default_factory=dict)
    """GPU -> its links that are not up."""


def read_ends(nvml: Library, device: Handle) -> list[End]:
    """Reads the NVLinks of a GPU. NVML reports an error for a link that the GPU does not have. Raises CallFailed."""
    count = nvml.fields(device, (NVLINK_COUNT,)).get(NVLINK_COUNT, MOST_NVLINKS)
    ends = []
    for link in range(min(count, MOST_NVLINKS)):
        state = nvml.number("nvmlDeviceGetNvLinkState", device, link)
        if state is not None and state != 1:
            ends.append(DOWN)
        elif state is not None:
            remote = nvml.maybe("nvmlDeviceGetNvLinkRemotePciInfo", device, link)
            kind = nvml.number("nvmlDeviceGetNvLinkRemoteDeviceType", device, link)
            ends.append(End(sysfs_address(remote), kind))
    return ends


def pair_ends(ends: Mapping[DeviceID, Sequence[End]], addresses: Mapping[DeviceID, str]) -> NvLinkTable:
    """Combines the ends that each GPU reports into NVLinks between GPUs. `addresses`: the known PCI addresses."""
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
    return NvLinkTable(pairs=pairs, to_switch=dict(to_switch), findings=tuple(findings), down=down)


# The MIG profiles of a GPU, and the placements of its instances.
#
# NVML numbers the profiles of all architectures; each GPU has some of them. Only privileged users can read placements:
# for other users, no profiles are returned, and no instance has a placement. For drivers that do not name profiles, no
# profiles are returned either.
#
# Source: nvidia-ml-py 13.615.71, nvmlGpuInstanceProfileInfo_v2_t; HAMi 4707fb02 for the cores of a profile.


KINDS = 18
"""NVML_GPU_INSTANCE_PROFILE_COUNT: the number of profiles in NVML."""
MOST_PLACEMENTS = 64
"""Maximum number of placements of one profile: eight times as many as GPUs have."""

NAMED = re.compile(r"(?:\d+c\.)?\d+g\.\d+gb(?:[+-][a-z.]+)*")
"""The profile in the name of an instance, or in that of a profile: `1g.10gb+me`."""


class InstanceSlices(Structure):
    """nvmlGpuInstancePlacement_t."""

    _fields_ = (("start", c_uint), ("size", c_uint))


def _read_profiles(nvml: Library, device: Handle, total: int | None) -> tuple[MigProfile, ...]:
    asked = (nvml.maybe("nvmlDeviceGetGpuInstanceProfileInfo", device, kind) for kind in range(KINDS))
    infos = [info for info in asked if info is not None]
    whole = max((int(info.multiprocessorCount) for info in infos), default=0)
    found: dict[str, MigProfile] = {}
    for info in infos:
        slots = (InstanceSlices * MOST_PLACEMENTS)()
        count = c_uint(MOST_PLACEMENTS)
        answer = nvml.maybe("nvmlDeviceGetGpuInstancePossiblePlacements", device, info.id, slots, byref(count))
        places = () if answer is None else tuple(MigPlacement(start=s.start, size=s.size) for s in slots[: count.value])
        memory = int(info.memorySizeMB) << 20
        slices = int(info.sliceCount)
        named = NAMED.search(info.name)
        name = named[0] if named else _make_profile_name(slices, slices, memory, total)
        if not places or name in found:
            continue
        cores = -(-int(info.multiprocessorCount) * 100 // whole) if whole else 0
        found[name] = MigProfile(name=name, memory=memory, slices=slices, cores=cores, placements=places)
    return tuple(found.values())


def _read_placement(nvml: Library, device: Handle, gpu_instance: int) -> MigPlacement | None:
    try:
        instance = nvml.maybe("nvmlDeviceGetGpuInstanceById", device, gpu_instance)
        info = None if instance is None else nvml.maybe("nvmlGpuInstanceGetInfo", instance)
    except CallFailed as error:
        if error.code == NOT_FOUND:  # not every container may see all instances
            return None
        raise
    return None if info is None else MigPlacement(start=info.placement.start, size=info.placement.size)


def _make_profile_name(gpu_slices: int, compute_slices: int, memory: int, total: int | None) -> str:
    """The name of a profile without a name from the driver. Memory is rounded up to eighths (go-nvlib, mig_profile)."""
    whole = -(-(total or memory) // GIB)
    eighths = -(-memory * 8 // (total or memory)) if memory else 0
    # `1g.10gb`; `1c.2g.20gb` is a compute instance that is smaller than its GPU instance
    part = f"{compute_slices}c." if compute_slices != gpu_slices else ""
    return f"{part}{gpu_slices}g.{round(whole * eighths / 8)}gb"


# The NVLink fabric of a GPU, as nvmlDeviceGetGpuFabricInfoV reports it. Constants: NVML as in nvidia-ml-py 13.615.71.


NOT_STARTED = 1
IN_PROGRESS = 2
COMPLETED = 3
"""nvmlGpuFabricState_t; 0 is not supported. Only `COMPLETED` has a status, a cluster and a health."""
TRUE = 1
"""Value of a boolean field of the healthMask; 0 is not supported, 2 is false."""
CONFIGURED = 1
"""The largest value of the field INCORRECT_CONFIGURATION that is not an error; 0 is not supported."""


def _joined_fabric(info: Any) -> Fabric | None:
    # the cluster of a domain within the node is all zeros
    if info is None or info.state != COMPLETED or info.status != 0 or not any(info.clusterUuid):
        return None
    return Fabric(cluster=str(UUID(bytes=bytes(info.clusterUuid))), clique=int(info.cliqueId))


def fabric_state(info: Any) -> str:
    """`Gpu.fabric_state`; empty if the fabric works or is not supported."""
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
"""Values of the field `RECOVERY_ACTION`; 0 means none."""
RESETS = {1, 2, 4}
"""Recovery actions that end with a reset."""

MOST_READS = 4
"""Attempts to read the MIG instances of a GPU. If they change during each, the last one counts."""
_INSTANCE = re.compile(r"[A-Za-z0-9_.:/-]{1,96}")


class Judged(NamedTuple):
    """One GPU of a reading, with its health and findings."""

    gpu: Gpu
    health: DeviceHealth
    findings: tuple[str, ...]
    awaits_reset: bool = False
    answers: bool = True
    """Whether it answered all calls."""


Profiles = dict[DeviceID, tuple[MigProfile, ...]]
"""GPU -> its MIG profiles. They never change, and reading them takes about twenty calls."""


def read_gpu(nvml: Library, index: int, uuid: DeviceID, device: Handle, files: Topology, profiles: Profiles) -> Judged:
    """Reads a GPU without its NVLinks, and adds its MIG profiles to `profiles`. Raises CallFailed."""
    address = sysfs_address(nvml.maybe("nvmlDeviceGetPciInfo", device))
    seen = next((gpu for gpu in files.gpus if address is not None and gpu.pci == address), Gpu(id=uuid, index=index))
    nodes = set(files.node_ids)
    cpus = {cpu.id for cpu in files.cpus}
    size = nvml.maybe("nvmlDeviceGetMemoryInfo", device)
    memory = None if size is None else int(size.total)
    memory_node = nvml.number("nvmlDeviceGetNumaNodeId", device)
    mig, mig_findings = _read_mig(nvml, device, memory) if nvml.mig_enabled(device) else (None, ())
    if mig is not None and uuid not in profiles:
        profiles[uuid] = _read_profiles(nvml, device, memory)
    fabric = nvml.fabric(device)
    gpu = Gpu(
        id=uuid,
        index=index,
        name=clean(nvml.maybe("nvmlDeviceGetName", device) or ""),
        minor=nvml.number("nvmlDeviceGetMinorNumber", device),
        pci=address,
        bridge=seen.bridge,
        memory=memory if memory is not None and memory <= LARGEST_MEMORY else seen.memory,
        cpu_affinity=_read_affinity(nvml, cpus, "nvmlDeviceGetCpuAffinity", device) or seen.cpu_affinity,
        numa_affinity=seen.numa_affinity
        or _read_affinity(nvml, nodes, "nvmlDeviceGetMemoryAffinity", device, NEAREST_NODE),
        memory_node=memory_node if memory_node in nodes else seen.memory_node,
        fabric=_joined_fabric(fabric),
        fabric_state=fabric_state(fabric),
        mig=mig,
        mig_profiles=profiles[uuid] if mig is not None else (),
    )
    health, findings, awaits_reset = judge(nvml, index, device)
    return Judged(gpu, health, (*mig_findings, *findings), awaits_reset)


def _read_affinity(
    nvml: Library, known: Collection[int], function: str, device: Handle, *scope: int
) -> tuple[int, ...]:
    """Reads a mask of 64-bit words, the lowest first. Returns those of its ids that are `known`. Raises CallFailed."""
    words = nvml.maybe(function, device, max(known, default=0) // 64 + 1, *scope)
    return () if words is None else tuple(i for i in sorted(known) if words[i // 64] >> i % 64 & 1)


def judge(nvml: Library, index: int, device: Handle) -> tuple[DeviceHealth, tuple[str, ...], bool]:
    """Returns the health that the driver reports for the GPU, findings, and whether the GPU needs a reset."""
    fields = nvml.fields(device, (RECOVERY_ACTION, REMAPPING_FAILED, REMAPPING_PENDING))
    # only a finding, because the GPU continues to work until its next reset
    findings = (f"GPU {index} has memory rows to remap at its next reset",) if fields.get(REMAPPING_PENDING) else ()
    action = fields.get(RECOVERY_ACTION, 0)
    if action:
        reason = RECOVERY.get(action, f"the driver asks for recovery action {action}")
        return unhealthy(reason), findings, action in RESETS
    if fields.get(REMAPPING_FAILED):
        return unhealthy("a defective memory row could not be remapped"), findings, False
    return HEALTHY, findings, False


def _read_mig(nvml: Library, device: Handle, total: int | None) -> tuple[tuple[MigDevice, ...], tuple[str, ...]]:
    # NVML may renumber the instances when one is destroyed, and handles may then name other instances (nvml.h,
    # nvmlDeviceGetMigDeviceHandleByIndex). So they are read again if they have changed meanwhile.
    uuids = _uuid_by_index(nvml, device)
    for _ in range(MOST_READS):
        found = _read_instances(nvml, device, total)
        before = uuids
        uuids = _uuid_by_index(nvml, device)
        if uuids == before:
            break
    return found


def _uuid_by_index(nvml: Library, device: Handle) -> dict[int, str]:
    found = {}
    for index, handle in nvml.mig_handles(device).items():
        try:
            found[index] = nvml.uuid(handle)
        except CallFailed as error:
            if error.code not in {NOT_FOUND, *UNREPORTED}:
                raise
    return found


def _read_instances(nvml: Library, device: Handle, total: int | None) -> tuple[tuple[MigDevice, ...], tuple[str, ...]]:
    instances: list[MigDevice] = []
    findings = []
    for index, handle in nvml.mig_handles(device).items():
        try:
            instance = _read_instance(nvml, device, index, handle, total)
            if not _INSTANCE.fullmatch(instance.uuid) or instance.uuid in {other.uuid for other in instances}:
                findings.append(f"a MIG instance is left out: {quoted([instance.uuid])} names no device, or two")
            else:
                instances.append(instance)
        except CallFailed as error:
            if error.code not in {NOT_FOUND, *UNREPORTED}:  # one that is not found has been destroyed meanwhile
                raise
            findings.append(f"a MIG instance that does not report all values is left out: {error}")
    return tuple(sorted(instances, key=lambda mig: (mig.gpu_instance, mig.compute_instance))), tuple(findings)


def _read_instance(nvml: Library, device: Handle, index: int, handle: Handle, total: int | None) -> MigDevice:
    size = nvml.ask("nvmlDeviceGetAttributes", handle)
    memory = int(size.memorySizeMB) << 20
    named = NAMED.search(nvml.maybe("nvmlDeviceGetName", handle) or "")
    slices = int(size.gpuInstanceSliceCount), int(size.computeInstanceSliceCount)
    gpu_instance = int(nvml.ask("nvmlDeviceGetGpuInstanceId", handle))
    return MigDevice(
        uuid=DeviceID(nvml.uuid(handle)),
        profile=named[0] if named else _make_profile_name(*slices, memory, total),
        gpu_instance=gpu_instance,
        compute_instance=int(nvml.ask("nvmlDeviceGetComputeInstanceId", handle)),
        memory=memory,
        index=index,
        placement=_read_placement(nvml, device, gpu_instance),
    )
