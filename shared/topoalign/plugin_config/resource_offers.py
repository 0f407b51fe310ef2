"""
The offers of a node to the kubelet: its devices, grouped into resources by a configuration.

First every device gets its resource as an unshared device (`topoalign.plugin_config.bases`); then devices that are shared
in time or by MPS are offered several times, GPUs in units as two resources, and GPUs and MIG instances in slots once a
slot. Each device is offered once, as a whole or in parts. If a configuration names something that this node does not have,
a finding reports it and it is skipped: one file can serve a whole fleet. MPS cannot share a GPU in MIG mode: what it is
asked to share of one is not offered, because a whole one was not asked for.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from topoalign.core.demand.device_lists import gpu_lists
from topoalign.core.model.errors import quoted
from topoalign.core.model.holdings import UnitKind
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.device_offers import CORES, MEMORY_BLOCK, Limiter, Offer, Slots
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.topology_checks import MOST_HANDED_OUT
from topoalign.plugin_config.bases import Base, gpu_bases, nic_bases, why_no_instances, why_no_slots
from topoalign.plugin_config.configuration import (
    Chosen,
    Configuration,
    Mps,
    Packing,
    SharedResource,
    SharingSection,
    TimeSlicing,
)
from topoalign.plugin_config.findings import ConfigurationFinding

Way = Literal["time-slicing", "mps"]
NUMA_TOPOLOGY = "sharing.slots.numaTopology"


class DeviceSharing(NamedTuple):
    """The shared resource, strategy and bound of a device."""

    resource: SharedResource
    way: Way
    most: int | None
    """Shares that a container may ask for; None: any number."""


class ResourceOffers(msgspec.Struct, frozen=True, kw_only=True):
    """The offers of a node, and the findings about them."""

    offers: tuple[Offer, ...]
    findings: tuple[ConfigurationFinding, ...]


def list_findings(
    topology: Topology, offering: ResourceOffers, configuration: Configuration
) -> tuple[ConfigurationFinding, ...]:
    """The finding of `config check` about containers with GPUs of several resources that one variable lists."""
    names = gpu_lists(msgspec.structs.replace(topology, offers=offering.offers))
    if len(names) < 2 or not configuration.flags.plugin.by_variable_alone:
        return ()
    finding = ConfigurationFinding(
        field="flags.plugin.deviceListStrategy",
        finding=f"under envvar a container that asks for two of {', '.join(names)} is refused (NotVisible) unless "
        "topoalign's scheduler binds its pod",
        remedy="use volume-mounts, cdi-annotations or cdi-cri if such containers come past that scheduler",
    )
    return (finding,)


class OfferTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The terms under which a device is offered; devices with equal terms are one offer."""

    resource: ResourceName
    replicas: int
    most: int | None = None
    packing: Packing = "distributed"
    sharing: Way = "time-slicing"
    unit: UnitKind | None = None
    limiter: Limiter | None = None
    slots: Slots | None = None


def offer_resources(topology: Topology, configuration: Configuration, before: Sequence[Offer] = ()) -> ResourceOffers:
    """
    The offers of a node in the hardware's order, and findings; `before` is what was offered under the same configuration.

    Never raises for a valid topology and a configuration that has been checked.
    """
    findings: list[ConfigurationFinding] = []
    offered = frozenset(device for offer in before for device in offer.devices)
    gpus = gpu_bases(topology, configuration, offered, findings)
    everything = (*gpus, *nic_bases(topology, configuration.nics, findings))
    by_amounts = {
        **offer_units(topology, gpus, configuration.sharing, findings),
        **offer_slots(topology, gpus, configuration, findings),
    }
    shared: dict[DeviceID, DeviceSharing] = {}
    unfit: set[DeviceID] = set()
    for way, name, section in list_strategies(configuration.sharing):
        most = 1 if section.fail_requests_greater_than_one else None
        for place, resource in enumerate(section.resources):
            field = f"sharing.{name}.resources[{place}]"
            mine = [base for base in everything if base.resource == resource.name]
            if not mine:
                findings.append(ConfigurationFinding(field=field, finding=f"this node has no {resource.name}"))
            devices = choose_shared_devices(mine, resource.name, resource.devices, field, findings)
            if way == "mps":
                unfit.update(find_mig_devices(topology, devices, field, findings))
            shared.update(dict.fromkeys(devices, DeviceSharing(resource, way, most)))
    divided: dict[OfferTerms, list[DeviceID]] = {}
    for base in everything:
        if base.id in unfit:
            continue
        for one in by_amounts.get(base.id, (offer_terms(base, shared.get(base.id), configuration),)):
            divided.setdefault(one, []).append(base.id)
    return ResourceOffers(offers=tuple(within_limits(divided, findings)), findings=tuple(findings))


def list_strategies(sharing: SharingSection) -> tuple[tuple[Way, str, TimeSlicing | Mps], ...]:
    """The sharing strategies, with the name and the content of the section of each."""
    return ("time-slicing", "timeSlicing", sharing.time_slicing), ("mps", "mps", sharing.mps)


class Enforcement(NamedTuple):
    """The strategy and library that limit containers to their amounts."""

    sharing: Way
    limiter: Limiter | None


def find_enforcement(sharing: SharingSection, mine: Limiter) -> Enforcement:
    """
    What limits units, or slots. Of the libraries only `mine` can: the other one is for GPUs that are shared in the other
    way. MPS limits both.
    """
    if sharing.limiter == "mps":
        return Enforcement("mps", None)
    return Enforcement("time-slicing", mine if sharing.limiter == mine else "none")


def find_mig_devices(
    topology: Topology, devices: Sequence[DeviceID], field: str, findings: list[ConfigurationFinding]
) -> Sequence[DeviceID]:
    """The devices that are GPUs in MIG mode or instances of one. MPS shares neither; a finding reports them."""
    found = [each for each in devices if topology.gpu_by_id[topology.card_of(each)].mig is not None]
    if found:
        finding = f"MPS shares no GPU in MIG mode and no MIG instance: {len(found)} devices are not offered"
        remedy = "switch MIG mode off, share them by timeSlicing, or leave them out of devices"
        findings.append(ConfigurationFinding(field=field, finding=finding, remedy=remedy, severe=True))
    return found


def offer_units(
    topology: Topology, gpus: Sequence[Base], sharing: SharingSection, findings: list[ConfigurationFinding]
) -> Mapping[DeviceID, tuple[OfferTerms, ...]]:
    """GPU -> the terms of its computing time and memory, for GPUs that are offered in units."""
    units = sharing.units
    (way, limiter) = find_enforcement(sharing, "vcuda")
    if units is None:
        return {}
    mine = [base for base in gpus if base.resource == units.name and not base.part]
    if not mine:
        findings.append(ConfigurationFinding(field="sharing.units", finding=f"this node has no {units.name}"))
    found = {}
    for device in choose_shared_devices(mine, units.name, units.devices, "sharing.units", findings):
        gpu = topology.gpu_by_id[device]
        if gpu.mig is not None or gpu.memory is None or gpu.memory < MEMORY_BLOCK:
            why = "is in MIG mode" if gpu.mig is not None else "has no memory that is known"
            findings.append(
                ConfigurationFinding(field="sharing.units", finding=f"GPU {gpu.index} {why}: offered as a whole")
            )
            continue
        found[device] = (
            OfferTerms(resource=ResourceName(units.cores), replicas=CORES, sharing=way, unit="cores", limiter=limiter),
            OfferTerms(
                resource=ResourceName(units.memory),
                replicas=gpu.memory // MEMORY_BLOCK,
                sharing=way,
                unit="memory",
                limiter=limiter,
            ),
        )
    if found and limiter == "none":
        finding = (
            f"{len(found)} GPUs are in units: their amounts are counted, and nothing enforces them (limiter: none)"
        )
        findings.append(ConfigurationFinding(field="sharing.units", finding=finding))
    return found


def offer_slots(
    topology: Topology, gpus: Sequence[Base], configuration: Configuration, findings: list[ConfigurationFinding]
) -> Mapping[DeviceID, tuple[OfferTerms, ...]]:
    """
    Device of the resource that is in slots -> how it is offered: not at all where it has no slots (`why_no_slots`), for its
    resource has slots alone.
    """
    sharing = configuration.sharing
    strategy = configuration.flags.mig_strategy
    slots = sharing.slots
    (way, limiter) = find_enforcement(sharing, "hami-core")
    if slots is None:
        return {}
    if strategy == "dynamic":
        limiter = None
    mine = [base for base in gpus if base.resource == slots.name]
    if not mine:
        findings.append(ConfigurationFinding(field="sharing.slots", finding=f"this node has no {slots.name}"))
    terms = Slots(
        memory=ResourceName(slots.memory),
        percentage=ResourceName(slots.percentage),
        cores=ResourceName(slots.cores),
        priority=ResourceName(slots.priority),
        memory_scaling=slots.memory_scaling,
        core_scaling=slots.core_scaling,
        numa_topology=slots.numa_topology,
        instances=strategy == "dynamic",
    )
    name = ResourceName(slots.name)
    one = OfferTerms(resource=name, replicas=slots.replicas, sharing=way, limiter=limiter, slots=terms)
    found: dict[DeviceID, tuple[OfferTerms, ...]] = {}
    unfit: dict[tuple[str, str], int] = {}
    for base in mine:
        gpu = topology.gpu_by_id[topology.card_of(base.id)]
        why = why_no_instances(gpu) if strategy == "dynamic" else why_no_slots(gpu, base, sharing.limiter)
        found[base.id] = () if why else (one,)
        if why:
            unfit[why] = unfit.get(why, 0) + 1
    for (reason, remedy), number in unfit.items():
        finding = f"{number} devices of {slots.name} {reason}: not offered"
        findings.append(ConfigurationFinding(field="sharing.slots", finding=finding, remedy=remedy, severe=True))
    in_slots = len(found) - sum(unfit.values())
    if in_slots and limiter == "none":
        finding = (
            f"{in_slots} devices are in slots: their amounts are counted, and nothing enforces them (limiter: none)"
        )
        findings.append(ConfigurationFinding(field="sharing.slots", finding=finding))
    if slots.numa_topology:
        findings += beyond_a_numa_node(topology, [base for base, divisions in found.items() if divisions])
    return found


def beyond_a_numa_node(topology: Topology, in_slots: Sequence[DeviceID]) -> Iterator[ConfigurationFinding]:
    """
    What does not fit if slots of these devices are listed with NUMA nodes. A kubelet that aligns counts slots, several of
    each GPU, and so takes fewer NUMA nodes than have as many GPUs. Nothing where one NUMA node has all of them.
    """
    nodes = [topology.listed_nodes(topology.gpu_by_id[topology.card_of(each)].numa_affinity) for each in in_slots]
    on_nodes = Counter(filter(None, nodes))
    most = max(on_nodes.values(), default=0)
    if len(on_nodes) < 2:
        return
    yield ConfigurationFinding(
        field=NUMA_TOPOLOGY,
        finding=(
            f"a NUMA node has {most} of {len(in_slots)} GPUs: unless the kubelet's policy is none, slots of more GPUs do "
            "not fit on the empty node (by best-effort they do if CPUs or memory need several NUMA nodes), and the lowest "
            "NUMA node with free slots is taken, whatever its GPUs have left"
        ),
        remedy="leave numaTopology out, which the choice of GPUs does not need, or use the kubelet's policy none",
    )


def choose_shared_devices(
    mine: Sequence[Base], name: str, devices: Chosen, field: str, findings: list[ConfigurationFinding]
) -> list[DeviceID]:
    """Chooses the devices of a resource that are shared."""
    match devices:
        case "all":
            return [base.id for base in mine]
        case int(count):
            if 0 < len(mine) < count:
                finding = f"there are {len(mine)}, and {count} are asked for"
                findings.append(ConfigurationFinding(field=f"{field}.devices", finding=finding))
            return [base.id for base in mine[:count]]
        case references:
            wanted = {str(reference) for reference in references}
            missing = sorted(wanted - {base.id for base in mine} - {base.reference for base in mine})
            if mine and missing:
                finding = f"this node has no {name} {quoted(missing)}"
                findings.append(ConfigurationFinding(field=f"{field}.devices", finding=finding))
            return [base.id for base in mine if base.id in wanted or base.reference in wanted]


def offer_terms(base: Base, shared: DeviceSharing | None, configuration: Configuration) -> OfferTerms:
    """Chooses how a device is offered: its resource, replicas, the maximum of a container, and its packing."""
    policy = configuration.flags.plugin.shared_devices_allocation_policy
    resource = base.resource if shared is None else ResourceName(shared.resource.rename or shared.resource.name)
    if shared is None or shared.resource.replicas == 1:
        packing: Packing = policy if base.part else "distributed"
        return OfferTerms(resource=resource, replicas=1, most=None, packing=packing)
    return OfferTerms(
        resource=resource,
        replicas=shared.resource.replicas,
        most=shared.most,
        packing=policy,
        sharing=shared.way,
    )


def within_limits(divided: dict[OfferTerms, list[DeviceID]], findings: list[ConfigurationFinding]) -> list[Offer]:
    """The offers up to the number of devices that a node can list."""
    found = []
    count = 0
    for division, devices in divided.items():
        count += len(devices) * division.replicas
        if count > MOST_HANDED_OUT:
            count -= len(devices) * division.replicas
            finding = (
                f"{division.resource}: {len(devices)} devices in {division.replicas} shares are too many: not offered"
            )
            remedy = f"a node lists at most {MOST_HANDED_OUT} in all"
            findings.append(ConfigurationFinding(field="sharing", finding=finding, remedy=remedy, severe=True))
            continue
        found.append(
            Offer(
                resource=division.resource,
                devices=tuple(devices),
                replicas=division.replicas,
                most=division.most,
                packing=division.packing,
                sharing=division.sharing,
                unit=division.unit,
                limiter=division.limiter,
                slots=division.slots,
            )
        )
    return found
