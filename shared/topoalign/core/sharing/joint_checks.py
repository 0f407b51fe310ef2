"""
Which of Koordinator's annotations about devices cannot be meant beside parts of GPUs.

They choose whole GPUs and NICs together, and GPUs by Koordinator's names. Units are chosen without them. Slots of
`nvidia.com/gpu` have the name of whole GPUs, so that a pod with such an annotation would wait for whole ones, which a node
with slots has none of.
"""

from collections.abc import Iterable
from typing import Literal

from topoalign.core.demand.field_paths import containers_of
from topoalign.core.demand.gangs import path
from topoalign.core.demand.share_annotations import InvalidShare
from topoalign.core.demand.shares import SlotResources
from topoalign.core.demand.units import UnitResources
from topoalign.core.deviceshare.demand import RESOURCES as JOINT_RESOURCES
from topoalign.core.deviceshare.demand import JointDemand
from topoalign.core.deviceshare.names import ANNOTATIONS, GPU_BYTES
from topoalign.core.model.ids import GPU, NIC
from topoalign.core.model.requests import PodRequest
from topoalign.core.model.topology.offers import MEMORY_BLOCK
from topoalign.core.sharing.refusals import MemoryAboveCard, ShareFields


def joint_key(pod: PodRequest) -> str | None:
    """The first of these annotations that the pod has; None: it has none."""
    return next((key for key in ANNOTATIONS if key in pod.annotations), None)


def check_not_joint(pod: PodRequest) -> None:
    """
    Raises InvalidShare for an annotation of Koordinator where no container asks for what these are about: whole GPUs and
    NICs, and GPUs by its own names. `pod`: valid, and asks for units.
    """
    key = joint_key(pod)
    if key is None:
        return
    asked = (amounts for _, each in containers_of(pod) for amounts in (each.limits, each.requests))
    if any(amounts.get(name) for amounts in asked for name in JOINT_RESOURCES):
        return  # what that container asks for is decided by them, and their content is checked
    raise InvalidShare(
        f"{path(key)}: {without_effect('units')}",
        f"leave it out; it is about whole GPUs ({GPU}) and NICs ({NIC}), and no container asks for any",
    )


def check_joint_memory(pod: PodRequest, asked: Iterable[JointDemand | None], offered: UnitResources) -> None:
    """
    Raises MemoryAboveCard for a container that asks by Koordinator's name for more bytes of each GPU than the largest one in
    units has. `asked`: what each container asks for together, in the order of `containers_of`.
    """
    largest = offered.most * MEMORY_BLOCK
    for (where, _), demand in zip(containers_of(pod), asked, strict=True):
        memory = 0 if demand is None or demand.gpu is None else demand.gpu.each.get(GPU_BYTES, 0)
        if memory > largest:
            raise MemoryAboveCard(ShareFields(memory=f"{where}.resources.limits[{GPU_BYTES}]"), memory, largest)


def check_slots_not_joint(pod: PodRequest, offered: SlotResources) -> None:
    """
    Raises InvalidShare for such an annotation of a pod with slots, where whole GPUs have their name. `pod`: valid, and asks
    for these slots or for amounts of them.
    """
    key = joint_key(pod)
    if key is not None and offered.resource in JOINT_RESOURCES:
        raise InvalidShare(
            f"{path(key)}: {without_effect('slots')}",
            f"leave it out, or ask for whole GPUs ({offered.resource}) without amounts, where nodes offer them so",
        )


def without_effect(what: Literal["units", "slots"]) -> str:
    """What is found of an annotation that chooses otherwise."""
    return f"has no effect on {what} of GPUs{', which go where least is left' if what == 'units' else ''}"
