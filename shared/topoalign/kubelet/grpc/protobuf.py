"""
Encodes parts of protobuf's wire format by hand, where a codec would be too slow or is not available.

Source: protobuf's encoding, wire types 0 (varint) and 2 (bytes, strings, messages).
"""

from collections.abc import Iterator


def field(number: int, content: bytes) -> bytes:
    """A field of bytes: a string or a message. Numbers up to 15."""
    if len(content) < 0x80:
        return bytes((number << 3 | 2, len(content))) + content
    return bytes((number << 3 | 2,)) + varint(len(content)) + content


def number_field(number: int, value: int) -> bytes:
    """A field of a number that is not negative. Proto3 does not write a zero."""
    return bytes((number << 3,)) + varint(value) if value else b""


def varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; the highest bit says that more follow."""
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
