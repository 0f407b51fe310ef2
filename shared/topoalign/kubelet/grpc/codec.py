"""
Decodes messages that arrive over gRPC: complete, and with every field of the type in the API, or refused.

The generated code decodes and encodes what is rare. The messages that a kubelet waits for when a pod starts are decoded in
`decoding`, a large one in turns, and encoded below.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from betterproto2 import Message
from grpclib.encoding.proto import ProtoCodec

from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.decoding import NAMING, Decoding, field, malformed_message, number_field


class Codec(ProtoCodec):
    """The protobuf codec; invalid bytes are reported as the sender's fault."""

    def decode(self, data: bytes, message_type: Any) -> Any:
        """The decoded message. Raises the error of `malformed_message` for bytes or fields of another type."""
        try:
            message: Any = super().decode(data, message_type)
        except Exception as error:  # betterproto2 lets many kinds through: EOFError, UnicodeDecodeError, KeyError, ...
            raise malformed_message(message_type, type(error).__name__) from error
        if not sound(message):
            raise malformed_message(message_type, "a field has another type")
        return message


CODEC = Codec()


class ServerCodec(Codec):
    """The codec of a server: leaves large requests to it, and encodes frequent answers by hand."""

    def encode(self, message: Any, message_type: Any) -> bytes:
        """The bytes of a message."""
        encode = ENCODERS.get(type(message))
        return encode(message) if encode is not None else super().encode(message, message_type)

    def decode(self, data: bytes, message_type: Any) -> Any:
        """The decoded message; of a request that names more devices than are decoded at once, its Decoding."""
        if message_type not in NAMING:
            return super().decode(data, message_type)
        decoding = Decoding(data, message_type)
        message = decoding.step()
        return decoding if message is None else message


def sound(message: Message) -> bool:
    """
    Whether every field has a value of its type. betterproto2 does not check this: a field that arrives with another wire
    type becomes None, or a number among texts.
    """
    return all(has_type(getattr(message, name), hint) for name, hint in hints_of(type(message)))


def has_type(value: object, hint: Any) -> bool:
    """Whether a value has the type of its field, with the elements of lists and maps."""
    inner = get_args(hint)
    if isinstance(value, list):
        return get_origin(hint) is list and all(has_type(element, inner[0]) for element in value)
    if isinstance(value, dict):
        return get_origin(hint) is dict and all(type(text) is str for pair in value.items() for text in pair)
    if isinstance(value, Message):
        return type(value) in (hint, *inner) and sound(value)
    return type(value) in (hint, *inner)


@cache
def hints_of(kind: type[Message]) -> tuple[tuple[str, Any], ...]:
    """The fields of a generated message and their types."""
    return tuple(get_type_hints(kind).items())


# Encodes the responses that a kubelet waits for when a pod starts, ten times as fast as the generated code.
#
# The bytes are those of the generated code: fields in the order of their numbers, without those that have their
# default.
#
# Source: protobuf's encoding guide; the device plugin API v1beta1.


def preferred(response: v1beta1.PreferredAllocationResponse) -> bytes:
    """A response to GetPreferredAllocation."""
    return b"".join(
        field(1, b"".join([field(1, device.encode()) for device in container.device_i_ds]))
        for container in response.container_responses
    )


def allocated(response: v1beta1.AllocateResponse) -> bytes:
    """A response to Allocate."""
    return b"".join([field(1, container(each)) for each in response.container_responses])


def container(response: v1beta1.ContainerAllocateResponse) -> bytes:
    """Encodes the response for one container."""
    return b"".join(
        (
            *encode_map(1, response.envs),
            *(
                field(
                    2,
                    encode_text(1, each.container_path)
                    + encode_text(2, each.host_path)
                    + number_field(3, each.read_only),
                )
                for each in response.mounts
            ),
            *(
                field(
                    3,
                    encode_text(1, each.container_path)
                    + encode_text(2, each.host_path)
                    + encode_text(3, each.permissions),
                )
                for each in response.devices
            ),
            *encode_map(4, response.annotations),
            *(field(5, encode_text(1, each.name)) for each in response.cdi_devices),
        )
    )


def encode_map(number: int, texts: Mapping[str, str]) -> list[bytes]:
    """A map of texts: a message per entry, with key and value even where they are empty."""
    return [field(number, field(1, key.encode()) + field(2, value.encode())) for key, value in texts.items()]


def encode_text(number: int, value: str) -> bytes:
    """A field with a text. Proto3 does not write an empty one."""
    return field(number, value.encode()) if value else b""


def nothing(response: Message) -> bytes:
    """A response without fields."""
    return b""


ENCODERS: dict[type, Callable[[Any], bytes]] = {
    v1beta1.AllocateResponse: allocated,
    v1beta1.PreferredAllocationResponse: preferred,
    v1beta1.PreStartContainerResponse: nothing,
}
