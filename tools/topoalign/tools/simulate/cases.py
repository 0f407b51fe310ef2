"""What explains a pod that its node refused, or that got other devices than were reserved for it."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from topoalign.core.model.ids import DeviceID, NodeName

MOST_CASES = 20
"""Of a report."""
BEFORE_SECONDS = 6.0
"""So long before a pod was reserved a case begins: nodes tell of ended pods some seconds later."""

Devices = frozenset[DeviceID]


class Taken(NamedTuple):
    """What a kubelet saw of its devices when it took a pod."""

    uid: str
    pod: str
    at: float
    """Seconds of the loop when it had decided."""
    free: Devices = frozenset()
    """What no running pod had when the kubelet took it."""
    preferred: Sequence[DeviceID] = ()
    """What device plugins answered to GetPreferredAllocation."""
    unhealthy: Devices = frozenset()
    """As the kubelet was told."""
    happened: Sequence[tuple[float, str]] = ()
    """What happened on the node before, the oldest first: seconds of the loop, and words."""


class Reserved(NamedTuple):
    """What was reserved for a pod, when that was written last."""

    devices: Devices
    at: float
    """Seconds of the loop."""
    pod: str = ""
    ended: float | None = None
    """When it was written down that this is over. None: it was not."""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What was reserved for another pod of the node when the kubelet decided."""

    devices: tuple[DeviceID, ...]
    reserved_seconds: float
    """How long before the decision that was written."""
    taken_seconds: float | None
    """
    How long before the decision the kubelet had taken the other pod; negative: it took it later, so that pods came in
    another order than they were reserved in. None: it has not taken it.
    """


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A pod that was refused or that deviated, with what was known then. Devices are sorted by id."""

    what: Literal["refused", "deviated"]
    pod: str
    node: NodeName
    container: str | None
    """None: the pod as a whole."""
    message: str
    """The node's, or how the devices differ."""
    reserved: tuple[DeviceID, ...]
    """For the pod; the last time that something was."""
    reserved_seconds: float | None
    """How long before the kubelet's decision that was written; negative: after it. None: nothing was."""
    preferred: tuple[DeviceID, ...]
    """
    By the node's device plugins, in this admission. Where it differs from what was reserved, and that was free, the
    allocator did not know of the reservation then, or answered with that of another pod.
    """
    given: tuple[DeviceID, ...]
    free: tuple[DeviceID, ...]
    """Devices that no pod had that ran."""
    unhealthy: tuple[DeviceID, ...]
    """As the kubelet was told."""
    held: dict[str, Held]
    """Pod -> what was reserved for it then, of other pods of the node."""
    happened: tuple[str, ...]
    """What had happened on the node since the pod was reserved and a few seconds before, the oldest first."""


def case_of(
    what: Literal["refused", "deviated"],
    node: NodeName,
    taken: Taken,
    records: Mapping[str, Reserved],
    all_taken: Mapping[str, float] = {},
    *,
    container: str | None,
    message: str = "",
    given: Devices = frozenset(),
) -> Case:
    """
    The case of a pod. By UID: `records`, what was reserved on its node; `all_taken`, when its kubelet took pods, in seconds
    of the loop.
    """
    own = records.get(taken.uid)
    held = {
        each.pod or uid: Held(
            devices=ordered(each.devices),
            reserved_seconds=round(taken.at - each.at, 3),
            taken_seconds=round(taken.at - all_taken[uid], 3) if uid in all_taken else None,
        )
        for uid, each in records.items()
        if uid != taken.uid and each.at <= taken.at and (each.ended is None or each.ended > taken.at)
    }
    return Case(
        what=what,
        pod=taken.pod,
        node=node,
        container=container,
        message=message or difference(own.devices if own else frozenset(), given),
        reserved=ordered(own.devices) if own else (),
        reserved_seconds=round(taken.at - own.at, 3) if own else None,
        preferred=tuple(taken.preferred),
        given=ordered(given),
        free=ordered(taken.free),
        unhealthy=ordered(taken.unhealthy),
        held=held,
        happened=tuple(
            f"{at - taken.at:+.3f} s {what}"
            for at, what in taken.happened
            if at >= (own.at if own else taken.at) - BEFORE_SECONDS
        ),
    )


def difference(reserved: Devices, given: Devices) -> str:
    """How devices that were given differ from those that were reserved."""
    return f"got {listed(given - reserved)} instead of {listed(reserved - given)}"


def lines(case: Case) -> list[str]:
    """The case as text, its first line first."""
    when = "" if case.reserved_seconds is None else f", written {case.reserved_seconds:g} s before the decision"
    return [
        f"{case.what}: pod {case.pod}, node {case.node}, container {case.container or '-'}: {case.message}",
        f"  reserved   {listed(case.reserved)}{when}",
        f"  preferred  {listed(case.preferred)}",
        f"  given      {listed(case.given)}",
        f"  free       {listed(case.free)}",
        f"  unhealthy  {listed(case.unhealthy)}",
        *(held_line(pod, each) for pod, each in case.held.items()),
        *(f"  {each}" for each in case.happened),
    ]


def held_line(pod: str, held: Held) -> str:
    """The line about what was reserved for another pod."""
    when = "not taken" if held.taken_seconds is None else f"taken {held.taken_seconds:g} s before it"
    return f"  held       {listed(held.devices)} for {pod}, written {held.reserved_seconds:g} s before the decision, {when}"


def ordered(devices: Devices) -> tuple[DeviceID, ...]:
    """By id."""
    return tuple(sorted(devices))


def listed(devices: Sequence[DeviceID] | Devices) -> str:
    """The devices as text."""
    return ", ".join(sorted(devices)) or "nothing"
