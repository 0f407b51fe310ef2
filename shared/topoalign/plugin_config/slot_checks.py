"""
Checks of the section `sharing.slots`: the slots of a resource, and the resources by which amounts are asked for, are apart
from all others. A kubelet that lists one of the latter would be asked for it.
"""

from collections.abc import Collection

from msgspec.structs import replace

from topoalign.core.model.errors import InvalidField, quoted
from topoalign.core.model.ids import GPU
from topoalign.plugin_config import names
from topoalign.plugin_config.configuration import Configuration, GpuSlots, Sharing

PATH = "sharing.slots"
AMOUNTS = ("memory", "percentage", "cores", "priority")


def check_instances(found: Configuration, mig_prefix: str) -> None:
    """Raises InvalidField for slots of MIG instances that no GPU is divided into by this configuration."""
    slots = found.sharing.slots
    strategy = found.flags.mig_strategy
    if slots is None or not slots.name.startswith(mig_prefix) or strategy == "mixed":
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


def slots(sharing: Sharing) -> GpuSlots | None:
    """The section with complete resource names. Raises InvalidField for names that are taken within `sharing`."""
    found = sharing.slots
    if found is None:
        return None
    named = replace(
        found,
        name=names.resource(f"{PATH}.name", found.name),
        **{each: names.resource(f"{PATH}.{each}", getattr(found, each)) for each in AMOUNTS},
    )
    if named.priorities and sharing.limiter != "hami-core":
        remedy = "add sharing.limiter: hami-core, or leave it out"
        raise InvalidField(f"{PATH}.priorities", "has an effect with the limiter hami-core alone", remedy)
    shared = {"timeSlicing": sharing.time_slicing.resources, "mps": sharing.mps.resources}
    ways = {way: {names.qualified(each.name, names.GPU_DOMAIN) for each in some} for way, some in shared.items()}
    if sharing.units is not None:
        ways["units"] = {names.qualified(sharing.units.name, names.GPU_DOMAIN)}
    for way, taken in ways.items():
        if named.name in taken:
            raise InvalidField(
                f"{PATH}.name",
                f"{quoted([named.name])} is shared by sharing.{way}",
                "share it in one way; resources.gpus can give some GPUs another name",
            )
    return named


def check_limiter(found: Configuration, mig_prefix: str) -> None:
    """Raises InvalidField where HAMi-core is to limit nothing, or MIG instances, or has no directory."""
    slots = found.sharing.slots
    if slots is None:
        remedy = "add sharing.slots, or leave the limiter out"
        raise InvalidField("sharing.limiter", "hami-core limits GPUs in slots, and none are offered so", remedy)
    instances = {each.name for each in found.resources.mig} - {str(GPU), *(each.name for each in found.resources.gpus)}
    if slots.name in instances or slots.name.startswith(mig_prefix):
        finding = f"hami-core does not limit MIG instances, which {quoted([slots.name])} is a resource of"
        remedy = (
            "leave the limiter out: an instance keeps its containers from other instances, and none from one another"
        )
        raise InvalidField("sharing.limiter", finding, remedy)
    if not found.flags.hami_root.rstrip("/"):
        remedy = "name a directory on the host that is for this alone: /var/lib/topoalign/hami"
        raise InvalidField("flags.hamiRoot", "is missing, and the limiter hami-core needs it", remedy)


def keep_apart(sharing: Sharing, others: Collection[str], mig_prefix: str) -> None:
    """
    Raises InvalidField for a resource of amounts that is another one as well. `others`: all that GPUs and NICs may be
    offered as; those of MIG instances begin with `mig_prefix`.
    """
    if sharing.slots is None:
        return
    seen = {*others, sharing.slots.name}
    if sharing.units is not None:
        seen |= {sharing.units.cores, sharing.units.memory}
    for field in AMOUNTS:
        name = getattr(sharing.slots, field)
        if name in seen or name.startswith(mig_prefix):
            raise InvalidField(
                f"{PATH}.{field}", f"{quoted([name])} is the name of another resource", "use another name"
            )
        seen.add(name)
