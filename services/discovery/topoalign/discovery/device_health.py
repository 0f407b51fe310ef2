"""
Keeps the health of a node's devices: combines errors, readings and operator overrides, and remembers them.

The parts are: `xids` for the severity of an XID, `health` for the state of a device, `record` for what survives a
restart.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import structlog

from topoalign.core.model.errors import StateFault, clean
from topoalign.core.model.events import DeviceHealth, HealthState
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.maintenance import Override
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Clock, HardwareEvent, Inventory, Occurrence
from topoalign.discovery.drivers.health import HEALTHY, unhealthy
from topoalign.discovery.record import DeviceRecord, RecordFile
from topoalign.discovery.xids import Severity, XidRules, describe_xid
from topoalign.runtime.clock import backoff_seconds

# The health of each device, from all readings and errors so far.
#
# There are two sources: readings, each of which covers all devices, and signs, such as an XID, between readings. A bad
# sign takes a device out of use at once. The device comes back when it has shown no sign for the quiet time and a
# reading that began after that is good. The quiet time doubles for each recovery within the past hour. After some signs
# only a reset helps; they last until readings have seen the device go and come back, until the node was booted, or
# until an operator heals it.
#
# Every device is judged by itself: an error of one changes the health of no other. A MIG instance is listed if it alone
# is unhealthy; else it has the health of its card.
#
# Nothing here reads a clock or hardware: `now` is in monotonic seconds.


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
    _unsubscribed: dict[DeviceID, str] = field(default_factory=dict)
    """GPU -> why its signs cannot be received."""
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
        if card in self._unsubscribed:
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

    def lose_subscription(self, reason: str | None, gpus: Iterable[DeviceID] = ()) -> None:
        """Signs of these GPUs, and of no others, cannot be received for this reason."""
        self._unsubscribed = {} if reason is None else dict.fromkeys(gpus, reason)

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
        return {device: add_cordon(self._verdict(device), cordons.get(device)) for device in devices}

    def _verdict(self, device: DeviceID) -> DeviceHealth:
        mark = self._marks.get(device)
        found = self._found.get(device)
        blind = self._failure or self._unsubscribed.get(device)
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


def add_cordon(health: DeviceHealth, reason: str | None) -> DeviceHealth:
    """The same device kept back by an operator for this reason; None: it is not."""
    if reason is None:
        return health
    reasons = (health.reason, f"cordoned: {reason}" if reason else "cordoned")
    return msgspec.structs.replace(health, reason="; ".join(filter(None, reasons)), cordoned=True)


LONGEST_REASON = 200

log = structlog.get_logger("topoalign.discovery")


class HealthKeeper:
    """Of one node."""

    def __init__(self, record: RecordFile, xids: XidRules, quiet_seconds: float, clock: Clock) -> None:
        self._record = record
        self._xids = xids
        self._clock = clock
        self._judge = HealthJudge(quiet_seconds)
        self._unsaved: str | None = None
        self._unnumbered: str | None = None
        """Why the last epoch is not on record; logged once."""
        if doubt := record.load():
            remedy = "cordon anew what is not to be used; if all is, uncordon one"
            log.error("cordons are not known", finding=doubt, remedy=remedy)
        for device, reason in record.kept.awaiting_reset.items():
            self._judge.sign(device, reason, clock.monotonic(), lasting=True)

    def trouble(self) -> str | None:
        """Readiness: why what must outlive a restart is not whole."""
        return self._record.kept.doubt or self._unsaved

    @property
    def cordons(self) -> Mapping[DeviceID, str]:
        """Device id -> the operator's reason."""
        return self._record.kept.cordons

    def new_epoch(self) -> int:
        """
        For a run of discovery, or a part of one: above that of the run before it, also where the clock was set back in
        between. What is said under numbers that were used already is taken for a repetition, and the devices for what they
        were.
        """
        epoch = max(int(self._clock.wall() * 1000), self._record.kept.epoch + 1)
        try:
            self._record.change(lambda record: msgspec.structs.replace(record, epoch=epoch))
        except StateFault as fault:
            if self._unnumbered != fault.finding:
                log.warning(
                    "the next start has only the clock to number by", finding=fault.finding, remedy=fault.remedy
                )
            self._unnumbered = fault.finding
        return epoch

    def follow(self, xids: XidRules, quiet_seconds: float) -> None:
        """From now on by these rules."""
        self._xids = xids
        self._judge.quiet_seconds = quiet_seconds

    def verdicts(self) -> dict[DeviceID, DeviceHealth]:
        """The health of each device, with cordons, as it is published."""
        return self._judge.verdicts(self.cordons)

    def read(self, found: Mapping[DeviceID, DeviceHealth], inventory: Inventory, began: float) -> None:
        """`found`: all GPUs and NICs, those included that this inventory lacks."""
        topology = inventory.topology
        instances = {part.uuid: gpu.id for gpu in topology.gpus for part in gpu.mig or ()}
        missing = found.keys() - topology.gpu_by_id.keys() - topology.nic_by_id.keys()
        gone = frozenset() if inventory.nameless else missing
        self._judge.read(found, instances, inventory.awaiting_reset | gone, began)
        self._remember()

    def failed(self, reason: str) -> None:
        """A reading failed for this reason: the health of all devices is unknown."""
        self._look()
        self._judge.failed(reason)

    def lose_subscription(self, reason: str | None, gpus: Iterable[DeviceID]) -> None:
        """Events of these GPUs cannot be received for this reason; None: all can be received."""
        self._judge.lose_subscription(reason, gpus)

    def observe(self, event: HardwareEvent, topology: Topology) -> bool:
        """Weighs an event. Returns whether a reading should follow soon, because it tells more."""
        severity, reason = self._weighed(event)
        devices = touched(topology, event)
        if not devices:
            log.warning("an event of a GPU that is not known", kind=event.kind, xid=event.xid, gpu=event.gpu)
            return True
        if severity in (Severity.IGNORED, Severity.READ):
            log.debug("a GPU reports", devices=devices, what=reason, meaning=severity.value)
            return severity is Severity.READ
        lasting = severity is Severity.LASTING
        news = [self._judge.sign(device, reason, self._clock.monotonic(), lasting=lasting) for device in devices]
        if any(news):
            log.warning("a GPU has failed", devices=devices, what=reason, meaning=severity.value)
        self._remember()
        return any(news)

    def _weighed(self, event: HardwareEvent) -> tuple[Severity, str]:
        match event.kind:
            case Occurrence.XID:
                xid = event.xid or 0
                return self._xids.severity(xid), describe_xid(xid)
            case Occurrence.DOUBLE_BIT_ECC:  # the XID that comes with it says what it takes
                return Severity.READ, "uncorrectable memory error"
            case Occurrence.SINGLE_BIT_ECC:
                return Severity.IGNORED, "corrected memory error"
            case Occurrence.UNAVAILABLE:
                return Severity.PASSING, "the driver has taken it out of use"
            case Occurrence.CHANGED:
                return Severity.READ, "its MIG instances or its recovery action changed"

    def say(self, word: Override, devices: Sequence[DeviceID], reason: str) -> None:
        """Of an operator, or a service that reports. Raises StateFault where it cannot be kept; then it does not hold."""
        self._look()
        match word:
            case "cordon":
                self._keep(devices, dict.fromkeys(devices, clean(reason, LONGEST_REASON)))
            case "uncordon":
                self._keep(devices, {})
            case "heal":
                for device in devices:
                    self._judge.heal(device)
                self._remember()
            case "report":
                self._report(devices, clean(reason, LONGEST_REASON))
                return
        log.info("an operator has spoken", word=word, devices=devices, reason=clean(reason, LONGEST_REASON))

    def _report(self, devices: Sequence[DeviceID], reason: str) -> None:
        """A service saw these devices fail: an error that passes, of which the log has the first."""
        now = self._clock.monotonic()
        if news := [device for device in devices if self._judge.sign(device, reason, now)]:
            log.warning("a service of the node reports a failure", devices=news, what=reason)

    def _keep(self, devices: Sequence[DeviceID], cordons: Mapping[DeviceID, str]) -> None:
        """Of these devices these cordons, and no others. Whoever says so knows what is cordoned, so that ends a doubt."""

        def with_these(record: DeviceRecord) -> DeviceRecord:
            others = {device: why for device, why in record.cordons.items() if device not in devices}
            return msgspec.structs.replace(record, cordons={**others, **cordons}, doubt="")

        self._record.change(with_these)

    def _look(self) -> None:
        """Takes in what another process of this node has written: what an operator told it, and what it has received."""
        had = self._record.kept.awaiting_reset
        self._record.look()
        now = self._record.kept.awaiting_reset
        for device in had.keys() - now.keys():
            self._judge.heal(device)
        for device in now.keys() - had.keys():
            self._judge.sign(device, now[device], self._clock.monotonic(), lasting=True)

    def _remember(self) -> None:
        """Goes on without, where the file cannot be written: a GPU that failed is out of use all the same."""

        def with_lasting(record: DeviceRecord) -> DeviceRecord:
            return msgspec.structs.replace(record, awaiting_reset=self._judge.lasting())

        self._look()
        try:
            self._record.change(with_lasting)
        except StateFault as fault:
            if self._unsaved != fault.finding:
                log.error("a restart would forget what waits for a reset", finding=fault.finding, remedy=fault.remedy)
            self._unsaved = fault.finding
        else:
            self._unsaved = None


def touched(topology: Topology, event: HardwareEvent) -> tuple[DeviceID, ...]:
    """
    What an event happened to: a GPU, or the MIG instances it names. The whole GPU if those are not known, for they may have
    been made since the last reading, and if it is offered as a whole: whoever gets it gets them, too.
    """
    gpu = topology.gpu_by_id.get(event.gpu) if event.gpu is not None else None
    if gpu is None:
        return ()
    if gpu.id in topology.offers_by_base:
        return (gpu.id,)
    parts = tuple(
        part.uuid
        for part in gpu.mig or ()
        if part.gpu_instance == event.gpu_instance and event.compute_instance in (None, part.compute_instance)
    )
    return parts or (gpu.id,)
