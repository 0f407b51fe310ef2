"""
The offers of a node to the kubelet: its devices, grouped into resources by a configuration.

First every device gets its resource as an unshared device (`topoalign.plugin_config.bases`); then devices with time
slicing are offered several times. Each device is offered once, as a whole or in parts. If a configuration names
something that this node does not have, a finding says so and it is skipped: one file can serve a whole fleet.
"""

from collections.abc import Sequence

import msgspec

from topoalign.core.model.errors import quoted
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.offers import Offer
from topoalign.core.model.topology.validate import MOST_HANDED_OUT
from topoalign.plugin_config.bases import Base, gpu_bases, nic_bases
from topoalign.plugin_config.configuration import Configuration, Packing, SharedResource
from topoalign.plugin_config.findings import Finding


class Offering(msgspec.Struct, frozen=True, kw_only=True):
    """What is offered, and what there is to say about it."""

    offers: tuple[Offer, ...]
    findings: tuple[Finding, ...]


class Division(msgspec.Struct, frozen=True, kw_only=True):
    """How a device is offered; devices of equal division are one offer."""

    resource: ResourceName
    replicas: int
    most: int | None
    packing: Packing


def offers(topology: Topology, configuration: Configuration, before: Sequence[Offer] = ()) -> Offering:
    """
    The offers of a node in the hardware's order, and findings; `before` is what was offered under the same configuration.

    Never raises for a valid topology and a configuration that has been checked.
    """
    findings: list[Finding] = []
    offered = frozenset(device for offer in before for device in offer.devices)
    gpus = gpu_bases(topology, configuration, offered, findings)
    everything = (*gpus, *nic_bases(topology, configuration.nics, findings))
    shared = {}
    for place, resource in enumerate(configuration.sharing.time_slicing.resources):
        field = f"sharing.timeSlicing.resources[{place}]"
        mine = [base for base in everything if base.resource == resource.name]
        if not mine:
            findings.append(Finding(field=field, finding=f"this node has no {resource.name}"))
        shared.update(dict.fromkeys(chosen(mine, resource, field, findings), resource))
    divided: dict[Division, list[DeviceID]] = {}
    for base in everything:
        divided.setdefault(division(base, shared.get(base.id), configuration), []).append(base.id)
    return Offering(offers=tuple(within_limits(divided, findings)), findings=tuple(findings))


def chosen(mine: Sequence[Base], resource: SharedResource, field: str, findings: list[Finding]) -> list[DeviceID]:
    """Those of a resource that are shared."""
    match resource.devices:
        case "all":
            return [base.id for base in mine]
        case int(count):
            if 0 < len(mine) < count:
                findings.append(
                    Finding(field=f"{field}.devices", finding=f"there are {len(mine)}, and {count} are asked for")
                )
            return [base.id for base in mine[:count]]
        case references:
            wanted = {str(reference) for reference in references}
            missing = sorted(wanted - {base.id for base in mine} - {base.reference for base in mine})
            if mine and missing:
                finding = f"this node has no {resource.name} {quoted(missing)}"
                findings.append(Finding(field=f"{field}.devices", finding=finding))
            return [base.id for base in mine if base.id in wanted or base.reference in wanted]


def division(base: Base, shared: SharedResource | None, configuration: Configuration) -> Division:
    """How a device is offered: its resource, its replicas, the most that a container may ask for, and its packing."""
    policy = configuration.flags.plugin.shared_devices_allocation_policy
    resource = base.resource if shared is None else ResourceName(shared.rename or shared.name)
    if shared is None or shared.replicas == 1:
        packing: Packing = policy if base.part else "distributed"
        return Division(resource=resource, replicas=1, most=None, packing=packing)
    return Division(
        resource=resource,
        replicas=shared.replicas,
        most=1 if configuration.sharing.time_slicing.fail_requests_greater_than_one else None,
        packing=policy,
    )


def within_limits(divided: dict[Division, list[DeviceID]], findings: list[Finding]) -> list[Offer]:
    """The offers, as far as they are not more than a node can list."""
    found, count = [], 0
    for division, devices in divided.items():
        count += len(devices) * division.replicas
        if count > MOST_HANDED_OUT:
            count -= len(devices) * division.replicas
            finding = (
                f"{division.resource}: {len(devices)} devices in {division.replicas} shares are too many: not offered"
            )
            remedy = f"a node lists at most {MOST_HANDED_OUT} in all"
            findings.append(Finding(field="sharing.timeSlicing", finding=finding, remedy=remedy, severe=True))
            continue
        found.append(
            Offer(
                resource=division.resource,
                devices=tuple(devices),
                replicas=division.replicas,
                most=division.most,
                packing=division.packing,
            )
        )
    return found
