"""
Describes a GPU and a share of it in HAMi's amounts, which the checks, scores and orders of this package compare.

Partial MiB count against the request: what a GPU has is rounded down, what is held is rounded up. An unknown NUMA node
counts as node 0, as upstream registers it.
"""

import msgspec

from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.mig import MigPlacement, MigProfile
from topoalign.core.sharing.shared_gpus import SharedGpu

MIB = 1 << 20


class HamiGpuUsage(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU, and what of it is used. More can be used than it has."""

    uuid: DeviceID
    index: int
    """NVML's."""
    numa: int
    type: str
    """The model; a request is for GPUs whose type contains its vendor."""
    healthy: bool
    mode: str = ""
    """`hami-core`, `mig` or `mps`."""
    slots: int
    used_slots: int = 0
    memory: int
    """MiB."""
    used_memory: int = 0
    """MiB."""
    cores: int
    used_cores: int = 0
    profiles: tuple[MigProfile, ...] = ()
    """Of a GPU in mode `mig`: the instances that it can be partitioned into."""
    instances: tuple[MigPlacement, ...] = ()
    """Of a GPU in mode `mig`: the slices that instances occupy."""


class HamiShare(msgspec.Struct, frozen=True, kw_only=True):
    """What one container has of one GPU."""

    uuid: DeviceID
    memory: int
    """MiB."""
    cores: int
    profile: str = ""
    """Name of the MIG profile. Empty: the GPU is not in mode `mig`, or the instance is not chosen yet."""
    placement: MigPlacement | None = None


def to_hami_usage(
    gpu: SharedGpu, mode: str = "", profiles: tuple[MigProfile, ...] = (), instances: tuple[MigPlacement, ...] = ()
) -> HamiGpuUsage:
    """The GPU in HAMi's amounts."""
    return HamiGpuUsage(
        uuid=gpu.device,
        index=gpu.index,
        numa=gpu.numa_node or 0,
        type=gpu.model,
        healthy=gpu.usable,
        mode=mode,
        slots=gpu.all_slots,
        used_slots=gpu.sharers,
        memory=gpu.offered.memory // MIB,
        used_memory=-(-gpu.held.memory // MIB),
        cores=gpu.offered.cores,
        used_cores=gpu.held.cores,
        profiles=profiles,
        instances=instances,
    )


def with_share(gpu: HamiGpuUsage, share: HamiShare) -> HamiGpuUsage:
    """The GPU with one more share held of it."""
    placed = () if share.placement is None else (share.placement,)
    return msgspec.structs.replace(
        gpu,
        used_slots=gpu.used_slots + 1,
        used_memory=gpu.used_memory + share.memory,
        used_cores=gpu.used_cores + share.cores,
        instances=gpu.instances + placed,
    )
