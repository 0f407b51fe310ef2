"""
The offers of a node to the kubelet: its devices, grouped into resources by a configuration.

First, every device gets the resource that it has without sharing (`topoalign.plugin_config.bases`). Then devices that
are shared by time slicing or MPS are offered several times, GPUs in units are offered as two resources, and GPUs and
MIG instances in slots are offered once for each slot. No device is offered both as a whole and in parts. If a
configuration names something that this node does not have, a finding reports it and it is skipped: one file can serve a
whole fleet. MPS cannot share a GPU in MIG mode. If the configuration requests that, neither shares nor the whole device
are offered, because the configuration did not request a whole device.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

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
    ConfigurationFinding,
    Findings,
    Mps,
    SharingSection,
    TimeSlicing,
)

Way = Literal["time-slicing", "mps"]
Terms = dict[DeviceID, tuple[Offer, ...]]
"""Device -> its offers, with empty `devices`. Devices with equal terms become one offer."""


class ResourceOffers(msgspec.Struct, frozen=True, kw_only=True):
    """The offers of a node, and the findings about them."""

    offers: tuple[Offer, ...]
    findings: tuple[ConfigurationFinding, ...]


def offer_resources(topology: Topology, configuration: Configuration, before: Sequence[Offer] = ()) -> ResourceOffers:
    """
    The offers of a node in the hardware's order, and findings. `before`: earlier offers under the same configuration.

    Never raises for a valid topology and a configuration that has been checked.
    """
    findings = Findings()
    offered = frozenset(device for offer in before for device in offer.devices)
    gpus = gpu_bases(topology, configuration, offered, findings)
    everything = (*gpus, *nic_bases(topology, configuration.nics, findings))
    policy = configuration.flags.plugin.shared_devices_allocation_policy
    terms: Terms = {
        base.id: (Offer(resource=base.resource, devices=(), packing=policy if base.part else "distributed"),)
        for base in everything
    }
    sharing = configuration.sharing
    sections: tuple[tuple[Way, str, TimeSlicing | Mps], ...] = (
        ("time-slicing", "timeSlicing", sharing.time_slicing),
        ("mps", "mps", sharing.mps),
    )
    for way, name, section in sections:
        for place, resource in enumerate(section.resources):
            field = f"sharing.{name}.resources[{place}]"
            mine = [base for base in everything if base.resource == resource.name]
            if not mine:
                findings.add(field, f"this node has no {resource.name}")
            chosen = choose_shared_devices(mine, resource.name, resource.devices, field, findings)
            in_mig_mode = find_mig_devices(topology, chosen, field, findings) if way == "mps" else []
            renamed = ResourceName(resource.rename or resource.name)
            shares = Offer(
                resource=renamed,
                devices=(),
                replicas=resource.replicas,
                sharing=way,
                most=1 if section.fail_requests_greater_than_one else None,
                packing=policy,
            )
            for base in chosen:
                if base in in_mig_mode:
                    terms[base.id] = ()
                elif resource.replicas == 1:
                    terms[base.id] = (replace(terms[base.id][0], resource=renamed),)
                else:
                    terms[base.id] = (shares,)
    terms |= offer_units(topology, gpus, sharing, findings)
    terms |= offer_slots(topology, gpus, configuration, findings)
    divided: dict[Offer, list[DeviceID]] = {}
    for base in everything:
        for one in terms[base.id]:
            divided.setdefault(one, []).append(base.id)
    return ResourceOffers(offers=tuple(within_limits(divided, findings)), findings=tuple(findings))


def find_enforcement(sharing: SharingSection, mine: Limiter) -> tuple[Way, Limiter | None]:
    """
    The sharing strategy and the library that limit containers to their units or slots. `mine`: the only library for
    this way of sharing (vcuda for units, hami-core for slots). MPS limits both.
    """
    if sharing.limiter == "mps":
        return "mps", None
    return "time-slicing", mine if sharing.limiter == mine else "none"


def find_mig_devices(topology: Topology, bases: Sequence[Base], field: str, findings: Findings) -> list[Base]:
    """The devices that are GPUs in MIG mode or instances of one. MPS shares neither; a finding reports them."""
    found = [base for base in bases if topology.gpu_by_id[topology.parent_of(base.id)].mig is not None]
    if found:
        finding = f"MPS shares no GPU in MIG mode and no MIG instance: {len(found)} devices are not offered"
        remedy = "switch MIG mode off, share them by timeSlicing, or leave them out of devices"
        findings.add(field, finding, remedy, severe=True)
    return found


def offer_units(topology: Topology, gpus: Sequence[Base], sharing: SharingSection, findings: Findings) -> Terms:
    """GPU -> the terms of its computing time and memory, for GPUs that are offered in units."""
    units = sharing.units
    way, limiter = find_enforcement(sharing, "vcuda")
    if units is None:
        return {}
    mine = [base for base in gpus if base.resource == units.name and not base.part]
    if not mine:
        findings.add("sharing.units", f"this node has no {units.name}")
    found: Terms = {}
    for base in choose_shared_devices(mine, units.name, units.devices, "sharing.units", findings):
        gpu = topology.gpu_by_id[base.id]
        if gpu.mig is not None or gpu.memory is None or gpu.memory < MEMORY_BLOCK:
            why = "is in MIG mode" if gpu.mig is not None else "has no memory that is known"
            findings.add("sharing.units", f"GPU {gpu.index} {why}: offered as a whole")
            continue
        amounts: tuple[tuple[str, int, UnitKind], ...] = (
            (units.cores, CORES, "cores"),
            (units.memory, gpu.memory // MEMORY_BLOCK, "memory"),
        )
        found[base.id] = tuple(
            Offer(resource=ResourceName(name), devices=(), replicas=number, sharing=way, unit=unit, limiter=limiter)
            for name, number, unit in amounts
        )
    if found and limiter == "none":
        finding = (
            f"{len(found)} GPUs are in units: their amounts are counted, and nothing enforces them (limiter: none)"
        )
        findings.add("sharing.units", finding)
    return found


def offer_slots(topology: Topology, gpus: Sequence[Base], configuration: Configuration, findings: Findings) -> Terms:
    """
    Each device of the resource `sharing.slots.name` -> its offer in slots, or () if it cannot be offered in slots
    (`why_no_slots`, `why_no_instances`).
    """
    sharing = configuration.sharing
    strategy = configuration.flags.mig_strategy
    slots = sharing.slots
    way, limiter = find_enforcement(sharing, "hami-core")
    if slots is None:
        return {}
    if strategy == "dynamic":
        limiter = None
    mine = [base for base in gpus if base.resource == slots.name]
    if not mine:
        findings.add("sharing.slots", f"this node has no {slots.name}")
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
    one = Offer(resource=name, devices=(), replicas=slots.replicas, sharing=way, limiter=limiter, slots=terms)
    found: Terms = {}
    unfit: dict[tuple[str, str], int] = {}
    for base in mine:
        gpu = topology.gpu_by_id[topology.parent_of(base.id)]
        why = why_no_instances(gpu) if strategy == "dynamic" else why_no_slots(gpu, base, sharing.limiter)
        found[base.id] = () if why else (one,)
        if why:
            unfit[why] = unfit.get(why, 0) + 1
    for (reason, remedy), number in unfit.items():
        finding = f"{number} devices of {slots.name} {reason}: not offered"
        findings.add("sharing.slots", finding, remedy, severe=True)
    in_slots = len(found) - sum(unfit.values())
    if in_slots and limiter == "none":
        finding = (
            f"{in_slots} devices are in slots: their amounts are counted, and nothing enforces them (limiter: none)"
        )
        findings.add("sharing.slots", finding)
    return found


def choose_shared_devices(
    mine: Sequence[Base], name: str, devices: Chosen, field: str, findings: Findings
) -> Sequence[Base]:
    """Chooses the devices of a resource that are shared."""
    match devices:
        case "all":
            return mine
        case int(count):
            if 0 < len(mine) < count:
                finding = f"there are {len(mine)}, and {count} are asked for"
                findings.add(f"{field}.devices", finding)
            return mine[:count]
        case references:
            wanted = {str(reference) for reference in references}
            missing = sorted(wanted - {base.id for base in mine} - {base.reference for base in mine})
            if mine and missing:
                finding = f"this node has no {name} {quoted(missing)}"
                findings.add(f"{field}.devices", finding)
            return [base for base in mine if base.id in wanted or base.reference in wanted]


def within_limits(divided: Mapping[Offer, Sequence[DeviceID]], findings: Findings) -> list[Offer]:
    """The offers within the number of devices a node can list. `divided`: offers without devices -> their devices."""
    found = []
    left = MOST_HANDED_OUT
    for offer, devices in divided.items():
        number = len(devices) * offer.replicas
        if number > left:
            finding = f"{offer.resource}: {len(devices)} devices in {offer.replicas} shares are too many: not offered"
            findings.add("sharing", finding, f"a node lists at most {MOST_HANDED_OUT} in all", severe=True)
            continue
        left -= number
        found.append(replace(offer, devices=tuple(devices)))
    return found
