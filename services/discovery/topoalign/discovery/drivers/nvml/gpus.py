"""
One GPU, from NVML and /sys together.

NVML has its identity; the files have its place, since they show the bridges above it and NVML does not. For the NUMA
node the files take precedence: they come from the kernel, while NVML's affinity can name every node of the machine.
"""

import re
from collections.abc import Collection
from typing import NamedTuple

from topoalign.core.model.errors import quoted
from topoalign.core.model.events import DeviceHealth
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.mig import MigDevice, MigProfile
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.core.model.topology.validate import LARGEST_MEMORY
from topoalign.discovery.drivers.health import HEALTHY, unhealthy
from topoalign.discovery.drivers.nvml.codes import NOT_FOUND, NOT_TOLD
from topoalign.discovery.drivers.nvml.fabric import fabric_state, joined_fabric
from topoalign.discovery.drivers.nvml.library import (
    RECOVERY_ACTION,
    REMAPPING_FAILED,
    REMAPPING_PENDING,
    CallFailed,
    Handle,
    Library,
)
from topoalign.discovery.drivers.nvml.mig_profiles import NAMED, profile_name, read_placement, read_profiles

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
