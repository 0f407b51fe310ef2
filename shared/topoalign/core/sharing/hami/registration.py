"""
Reads the annotation in which HAMi's device plugin registers the GPUs of a node.

The current format is JSON. It omits fields with zero values: index 0, NUMA node 0, and the health of an unhealthy GPU.
Older versions wrote `id,count,memory,cores,type,numa,health[,index,mode]:` for each GPU; the oldest versions wrote no
index and mode. All these formats are supported.

Source: HAMi 4707fb02, node registration.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from topoalign.core.demand.go_text import go_quoted, parse_bool, parse_int
from topoalign.core.demand.share_annotations import REGISTER
from topoalign.core.model.errors import BadRequest, clean
from topoalign.core.model.topology.mig import MigPlacement

T = TypeVar("T")

PairScores = Mapping[str, Mapping[str, int]]
"""Uuid -> uuid of another GPU -> score of the links between them. A missing score is 0."""

OLD_MODE = "hami-core"
"""Mode of GPUs in the oldest format."""
_OLDEST = 7
_OLD = 9
"""Number of fields of a GPU in the old formats."""


class RegisteredProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of MIG instance that a GPU can be partitioned into, field by field as in the annotation."""

    name: str
    """NVIDIA's name: `1g.5gb`."""
    memory: int = msgspec.field(default=0, name="memoryMB")
    """MiB."""
    cores: int = msgspec.field(default=0, name="core")
    """Hundredths of the GPU's multiprocessors, rounded up."""
    slices: int = msgspec.field(default=0, name="sliceCount")
    placements: tuple[MigPlacement, ...] = ()
    """The possible placements of an instance, in any order."""


class RegisteredGpu(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One GPU of a node, field by field as in the annotation."""

    id: str = ""
    index: int = 0
    slots: int = msgspec.field(default=0, name="count")
    memory: int = msgspec.field(default=0, name="devmem")
    """MiB."""
    cores: int = msgspec.field(default=0, name="devcore")
    type: str = ""
    numa: int = 0
    mode: str = ""
    profiles: tuple[RegisteredProfile, ...] = msgspec.field(default=(), name="migProfiles")
    healthy: bool = msgspec.field(default=False, name="health")


class InvalidAnnotation(BadRequest):
    """
    Raised for an annotation of HAMi that cannot be read.

    `reason` is the message of HAMi's own components.

    Remedy: Check the component of HAMi that writes it.
    """

    def __init__(self, key: str, reason: str) -> None:
        self.key = key
        self.reason = reason
        super().__init__(f"annotation {key}: {clean(reason, 300)}", "look at the part of HAMi that writes it")


def decode_register(text: str) -> tuple[RegisteredGpu, ...]:
    """The GPUs in an annotation in the current or an old format. Raises InvalidAnnotation."""
    if not text.lstrip().startswith("["):
        return decode_old_register(text)
    try:
        return msgspec.json.decode(text, type=tuple[RegisteredGpu, ...])
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
        raise InvalidAnnotation(REGISTER, str(error)) from error


def decode_old_register(text: str) -> tuple[RegisteredGpu, ...]:
    """The GPUs in an annotation in an old format. Raises InvalidAnnotation with upstream's reason."""
    if ":" not in text:
        raise InvalidAnnotation(REGISTER, "node annotation missing device separator")
    return tuple(_read_old_gpu(segment) for segment in text.split(":") if segment)


def _read_old_gpu(segment: str) -> RegisteredGpu:
    if "," not in segment:
        raise InvalidAnnotation(REGISTER, f"malformed node annotation segment: {go_quoted(segment)}")
    fields = segment.split(",")
    if len(fields) not in (_OLDEST, _OLD):
        raise InvalidAnnotation(REGISTER, f"unexpected field count {len(fields)} in node annotation")
    slots, memory, cores = (
        _field(name, text, parse_int) for name, text in zip(("count", "memory", "core"), fields[1:4], strict=True)
    )
    healthy = _field("health", fields[6], parse_bool)
    numa = _field("numa", fields[5], _atoi)
    index = _field("index", fields[7], _atoi) if len(fields) == _OLD else 0
    if index < 0:
        raise InvalidAnnotation(REGISTER, f"index field must not be negative: {index}")
    return RegisteredGpu(
        id=fields[0],
        index=index,
        slots=slots,
        memory=memory,
        cores=cores,
        type=fields[4],
        numa=numa,
        mode=fields[8] if len(fields) == _OLD else OLD_MODE,
        healthy=healthy,
    )


def _field(name: str, text: str, read: Callable[[str], T]) -> T:
    try:
        return read(text)
    except ValueError as error:
        raise InvalidAnnotation(REGISTER, f"invalid {name} field: {error}") from error


def _atoi(text: str) -> int:
    return parse_int(text, 64, "Atoi")
