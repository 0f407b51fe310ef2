"""
Decodes the requests that name devices, a piece at a time.

A kubelet sends them whenever a pod starts, and they may be large. They consist of texts and one number, so they are
decoded here, ten times as fast as the generated code does it, into the generated classes. The result is the same:
unknown fields are skipped, repeated fields add up, the last number counts. A known field with another wire type, a text
that is not UTF-8, and a message that ends early are refused; so is a request that names more devices than a kubelet knows,
or a device without a name.

40,000 devices still take 10 ms, in which no other task of this process could run. So the first `FIRST_PIECE` fields, which
are all that most pods need, are decoded at once, and the others of a larger request `PIECE` at a time, each in a turn of its
connection (`turns`).

Source: protobuf's encoding guide.
"""

from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

from betterproto2 import Message
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from topoalign.core.model.requests import MOST_CONTAINERS
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.arriving import MOST_NAMES

FIRST_PIECE = 64
"""Fields that are decoded without a turn."""

PIECE = 1_000
"""Fields that are decoded in one turn: half a millisecond."""

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
"""The lists of names in a message, which are its fields 1, 2, …"""

NUMBERS: dict[type[Message], tuple[int, str]] = {v1beta1.ContainerPreferredAllocationRequest: (3, "allocation_size")}
"""The field of a message that is a number of 32 bits."""

NAMING = (*PARTS, v1beta1.PreStartContainerRequest)
"""The requests that name devices, and may be large."""

WIDTHS = {1: 8, 5: 4}
"""Bytes of the wire types of fixed width."""

Steps = Generator[None, None, Message]
"""Pauses after each piece; returns the message."""


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
        """Fields that are decoded, and those at which the piece ends."""
        self._steps = self._containers(kind, PARTS[kind]) if kind in PARTS else self._names(kind, 0, len(data))

    def step(self) -> Message | None:
        """Decodes the next piece. Returns the message when it is whole. Raises GRPCError: INVALID_ARGUMENT."""
        try:
            next(self._steps)
        except StopIteration as whole:
            message: Message = whole.value
            return message
        return None

    def _containers(self, kind: type[Message], part: type[Message]) -> Steps:
        containers: list[Message] = []
        for field in iterate_fields(self._data, 0, len(self._data), kind):
            if field.number == 1:
                if field.wire != 2:
                    raise malformed_message(kind, "a field has another type")
                if len(containers) == MOST_CONTAINERS:
                    raise malformed_message(kind, f"a pod has at most {MOST_CONTAINERS} containers")
                containers.append((yield from self._names(part, field.content, field.end)))
            elif self._count(kind) >= self._until:  # fields that the API does not have take time as well
                self._until += PIECE
                yield
        return kind(container_requests=containers)  # type: ignore[call-arg]  # both of `PARTS` have it

    def _names(self, kind: type[Message], at: int, end: int) -> Steps:
        """The message that stands there."""
        data = self._data
        message = kind()
        known = {number << 3 | 2: getattr(message, name).append for number, name in enumerate(NAMES[kind], 1)}
        while at < end:
            if (add := known.get(data[at])) is not None and (after := self._short(kind, add, at, end)) > at:
                at = after
            else:
                field = field_at(data, at, end, kind)
                at = field.end
                self._other(message, field, known)
                self._count(kind)
            if self._fields >= self._until:
                self._until += PIECE
                yield
        return message

    def _short(self, kind: type[Message], add: Callable[[str], None], at: int, end: int) -> int:
        """Adds the names of one list that follow one another, as far as this piece goes. Returns where the next field is."""
        data = self._data
        key = self._data[at]
        most = left = self._until - self._fields
        try:
            while left and at + 1 < end and data[at] == key and 0 < (length := data[at + 1]) < 0x80:
                at, start, left = at + 2 + length, at + 2, left - 1
                add(data[start:at].decode())
        except UnicodeDecodeError as error:
            raise malformed_message(kind, "a text that is not UTF-8") from error
        if at > end:
            raise malformed_message(kind, "it ends early")
        if left < most:
            self._count(kind, most - left)
        return at

    def _other(self, message: Message, field: WireField, known: dict[int, Callable[[str], None]]) -> None:
        """Takes in a field that is no short name."""
        kind = type(message)
        number, name = NUMBERS.get(kind, (0, ""))
        if (add := known.get(field.number << 3 | 2)) is not None:
            if field.wire != 2:
                raise malformed_message(kind, "a field has another type")
            if field.content == field.end:
                raise malformed_message(kind, "a device without a name")
            add(decode_text(kind, self._data[field.content : field.end]))
        elif field.number == number:
            if field.wire != 0:
                raise malformed_message(kind, "a field has another type")
            value = varint_at(self._data, field.content)[0] & 0xFFFF_FFFF
            setattr(message, name, value - ((value & 0x8000_0000) << 1))

    def _count(self, kind: type[Message], fields: int = 1) -> int:
        """Counts fields, and returns their number."""
        self._fields += fields
        if self._fields > MOST_NAMES:
            raise malformed_message(kind, f"it names at most {MOST_NAMES} devices")
        return self._fields


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
    """The fields of a message that stands there. Raises GRPCError where it is none."""
    while at < end:
        field = field_at(data, at, end, kind)
        yield field
        at = field.end


def field_at(data: bytes, at: int, end: int, kind: type[Message]) -> WireField:
    """The field that begins there, in a message until `end`. Raises GRPCError where there is none."""
    if (
        data[at] & 0x87 == 2 and at + 1 < end and (length := data[at + 1]) < 0x80
    ):  # a short text or message, as most are
        if at + 2 + length > end:
            raise malformed_message(kind, "it ends early")
        return WireField(data[at] >> 3, 2, at, at + 2, at + 2 + length)
    try:
        key, content = varint_at(data, at)
        match key & 7:
            case 0:
                field_end = varint_at(data, content)[1]
            case 2:
                length, content = varint_at(data, content)
                field_end = content + length
            case wire:
                field_end = content + WIDTHS[wire]
    except (ValueError, KeyError) as error:
        raise malformed_message(kind, "no fields of protobuf") from error
    if field_end > end:
        raise malformed_message(kind, "it ends early")
    return WireField(key >> 3, key & 7, at, content, field_end)


# Encodes parts of protobuf's wire format by hand, where a codec would be too slow or is not available.
#
# Source: protobuf's encoding, wire types 0 (varint) and 2 (bytes, strings, messages).


def field(number: int, content: bytes) -> bytes:
    """A field of bytes: a string or a message. Numbers up to 15."""
    if len(content) < 0x80:
        return bytes((number << 3 | 2, len(content))) + content
    return bytes((number << 3 | 2,)) + varint(len(content)) + content


def number_field(number: int, value: int) -> bytes:
    """A field of a number that is not negative. Proto3 does not write a zero."""
    return bytes((number << 3,)) + varint(value) if value else b""


def varint(number: int) -> bytes:
    """Decodes a varint: seven bits a byte, the lowest first; the highest bit marks that more follow."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of the fields of a message that has none but those of wire type 2. Raises ValueError otherwise."""
    at = 0
    while at < len(message):
        key, at = varint_at(message, at)
        if key & 7 != 2:
            raise ValueError(f"field {key >> 3} has wire type {key & 7}, not 2")
        length, at = varint_at(message, at)
        if at + length > len(message):
            raise ValueError("the message ends early")
        yield key >> 3, message[at : at + length]
        at += length


LONGEST_VARINT = 10
"""Bytes of a number of 64 bits (protobuf's encoding guide, "Base 128 Varints")."""


def varint_at(message: bytes, at: int) -> tuple[int, int]:
    """The number there, and where the next byte is. Raises ValueError where the message ends in it, or it is longer."""
    number = shift = 0
    for end in range(at, min(at + LONGEST_VARINT, len(message))):
        number |= (message[end] & 0x7F) << shift
        shift += 7
        if message[end] < 0x80:
            return number, end + 1
    if len(message) - at >= LONGEST_VARINT:
        raise ValueError(f"a number of more than {LONGEST_VARINT} bytes")
    raise ValueError("the message ends early")
