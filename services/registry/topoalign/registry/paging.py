"""
Lists in pages: `limit` is the largest length of a page, `continue` starts after the previous page.

A page ends at the key of its last row, so rows that appear or disappear between two pages shift nothing. The token is
opaque to the reader and checked like all input from outside.
"""

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable
from itertools import islice
from typing import Generic, TypeVar

import msgspec

from topoalign.core.model.errors import InvalidField, quoted

T = TypeVar("T")
Key = tuple[str, ...]

DEFAULT_LIMIT = 500
MOST = 1_000
"""Rows in one answer."""


class Page(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """A part of a list."""

    items: tuple[T, ...]
    next: str | None = msgspec.field(name="continue")
    """Give this as `continue` to read on; null on the last page."""


def limit_of(text: str | None) -> int:
    """Raises InvalidField."""
    if text is None:
        return DEFAULT_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and 1 <= int(text) <= MOST):
        raise InvalidField("limit", quoted([text]), f"give a whole number from 1 to {MOST}")
    return int(text)


def key_of(token: str | None) -> Key:
    """The key a page begins after; () for the first. Raises InvalidField."""
    if token is None:
        return ()
    try:
        return msgspec.json.decode(urlsafe_b64decode(token.encode()), type=Key)
    except (msgspec.DecodeError, binascii.Error, ValueError, RecursionError):
        raise InvalidField("continue", quoted([token]), "give back what the last page had, unchanged") from None


def page(rows: Iterable[tuple[Key, T]], limit: int) -> Page[T]:
    """The first `limit` rows of what comes in the order of its keys. No more than one row behind them is looked at."""
    found = list(islice(rows, limit + 1))
    more = len(found) > limit
    token = urlsafe_b64encode(msgspec.json.encode(found[limit - 1][0])).decode() if more else None
    return Page(items=tuple(item for _, item in found[:limit]), next=token)
