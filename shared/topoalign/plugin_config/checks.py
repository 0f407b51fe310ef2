"""
Checks of a configuration beyond the types of its fields: names that Kubernetes accepts, one selecting key per entry, no
duplicates.
"""

import re
from collections.abc import Collection, Sequence
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
"""Bytes: Linux takes 107 of a socket's path, and below the root it has 50, as in `/units-<32 digits>/vcuda.sock`."""

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
        units=None if configuration.sharing.units is None else qualify_units("sharing.units", configuration.sharing),
        limiter=configuration.sharing.limiter,
        slots=qualify_slots(configuration.sharing),
    )
    resources = ResourcesSection(gpus=tuple(gpus), mig=tuple(mig))
    found = replace(configuration, resources=resources, nics=tuple(nics), sharing=sharing)
    check_mps(found)
    check_instances(found)
    check_dynamic(found)
    check_limiter(found)
    check_resources_apart(found)
    return found


def check_flags(flags: Flags) -> None:
    """
    Raises InvalidField for paths and keys without effect in a container: a runtime ignores an annotation that it does not
    know, and `/a/../b` is another directory than `/b` where `/a` is a link.
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
    The entry with the complete name of its resource, or none where it excludes devices. Raises InvalidField unless there is
    exactly one selector, because two would be ambiguous between "both" and "either".
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


def check_limiter(found: Configuration) -> None:
    """Raises InvalidField for a limiter of nothing, and for a directory that no socket can be in."""
    root = found.flags.vcuda_root.rstrip("/")
    if len(root.encode()) > LONGEST_VCUDA_ROOT:
        finding = f"has {len(root.encode())} bytes, and the path of a socket in it would be too long"
        raise InvalidField("flags.vcudaRoot", finding, f"use a path of at most {LONGEST_VCUDA_ROOT}")
    if found.sharing.limiter == "none":
        return
    if found.sharing.limiter == "hami-core":
        check_slot_limiter(found)
    elif found.sharing.limiter == "mps":
        check_mps_limiter(found)
    elif found.sharing.units is None:
        remedy = "add sharing.units, or leave the limiter out"
        raise InvalidField("sharing.limiter", "vcuda limits GPUs in units, and none are offered so", remedy)
    elif not root:
        remedy = "name a directory on the host that is for this alone: /run/topoalign/vcuda"
        raise InvalidField("flags.vcudaRoot", "is missing, and the limiter vcuda needs it", remedy)


def qualify_units(path: str, sharing: SharingSection) -> Units:
    """The section with complete resource names. Raises InvalidField for names that are taken."""
    found = sharing.units
    assert found is not None
    if isinstance(found.devices, tuple):
        check_references(f"{path}.devices", found.devices)
    named = replace(
        found,
        name=resource_names.resource(f"{path}.name", found.name),
        cores=resource_names.resource(f"{path}.cores", found.cores),
        memory=resource_names.resource(f"{path}.memory", found.memory),
    )
    for way, others in (("timeSlicing", sharing.time_slicing), ("mps", sharing.mps)):
        if named.name in {
            resource_names.qualify_name(each.name, resource_names.GPU_DOMAIN) for each in others.resources
        }:
            finding = f"{quoted([named.name])} is shared by sharing.{way}"
            remedy = "share it in one way; resources.gpus can give some GPUs another name"
            raise InvalidField(f"{path}.name", finding, remedy)
    if named.cores == named.memory:
        raise InvalidField(f"{path}.memory", "computing time and memory would be one resource", "use another name")
    return named


def check_references(path: str, devices: Sequence[str | int]) -> None:
    """Raises InvalidField unless a list has indexes, `<GPU>:<MIG instance>` and uuids, each once."""
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


def gpu_names(resources: ResourcesSection) -> dict[str, str]:
    """Path of an entry -> the name it gives."""
    gpus = {f"resources.gpus[{i}]": each.name for i, each in enumerate(resources.gpus) if each.name}
    return gpus | {f"resources.mig[{i}]": each.name for i, each in enumerate(resources.mig) if each.name}


def check_resources_apart(found: Configuration) -> None:
    """Raises InvalidField if a resource would consist of GPUs and NICs: a container could get either."""
    nics = {str(NIC), *(choice.name for choice in found.nics if choice.name)}
    for path, name in gpu_names(found.resources).items():
        if name == NIC:
            raise InvalidField(f"{path}.name", f"{NIC} is a resource of NICs", "use another name")
    gpus = {str(GPU), *gpu_names(found.resources).values()}
    for way, section in (("timeSlicing", found.sharing.time_slicing), ("mps", found.sharing.mps)):
        for place, each in enumerate(section.resources):
            mine, others = (nics, gpus) if each.name in nics else (gpus, nics)
            path = f"sharing.{way}.resources[{place}].rename"
            if each.rename in others:
                raise InvalidField(path, "GPUs and NICs would be one resource", "use another name")
            if found.sharing.slots is not None and each.rename == found.sharing.slots.name:
                raise InvalidField(path, "slots and other shares would be one resource", "use another name")
            mine.add(each.rename or each.name)
    if found.sharing.units is not None:
        for field in ("cores", "memory"):
            name = getattr(found.sharing.units, field)
            if name in gpus | nics or name.startswith(MIG_PREFIX):
                finding = f"{quoted([name])} is a resource of devices that are not in units"
                raise InvalidField(f"sharing.units.{field}", finding, "use another name")
    check_slot_resources(found.sharing, gpus | nics)
    for place, choice in enumerate(found.nics):
        if choice.name in gpus or choice.name.startswith(MIG_PREFIX):
            raise InvalidField(f"nics[{place}].name", f"{choice.name} is a resource of GPUs", "use another name")


# MPS shares GPUs in equal parts (`sharing.mps`), or limits their units and slots (`sharing.limiter`).


MOST_CLIENTS = 48
"""Clients of an MPS server on a GPU of any architecture: NVIDIA's device plugin refuses more replicas, too."""


def check_mps(found: Configuration) -> None:
    """Raises InvalidField for what MPS cannot share (NVIDIA's device plugin v0.20.0), and for a second strategy."""
    mps = found.sharing.mps
    if not mps.resources:
        return
    if found.flags.mig_strategy == "mixed":
        raise InvalidField("flags.migStrategy", "mixed cannot be used with sharing.mps", "use none or single")
    check_root(found, "sharing.mps")
    no_gpus = {str(NIC), *(each.name for each in found.nics), *names_of_instances(found)}
    in_time = {name for each in found.sharing.time_slicing.resources for name in (each.name, each.rename)}
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
        if not in_time.isdisjoint((each.name, called)):
            finding = f"{called} is shared by timeSlicing, too"
            raise InvalidField(f"{path}.name", finding, "share it in one way, or give some GPUs a name of their own")
        if replicas.setdefault(called, each.replicas) != each.replicas:
            finding = f"{called} has {replicas[called]} shares of other GPUs, and one daemon has one limit for all"
            raise InvalidField(f"{path}.replicas", finding, "use the same number, or another rename")
        if each.devices != "all" and called == each.name and not mps.fail_requests_greater_than_one:
            finding = "a container could get a share and a whole GPU, which its daemon does not serve"
            raise InvalidField(f"{path}.rename", finding, "give the shares a name of their own")


def check_mps_limiter(found: Configuration) -> None:
    """Raises InvalidField where MPS is to limit nothing, MIG instances, or more containers than a server has clients."""
    slots = found.sharing.slots
    if slots is None and found.sharing.units is None:
        remedy = (
            "add sharing.units or sharing.slots, or leave the limiter out: shares by sharing.mps are limited anyway"
        )
        raise InvalidField("sharing.limiter", "mps limits GPUs in units or slots, and none are offered so", remedy)
    if slots is not None:
        check_whole_gpus(found, slots, "leave the limiter out: an instance keeps its containers from other instances")
        if slots.replicas > MOST_CLIENTS:
            finding = f"{slots.replicas} slots of a GPU by MPS"
            remedy = f"use 2 to {MOST_CLIENTS}: a server has no more clients"
            raise InvalidField("sharing.slots.replicas", finding, remedy)
    check_root(found, "the limiter mps")


def check_whole_gpus(found: Configuration, slots: GpuSlots, remedy: str) -> None:
    """Raises InvalidField for slots of MIG instances, which the limiter does not limit."""
    if slots.name in names_of_instances(found) or slots.name.startswith(MIG_PREFIX):
        finding = f"{found.sharing.limiter} does not limit MIG instances, which {quoted([slots.name])} is a resource of"
        raise InvalidField("sharing.limiter", finding, remedy)


def names_of_instances(found: Configuration) -> set[str]:
    """The names that `resources.mig` gives and `resources.gpus` does not."""
    return {each.name for each in found.resources.mig} - {str(GPU), *(each.name for each in found.resources.gpus)}


def check_root(found: Configuration, needed_by: str) -> None:
    """Raises InvalidField where there is no directory for the pipes of the daemons."""
    if not found.flags.mps_root:
        remedy = "name the directory on the host where topoalign mps has its pipes, such as /run/nvidia/mps"
        raise InvalidField("flags.mpsRoot", f"is missing, and {needed_by} needs it", remedy)


# The resources of slots (`sharing.slots`), and those by which amounts are requested, must differ from all other resources:
# if the kubelet listed a resource of amounts as devices, it would allocate devices for a request of an amount.


PATH = "sharing.slots"
AMOUNTS = ("memory", "percentage", "cores", "priority")


def check_instances(found: Configuration) -> None:
    """Raises InvalidField for slots of MIG instances that no GPU is divided into by this configuration."""
    slots = found.sharing.slots
    strategy = found.flags.mig_strategy
    if slots is None or not slots.name.startswith(MIG_PREFIX) or strategy == "mixed":
        return
    if slots.name in {*(each.name for each in found.resources.gpus), *(each.name for each in found.resources.mig)}:
        return
    finding = f"{quoted([slots.name])} is offered by flags.migStrategy mixed, and it is {strategy}"
    raise InvalidField(f"{PATH}.name", finding, "set flags.migStrategy to mixed, or use nvidia.com/gpu with single")


def check_dynamic(found: Configuration) -> None:
    """Raises InvalidField for what cannot be where slots become MIG instances."""
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
    if found.sharing.mps.resources:
        raise InvalidField(path, "dynamic cannot be used with sharing.mps", "use none or single")
    if found.resources.mig:
        raise InvalidField(
            "resources.mig", "names instances, and dynamic makes them itself", "leave it out, or use mixed"
        )
    for field, scaling in (("memoryScaling", slots.memory_scaling), ("coreScaling", slots.core_scaling)):
        if scaling != 1:
            raise InvalidField(
                f"{PATH}.{field}", "an instance has what it has", "leave it out with migStrategy dynamic"
            )


def qualify_slots(sharing: SharingSection) -> GpuSlots | None:
    """The section with complete resource names. Raises InvalidField for names that are taken within `sharing`."""
    found = sharing.slots
    if found is None:
        return None
    named = replace(
        found,
        name=resource_names.resource(f"{PATH}.name", found.name),
        **{each: resource_names.resource(f"{PATH}.{each}", getattr(found, each)) for each in AMOUNTS},
    )
    if named.priorities and sharing.limiter != "hami-core":
        remedy = "add sharing.limiter: hami-core, or leave it out"
        raise InvalidField(f"{PATH}.priorities", "has an effect with the limiter hami-core alone", remedy)
    shared = {"timeSlicing": sharing.time_slicing.resources, "mps": sharing.mps.resources}
    ways = {
        way: {resource_names.qualify_name(each.name, resource_names.GPU_DOMAIN) for each in some}
        for way, some in shared.items()
    }
    if sharing.units is not None:
        ways["units"] = {resource_names.qualify_name(sharing.units.name, resource_names.GPU_DOMAIN)}
    for way, taken in ways.items():
        if named.name in taken:
            raise InvalidField(
                f"{PATH}.name",
                f"{quoted([named.name])} is shared by sharing.{way}",
                "share it in one way; resources.gpus can give some GPUs another name",
            )
    return named


def check_slot_limiter(found: Configuration) -> None:
    """Raises InvalidField where HAMi-core is to limit nothing, or MIG instances, or has no directory."""
    slots = found.sharing.slots
    if slots is None:
        remedy = "add sharing.slots, or leave the limiter out"
        raise InvalidField("sharing.limiter", "hami-core limits GPUs in slots, and none are offered so", remedy)
    remedy = "leave the limiter out: an instance keeps its containers from other instances, and none from one another"
    check_whole_gpus(found, slots, remedy)
    if not found.flags.hami_root.rstrip("/"):
        remedy = "name a directory on the host that is for this alone: /var/lib/topoalign/hami"
        raise InvalidField("flags.hamiRoot", "is missing, and the limiter hami-core needs it", remedy)


def check_slot_resources(sharing: SharingSection, others: Collection[str]) -> None:
    """Raises InvalidField for a resource of amounts that is another one, too. `others`: of GPUs and NICs."""
    if sharing.slots is None:
        return
    seen = {*others, sharing.slots.name}
    if sharing.units is not None:
        seen |= {sharing.units.cores, sharing.units.memory}
    for field in AMOUNTS:
        name = getattr(sharing.slots, field)
        if name in seen or name.startswith(MIG_PREFIX):
            raise InvalidField(
                f"{PATH}.{field}", f"{quoted([name])} is the name of another resource", "use another name"
            )
        seen.add(name)
