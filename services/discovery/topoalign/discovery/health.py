"""
The health of each device, from all readings and errors so far.

There are two sources: readings, each of which covers all devices, and signs, such as an XID, between readings. A bad
sign takes a device out of use at once. The device comes back when it has shown no sign for the quiet time and a reading
that began after that is good. The quiet time doubles for each recovery within the past hour. After some signs only a
reset helps; they last until readings have seen the device go and come back, until the node was booted, or until an
operator heals it.

Every device is judged by itself: an error of one changes the health of no other. A MIG instance is listed
if it alone is unhealthy; else it has the health of its card.

Nothing here reads a clock or hardware: `now` is in monotonic seconds.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from topoalign.core.model.events import DeviceHealth, HealthState
from topoalign.core.model.ids import DeviceID
from topoalign.discovery.drivers.health import HEALTHY, unhealthy
from topoalign.runtime.backoff import backoff_seconds

RELAPSE_SECONDS = 3600.0
"""Whoever falls ill again within this time after a recovery has to be quiet for twice as long; and the longest such time."""


@dataclass
class Mark:
    """Why a device is not trusted."""

    reason: str
    newest: float
    """When the newest sign was seen."""
    lasting: bool
    """Only a reset helps."""
    went: bool = False
    """Since then a reading found it waiting for its reset, or gone."""

    def seen(self, when: float) -> None:
        """There was another sign then, or may have been. A reading may have been begun before the newest one."""
        self.newest = max(self.newest, when)


@dataclass
class HealthJudge:
    """What is known of all devices of a node."""

    quiet_seconds: float
    """Without a sign, before a reading is believed again."""
    _found: dict[DeviceID, DeviceHealth] = field(default_factory=dict)
    """What the newest reading says of GPUs and NICs."""
    _card_of: dict[DeviceID, DeviceID] = field(default_factory=dict)
    """MIG instance -> its GPU."""
    _failure: str | None = None
    """Why the newest reading said nothing."""
    _deaf: dict[DeviceID, str] = field(default_factory=dict)
    """GPU -> why its signs cannot be heard."""
    _marks: dict[DeviceID, Mark] = field(default_factory=dict)
    _well: set[DeviceID] = field(default_factory=set)
    """What a reading once found all right. What is still on its way up, like a NIC at boot, has no relapse to fear."""
    _recoveries: dict[DeviceID, list[float]] = field(default_factory=dict)
    """When devices recovered within the last RELAPSE_SECONDS."""

    def read(
        self,
        found: Mapping[DeviceID, DeviceHealth],
        instances: Mapping[DeviceID, DeviceID],
        awaiting_reset: Iterable[DeviceID],
        began: float,
    ) -> None:
        """A reading of all GPUs and NICs that was begun then. `instances`: MIG instance -> its GPU."""
        had = self._card_of
        self._failure = None
        self._found = dict(found)
        self._card_of = dict(instances)
        for device, health in found.items():
            if health.state is HealthState.HEALTHY:
                self._well.add(device)
            elif health.state is HealthState.UNHEALTHY and device in self._well:
                self.sign(device, health.reason, began)
        gone = set(awaiting_reset)
        for device, mark in list(self._marks.items()):
            card = self._card_of.get(device, device)
            if card not in found:  # one remembered from a run before may only not have been read yet
                if device in had:
                    del self._marks[device]  # an instance that is no more
            elif card in gone:
                mark.went = True
            elif found[card].state is HealthState.HEALTHY:
                self._try(device, card, mark, began)

    def _try(self, device: DeviceID, card: DeviceID, mark: Mark, now: float) -> None:
        """A reading finds nothing wrong any more: perhaps nothing is."""
        if mark.went:
            mark.lasting = False
            mark.went = False
            mark.seen(now)
        if card in self._deaf:
            mark.seen(now)  # it may not be quiet
        if not mark.lasting and now - mark.newest >= self.quiet(device, now):
            del self._marks[device]
            self._recoveries[device] = [*self._relapses(device, now), now]

    def quiet(self, device: DeviceID, now: float) -> float:
        """For how long this device must be without a sign."""
        longest = max(self.quiet_seconds, RELAPSE_SECONDS)
        return backoff_seconds(1 + len(self._relapses(device, now)), self.quiet_seconds, longest)

    def _relapses(self, device: DeviceID, now: float) -> list[float]:
        return [time for time in self._recoveries.get(device, ()) if now - time < RELAPSE_SECONDS]

    def failed(self, reason: str) -> None:
        """A reading that said nothing: nobody knows how the devices are."""
        self._failure = reason

    def deaf(self, reason: str | None, gpus: Iterable[DeviceID] = ()) -> None:
        """Signs of these GPUs, and of no others, cannot be heard for this reason."""
        self._deaf = {} if reason is None else dict.fromkeys(gpus, reason)

    def sign(self, device: DeviceID, reason: str, now: float, *, lasting: bool = False) -> bool:
        """Something bad was seen of a device; whether that is news. The first reason stands, unless a graver one comes."""
        mark = self._marks.get(device)
        news = mark is None or (lasting and not mark.lasting)
        if mark is None or news:
            self._marks[device] = Mark(reason, now, lasting)
        else:
            mark.seen(now)
            mark.went = mark.went and not lasting
        return news

    def heal(self, device: DeviceID) -> None:
        """An operator trusts it, and its instances, again: it is as the newest reading says."""
        for name in (device, *(part for part, card in self._card_of.items() if card == device)):
            self._marks.pop(name, None)
            self._recoveries.pop(name, None)

    def lasting(self) -> dict[DeviceID, str]:
        """Devices that wait for a reset, and why: to be remembered for as long as the node is not booted."""
        return {device: mark.reason for device, mark in self._marks.items() if mark.lasting}

    def verdicts(self, cordons: Mapping[DeviceID, str]) -> dict[DeviceID, DeviceHealth]:
        """
        All GPUs and NICs, and those MIG instances that are ill or cordoned themselves. Nothing before the first reading.

        `cordons`: device -> the operator's reason.
        """
        devices = [*self._found]
        devices += [part for part in self._card_of if part in self._marks or part in cordons]
        return {device: cordoned(self._verdict(device), cordons.get(device)) for device in devices}

    def _verdict(self, device: DeviceID) -> DeviceHealth:
        mark = self._marks.get(device)
        found = self._found.get(device)
        blind = self._failure or self._deaf.get(device)
        if mark is None and blind is not None and found is not None:
            return DeviceHealth(state=HealthState.UNKNOWN, reason=blind)
        if mark is None:
            return found or HEALTHY  # an instance of which nothing is known for itself is as its card
        if blind is not None:
            return unhealthy(mark.reason, blind)
        if found is not None and found.state is not HealthState.HEALTHY:
            return unhealthy(mark.reason, found.reason)
        if mark.lasting:
            return unhealthy(mark.reason, "out of use until it was reset, or an operator heals it")
        return unhealthy(mark.reason, "out of use until it has been quiet for a while")


def cordoned(health: DeviceHealth, reason: str | None) -> DeviceHealth:
    """The same device kept back by an operator for this reason; None: it is not."""
    if reason is None:
        return health
    reasons = (health.reason, f"cordoned: {reason}" if reason else "cordoned")
    return msgspec.structs.replace(health, reason="; ".join(filter(None, reasons)), cordoned=True)
