"""
Decodes an answer that is requested again and again only when it has changed.

GetAllocatableResources is polled, and a node with 1,000 devices needs 30 ms of pure Python to decode it. A kubelet lists the
devices of its maps in another order each time (v1.36.3), so the fields are compared as a set: that takes a tenth of it.
What the asker knows itself, as a node its own thousands of shares, is neither compared nor decoded nor kept.
"""

from collections.abc import Iterator
from typing import Any

from topoalign.kubelet.grpc.codec import QuickCodec
from topoalign.kubelet.grpc.decoding import broken, field_at

Fields = frozenset[bytes]


class Unchanged:
    """Stands for an answer that has the fields of the one before."""


UNCHANGED: Any = Unchanged()

MESSAGES = 1 << 3 | 2
"""The key of field 1, of messages."""


class ComparingCodec(QuickCodec):
    """Of one answer. Decodes to `UNCHANGED` where its fields are the `known` ones; the order does not matter."""

    def __init__(self, known: Fields | None, left_out: tuple[bytes, ...] = ()) -> None:
        """`left_out`: how messages in field 1 begin that are not wanted."""
        self._known = known
        self._left_out = left_out
        self.fields: Fields = frozenset()
        """Of the answer."""

    def decode(self, data: bytes, message_type: Any) -> Any:
        """Raises GRPCError where it is none."""
        wanted = list(fields_without(data, message_type, self._left_out))
        self.fields = frozenset(wanted)
        return UNCHANGED if self.fields == self._known else super().decode(b"".join(wanted), message_type)


def fields_without(data: bytes, kind: Any, left_out: tuple[bytes, ...]) -> Iterator[bytes]:
    """The encoded fields of a message, without messages in field 1 that begin like one of `left_out`. Raises GRPCError."""
    at = 0
    end = len(data)
    while at < end:
        start = at
        if (
            data[at] == MESSAGES and at + 1 < end and data[at + 1] < 0x80
        ):  # a short one, as of a device: read in passing
            content = at + 2
            at = content + data[at + 1]
        else:
            field = field_at(data, at, end, kind)
            content = field.content
            at = field.end
        if at > end:
            raise broken(kind, "it ends early")
        if data[start] != MESSAGES or not data.startswith(left_out, content):
            yield data[start:at]
