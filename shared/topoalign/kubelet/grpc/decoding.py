"""
Decodes messages that arrive over gRPC. Rejects a message that is incomplete, or that has a field of a wrong type.

The generated code decodes small messages. Requests that list device IDs can be large, and the kubelet sends them
whenever a pod starts. They consist of strings and one number. So this module decodes them into the generated classes
itself, ten times as fast. The result is the same: unknown fields are skipped, repeated fields are concatenated, and the
last value of the number counts. A message is rejected if a known field has another wire type, if a string is not UTF-8,
or if it is truncated. A request is also rejected if it lists more device IDs than a kubelet knows, or an empty one.

40,000 device IDs still take 10 ms, during which no other task of this process can run. So the first `FIRST_PIECE`
fields are decoded at once; the requests for most pods have no more. The other fields are decoded `PIECE` at a time,
each piece in a turn of the connection (`turns`).

Source: protobuf's encoding guide.
"""

from collections.abc import Callable, Generator, Iterator
from functools import cache
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from betterproto2 import Message, decode_varint, encode_varint
from grpclib.const import Status
from grpclib.encoding.proto import ProtoCodec
from grpclib.exceptions import GRPCError

from topoalign.core.model.requests import MOST_CONTAINERS
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.arriving import MOST_NAMES


class Codec(ProtoCodec):
    """The protobuf codec; invalid bytes are reported as the sender's fault."""

    def decode(self, data: bytes, message_type: Any) -> Any:
        """The decoded message. Raises the error of `malformed_message` for invalid bytes or a field of a wrong type."""
        try:
            message: Any = super().decode(data, message_type)
        except Exception as error:  # betterproto2 raises many kinds: EOFError, UnicodeDecodeError, KeyError, ...
            raise malformed_message(message_type, type(error).__name__) from error
        if not is_sound(message):
            raise malformed_message(message_type, "a field has another type")
        return message


CODEC = Codec()


class ServerCodec(Codec):
    """The codec of a server. Of a large request, it decodes the first piece; the rest is decoded in turns."""

    def decode(self, data: bytes, message_type: Any) -> Any:
        """The decoded message; for a request with more device IDs than are decoded at once, its Decoding."""
        if message_type not in NAMING:
            return super().decode(data, message_type)
        decoding = Decoding(data, message_type)
        message = decoding.step()
        return decoding if message is None else message


def is_sound(message: Message) -> bool:
    """
    Whether every field has a value of its type. betterproto2 does not check this: a field that arrives with another wire
    type becomes None, or a number in a list of strings.
    """
    return all(has_type(getattr(message, name), hint) for name, hint in hints_of(type(message)))


def has_type(value: object, hint: Any) -> bool:
    """Whether a value, and each element of a list or map, has the type of the field."""
    inner = get_args(hint)
    if isinstance(value, list):
        return get_origin(hint) is list and all(has_type(element, inner[0]) for element in value)
    if isinstance(value, dict):
        return get_origin(hint) is dict and all(type(text) is str for pair in value.items() for text in pair)
    if isinstance(value, Message):
        return type(value) in (hint, *inner) and is_sound(value)
    return type(value) in (hint, *inner)


@cache
def hints_of(kind: type[Message]) -> tuple[tuple[str, Any], ...]:
    """The fields of a generated message and their types."""
    return tuple(get_type_hints(kind).items())


FIRST_PIECE = 64
"""Fields that are decoded without waiting for a turn."""

PIECE = 1_000
"""Fields that are decoded in one turn, which takes half a millisecond."""

PARTS: dict[type[Message], type[Message]] = {
    v1beta1.AllocateRequest: v1beta1.ContainerAllocateRequest,
    v1beta1.PreferredAllocationRequest: v1beta1.ContainerPreferredAllocationRequest,
}
"""Request -> the type of its elements: a message per container, in field 1."""

NAMES: dict[type[Message], tuple[str, ...]] = {
    v1beta1.ContainerAllocateRequest: ("devices_ids",),
    v1beta1.ContainerPreferredAllocationRequest: ("available_deviceIDs", "must_include_deviceIDs"),
    v1beta1.PreStartContainerRequest: ("devices_ids",),
}
"""Message -> its lists of device IDs, which are its fields 1, 2, …"""

ALLOCATION_SIZE = 3
"""The number of the field `allocation_size` (int32) of ContainerPreferredAllocationRequest."""

NAMING = (*PARTS, v1beta1.PreStartContainerRequest)
"""The requests that list device IDs, and can be large."""

WIDTHS = {1: 8, 5: 4}
"""Wire type of fixed width -> its bytes."""

Steps = Generator[None, None, Message]
"""Yields after each piece; returns the message."""


class WireField(NamedTuple):
    """The position of a field in a message, and of its content."""

    number: int
    wire: int
    start: int
    content: int
    end: int


class Decoding:
    """One request of `NAMING` that is being decoded."""

    def __init__(self, data: bytes, kind: type[Message]) -> None:
        self._data = data
        self._fields = 0
        self._until = FIRST_PIECE
        """The number of fields decoded so far, and the number at which the current piece ends."""
        self._steps = self._containers(kind, PARTS[kind]) if kind in PARTS else self._names(kind, 0, len(data))

    def step(self) -> Message | None:
        """Decodes the next piece. Returns the message once it is complete, else None. Raises GRPCError."""
        try:
            next(self._steps)
        except StopIteration as whole:
            message: Message = whole.value
            return message
        return None

    def _containers(self, kind: type[Message], part: type[Message]) -> Steps:
        containers: list[Message] = []
        for found in iterate_fields(self._data, 0, len(self._data), kind):
            if found.number == 1:
                if found.wire != 2:
                    raise malformed_message(kind, "a field has another type")
                if len(containers) == MOST_CONTAINERS:
                    raise malformed_message(kind, f"a pod has at most {MOST_CONTAINERS} containers")
                containers.append((yield from self._names(part, found.content, found.end)))
            elif self._count(kind):  # unknown fields also take time
                yield
        return kind(container_requests=containers)  # type: ignore[call-arg]  # both of `PARTS` have it

    def _names(self, kind: type[Message], at: int, end: int) -> Steps:
        data = self._data
        message = kind()
        lists = {number << 3 | 2: getattr(message, name).append for number, name in enumerate(NAMES[kind], 1)}
        try:
            while at < end:
                add = lists.get(data[at])
                if (
                    add is not None and at + 1 < end and 0 < (length := data[at + 1]) < 0x80
                ):  # a short name, as most are
                    start = at + 2
                    at = start + length
                    if at > end:
                        raise malformed_message(kind, "it ends early")
                    add(data[start:at].decode())
                else:
                    found = field_at(data, at, end, kind)
                    at = found.end
                    self._other(message, found, lists)
                if self._count(kind):
                    yield
        except UnicodeDecodeError as error:
            raise malformed_message(kind, "a text that is not UTF-8") from error
        return message

    def _other(self, message: Message, found: WireField, lists: dict[int, Callable[[str], None]]) -> None:
        kind = type(message)
        if (add := lists.get(found.number << 3 | 2)) is not None:
            if found.wire != 2:
                raise malformed_message(kind, "a field has another type")
            if found.content == found.end:
                raise malformed_message(kind, "a device without a name")
            add(self._data[found.content : found.end].decode())
        elif isinstance(message, v1beta1.ContainerPreferredAllocationRequest) and found.number == ALLOCATION_SIZE:
            if found.wire != 0:
                raise malformed_message(kind, "a field has another type")
            value = decode_varint(self._data, found.content)[0] & 0xFFFF_FFFF
            message.allocation_size = value - ((value & 0x8000_0000) << 1)

    def _count(self, kind: type[Message]) -> bool:
        """Counts a field. Returns whether the piece ends with it."""
        self._fields += 1
        if self._fields > MOST_NAMES:
            raise malformed_message(kind, f"it names at most {MOST_NAMES} devices")
        if self._fields < self._until:
            return False
        self._until += PIECE
        return True


def decode_text(kind: type[Message], content: bytes) -> str:
    """Raises GRPCError for bytes that are not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise malformed_message(kind, "a text that is not UTF-8") from error


def malformed_message(kind: Any, why: str) -> GRPCError:
    """The error for a message that is not valid protobuf: the sender's fault."""
    return GRPCError(Status.INVALID_ARGUMENT, f"not a {kind.__name__}: {why}")


def iterate_fields(data: bytes, at: int, end: int, kind: type[Message]) -> Iterator[WireField]:
    """The fields of the message in `data[at:end]`. Raises GRPCError for an invalid message."""
    while at < end:
        found = field_at(data, at, end, kind)
        yield found
        at = found.end


def field_at(data: bytes, at: int, end: int, kind: type[Message]) -> WireField:
    """The field that begins at `at`, in a message that ends at `end`. Raises GRPCError if there is no valid field."""
    if data[at] & 0x87 == 2 and at + 1 < end and data[at + 1] < 0x80:  # a short text or message, as most are
        key = data[at]
        content = at + 2
        field_end = content + data[at + 1]
    else:
        try:
            key, content = decode_varint(data, at)
            match key & 7:
                case 0:
                    field_end = decode_varint(data, content)[1]
                case 2:
                    length, content = decode_varint(data, content)
                    field_end = content + length
                case wire:
                    field_end = content + WIDTHS[wire]
        except (EOFError, ValueError, KeyError) as error:
            raise malformed_message(kind, "no fields of protobuf") from error
    if field_end > end:
        raise malformed_message(kind, "it ends early")
    if not key >> 3:
        raise malformed_message(kind, "no fields of protobuf")
    return WireField(key >> 3, key & 7, at, content, field_end)


def field(number: int, content: bytes) -> bytes:
    """Encodes a string or message field. `number`: at most 15."""
    if len(content) < 0x80:
        return bytes((number << 3 | 2, len(content))) + content
    return bytes((number << 3 | 2,)) + encode_varint(len(content)) + content


def number_field(number: int, value: int) -> bytes:
    """Encodes an integer field. `value`: not negative. Zero is not encoded (proto3)."""
    return bytes((number << 3,)) + encode_varint(value) if value else b""
