"""Checks of what a topology tells of MIG: unique names and instances, and sizes that a GPU can have."""

from topoalign.core.model.errors import InvalidField, quoted
from topoalign.core.model.topology.mig import MigPlacement
from topoalign.core.model.topology.model import Gpu

MOST_PROFILES = 64
"""NVML counts 18."""
MOST_SLICES = 64
"""Of a GPU, and as many places has a profile: eight times what GPUs have."""


def check_mig(path: str, gpu: Gpu, most_memory: int) -> None:
    """Raises InvalidField for a GPU at this path whose instances or profiles cannot be so."""
    check_once(f"{path}.mig", [instance.uuid for instance in gpu.mig or ()])
    for i, instance in enumerate(gpu.mig or ()):
        if instance.placement is not None:
            check_placement(f"{path}.mig[{i}].placement", instance.placement)
    profiles = gpu.mig_profiles
    where = f"{path}.mig_profiles"
    if len(profiles) > MOST_PROFILES:
        raise InvalidField(where, f"{len(profiles)} of them", f"a GPU has at most {MOST_PROFILES}")
    check_once(where, [profile.name for profile in profiles])
    for i, profile in enumerate(profiles):
        if not (
            0 <= profile.memory <= most_memory and 0 <= profile.slices <= MOST_SLICES and 0 <= profile.cores <= 100
        ):
            finding = f"{quoted([profile.name])} has a size that no instance has"
            raise InvalidField(f"{where}[{i}]", finding, "give bytes, compute slices and hundredths of the GPU")
        if not 1 <= len(profile.name) <= 128 or not profile.name.isprintable():
            raise InvalidField(f"{where}[{i}].name", f"{quoted([profile.name])} is no name", "write it as 1g.10gb")
        if len(profile.placements) > MOST_SLICES:
            raise InvalidField(f"{where}[{i}].placements", "too many", f"a profile has at most {MOST_SLICES}")
        for place, placement in enumerate(profile.placements):
            check_placement(f"{where}[{i}].placements[{place}]", placement)


def check_placement(path: str, placement: MigPlacement) -> None:
    """Raises InvalidField for slices that no GPU has."""
    if not (placement.start >= 0 and placement.size >= 1 and placement.start + placement.size <= MOST_SLICES):
        finding = f"{placement.size} slices from {placement.start} on"
        raise InvalidField(path, finding, f"name slices of 0 to {MOST_SLICES - 1}, one at least")


def check_once(path: str, names: list[str]) -> None:
    """Raises InvalidField for a name that is there twice."""
    if twice := {name for name in names if names.count(name) > 1}:
        raise InvalidField(path, f"{quoted(sorted(twice))} is there twice", "name each once")
