"""
Keeps the health of a node's devices: combines errors, readings and operator overrides, and remembers them.

The parts are: `xids` for the severity of an XID, `health` for the state of a device, `record` for what survives a
restart.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import structlog

from topoalign.core.model.errors import StateFault, clean
from topoalign.core.model.events import DeviceHealth
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.maintenance import Word
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Clock, HardwareEvent, Inventory, Occurrence
from topoalign.discovery.health import HealthJudge
from topoalign.discovery.record import Record, RecordFile
from topoalign.discovery.xids import Severity, XidRules, describe_xid

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

    def deaf(self, reason: str | None, gpus: Iterable[DeviceID]) -> None:
        """Events of these GPUs cannot be received for this reason; None: all can be received."""
        self._judge.deaf(reason, gpus)

    def heard(self, event: HardwareEvent, topology: Topology) -> bool:
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

    def say(self, word: Word, devices: Sequence[DeviceID], reason: str) -> None:
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

        def with_these(record: Record) -> Record:
            others = {device: why for device, why in record.cordons.items() if device not in devices}
            return msgspec.structs.replace(record, cordons={**others, **cordons}, doubt="")

        self._record.change(with_these)

    def _look(self) -> None:
        """Takes in what another process of this node has written: what an operator told it, and what it has heard."""
        had = self._record.kept.awaiting_reset
        self._record.look()
        now = self._record.kept.awaiting_reset
        for device in had.keys() - now.keys():
            self._judge.heal(device)
        for device in now.keys() - had.keys():
            self._judge.sign(device, now[device], self._clock.monotonic(), lasting=True)

    def _remember(self) -> None:
        """Goes on without, where the file cannot be written: a GPU that failed is out of use all the same."""

        def with_lasting(record: Record) -> Record:
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
