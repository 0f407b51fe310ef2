"""
What a pod that asks for slots of GPUs leaves out, filled in as HAMi does (`hami.admission`), under the names of the offer.

    gpumem: 4000                     nvidia.com/gpu: 1      an amount without a number of GPUs is of one
    nvidia.com/gpu: 1                gpucores: 100          without an amount it is of whole GPUs
    gpumem-percentage: 100           both of them
    nvidia.com/gpu: 1, gpumem: 4000  nothing
    nvidia.com/priority: 1           CUDA_TASK_PRIORITY=1 in the environment, beside slots

Where nodes offer the same resource in another way, too, `nvidia.com/gpu: 1` alone is left as it is: with an amount it would
be refused by these nodes, and without one no other container has memory of its GPU, either.

What cannot be meant is left as it is: `pod_checks` refuses it.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec

from topoalign.core.demand.field_paths import containers_of
from topoalign.core.demand.hami_names import ResourceNames
from topoalign.core.demand.slots import SlotResources
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.requests import ContainerRequest, PodRequest
from topoalign.core.sharing.hami.admission import AdmissionSettings, Changes, Container, changes_to


class FilledIn(NamedTuple):
    """What is added to one container."""

    where: str
    """Its path: `spec.containers[0]`."""
    limits: Mapping[ResourceName, int]
    environment: Mapping[str, str]


def slot_defaults(
    pod: PodRequest, offered: Collection[SlotResources], otherwise: Collection[ResourceName] = ()
) -> list[FilledIn]:
    """
    What is added to the containers of a valid pod; nothing to one that names none of the resources of slots. `otherwise`:
    what nodes offer in another way than in slots.
    """
    found = []
    for where, container in containers_of(pod):
        changes = defaults_of(where, container, offered, otherwise)
        if changes.limits or changes.env:
            found.append(FilledIn(where, changes.limits, changes.env))
    return found


def defaults_of(
    where: str, container: ContainerRequest, offered: Iterable[SlotResources], otherwise: Collection[ResourceName]
) -> Changes:
    """
    The same for one container. Of several offers that have the amounts under one name, the one counts whose slots are asked
    for; without a number of GPUs the first by name.
    """
    limits = container.limits
    known = [each for each in offered if not {each.resource, *each.slots.resources}.isdisjoint(limits)]
    if not known:
        return Changes()
    each = min(known, key=lambda each: (each.resource not in limits, each.resource))
    if limits.get(each.resource) == 0:
        return Changes()
    slots = each.slots
    if each.resource in otherwise and limits.keys().isdisjoint(slots.resources):
        return Changes()
    names = ResourceNames(
        count=each.resource,
        memory=slots.memory,
        percentage=slots.percentage,
        cores=slots.cores,
        priority=slots.priority,
    )
    try:
        return changes_to(Container(path=where, limits=limits), AdmissionSettings(names=names))
    except InvalidField:
        return Changes()


def with_defaults(pod: PodRequest, filled: Iterable[FilledIn]) -> PodRequest:
    """The pod with these limits, and with requests equal to them, as the API server fills them in."""
    added = {each.where: each.limits for each in filled}
    new = {
        id(container): msgspec.structs.replace(
            container,
            limits={**container.limits, **added[where]},
            requests={**container.requests, **added[where]},
        )
        for where, container in containers_of(pod)
        if where in added
    }
    return msgspec.structs.replace(
        pod,
        init_containers=tuple(new.get(id(each), each) for each in pod.init_containers),
        containers=tuple(new.get(id(each), each) for each in pod.containers),
    )
