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
_TIME = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2}) ([0-9]{1,2}):([0-9]{2}:[0-9]{2})([.,][0-9]+)?")


class NodeHealth(msgspec.Struct, frozen=True):
    """What follows for a node."""

    healthy: bool
    refresh: bool
    """Whether its cards are to be read anew."""


class Reported(msgspec.Struct, frozen=True, kw_only=True):
    """What a node shows of its cards."""

    allocatable: int = 0
    """Of `nvidia.com/gpu`, as the kubelet counts them."""
    register: str | None = None
    """The annotation with its cards. None: there is none."""


def check_handshake(handshake: str | None, allocatable: int, now: datetime) -> NodeHealth:
    """What the annotation (None: absent) says. `refresh` also means that `requesting(now)` is to be written."""
    if handshake is None or REQUESTING not in handshake:
        return NodeHealth(healthy=True, refresh=True)
    asked = _time_of(handshake)
    return NodeHealth(healthy=asked is None or now < asked + PATIENCE or allocatable > 0, refresh=False)


def check_node(handshake: str | None, before: Reported, current: Reported, now: datetime) -> NodeHealth:
    """
    As `check_handshake`, and what has changed since the node was looked at last (`before`; `Reported()` at first).

    A node whose last card goes is unhealthy at once; one whose number of cards or register text changes is read anew.
    """
    answer = check_handshake(handshake, current.allocatable, now)
    if current.allocatable == 0:
        return answer if before.allocatable == 0 else NodeHealth(healthy=False, refresh=answer.refresh)
    if before.allocatable != current.allocatable:
        return NodeHealth(healthy=True, refresh=True)
    changed = (before.register or "") != (current.register or "")
    return NodeHealth(healthy=answer.healthy, refresh=answer.refresh or changed)


def requesting(now: datetime) -> str:
    """The annotation that the scheduler writes."""
    return f"{REQUESTING}_{now:%Y-%m-%d %H:%M:%S}"


def _time_of(handshake: str) -> datetime | None:
    """When it was asked; None where that cannot be read."""
    found = _TIME.fullmatch(handshake.partition("_")[2])
    if found is None:
        return None
    try:
        return datetime.fromisoformat(f"{found[1]} {int(found[2]):02}:{found[3]}")
    except ValueError:
        return None
