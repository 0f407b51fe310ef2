"""
Whether HAMi's device plugin on a node is alive: the handshake annotation, and what the kubelet says can be allocated.

The scheduler writes `Requesting_<time>` whenever the annotation says anything else, and then reads the node's cards
anew. Nobody answers any more: what counts is that the kubelet still has cards to allocate, which ends with the
plugin's stream. Only where it has none, and the request is a minute old, is the node unhealthy; its cards are then
removed, and the annotation with them.

Times are local times of the scheduler, without a zone, to the second. Source: HAMi 4707fb02, CheckHealth.
"""

import re
from datetime import datetime, timedelta

import msgspec

REQUESTING = "Requesting"
PATIENCE = timedelta(seconds=60)
"""A younger request shows a healthy node."""
_TIME = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2}) ([0-9]{1,2}):([0-9]{2}:[0-9]{2}(?:[.,][0-9]+)?)")


class NodeHealth(msgspec.Struct, frozen=True):
    """What follows for a node."""

    healthy: bool
    refresh: bool
    """Whether its cards are to be read anew."""


def check_handshake(handshake: str | None, allocatable: int, now: datetime) -> NodeHealth:
    """What the annotation (None: absent) says. `refresh` also means that HAMi writes a new request."""
    if handshake is None or REQUESTING not in handshake:
        return NodeHealth(healthy=True, refresh=True)
    asked = _time_of(handshake)
    return NodeHealth(healthy=asked is None or now - asked < PATIENCE or allocatable > 0, refresh=False)


def _time_of(handshake: str) -> datetime | None:
    """When it was asked; None where that cannot be read."""
    found = _TIME.fullmatch(handshake.partition("_")[2])
    if found is None:
        return None
    try:
        return datetime.fromisoformat(f"{found[1]} {int(found[2]):02}:{found[3]}")
    except ValueError:
        return None
