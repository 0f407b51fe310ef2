"""
Decodes large requests a piece at a time.

Decoding is pure Python, five microseconds a device: 40,000 devices block everything else for 0.2 s, in a thread as
well, because of the interpreter's lock. So a large request is cut at the borders of its fields and decoded in pieces,
each in a turn of its connection (`turns`). A piece of a message is a message, and the value of a message is the merge
of its pieces (protobuf's encoding guide, "Last One Wins" and merging), so the generated code decodes each of them.

If a request names more devices than a kubelet knows, or a device without a name, decoding ends there.
"""

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

from betterproto2 import Message

from topoalign.core.model.requests import MOST_CONTAINERS
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.arriving import MOST_NAMES
from topoalign.kubelet.grpc.codec import CODEC, broken
from topoalign.kubelet.grpc.protobuf import varint_at

PIECE = 100
"""Fields that are decoded in one turn: half a millisecond."""

PIECE_BYTES = 8 * 2**10
"""Or so many bytes: a name of this length is one that no device has, and is one piece."""

PARTS: dict[type[Message], type[Message]] = {
    v1beta1.AllocateRequest: v1beta1.ContainerAllocateRequest,
    v1beta1.PreferredAllocationRequest: v1beta1.ContainerPreferredAllocationRequest,
}
"""What these consist of: a message per container, in field 1."""

NAMING = (*PARTS, v1beta1.PreStartContainerRequest)
"""The requests that name devices, and may be large."""

WIDTHS = {1: 8, 5: 4}
"""Bytes of the wire types of fixed width."""

Turn = Callable[[], Awaitable[None]]


class Field(NamedTuple):
    """Where a field stands in a message: all of it, and its content."""

    number: int
    wire: int
    start: int
    content: int
    end: int


class Decoding:
    """One request that is being decoded."""

    def __init__(self, data: bytes, turn: Turn) -> None:
        self._data, self._turn = data, turn
        self._names = 0

    async def decode(self, kind: type[Message]) -> Message:
        """Raises GRPCError: INVALID_ARGUMENT."""
        await self._turn()
        part = PARTS.get(kind)
        if part is None:
            return await self._pieces(kind, 0, len(self._data))
        containers: list[Message] = []
        for field in fields_of(self._data, 0, len(self._data), kind):
            if field.number == 1:
                if field.wire != 2:
                    raise broken(kind, "a field has another type")
                if len(containers) == MOST_CONTAINERS:
                    raise broken(kind, f"a pod has at most {MOST_CONTAINERS} containers")
                containers.append(await self._pieces(part, field.content, field.end))
            else:
                self._count(kind)
                if self._names % PIECE == 0:  # fields that the API does not have take time as well
                    await self._turn()
        return kind(container_requests=containers)  # type: ignore[call-arg]  # both of `PARTS` have it

    async def _pieces(self, kind: type[Message], start: int, end: int) -> Message:
        """The message that stands there."""
        whole, begun, fields = kind(), start, 0
        for field in fields_of(self._data, start, end, kind):
            if field.wire == 2 and field.content == field.end:
                raise broken(kind, "a device without a name")
            self._count(kind)
            fields += 1
            if fields == PIECE or field.end - begun >= PIECE_BYTES:
                add(whole, CODEC.decode(self._data[begun : field.end], kind))
                begun, fields = field.end, 0
                await self._turn()
        add(whole, CODEC.decode(self._data[begun:end], kind))
        return whole

    def _count(self, kind: type[Message]) -> None:
        self._names += 1
        if self._names > MOST_NAMES:
            raise broken(kind, f"it names at most {MOST_NAMES} devices")


def add(whole: Message, piece: Any) -> None:
    """What a piece says comes after what was said before: lists grow, a number that is there replaces the former one."""
    for name, value in vars(piece).items():
        if isinstance(value, list):
            getattr(whole, name).extend(value)
        elif isinstance(value, int) and value:
            setattr(whole, name, value)


def fields_of(data: bytes, at: int, end: int, kind: type[Message]) -> Iterator[Field]:
    """The fields of a message that stands there. Raises GRPCError where it is none."""
    while at < end:
        try:
            key, content = varint_at(data, at)
            match key & 7:
                case 0:
                    field_end = content = varint_at(data, content)[1]
                case 2:
                    length, content = varint_at(data, content)
                    field_end = content + length
                case wire:
                    field_end = content + WIDTHS[wire]
        except (ValueError, KeyError) as error:
            raise broken(kind, "no fields of protobuf") from error
        if field_end > end:
            raise broken(kind, "it ends early")
        yield Field(key >> 3, key & 7, at, content, field_end)
        at = field_end
