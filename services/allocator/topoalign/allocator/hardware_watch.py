"""
What the allocator hears of its devices, and for how long it believes it.

The stream keeps the last reading of every node for ever: that of a discovery which has died since, or of the boot before
this one. A GPU may have failed in the meantime, so discovery must confirm what it has said: it is asked which revisions
are its newest, and while it has not answered with those that were received, the health of all devices is unknown. They stay
listed, since a kubelet forgets what it no longer hears of, and none is offered.

Nor is a reading believed for its number alone, which whoever may publish can forge: what comes after the first reading
counts once discovery confirms that it has said it. One with a revision that discovery has not reached is forged, and
discovery is asked to say everything anew, which it does under a new epoch. So is one that has the number of discovery's and
another content. Nothing is released for a topology whose content discovery has not confirmed.

On a node whose services share a process discovery answers at once, whether or not the bus is there. Where they do not, a
bus that is away makes discovery silent, too; that says nothing of the hardware, and a node gives out its devices without
the bus, so what was believed when the bus went is believed until it is back.
"""

from collections.abc import Mapping

import anyio
import msgspec
import structlog

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.client import Client, Delivery
from topoalign.core import wire
from topoalign.core.model.errors import BadRequest, NobodyAnswers, StateFault, Unavailable
from topoalign.core.model.events import DeviceHealthChanged, HealthState, Reading, TopologyDiscovered
from topoalign.core.model.ids import AllocationID
from topoalign.core.model.requests import AliveRequest, AnnounceRequest, Published, PublishedRequest
from topoalign.core.ports import Bus, Clock
from topoalign.runtime.clock import until_tick

ASK_SECONDS = 10.0
"""Between two questions to a discovery that answers."""
ASK_AGAIN_SECONDS = 1.0
"""Between two questions to one that does not, and for its answer."""
SILENT_SECONDS = 30.0
"""How long what was received is believed after discovery has confirmed it last."""

FORGED_PAUSE = 0.1
"""Seconds after a reading that discovery does not confirm before the next one is judged: this bounds the cost of a flood."""

UNCONFIRMED_ANSWERS = 5
"""So often discovery may name a reading that has not come, before it is asked to say it again."""

log = structlog.get_logger("topoalign.allocator")


class HardwareWatch:
    """Passes what discovery publishes on to the ledger, and unknown health for all devices while discovery is silent."""

    def __init__(self, ledger: Ledger, bus: Bus, clock: Clock) -> None:
        self._ledger = ledger
        self._bus = bus
        self._clock = clock
        self._topology: TopologyDiscovered | None = None
        self._health: DeviceHealthChanged | None = None
        """As discovery said it, whatever the ledger was told."""
        self._body = b""
        """The message of the topology, as it was said."""
        self._waiting: Delivery | None = None
        """What was received while discovery was silent, and is believed if it is discovery's own."""
        self._newest: dict[str, tuple[int, int]] = {}
        """Epoch and revision of topology and health, as discovery answered last."""
        self._answered = 0.0
        """Monotonic seconds at which it did."""
        self._confirmed: float | None = None
        """Monotonic seconds at which it last answered with what was received; None: never yet."""
        self._asked_to_announce: float | None = None
        """Monotonic seconds at which it was last asked to say everything anew."""
        self._logged = False
        """Whether it was logged that a reading was forged, since discovery confirmed what was received."""
        self.forged = 0
        """Readings with a revision that discovery had not reached."""
        self._trouble: str | None = None
        """Why the ledger was told that the health is unknown; None: it was not."""

    @property
    def newest(self) -> Mapping[str, tuple[int, int]]:
        """`topology` and `health` -> epoch and revision, as discovery answered last; empty: it never did."""
        return self._newest

    async def run(self) -> None:
        """Subscribes to the readings of the node and asks discovery regularly to confirm them, until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._hear)
            tasks.start_soon(self._ask_regularly)

    def reason(self) -> str | None:
        """Why the health of the devices is unconfirmed; None: discovery confirmed it at most `SILENT_SECONDS` ago."""
        if self._confirmed is None:
            return "discovery has not confirmed how the devices are since this process started"
        if self._clock.monotonic() - self._confirmed > SILENT_SECONDS:
            return f"discovery has not confirmed how the devices are for {SILENT_SECONDS:g} s"
        return None

    async def ensure_fresh(self) -> None:
        """
        Asks discovery to confirm the health of the devices if it has not done so for too long; called before every grant.

        That is so after this process was stopped for a while. If discovery does not answer, the ledger is told that the
        health of all devices is unknown.
        """
        if self._health is not None and self.reason() is not None:
            await self._ask()
            self._tell()

    async def _hear(self) -> None:
        async for delivery in Client(self._bus, self._clock, "topoalign-allocator").nodes(node=self._ledger.node):
            await self._take(delivery)

    async def _take(self, delivery: Delivery) -> None:
        """Believes a reading if it is news."""
        match delivery.event:
            case TopologyDiscovered() as event if await self._is_news("topology", self._topology, event, delivery.body):
                self._topology = event
                self._body = delivery.body
                self._ledger.hear(event)
            case DeviceHealthChanged() as event if await self._is_news("health", self._health, event, delivery.body):
                self._health = event
            case _:
                return
        self._compare()
        if self.reason() is not None:
            await self._ask()
        self._tell()
        await self._release_other_machines()

    async def _is_news(self, kind: str, had: Reading | None, reading: Reading, body: bytes) -> bool:
        """
        Whether discovery says that this reading is its own. The first one is believed as it is, unless it is forged: the
        devices are to be listed although the discovery that read them may be gone.

        While discovery is silent, health is believed, for a device may have failed; another topology waits.
        """
        if not await self._ask() or (newest := self._newest.get(kind)) is None:
            if had is None or not isinstance(reading, TopologyDiscovered):
                return True
            self._waiting = Delivery(event=reading, position=0, time=None, body=body)
            return False
        if is_ahead_of(reading, newest) or await self._has_said(kind, reading, body) is False:
            await self._note_forged(kind, reading)
            await self._clock.sleep(FORGED_PAUSE)
            return False
        return had is None or reading.epoch == newest[0]

    async def _has_said(self, kind: str, reading: Reading, body: bytes) -> bool | None:
        """
        Whether discovery has said just this under this number; None: that is not known. A version that cannot be asked this
        is believed by its numbers.
        """
        node = self._ledger.node
        question = msgspec.json.encode(PublishedRequest(node=node))
        try:
            answer = await self._bus.ask(wire.published_subject(node), question, ASK_AGAIN_SECONDS)
            said = wire.decode_answer(answer, dict[str, Published]).get(kind)
        except NobodyAnswers:
            return True
        except (Unavailable, BadRequest) as error:
            log.debug("discovery does not answer", finding=error.finding)
            return None
        if said is None or (said.epoch, said.revision) != (reading.epoch, reading.revision):
            return None
        return said.digest == wire.body_digest(body)

    async def _note_forged(self, kind: str, reading: Reading) -> None:
        self.forged += 1
        if not self._logged:
            self._logged = True
            log.warning(
                "a reading was received that discovery has not said: discovery is asked to say everything anew",
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
        unheard = 0
        while True:
            answered = await self._ask()
            self._tell()
            await self._release_other_machines()
            if answered and self._waiting is not None:
                waiting = self._waiting
                self._waiting = None
                await self._take(waiting)
            unheard = unheard + 1 if answered and not self._is_newest() else 0
            if unheard == UNCONFIRMED_ANSWERS:
                unheard = 0
                await self._ask_to_announce()
            period = ASK_SECONDS if answered and self.reason() is None else ASK_AGAIN_SECONDS
            await self._clock.sleep(until_tick(self._clock, period))

    async def _ask(self) -> bool:
        """Whether discovery answered."""
        node = self._ledger.node
        question = msgspec.json.encode(AliveRequest(node=node))
        delivery = {"topology": self._topology, "health": self._health}
        try:
            answer = await self._bus.ask(wire.alive_subject(node), question, ASK_AGAIN_SECONDS)
            self._newest = wire.decode_answer(answer, dict[str, tuple[int, int]])
        except (Unavailable, BadRequest) as error:
            log.debug("discovery does not answer", finding=error.finding)
            if not self._bus.connected and self.reason() is None:
                self._confirmed = self._clock.monotonic()
            return False
        self._answered = self._clock.monotonic()
        self._compare()
        for kind, reading in delivery.items():  # what was believed while discovery was silent
            if reading is not None and kind in self._newest and is_ahead_of(reading, self._newest[kind]):
                await self._note_forged(kind, reading)
        return True

    def _compare(self) -> None:
        """Takes note if what was received is what discovery last answered with, or newer."""
        if self._answered and self._is_newest():
            self._confirmed = max(self._confirmed or 0.0, self._answered)
            self._logged = False

    def _is_newest(self) -> bool:
        return is_of(self._topology, self._newest.get("topology")) and is_of(self._health, self._newest.get("health"))

    async def _ask_to_announce(self) -> None:
        """What discovery said last does not come: it may be lost. Said anew, it comes under new numbers."""
        question = msgspec.json.encode(AnnounceRequest(node=self._ledger.node))
        try:
            await self._bus.ask(wire.announce_subject(self._ledger.node), question, ASK_AGAIN_SECONDS)
        except Unavailable as error:
            log.debug("discovery does not announce", finding=error.finding)

    async def _release_other_machines(self) -> None:
        """Only where discovery has said which machine this is: nothing is released because of a forged topology."""
        topology = self._topology
        if topology is None or not of_other_machines(self._ledger) or not is_of(topology, self._newest.get("topology")):
            return
        if await self._has_said("topology", topology, self._body) and self._topology is topology:
            release_other_machines(self._ledger)

    def _tell(self) -> None:
        """Tells the ledger how the devices are, as far as that is known."""
        if self._health is None:
            return
        trouble = self.reason()
        self._ledger.hear(self._health if trouble is None else unknown(self._health, trouble))
        if trouble is not None and self._trouble is None:
            log.warning("the health of all devices is unknown", reason=trouble, remedy="see the log of discovery")
        if trouble is None and self._trouble is not None:
            log.info("the health of the devices is known again")
        self._trouble = trouble


def is_of(delivery: Reading | None, newest: tuple[int, int] | None) -> bool:
    """Whether a reading has this epoch and revision; False where either is not known."""
    return delivery is not None and (delivery.epoch, delivery.revision) == newest


def is_ahead_of(delivery: Reading, newest: tuple[int, int]) -> bool:
    """Whether a reading has the epoch of discovery's newest one and a greater revision, which nobody has published."""
    return delivery.epoch == newest[0] and delivery.revision > newest[1]


def is_confirmed(health: DeviceHealthChanged | None) -> bool:
    """Whether discovery confirms the hardware, by the health that the ledger was told: neither none nor `unknown`."""
    return health is not None and health.epoch >= 0


def unknown(health: DeviceHealthChanged, reason: str) -> DeviceHealthChanged:
    """
    Returns the same reading with every device in state UNKNOWN, for this reason.

    Its epoch is negative, which discovery's never is, so that the fold takes the reading itself again afterwards.
    """
    return msgspec.structs.replace(
        health,
        epoch=~health.epoch,
        devices={
            device: msgspec.structs.replace(was, state=HealthState.UNKNOWN, reason=reason)
            for device, was in health.devices.items()
        },
    )


# Allocations of another described machine: what stays in a state directory whose node now plays a different one.
#
# Ids of described machines repeat: every catalogue machine has a GPU-0. So what was held on the former machine would be
# taken for held on the new one, and nobody would ever release it. Uuids of real GPUs do not repeat: records of real
# hardware stay.


def of_other_machines(ledger: Ledger) -> dict[AllocationID, str]:
    """Live allocations of a described machine that the node does not play any more -> that machine."""
    if ledger.state.topology is None:
        return {}
    return {
        name: allocation.machine
        for name, allocation in ledger.state.allocations.items()
        if allocation.machine not in ("", ledger.machine)
    }


def release_other_machines(ledger: Ledger) -> None:
    """
    Releases the allocations of a described machine that the node does not play any more, and logs that.

    An allocation recorded by a version that did not record the machine stays.
    """
    others = of_other_machines(ledger)
    if not others or ledger.state.topology is None:
        return
    try:
        ledger.release(tuple(others), "other-machine")
    except StateFault:  # the ledger has said so; the next call tries again
        return
    log.warning(
        "the record is of another machine: its allocations are released",
        machine=ledger.state.topology.source,
        recorded=sorted(set(others.values())),
        allocations=len(others),
    )
