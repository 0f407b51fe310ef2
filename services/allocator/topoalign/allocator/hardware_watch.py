"""
Receives readings of the hardware, has discovery confirm them, and passes them to the ledger.

The stream keeps the last reading of every node, even if it is from before a reboot or from a discovery that has ended.
A GPU may have failed since. So the allocator requests the newest revisions from discovery. The health of all devices is
unknown until these match the received revisions, and if they have not matched for `SILENT_SECONDS`. The devices stay
listed as unhealthy, because a kubelet forgets devices that are no longer listed.

Any client that may publish can forge the number (epoch and revision) of a reading. So discovery is asked about each
one; while it does not answer, topologies after the first one are dropped. A reading is forged if its revision is
greater than discovery's newest one, or if it has the same number as discovery's reading but different content. Then
the allocator drops it and requests that discovery publish everything again, under a new epoch.

While the bus is disconnected, discovery does not answer, unless the services of the node share a process. This does not
indicate a hardware fault, so the last confirmed readings stay valid until the bus is connected again.
"""

from collections.abc import Mapping
from contextlib import suppress

import anyio
import msgspec
import structlog

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.client import Client, Delivery
from topoalign.core import wire
from topoalign.core.model.errors import BadRequest, NobodyAnswers, StateFault, Unavailable
from topoalign.core.model.events import DeviceHealthChanged, HealthState, Reading, TopologyDiscovered
from topoalign.core.model.ids import AllocationID
from topoalign.core.model.requests import NodeRequest, Published
from topoalign.core.ports import Bus, Clock
from topoalign.runtime.clock import until_tick

ASK_SECONDS = 10.0
"""Seconds between two requests for confirmation, while discovery confirms the received readings."""
ASK_AGAIN_SECONDS = 1.0
"""Seconds between two requests otherwise, and the time limit of every request."""
SILENT_SECONDS = 30.0
"""Seconds for which readings stay valid after their last confirmation."""

FORGED_PAUSE = 0.1
"""Pause in seconds after a forged reading, before the next one is checked. It limits the load of a flood of them."""

UNCONFIRMED_ANSWERS = 5
"""Number of answers in a row that name a reading that was not received, after which discovery must publish again."""

log = structlog.get_logger("topoalign.allocator")


class HardwareWatch:
    """Passes discovery's readings to the ledger, and unknown health for all devices while discovery does not answer."""

    def __init__(self, ledger: Ledger, bus: Bus, clock: Clock) -> None:
        self._ledger = ledger
        self._bus = bus
        self._clock = clock
        self._topology: TopologyDiscovered | None = None
        self._health: DeviceHealthChanged | None = None
        """As discovery published it, even while the health in the ledger is unknown."""
        self._body = b""
        """The message of the topology, as published."""
        self.newest: Mapping[str, tuple[int, int]] = {}
        """`topology` and `health` -> epoch and revision, from discovery's last answer; empty: no answer yet."""
        self._answered = 0.0
        """Monotonic seconds of discovery's last answer; 0: no answer yet."""
        self._confirmed: float | None = None
        """Monotonic seconds at which discovery last confirmed the received readings; None: not yet."""
        self._asked_to_announce: float | None = None
        """Monotonic seconds of the last request to publish everything again because of a forged reading; None: none."""
        self._logged = False
        """Whether a forged reading was logged since the last confirmation."""
        self.forged = 0
        """Number of times that a forged reading was detected."""
        self._unknown_reason: str | None = None
        """Why the ledger has unknown health; None: it has discovery's."""

    async def run(self) -> None:
        """Subscribes to the readings of the node and regularly requests their confirmation, until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow)
            tasks.start_soon(self._ask_regularly)

    def reason(self) -> str | None:
        """Why the health of the devices is unconfirmed; None: discovery confirmed it at most `SILENT_SECONDS` ago."""
        if self._confirmed is None:
            return "discovery has not confirmed the health of the devices since this process started"
        if self._clock.monotonic() - self._confirmed > SILENT_SECONDS:
            return f"discovery has not confirmed the health of the devices for {SILENT_SECONDS:g} s"
        return None

    async def ensure_fresh(self) -> None:
        """
        Requests the confirmation of the health if the last one is too old, for example because this process was
        suspended. If discovery does not answer, all devices get unknown health. Called before every allocation.
        """
        if self._health is not None and self.reason() is not None:
            await self._ask()
            self._pass_health()

    async def _follow(self) -> None:
        async for delivery in Client(self._bus, self._clock, "topoalign-allocator").nodes(node=self._ledger.node):
            await self._take(delivery)

    async def _take(self, delivery: Delivery) -> None:
        """Accepts a reading if it is new and not forged."""
        match delivery.event:
            case TopologyDiscovered() as event if await self._is_news("topology", self._topology, event, delivery.body):
                self._topology = event
                self._body = delivery.body
                self._ledger.take_reading(event)
            case DeviceHealthChanged() as event if await self._is_news("health", self._health, event, delivery.body):
                self._health = event
            case _:
                return
        self._compare()
        if self.reason() is not None:
            await self._ask()
        self._pass_health()
        await self._release_other_machines()

    async def _is_news(self, kind: str, had: Reading | None, reading: Reading, body: bytes) -> bool:
        if not await self._ask() or (newest := self.newest.get(kind)) is None:
            # Discovery does not answer. The first reading is accepted, because the devices must be listed even if
            # discovery has ended. A later health is accepted, because a device may have failed. A later topology is
            # dropped: if it is discovery's, discovery will name its revision and will then be requested to publish it
            # again.
            return had is None or not isinstance(reading, TopologyDiscovered)
        if is_ahead_of(reading, newest) or await self._has_published(kind, reading, body) is False:
            await self._note_forged(kind, reading)
            await self._clock.sleep(FORGED_PAUSE)
            return False
        return had is None or reading.epoch == newest[0]

    async def _has_published(self, kind: str, reading: Reading, body: bytes) -> bool | None:
        """
        Returns whether discovery published this content under this number; None: unknown. If discovery does not have
        the endpoint, returns True, so that only the number counts.
        """
        node = self._ledger.node
        question = msgspec.json.encode(NodeRequest(node=node))
        try:
            answer = await self._bus.ask(wire.discovery_subject(node, "published"), question, ASK_AGAIN_SECONDS)
            published = wire.decode_answer(answer, dict[str, Published]).get(kind)
        except NobodyAnswers:
            return True
        except (Unavailable, BadRequest) as error:
            log.debug("discovery does not answer", finding=error.finding)
            return None
        if published is None or (published.epoch, published.revision) != (reading.epoch, reading.revision):
            return None
        return published.digest == wire.body_digest(body)

    async def _note_forged(self, kind: str, reading: Reading) -> None:
        self.forged += 1
        if not self._logged:
            self._logged = True
            log.warning(
                "a reading was received that discovery has not published: discovery is asked to publish everything again",
                what=kind,
                epoch=reading.epoch,
                revision=reading.revision,
                remedy="see who may publish on the node's subjects: only its own services should",
            )
        now = self._clock.monotonic()
        if self._asked_to_announce is None or now >= self._asked_to_announce + ASK_SECONDS:
            self._asked_to_announce = now
            await self._ask_to_announce()

    async def _ask_regularly(self) -> None:
        unconfirmed = 0
        while True:
            answered = await self._ask()
            self._pass_health()
            await self._release_other_machines()
            unconfirmed = unconfirmed + 1 if answered and not self._is_newest() else 0
            if unconfirmed == UNCONFIRMED_ANSWERS:
                unconfirmed = 0
                await self._ask_to_announce()
            is_settled = answered and self._is_newest() and self.reason() is None
            period = ASK_SECONDS if is_settled else ASK_AGAIN_SECONDS
            await self._clock.sleep(until_tick(self._clock, period))

    async def _ask(self) -> bool:
        """Requests the newest revisions from discovery. Returns whether it answered."""
        node = self._ledger.node
        question = msgspec.json.encode(NodeRequest(node=node))
        delivery = {"topology": self._topology, "health": self._health}
        try:
            answer = await self._bus.ask(wire.discovery_subject(node, "alive"), question, ASK_AGAIN_SECONDS)
            self.newest = wire.decode_answer(answer, dict[str, tuple[int, int]])
        except (Unavailable, BadRequest) as error:
            log.debug("discovery does not answer", finding=error.finding)
            if not self._bus.connected and self.reason() is None:
                self._confirmed = self._clock.monotonic()
            return False
        self._answered = self._clock.monotonic()
        self._compare()
        for kind, reading in delivery.items():  # readings accepted while discovery did not answer
            if reading is not None and kind in self.newest and is_ahead_of(reading, self.newest[kind]):
                await self._note_forged(kind, reading)
        return True

    def _compare(self) -> None:
        """Records a confirmation if the received readings are the ones that discovery named."""
        if self._answered and self._is_newest():
            self._confirmed = max(self._confirmed or 0.0, self._answered)
            self._logged = False

    def _is_newest(self) -> bool:
        return has_number(self._topology, self.newest.get("topology")) and has_number(
            self._health, self.newest.get("health")
        )

    async def _ask_to_announce(self) -> None:
        """Requests that discovery publish its readings again, under new numbers, because the last ones may be lost."""
        question = msgspec.json.encode(NodeRequest(node=self._ledger.node))
        try:
            await self._bus.ask(wire.discovery_subject(self._ledger.node, "announce"), question, ASK_AGAIN_SECONDS)
        except Unavailable as error:
            log.debug("discovery does not announce", finding=error.finding)

    async def _release_other_machines(self) -> None:
        """Releases allocations of another machine, but only if discovery confirms that the topology is its own."""
        topology = self._topology
        if (
            topology is None
            or not of_other_machines(self._ledger)
            or not has_number(topology, self.newest.get("topology"))
        ):
            return
        if await self._has_published("topology", topology, self._body) and self._topology is topology:
            release_other_machines(self._ledger)

    def _pass_health(self) -> None:
        """Passes discovery's health to the ledger, or unknown health if it is unconfirmed."""
        if self._health is None:
            return
        reason = self.reason()
        self._ledger.take_reading(self._health if reason is None else mark_unknown(self._health, reason))
        if reason is not None and self._unknown_reason is None:
            log.warning("the health of all devices is unknown", reason=reason, remedy="see the log of discovery")
        if reason is None and self._unknown_reason is not None:
            log.info("the health of the devices is known again")
        self._unknown_reason = reason


def has_number(reading: Reading | None, newest: tuple[int, int] | None) -> bool:
    """Whether a reading has this epoch and revision; False if either argument is None."""
    return reading is not None and (reading.epoch, reading.revision) == newest


def is_ahead_of(reading: Reading, newest: tuple[int, int]) -> bool:
    """Whether a reading has the epoch of discovery's newest one and a greater revision, so that it must be forged."""
    return reading.epoch == newest[0] and reading.revision > newest[1]


def is_confirmed(health: DeviceHealthChanged | None) -> bool:
    """Whether discovery has confirmed this health. False for None and for a result of `mark_unknown`."""
    return health is not None and health.epoch >= 0


def mark_unknown(health: DeviceHealthChanged, reason: str) -> DeviceHealthChanged:
    """
    Returns the same reading with every device in state UNKNOWN. Its epoch is negative, unlike those of discovery, so
    that the fold accepts the original reading again afterwards.
    """
    return msgspec.structs.replace(
        health,
        epoch=~health.epoch,
        devices={
            device: msgspec.structs.replace(was, state=HealthState.UNKNOWN, reason=reason)
            for device, was in health.devices.items()
        },
    )


def of_other_machines(ledger: Ledger) -> dict[AllocationID, str]:
    """Returns allocation -> its machine, for live allocations of a machine that the node no longer simulates."""
    if ledger.state.topology is None:
        return {}
    return {
        name: allocation.machine
        for name, allocation in ledger.state.allocations.items()
        if allocation.machine not in ("", ledger.machine)
    }


def release_other_machines(ledger: Ledger) -> None:
    """
    Releases the allocations of a machine that the node no longer simulates, and logs it. Simulated machines use the
    same device ids: every machine of the catalogue has a GPU-0. So these allocations would count for the new machine,
    and would never be released.
    """
    if others := of_other_machines(ledger):
        with suppress(StateFault):  # the ledger has logged it; the next call tries again
            ledger.release(tuple(others), "other-machine")
            log.warning(
                "the record is of another machine: its allocations are released",
                machine=ledger.machine,
                recorded=sorted(set(others.values())),
                allocations=len(others),
            )
