"""
The cards of a pod in HAMi's annotations: what the scheduler decides, and what its device plugin then allocates.

A card is `uuid,type,memory,cores:`, a container its cards and `;`, init containers first; a container without cards
is only its `;`. So the text that is read back has one container more, after the last `;`, and it is empty. MIG
instances are in an annotation of their own, JSON, with the ids that the driver gave them as soon as they exist.

Source: HAMi 4707fb02.
"""

from collections.abc import Sequence

import msgspec

from topoalign.core.demand.go_text import parse_int
from topoalign.core.demand.hami_names import DEVICES_ALLOCATED, MIG_ALLOCATIONS
from topoalign.core.model.topology.mig import MigPlacement
from topoalign.core.sharing.hami.registration import InvalidAnnotation

_FIELDS = 4
_LARGEST_ID = (1 << 32) - 1


class PodCard(msgspec.Struct, frozen=True, kw_only=True):
    """One card of a container, as in the annotation."""

    uuid: str
    type: str
    """The vendor, not the model: `NVIDIA`."""
    memory: int
    """MiB."""
    cores: int


PodCards = tuple[tuple[PodCard, ...], ...]
"""The cards of each container, init containers first."""


class MigAllocation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One MIG instance of a pod, field by field as in the annotation."""

    container: int = msgspec.field(name="containerIndex")
    """Init containers first, from 0."""
    device: int = msgspec.field(name="deviceIndex")
    """Of the container, from 0."""
    gpu: str = msgspec.field(name="gpuUUID")
    profile: str
    placement: MigPlacement
    mig_uuid: str = msgspec.field(default="", name="migUUID")
    """Empty until it exists, and so are the next two."""
    gpu_instance: int | None = msgspec.field(default=None, name="gpuInstanceID")
    compute_instance: int | None = msgspec.field(default=None, name="computeInstanceID")


def encode_pod(containers: Sequence[Sequence[PodCard]]) -> str:
    """The annotation for the cards of these containers, for the suite `hami/pod_annotation_codec` and tests alone."""
    return "".join(
        "".join(f"{card.uuid},{card.type},{card.memory},{card.cores}:" for card in cards) + ";" for cards in containers
    )


def decode_pod(text: str, key: str = DEVICES_ALLOCATED) -> PodCards:
    """The cards of each container, and of one more after the last `;`. Raises InvalidAnnotation."""
    try:
        return tuple(
            tuple(_card(part.split(",")) for part in container.split(":") if "," in part)
            for container in text.split(";")
        )
    except ValueError as error:
        raise InvalidAnnotation(key, str(error)) from error


def encode_mig_allocations(allocations: Sequence[MigAllocation]) -> str:
    """The annotation for these instances."""
    return msgspec.json.encode(allocations).decode()


def decode_mig_allocations(text: str) -> tuple[MigAllocation, ...]:
    """
    The instances in an annotation; none in an empty one.

    Raises InvalidAnnotation where a field is missing, where an instance has some of the driver's ids and not all, and
    where two instances are for the same device of a container.
    """
    if not text:
        return ()
    try:
        allocations = msgspec.json.decode(text, type=tuple[MigAllocation, ...])
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
        raise InvalidAnnotation(MIG_ALLOCATIONS, str(error)) from error
    seen: set[tuple[int, int]] = set()
    for number, each in enumerate(allocations):
        if reason := _fault(each):
            raise InvalidAnnotation(MIG_ALLOCATIONS, f"MIG allocation {number} {reason}")
        if (each.container, each.device) in seen:
            place = f"container {each.container} device {each.device}"
            raise InvalidAnnotation(MIG_ALLOCATIONS, f"duplicate MIG allocation for {place}")
        seen.add((each.container, each.device))
    return allocations


def _card(fields: list[str]) -> PodCard:
    if len(fields) < _FIELDS:
        raise ValueError("pod annotation format error, missing fields, do not use nodeName in task spec")
    numbers = []
    for field, text in zip(("memory", "core"), fields[2:4], strict=True):
        try:
            numbers.append(parse_int(text))
        except ValueError as error:
            raise ValueError(f"invalid {field} field: {error}") from error
    return PodCard(uuid=fields[0], type=fields[1], memory=numbers[0], cores=numbers[1])


def _fault(each: MigAllocation) -> str | None:
    """What is wrong with an instance, or None."""
    numbers = (each.container, each.device, each.placement.start, each.gpu_instance or 0, each.compute_instance or 0)
    if not each.gpu or not each.profile or each.placement.size <= 0 or not all(0 <= n <= _LARGEST_ID for n in numbers):
        return "is incomplete"
    known = (bool(each.mig_uuid), each.gpu_instance is not None, each.compute_instance is not None)
    return "has partial runtime identity" if any(known) and not all(known) else None
