"""
Checks of a configuration beyond field types: names that Kubernetes accepts, one selecting key per entry, no duplicates.

A resource has one meaning: it is shared by one section of `sharing`, and it stands for GPUs, for NICs, or for one kind
of amount. If the kubelet got a resource of amounts as devices, it would allocate devices for a request for an amount.
"""

import re
from collections.abc import Sequence
from typing import TypeVar

from msgspec.structs import replace

from topoalign.core.model.errors import InvalidField, quoted
from topoalign.core.model.ids import GPU, NIC
from topoalign.plugin_config import resource_names
from topoalign.plugin_config.configuration import (
    Configuration,
    Flags,
    GpuEntry,
    GpuSlots,
    MigEntry,
    Mps,
    NicEntry,
    ResourcesSection,
    SharedResource,
    SharingSection,
    TimeSlicing,
    Units,
)

MIG_PREFIX = f"{resource_names.GPU_DOMAIN}/mig-"
"""The prefix of the resources of MIG instances under the strategy `mixed`."""

S = TypeVar("S", TimeSlicing, Mps)
E = TypeVar("E", GpuEntry, MigEntry, NicEntry)

LONGEST_VCUDA_ROOT = 57
"""Bytes. Linux allows 107 for a socket's path; the part below the root has 50 (`/units-<32 digits>/vcuda.sock`)."""

SLOTS = "sharing.slots"
AMOUNTS = ("memory", "percentage", "cores", "priority")
"""The fields of `sharing.slots` that name resources of amounts."""

MPS_DIRECTORY = "where topoalign mps has its pipes, such as /run/nvidia/mps"

_REFERENCE = re.compile(r"[0-9]{1,5}(?::[0-9]{1,5})?", re.ASCII)
"""An index of a GPU, or of a GPU and of one of its MIG instances."""


def validate_configuration(configuration: Configuration) -> Configuration:
    """Checks a configuration and qualifies all names by their domain. Raises InvalidField with the path of a wrong field."""
    check_flags(configuration.flags)
    gpus = [
        qualify_entry(f"resources.gpus[{place}]", each, ("pattern", "uuids", "indexes"))
        for place, each in enumerate(configuration.resources.gpus)
    ]
    mig = [
        qualify_entry(f"resources.mig[{place}]", each, ("pattern", "uuids"))
        for place, each in enumerate(configuration.resources.mig)
    ]
    nics = [qualify_nic(f"nics[{place}]", each) for place, each in enumerate(configuration.nics)]
    check_no_duplicates("imex.channelIDs", configuration.imex.channel_ids)
    sharing = SharingSection(
        time_slicing=qualify_replicated("sharing.timeSlicing", configuration.sharing.time_slicing),
        mps=qualify_replicated("sharing.mps", configuration.sharing.mps),
        units=qualify_units(configuration.sharing.units),
        limiter=configuration.sharing.limiter,
        slots=qualify_slots(configuration.sharing),
    )
    resources = ResourcesSection(gpus=tuple(gpus), mig=tuple(mig))
    found = replace(configuration, resources=resources, nics=tuple(nics), sharing=sharing)
    check_mps(found)
    check_dynamic(found)
    check_limiter(found)
    check_shared_once(sharing)
    check_meanings(found)
    return found


def check_flags(flags: Flags) -> None:
    """
    Raises InvalidField for paths and keys without effect in a container: a container runtime ignores unknown
    annotations, and `/a/../b` is another directory than `/b` if `/a` is a symbolic link.
    """
    limiters = {
        "flags.mpsRoot": flags.mps_root or "/",
        "flags.vcudaRoot": flags.vcuda_root or "/",
        "flags.vcudaLibraries": flags.vcuda_libraries or "/",
        "flags.hamiRoot": flags.hami_root or "/",
    }
    paths = {
        "flags.nvidiaDriverRoot": flags.nvidia_driver_root,
        "flags.nvidiaDevRoot": flags.nvidia_dev_root or "/",
        **limiters,
        "flags.plugin.containerDriverRoot": flags.plugin.container_driver_root,
        "flags.plugin.nvidiaCDIHookPath": flags.plugin.nvidia_cdi_hook_path or "/",
    }
    for field, path in paths.items():
        if not (path.startswith("/") and path.isprintable()):
            raise InvalidField(field, f"{quoted([path])} is no absolute path", "begin it with /, or leave it out")
    for field, path in limiters.items():
        if not {"", ".", ".."}.isdisjoint(path.rstrip("/").split("/")[1:]):
            finding = f"{quoted([path])} may be another directory to the agent than to the host"
            raise InvalidField(field, finding, "write it without ., .. and //")
    if not flags.plugin.device_list_strategy:
        remedy = "use envvar, volume-mounts, cdi-annotations or cdi-cri"
        raise InvalidField("flags.plugin.deviceListStrategy", "is empty", remedy)
    prefix = flags.plugin.cdi_annotation_prefix
    if "/" not in prefix[1:]:
        raise InvalidField(
            "flags.plugin.cdiAnnotationPrefix", f"{quoted([prefix])} begins no annotation", "write it as cdi.k8s.io/"
        )


def qualify_entry(path: str, entry: E, selectors: Sequence[str], domain: str = resource_names.GPU_DOMAIN) -> E:
    """
    The entry with the complete name of its resource, or without a name if it excludes devices. Raises InvalidField
    unless there is exactly one selector, because two would be ambiguous between "both" and "either".
    """
    given = [name for name in selectors if getattr(entry, name)]
    if len(given) != 1:
        finding = f"chooses by {' and '.join(given)}" if given else "chooses no device"
        raise InvalidField(path, finding, f"give one of {', '.join(selectors)}; several entries may have the same name")
    if bool(entry.name) == entry.exclude:
        finding = "has a name and is excluded" if entry.exclude else "has no name"
        raise InvalidField(f"{path}.name", finding, "give the resource a name, or set `exclude: true`")
    return replace(entry, name=resource_names.resource(f"{path}.name", entry.name, domain) if entry.name else "")


def qualify_nic(path: str, entry: NicEntry) -> NicEntry:
    """The entry with its complete resource name. Raises InvalidField with its path."""
    if entry.virtual_functions and entry.exclude:
        raise InvalidField(f"{path}.exclude", "excludes what virtualFunctions offers", "keep one of them")
    return qualify_entry(path, entry, ("names", "pci"), resource_names.NIC_DOMAIN)


def qualify_replicated(path: str, section: S) -> S:
    """The section with complete resource names. Raises InvalidField for a duplicate or missing resource."""
    if section != type(section)() and not section.resources:
        way = path.rpartition(".")[2]
        raise InvalidField(f"{path}.resources", "is missing", f"list the resources to share, or leave {way} out")
    resources: dict[str, SharedResource] = {}
    for place, each in enumerate(section.resources):
        where = f"{path}.resources[{place}]"
        name = resource_names.resource(f"{where}.name", each.name)
        if name in resources:
            raise InvalidField(f"{where}.name", f"{quoted([name])} is there twice", "name each resource once")
        rename = each.rename or (f"{name}{resource_names.SHARED}" if section.rename_by_default else "")
        if isinstance(each.devices, tuple):
            check_references(f"{where}.devices", each.devices)
        rename = resource_names.resource(f"{where}.rename", rename) if rename else ""
        resources[name] = replace(each, name=name, rename=rename)
    return replace(section, resources=tuple(resources.values()))


def qualify_units(units: Units | None) -> Units | None:
    """The section with complete resource names. Raises InvalidField."""
    if units is None:
        return None
    if isinstance(units.devices, tuple):
        check_references("sharing.units.devices", units.devices)
    return replace(
        units,
        name=resource_names.resource("sharing.units.name", units.name),
        cores=resource_names.resource("sharing.units.cores", units.cores),
        memory=resource_names.resource("sharing.units.memory", units.memory),
    )


def qualify_slots(sharing: SharingSection) -> GpuSlots | None:
    """The section with complete resource names. Raises InvalidField."""
    found = sharing.slots
    if found is None:
        return None
    if found.priorities and sharing.limiter != "hami-core":
        remedy = "add sharing.limiter: hami-core, or leave it out"
        raise InvalidField(f"{SLOTS}.priorities", "has an effect with the limiter hami-core alone", remedy)
    names = {each: resource_names.resource(f"{SLOTS}.{each}", getattr(found, each)) for each in ("name", *AMOUNTS)}
    return replace(found, **names)


def check_references(path: str, devices: Sequence[str | int]) -> None:
    """Raises InvalidField unless a list has only indexes, `<GPU>:<MIG instance>` and uuids, each once."""
    if not devices:
        raise InvalidField(path, "is empty", "name devices, or leave it out to share all")
    for place, device in enumerate(map(str, devices)):
        if not _REFERENCE.fullmatch(device) and not (
            1 < len(device) <= 128 and device.isprintable() and "::" not in device and device != "all"
        ):
            raise InvalidField(
                f"{path}[{place}]",
                f"{quoted([device])} names no device",
                "use an index, 0:1 for a MIG instance, or a uuid",
            )
    check_no_duplicates(path, devices)


def check_no_duplicates(path: str, values: Sequence[str | int]) -> None:
    """Raises InvalidField at the first value of a list that is a duplicate."""
    seen: set[str] = set()
    for place, value in enumerate(map(str, values)):
        if value in seen:
            raise InvalidField(f"{path}[{place}]", f"{quoted([value])} is there twice", "name each once")
        seen.add(value)


def check_shared_once(sharing: SharingSection) -> None:
    """Raises InvalidField for a resource that two sections share, or under which two sections offer their shares."""
    section_of: dict[str, str] = {}
    shared: list[tuple[str, str, str]] = []
    for section, resources in (("timeSlicing", sharing.time_slicing.resources), ("mps", sharing.mps.resources)):
        for place, each in enumerate(resources):
            path = f"sharing.{section}.resources[{place}]"
            shared += [(section, f"{path}.name", each.name), (section, f"{path}.rename", each.rename or each.name)]
    if sharing.units is not None:
        shared.append(("units", "sharing.units.name", sharing.units.name))
    if sharing.slots is not None:
        shared.append(("slots", f"{SLOTS}.name", sharing.slots.name))
    for section, path, name in shared:
        if section_of.setdefault(name, section) != section:
            raise InvalidField(
                path,
                f"{quoted([name])} is shared by sharing.{section_of[name]}",
                "share it in one way; resources.gpus can give some GPUs another name",
            )


def check_meanings(found: Configuration) -> None:
    """Raises InvalidField for a resource with two meanings, because a container could get either."""
    meanings = {str(GPU): "GPUs", str(NIC): "NICs"}

    def claim(path: str, name: str, meaning: str) -> None:
        if not name:
            return
        taken = meanings.setdefault(name, "GPUs" if name.startswith(MIG_PREFIX) else meaning)
        if taken != meaning:
            raise InvalidField(path, f"{quoted([name])} is a resource of {taken}", "use another name")

    for place, gpus in enumerate(found.resources.gpus):
        claim(f"resources.gpus[{place}].name", gpus.name, "GPUs")
    for place, instances in enumerate(found.resources.mig):
        claim(f"resources.mig[{place}].name", instances.name, "GPUs")
    for place, nics in enumerate(found.nics):
        claim(f"nics[{place}].name", nics.name, "NICs")
    sharing = found.sharing
    for section, resources in (("timeSlicing", sharing.time_slicing.resources), ("mps", sharing.mps.resources)):
        for place, each in enumerate(resources):
            path = f"sharing.{section}.resources[{place}].rename"
            claim(path, each.rename or each.name, meanings.get(each.name, "GPUs"))
    if sharing.units is not None:
        claim("sharing.units.name", sharing.units.name, "GPUs")
        claim("sharing.units.cores", sharing.units.cores, "units of computing time")
        claim("sharing.units.memory", sharing.units.memory, "units of memory")
    if sharing.slots is not None:
        claim(f"{SLOTS}.name", sharing.slots.name, "GPUs")
        for field in AMOUNTS:
            claim(f"{SLOTS}.{field}", getattr(sharing.slots, field), f"amounts ({field})")


# MPS shares GPUs in equal parts (`sharing.mps`), or limits their units and slots (`sharing.limiter`).


MOST_CLIENTS = 48
"""Maximum number of clients of an MPS server on a GPU of any architecture, and of replicas in NVIDIA's plugin."""


def check_mps(found: Configuration) -> None:
    """Raises InvalidField for what MPS cannot share (NVIDIA's device plugin v0.20.0), or without `flags.mpsRoot`."""
    mps = found.sharing.mps
    if not mps.resources:
        return
    if found.flags.mig_strategy == "mixed":
        raise InvalidField("flags.migStrategy", "mixed cannot be used with sharing.mps", "use none or single")
    check_root("flags.mpsRoot", found.flags.mps_root, "sharing.mps", MPS_DIRECTORY)
    no_gpus = {str(NIC), *(each.name for each in found.nics), *names_of_instances(found)}
    replicas: dict[str, int] = {}
    for place, each in enumerate(mps.resources):
        path = f"sharing.mps.resources[{place}]"
        called = each.rename or each.name
        if not 2 <= each.replicas <= MOST_CLIENTS:
            finding = f"{each.replicas} shares of a GPU by MPS"
            raise InvalidField(f"{path}.replicas", finding, f"use 2 to {MOST_CLIENTS}: a server has no more clients")
        if each.name in no_gpus or each.name.startswith(MIG_PREFIX):
            raise InvalidField(
                f"{path}.name", f"{each.name} is not a resource of whole GPUs", "share it by timeSlicing"
            )
        if replicas.setdefault(called, each.replicas) != each.replicas:
            finding = f"{called} has {replicas[called]} shares of other GPUs, and one daemon has one limit for all"
            raise InvalidField(f"{path}.replicas", finding, "use the same number, or another rename")
        if each.devices != "all" and called == each.name and not mps.fail_requests_greater_than_one:
            finding = "a container could get a share and a whole GPU, which its daemon does not serve"
            raise InvalidField(f"{path}.rename", finding, "give the shares a name of their own")


def check_limiter(found: Configuration) -> None:
    """Raises InvalidField for a limiter without GPUs to limit, for MIG instances, or without its directory."""
    flags = found.flags
    slots = found.sharing.slots
    limiter = found.sharing.limiter
    if (length := len(flags.vcuda_root.rstrip("/").encode())) > LONGEST_VCUDA_ROOT:
        finding = f"has {length} bytes, and the path of a socket in it would be too long"
        raise InvalidField("flags.vcudaRoot", finding, f"use a path of at most {LONGEST_VCUDA_ROOT}")
    if limiter == "none":
        return
    sections = {"vcuda": ("units",), "hami-core": ("slots",), "mps": ("units", "slots")}[limiter]
    if all(getattr(found.sharing, section) is None for section in sections):
        finding = f"{limiter} limits GPUs in {' or '.join(sections)}, and none are offered so"
        remedy = f"add {' or '.join(f'sharing.{section}' for section in sections)}, or leave the limiter out"
        raise InvalidField("sharing.limiter", finding, remedy)
    if slots is not None and limiter != "vcuda":
        if slots.name in names_of_instances(found) or slots.name.startswith(MIG_PREFIX):
            finding = f"{limiter} does not limit MIG instances, which {quoted([slots.name])} is a resource of"
            remedy = "leave the limiter out: an instance keeps its containers from those of other instances"
            raise InvalidField("sharing.limiter", finding, remedy)
        if limiter == "mps" and slots.replicas > MOST_CLIENTS:
            finding = f"{slots.replicas} slots of a GPU by MPS"
            remedy = f"use 2 to {MOST_CLIENTS}: a server has no more clients"
            raise InvalidField(f"{SLOTS}.replicas", finding, remedy)
    field, root, example = {
        "vcuda": ("flags.vcudaRoot", flags.vcuda_root, "that is for this alone: /run/topoalign/vcuda"),
        "hami-core": ("flags.hamiRoot", flags.hami_root, "that is for this alone: /var/lib/topoalign/hami"),
        "mps": ("flags.mpsRoot", flags.mps_root, MPS_DIRECTORY),
    }[limiter]
    check_root(field, root.rstrip("/"), f"the limiter {limiter}", example)


def names_of_instances(found: Configuration) -> set[str]:
    """The names that `resources.mig` gives and `resources.gpus` does not."""
    return {each.name for each in found.resources.mig} - {str(GPU), *(each.name for each in found.resources.gpus)}


def check_root(field: str, root: str, needed_by: str, example: str) -> None:
    """Raises InvalidField if the directory of a limiter is missing."""
    if not root:
        raise InvalidField(field, f"is missing, and {needed_by} needs it", f"name a directory on the host {example}")


def check_dynamic(found: Configuration) -> None:
    """Raises InvalidField for settings that do not work if slots become MIG instances."""
    if found.flags.mig_strategy != "dynamic":
        return
    slots = found.sharing.slots
    path = "flags.migStrategy"
    if slots is None:
        raise InvalidField(path, "dynamic makes MIG instances of slots, and none are offered", "add sharing.slots: {}")
    if (limiter := found.sharing.limiter) in ("hami-core", "mps"):
        raise InvalidField(
            "sharing.limiter", f"{limiter} does not limit MIG instances", "leave it out: the hardware limits them"
        )
    for field, scaling in (("memoryScaling", slots.memory_scaling), ("coreScaling", slots.core_scaling)):
        if scaling != 1:
            raise InvalidField(
                f"{SLOTS}.{field}", "an instance has what it has", "leave it out with migStrategy dynamic"
            )
