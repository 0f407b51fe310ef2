"""
What a GPU in MIG mode can be divided into, and where its instances are.

NVML counts the profiles of all architectures; a GPU has some of them. Where instances can be, and where they are, it tells
to privileged users alone: without the right to know there are no profiles, and no instance has a placement. Drivers that
do not name profiles do not tell of them in this way, and have none here.

Source: nvidia-ml-py 13.615.71, nvmlGpuInstanceProfileInfo_v2_t; HAMi 4707fb02 for the cores of a profile.
"""

import re
from ctypes import Structure, byref, c_uint

from topoalign.core.model.topology.mig import MigPlacement, MigProfile
from topoalign.discovery.drivers.nvml.codes import NOT_FOUND
from topoalign.discovery.drivers.nvml.library import CallFailed, Handle, Library

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
