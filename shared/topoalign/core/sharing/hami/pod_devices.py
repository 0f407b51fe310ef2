"""
The cards of a pod in HAMi's annotations: what the scheduler decides, and what its device plugin then allocates.

A card is `uuid,type,memory,cores:`, a container its cards and `;`, init containers first; a container without cards
is only its `;`. So the text that is read back has one container more, after the last `;`, and it is empty.

Source: HAMi 4707fb02.
"""

from collections.abc import Sequence

import msgspec

from topoalign.core.demand.go_text import parse_int
from topoalign.core.demand.share_annotations import DEVICES_ALLOCATED
from topoalign.core.sharing.hami.registration import InvalidAnnotation

_FIELDS = 4


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
