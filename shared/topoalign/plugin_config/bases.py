"""
Lists the devices that can be offered, before any sharing: whole GPUs, MIG instances, NICs, virtual functions.

With the MIG strategies `none` and `dynamic`, every GPU is offered as a whole. With `single` and `mixed`, a GPU in MIG
mode is offered as its instances. `mixed` makes each profile a separate resource, and leaves out instances that have
only a part of the compute units of their slice. `single` names all instances `nvidia.com/gpu`, so all must have the
same profile. If they differ, NVIDIA's device plugin (v0.20.0) does not start, and topoalign offers no GPUs. If a
running node gets into this state, it continues to offer those devices that it offered before and that still exist.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from topoalign.core.model.errors import InvalidField, clean, quoted
from topoalign.core.model.ids import GPU, NIC, DeviceID, ResourceName
from topoalign.core.model.topology.device_offers import LimitedBy
from topoalign.core.model.topology.mig import MigDevice
from topoalign.core.model.topology.model import Gpu, Nic, Topology
from topoalign.plugin_config import resource_names
from topoalign.plugin_config.checks import MIG_PREFIX
from topoalign.plugin_config.configuration import Configuration, Findings, GpuEntry, MigEntry, NicEntry

_PART_OF_COMPUTE = re.compile(r"[0-9]+c\.")
STRATEGY = "flags.migStrategy"


class Base(NamedTuple):
    """A device and the resource that it is offered as."""

    id: DeviceID
    resource: ResourceName
    part: bool = False
    """Whether it is a part of a GPU or of a NIC."""
    reference: str = ""
    """Its other name in lists of devices, from NVML's indexes: `3`, or `3:0` for a MIG instance. Empty: unknown."""


def gpu_bases(
    topology: Topology, configuration: Configuration, before: Collection[DeviceID], findings: Findings
) -> list[Base]:
    """Whole GPUs and MIG instances in the hardware's order. `before`: those offered so far by this configuration."""
    resources = configuration.resources
    strategy = configuration.flags.mig_strategy
    gpus = list(chosen_gpus(topology, resources.gpus, findings))
    if strategy == "none":
        divided = [f"GPU {gpu.index}" for gpu, _ in gpus if gpu.mig is not None]
        if divided:
            findings.add(STRATEGY, f"none offers GPUs that are in MIG mode as a whole: {', '.join(divided)}")
    if strategy in ("none", "dynamic"):
        if resources.mig:
            findings.add("resources.mig", f"has no effect: {STRATEGY} is {strategy}")
        return [Base(gpu.id, resource, reference=str(gpu.index)) for gpu, resource in gpus]
    instances = [instance for gpu in topology.gpus for instance in gpu.mig or ()]
    for place, choice in enumerate(resources.mig):
        if not any(chooses_instance(choice, instance) for instance in instances):
            findings.add(f"resources.mig[{place}]", "fits no MIG instance of this node")
    found = [base for gpu, resource in gpus for base in of_gpu(gpu, resource, configuration, findings)]
    unlike = why_unlike([gpu for gpu, _ in gpus]) if strategy == "single" else None
    if unlike is None:
        return found
    kept = [base for base in found if base.id in before]
    meanwhile = f"{len(kept)} devices that were offered before stay so" if kept else "no GPU is offered"
    findings.add(
        STRATEGY,
        f"single needs all GPUs alike, and {unlike}: meanwhile {meanwhile}",
        "make the same MIG instances on all GPUs, use mixed, or exclude a GPU in resources.gpus",
        severe=True,
    )
    return kept


def chosen_gpus(
    topology: Topology, choices: Sequence[GpuEntry], findings: Findings
) -> Iterator[tuple[Gpu, ResourceName]]:
    """The GPUs that are not excluded, each with the resource that it would have as a whole GPU."""
    used = set()
    for gpu in topology.gpus:
        place = next((place for place, choice in enumerate(choices) if chooses_gpu(choice, gpu)), None)
        used.add(place)
        if place is None:
            yield gpu, GPU
        elif not choices[place].exclude:
            yield gpu, ResourceName(choices[place].name)
    for place, _ in enumerate(choices):
        if place not in used:
            findings.add(f"resources.gpus[{place}]", "decides for no GPU of this node")


def of_gpu(gpu: Gpu, resource: ResourceName, configuration: Configuration, findings: Findings) -> Iterator[Base]:
    """Lists the GPU under `single` and `mixed`, or its instances if it is in MIG mode."""
    if gpu.mig is None:
        yield Base(gpu.id, resource, reference=str(gpu.index))
        return
    if not gpu.mig:
        remedy = "make instances with nvidia-smi mig, or switch its MIG mode off"
        findings.add(STRATEGY, f"GPU {gpu.index} is in MIG mode and has no instance: not offered", remedy)
    for instance in gpu.mig:
        choice = next((each for each in configuration.resources.mig if chooses_instance(each, instance)), None)
        if choice is not None:
            name = None if choice.exclude else ResourceName(choice.name)
        elif configuration.flags.mig_strategy == "single":
            name = GPU
        else:
            name = of_profile(instance.profile, gpu, findings)
        if name is not None:
            reference = "" if instance.index is None else f"{gpu.index}:{instance.index}"
            yield Base(instance.uuid, name, part=True, reference=reference)


def of_profile(profile: str, gpu: Gpu, findings: Findings) -> ResourceName | None:
    """The resource of a profile, such as `nvidia.com/mig-1g.10gb`; None if `mixed` does not offer the profile."""
    where = f"MIG instance {clean(profile)} of GPU {gpu.index}"
    remedy = "give it a name in resources.mig to offer it"
    if has_part_of_compute(profile):
        findings.add(STRATEGY, f"{where} has a part of its slice's compute units: not offered", remedy)
        return None
    try:
        return resource_names.resource(STRATEGY, f"{MIG_PREFIX}{profile.replace('+', '.')}")
    except InvalidField:
        findings.add(STRATEGY, f"{where} cannot be the name of a resource: not offered", remedy)
        return None


def has_part_of_compute(profile: str) -> bool:
    """Whether an instance has only a part of its slice's compute units: `1c.3g.40gb`."""
    return _PART_OF_COMPUTE.match(profile) is not None


def why_unlike(gpus: Sequence[Gpu]) -> str | None:
    """The difference between the devices of these GPUs; None if all are whole, or all are instances of one profile."""
    if all(gpu.mig is None for gpu in gpus):
        return None
    empty = next((gpu for gpu in gpus if not gpu.mig), None)
    if empty is not None:
        return f"GPU {empty.index} has no MIG instance"
    profiles = sorted({instance.profile for gpu in gpus for instance in gpu.mig or ()})
    return None if len(profiles) == 1 else f"there are instances of {quoted(profiles)}"


def nic_bases(topology: Topology, choices: Sequence[NicEntry], findings: Findings) -> Iterator[Base]:
    """Lists NICs and virtual functions in the hardware's order."""
    used = set()
    for nic in topology.nics:
        place = next((place for place, choice in enumerate(choices) if chooses_nic(choice, nic)), None)
        used.add(place)
        if place is None:
            yield Base(nic.id, NIC, reference=str(nic.index))
        elif choices[place].virtual_functions:
            if not nic.virtual_functions:
                remedy = "make some through its sriov_numvfs in /sys"
                findings.add(f"nics[{place}]", f"{clean(nic.id)} has no virtual function: not offered", remedy)
            for function in nic.virtual_functions:
                yield Base(DeviceID(function.pci), ResourceName(choices[place].name), part=True)
        elif not choices[place].exclude:
            yield Base(nic.id, ResourceName(choices[place].name), reference=str(nic.index))
    for place, _ in enumerate(choices):
        if place not in used:
            findings.add(f"nics[{place}]", "decides for no NIC of this node")


def chooses_gpu(choice: GpuEntry, gpu: Gpu) -> bool:
    """Whether an entry of `resources.gpus` matches this GPU."""
    if choice.pattern:
        return resource_names.found_in(choice.pattern, gpu.name)
    return gpu.id in choice.uuids or gpu.index in choice.indexes


def chooses_instance(choice: MigEntry, instance: MigDevice) -> bool:
    """Whether an entry of `resources.mig` matches this MIG instance."""
    if choice.pattern:
        return resource_names.matches_pattern(choice.pattern, instance.profile)
    return instance.uuid in choice.uuids


def chooses_nic(choice: NicEntry, nic: Nic) -> bool:
    """Whether an entry of `nics` matches this NIC, by name or PCI address."""
    addresses = [nic.pci] if nic.pci is not None else []  # the pattern `*` matches an empty text, too
    return any(resource_names.matches_pattern(name, nic.id) for name in choice.names) or any(
        resource_names.matches_pattern(pattern, address) for pattern in choice.pci for address in addresses
    )


def why_no_instances(gpu: Gpu) -> tuple[str, str] | None:
    """Why the slots of a GPU cannot become MIG instances, and the remedy; None: they can."""
    if gpu.mig is None:
        return "are not in MIG mode", "switch it on with nvidia-smi -mig 1, or give them another name in resources.gpus"
    if not gpu.mig_profiles or any(each.placement is None for each in gpu.mig):
        return (
            "do not report where MIG instances can be",
            "run discovery and allocator as root, to which the driver reports it",
        )
    return None


def why_no_slots(gpu: Gpu, base: Base, limiter: LimitedBy) -> tuple[str, str] | None:
    """
    Why a GPU, or a MIG instance of it, is not offered in slots, and the remedy; None: it is. HAMi-core identifies a GPU
    by its NVML index, and a MIG instance has none. MPS daemons serve whole GPUs. An instance with only a part of the
    compute units of its slice shares its memory with other instances.
    """
    rename = "or give them another name in resources"
    if not base.part:
        if gpu.mig is not None:
            return (
                "are in MIG mode",
                f"offer their instances by {STRATEGY} single or mixed, switch MIG mode off, {rename}",
            )
        return None if gpu.memory is not None else ("have no memory that is known", "exclude them in resources.gpus")
    if any(each.uuid == base.id and has_part_of_compute(each.profile) for each in gpu.mig or ()):
        return "share the memory of their GPU instance with others", "make instances with all of its compute units"
    if limiter in ("hami-core", "mps"):
        called = {"hami-core": "HAMi-core", "mps": "MPS"}[limiter]
        return f"are MIG instances, which {called} does not limit", "leave the limiter out, or switch MIG mode off"
    return None
