"""
Computes a node's device health from readings, errors and operator overrides, and stores what must survive a restart.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import structlog

from topoalign.core.model.errors import StateFault, clean
from topoalign.core.model.events import HEALTHY, DeviceHealth, HealthState
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.maintenance import Override
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Clock, HardwareEvent, Inventory, Occurrence
from topoalign.discovery.device_record import RecordFile
from topoalign.discovery.drivers.reading_health import unhealthy
from topoalign.discovery.xids import Severity, XidRules, describe_xid
from topoalign.runtime.clock import backoff_seconds

# The health of each device, from all readings and errors so far.
#
# There are two sources: readings, each of which covers all devices, and signs, which are errors between readings, such
# as an XID. A sign makes a device unhealthy at once. The device becomes healthy again with a good reading that began
# after a quiet time without signs. The quiet time doubles with each recovery within the past hour. After some signs,
# the device needs a reset. These signs last until readings have found the device missing or waiting for its reset, and
# then present again, until the node is rebooted, or until an operator heals the device.
#
# Every device is judged separately: an error of one device does not change the health of another. A MIG instance is
# listed only if it has a sign or a cordon of its own; otherwise, it has the health of its GPU.
#
# `HealthJudge` reads neither a clock nor hardware: `now` is in monotonic seconds.


RELAPSE_SECONDS = 3600.0
"""If a device fails again within this time after a recovery, its quiet time doubles. Also the longest quiet time."""


@dataclass
class Mark:
    """Why a device is unhealthy, even if readings are good."""

    reason: str
    newest: float
    lasting: bool
    """Whether the device needs a reset."""
    went: bool = False
    """Whether a later reading found the device missing or waiting for its reset."""

    def seen(self, when: float) -> None:
        """Records that there was, or may have been, another sign at this time, which may be before the newest one."""
        self.newest = max(self.newest, when)


@dataclass
class HealthJudge:
    """Judges the health of all devices of a node."""

    quiet_seconds: float
    """Seconds without a sign before a good reading makes the device healthy again."""
    _found: dict[DeviceID, DeviceHealth] = field(default_factory=dict)
    """The health of GPUs and NICs by the newest reading."""
    _gpu_or_nic_of: dict[DeviceID, DeviceID] = field(default_factory=dict)
    """MIG instance -> its GPU."""
    _failure: str | None = None
    _unsubscribed: dict[DeviceID, str] = field(default_factory=dict)
    """GPU -> why its signs cannot be received."""
    _marks: dict[DeviceID, Mark] = field(default_factory=dict)
    _well: set[DeviceID] = field(default_factory=set)
    """Devices that a reading has found healthy before. Only they get a mark if a reading finds them unhealthy. So a NIC
    whose port is not up yet at boot becomes healthy without a quiet time."""
    _recoveries: dict[DeviceID, list[float]] = field(default_factory=dict)
    """When devices recovered within the last RELAPSE_SECONDS."""

    def read(
        self,
        found: Mapping[DeviceID, DeviceHealth],
        instances: Mapping[DeviceID, DeviceID],
        awaiting_reset: Iterable[DeviceID],
        began: float,
    ) -> None:
        """Processes a reading of all GPUs and NICs that began at `began`. `instances`: MIG instance -> its GPU."""
        had = self._gpu_or_nic_of
        self._failure = None
        self._found = dict(found)
        self._gpu_or_nic_of = dict(instances)
        for device, health in found.items():
            if health.state is HealthState.HEALTHY:
                self._well.add(device)
            elif health.state is HealthState.UNHEALTHY and device in self._well:
                self.sign(device, health.reason, began)
        gone = set(awaiting_reset)
        for device, mark in list(self._marks.items()):
            owner = self._gpu_or_nic_of.get(device, device)
            if owner not in found:  # a device remembered from an earlier run may not have been read yet
                if device in had:
                    del self._marks[device]  # the instance was destroyed
            elif owner in gone:
                mark.went = True
            elif found[owner].state is HealthState.HEALTHY:
                self._recover(device, owner, mark, began)

    def _recover(self, device: DeviceID, owner: DeviceID, mark: Mark, now: float) -> None:
        if mark.went:
            mark.lasting = False
            mark.went = False
            mark.seen(now)
        if owner in self._unsubscribed:
            mark.seen(now)  # its signs cannot be received, so there may have been one
        if not mark.lasting and now - mark.newest >= self.quiet(device, now):
            del self._marks[device]
            self._recoveries[device] = [*self._relapses(device, now), now]

    def quiet(self, device: DeviceID, now: float) -> float:
        """Returns the quiet time of this device in seconds."""
        longest = max(self.quiet_seconds, RELAPSE_SECONDS)
        return backoff_seconds(1 + len(self._relapses(device, now)), self.quiet_seconds, longest)

    def _relapses(self, device: DeviceID, now: float) -> list[float]:
        return [time for time in self._recoveries.get(device, ()) if now - time < RELAPSE_SECONDS]

    def failed(self, reason: str) -> None:
        """Records a failed reading: the health of all devices becomes unknown."""
        self._failure = reason

    def lose_subscription(self, reason: str | None, gpus: Iterable[DeviceID] = ()) -> None:
        """Records that signs of only these GPUs cannot be received, and why; None: signs of all can be received."""
        self._unsubscribed = {} if reason is None else dict.fromkeys(gpus, reason)

    def sign(self, device: DeviceID, reason: str, now: float, *, lasting: bool = False) -> bool:
        """Records a sign. Returns whether it is new: the first reason is kept, unless a lasting sign follows."""
        mark = self._marks.get(device)
        news = mark is None or (lasting and not mark.lasting)
        if mark is None or news:
            self._marks[device] = Mark(reason, now, lasting)
        else:
            mark.seen(now)
            mark.went = mark.went and not lasting
        return news

    def heal(self, device: DeviceID) -> None:
        """Removes the marks of a device and its instances: they have the health of the newest reading again."""
        for name in (device, *(instance for instance, gpu in self._gpu_or_nic_of.items() if gpu == device)):
            self._marks.pop(name, None)
            self._recoveries.pop(name, None)

    def lasting(self) -> dict[DeviceID, str]:
        """Returns the devices that wait for a reset, with the reasons. They are remembered until the node reboots."""
        return {device: mark.reason for device, mark in self._marks.items() if mark.lasting}

    def health_by_device(self, cordons: Mapping[DeviceID, str]) -> dict[DeviceID, DeviceHealth]:
        """The health of GPUs and NICs, and of MIG instances with one of their own; `cordons`: device -> reason."""
        devices = [*self._found]
        devices += [each for each in self._gpu_or_nic_of if each in self._marks or each in cordons]
        found = {device: self._health_of(device) for device in devices}
        for device in found.keys() & cordons.keys():
            reasons = (found[device].reason, f"cordoned: {cordons[device]}" if cordons[device] else "cordoned")
            reason = "; ".join(filter(None, reasons))
            found[device] = msgspec.structs.replace(found[device], reason=reason, cordoned=True)
        return found

    def _health_of(self, device: DeviceID) -> DeviceHealth:
        mark = self._marks.get(device)
        found = self._found.get(device)
        blind = self._failure or self._unsubscribed.get(device)
        if mark is None and blind is not None and found is not None:
            return DeviceHealth(state=HealthState.UNKNOWN, reason=blind)
        if mark is None:
            return found or HEALTHY  # an instance without a health of its own
        if blind is not None:
            return unhealthy(mark.reason, blind)
        if found is not None and found.state is not HealthState.HEALTHY:
            return unhealthy(mark.reason, found.reason)
        if mark.lasting:
            return unhealthy(mark.reason, "out of use until it was reset, or an operator heals it")
        return unhealthy(mark.reason, "out of use until it has been quiet for a while")


LONGEST_REASON = 200

log = structlog.get_logger("topoalign.discovery")


class HealthKeeper:
    """Combines the sources of health of one node."""

    def __init__(self, record: RecordFile, xids: XidRules, quiet_seconds: float, clock: Clock) -> None:
        self._record = record
        self._xids = xids
        self._clock = clock
        self._judge = HealthJudge(quiet_seconds)
        self._unsaved: str | None = None
        if unconfirmed := record.load():
            remedy = "cordon again the devices that must not be used; if there are none, uncordon one device"
            log.error("cordons are not known", finding=unconfirmed, remedy=remedy)
        for device, reason in record.kept.awaiting_reset.items():
            self._judge.sign(device, reason, clock.monotonic(), lasting=True)

    def not_ready_reason(self) -> str | None:
        """For /readyz: why the record that must survive a restart is incomplete; None: it is complete."""
        return self._record.kept.unconfirmed or self._unsaved

    @property
    def cordons(self) -> Mapping[DeviceID, str]:
        """Device id -> the operator's reason."""
        return self._record.kept.cordons

    def new_epoch(self) -> int:
        """Returns a new epoch, which is greater than all earlier ones even if the clock was set back."""
        epoch = max(int(self._clock.wall() * 1000), self._record.kept.epoch + 1)
        try:
            self._record.change(epoch=epoch)
        except StateFault as fault:
            event = "the epoch cannot be recorded, so the next start takes it from the clock alone"
            log.warning(event, finding=fault.finding, remedy=fault.remedy)
        return epoch

    def follow(self, xids: XidRules, quiet_seconds: float) -> None:
        """Uses these rules from now on."""
        self._xids = xids
        self._judge.quiet_seconds = quiet_seconds

    def health_by_device(self) -> dict[DeviceID, DeviceHealth]:
        """The health of each device, with cordons, as it is published."""
        return self._judge.health_by_device(self.cordons)

    def read(self, found: Mapping[DeviceID, DeviceHealth], inventory: Inventory, began: float) -> None:
        """Processes a reading. `found`: all GPUs and NICs, including those that the inventory lacks."""
        topology = inventory.topology
        instances = {instance.uuid: gpu.id for gpu in topology.gpus for instance in gpu.mig or ()}
        missing = found.keys() - topology.gpu_by_id.keys() - topology.nic_by_id.keys()
        gone = frozenset() if inventory.nameless else missing
        self._judge.read(found, instances, inventory.awaiting_reset | gone, began)
        self._remember()

    def failed(self, reason: str) -> None:
        """Records a failed reading: the health of all devices becomes unknown for this reason."""
        self._reload()
        self._judge.failed(reason)

    def lose_subscription(self, reason: str | None, gpus: Iterable[DeviceID]) -> None:
        """Records that events of only these GPUs cannot be received, and why; None: all can be received."""
        self._judge.lose_subscription(reason, gpus)

    def observe(self, event: HardwareEvent, topology: Topology) -> bool:
        """Processes a hardware event. Returns whether a reading should follow soon."""
        severity, reason = self._judge_severity(event)
        gpu = topology.gpu_by_id.get(event.gpu) if event.gpu is not None else None
        if gpu is None:
            log.warning("an event of an unknown GPU", kind=event.kind, xid=event.xid, gpu=event.gpu)
            return True
        instances = [
            each.uuid
            for each in gpu.mig or ()
            if each.gpu_instance == event.gpu_instance and event.compute_instance in (None, each.compute_instance)
        ]
        # The event counts for the whole GPU in two cases: the GPU is offered as a whole (its container then has all
        # instances), or the instance is unknown (it may be newer than the last reading).
        devices = instances if instances and gpu.id not in topology.offers_by_base else [gpu.id]
        if severity in (Severity.IGNORED, Severity.READ):
            log.debug("a GPU reports", devices=devices, what=reason, meaning=severity.value)
            return severity is Severity.READ
        lasting = severity is Severity.LASTING
        news = [self._judge.sign(device, reason, self._clock.monotonic(), lasting=lasting) for device in devices]
        if any(news):
            log.warning("a GPU has failed", devices=devices, what=reason, meaning=severity.value)
        self._remember()
        return any(news)

    def _judge_severity(self, event: HardwareEvent) -> tuple[Severity, str]:
        match event.kind:
            case Occurrence.XID:
                xid = event.xid or 0
                return self._xids.severity(xid), describe_xid(xid)
            case Occurrence.DOUBLE_BIT_ECC:  # the XID that comes with it decides
                return Severity.READ, "uncorrectable memory error"
            case Occurrence.SINGLE_BIT_ECC:
                return Severity.IGNORED, "corrected memory error"
            case Occurrence.UNAVAILABLE:
                return Severity.PASSING, "the driver has taken it out of use"
            case Occurrence.CHANGED:
                return Severity.READ, "its MIG instances or its recovery action changed"

    def apply_override(self, override: Override, devices: Sequence[DeviceID], reason: str) -> None:
        """Applies an operator's override or a service's report. Raises StateFault if it cannot be written."""
        self._reload()
        reason = clean(reason, LONGEST_REASON)
        match override:
            case "cordon":
                self._keep(devices, dict.fromkeys(devices, reason))
            case "uncordon":
                self._keep(devices, {})
            case "heal":
                for device in devices:
                    self._judge.heal(device)
                self._remember()
            case "report":
                # the mark is removed after the quiet time
                now = self._clock.monotonic()
                if news := [device for device in devices if self._judge.sign(device, reason, now)]:
                    log.warning("a service of the node reports a failure", devices=news, what=reason)
                return
        log.info("an operator override was applied", override=override, devices=devices, reason=reason)

    def _keep(self, devices: Sequence[DeviceID], cordons: Mapping[DeviceID, str]) -> None:
        """Replaces the cordons of these devices. The operator has reviewed them, so the record counts as confirmed."""
        others = {device: why for device, why in self.cordons.items() if device not in devices}
        self._record.change(cordons={**others, **cordons}, unconfirmed="")

    def _reload(self) -> None:
        # another process of this node may have written to the record
        had = self._record.kept.awaiting_reset
        self._record.reload()
        now = self._record.kept.awaiting_reset
        for device in had.keys() - now.keys():
            self._judge.heal(device)
        for device in now.keys() - had.keys():
            self._judge.sign(device, now[device], self._clock.monotonic(), lasting=True)

    def _remember(self) -> None:
        self._reload()
        try:
            self._record.change(awaiting_reset=self._judge.lasting())
        except StateFault as fault:
            if self._unsaved != fault.finding:
                log.error("a restart would forget what waits for a reset", finding=fault.finding, remedy=fault.remedy)
            self._unsaved = fault.finding
        else:
            self._unsaved = None
