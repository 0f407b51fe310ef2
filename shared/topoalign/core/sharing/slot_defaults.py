"""
Adds missing limits to a pod that requests GPUs in slots, as HAMi does. The resource names are those of the offer.

    limits                           added
    gpumem: 4000                     nvidia.com/gpu: 1, because an amount without a number of GPUs is for one GPU
    nvidia.com/gpu: 1                gpucores: 100, because a request without an amount is for whole GPUs
    gpumem-percentage: 100           nvidia.com/gpu: 1 and gpucores: 100
    nvidia.com/gpu: 1, gpumem: 4000  nothing
    nvidia.com/priority: 1           with slots: the environment variable CUDA_TASK_PRIORITY=1

If other nodes offer the same resource under another sharing strategy, `nvidia.com/gpu: 1` alone is not changed. Those
nodes would refuse a pod with an amount, and a slot without an amount has all memory of its GPU anyway.

Invalid requests are not changed: `pod_checks` refuses them.

Source: HAMi 4707fb02, its admission webhook.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec

from topoalign.core.demand.field_paths import containers_with_paths
from topoalign.core.demand.resource_quantities import Quantities
from topoalign.core.demand.shares import ALL_MEMORY, USUAL_NAMES, SlotResources
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.requests import PodRequest
from topoalign.core.model.topology.device_offers import CORES

PRIORITY = "CUDA_TASK_PRIORITY"
"""The environment variable from which HAMi's library reads the priority."""


class FilledIn(NamedTuple):
    """The limits and environment variables that are added to one container."""

    where: str
    """Path of the container: `spec.containers[0]`."""
    limits: Quantities
    environment: Mapping[str, str]


def slot_defaults(
    pod: PodRequest,
    offered: Collection[SlotResources],
    otherwise: Collection[ResourceName] = (),
    units: Collection[ResourceName] = USUAL_NAMES,
) -> list[FilledIn]:
    """
    The additions to the containers of a valid pod. A container is not changed if its limits name no resource of slots,
    or if it also requests `units`. `otherwise`: the resources that nodes offer other than in slots.
    """
    found = []
    for where, container in containers_with_paths(pod):
        limits = container.limits
        known = [each for each in offered if not {each.resource, *each.slots.resources}.isdisjoint(limits)]
        if not known or any(limits.get(name) for name in units):
            continue
        # if several offers have the same names of amounts: the one whose slots are requested, else the first by name
        offer = min(known, key=lambda each: (each.resource not in limits, each.resource))
        if offer.resource in otherwise and limits.keys().isdisjoint(offer.slots.resources):
            continue  # the request might be for GPUs that are offered in another way under the same name
        filled = _defaults_of(where, limits, offer)
        if filled.limits or filled.environment:
            found.append(filled)
    return found


def _defaults_of(where: str, limits: Quantities, offer: SlotResources) -> FilledIn:
    slots = offer.slots
    added = dict[ResourceName, int]()
    percentage = limits.get(slots.percentage)
    if limits.get(offer.resource) == 0 or (percentage is not None and percentage > ALL_MEMORY):
        return FilledIn(where, {}, {})
    if offer.resource not in limits:
        if limits.keys().isdisjoint((slots.memory, slots.percentage, slots.cores)):  # a priority is not an amount
            return FilledIn(where, {}, {})
        added[offer.resource] = 1
    is_whole = slots.memory not in limits if percentage is None else percentage == ALL_MEMORY
    if is_whole and slots.cores not in limits:
        added[slots.cores] = CORES
    return FilledIn(where, added, {PRIORITY: str(limits[slots.priority])} if slots.priority in limits else {})


def with_defaults(pod: PodRequest, filled: Iterable[FilledIn]) -> PodRequest:
    """The pod with the added limits, and with equal requests, as the API server sets them."""
    added = {each.where: each.limits for each in filled}
    new = {
        id(container): msgspec.structs.replace(
            container,
            limits={**container.limits, **added[where]},
            requests={**container.requests, **added[where]},
        )
        for where, container in containers_with_paths(pod)
        if where in added
    }
    return msgspec.structs.replace(
        pod,
        init_containers=tuple(new.get(id(each), each) for each in pod.init_containers),
        containers=tuple(new.get(id(each), each) for each in pod.containers),
    )
