"""
What the allocator hears of its devices, and for how long it believes it.

The stream keeps the last reading of every node for ever: that of a discovery which has died since, or of the boot before
this one. A GPU may have failed in the meantime, so discovery must confirm what it has said: it is asked which revisions
are its newest, and while it has not answered with those that were heard, the health of all devices is unknown. They stay
listed, since a kubelet forgets what it no longer hears of, and none is offered.

On a node whose services share a process discovery answers at once, whether or not the bus is there. Where they do not, a
bus that is away makes discovery silent, too; that says nothing of the hardware, and a node gives out its devices without
the bus, so what was believed when the bus went is believed until it is back.
"""

import anyio
import msgspec
import structlog

from topoalign.allocator.ledger import Ledger
from topoalign.allocator.other_machines import release_other_machines
from topoalign.client import Client
from topoalign.core import wire
from topoalign.core.errors import BadRequest, Unavailable
from topoalign.core.events import DeviceHealthChanged, HealthState, Reading, TopologyDiscovered
from topoalign.core.ports import Bus, Clock
from topoalign.core.requests import AliveRequest, AnnounceRequest

ASK_SECONDS = 10.0
"""Between two questions to a discovery that answers."""
ASK_AGAIN_SECONDS = 1.0
"""Between two questions to one that does not, and for its answer."""
SILENT_SECONDS = 30.0
"""How long what was heard is believed after discovery has confirmed it last."""

UNHEARD_ANSWERS = 5
"""So often discovery may name a reading that has not come, before it is asked to say it again."""

log = structlog.get_logger("topoalign.allocator")


class Hearing:
    """Passes on to the ledger what discovery says, and that its health is unknown while discovery is silent."""

    def __init__(self, ledger: Ledger, bus: Bus, clock: Clock) -> None:
        self._ledger, self._bus, self._clock = ledger, bus, clock
        self._topology: TopologyDiscovered | None = None
        self._health: DeviceHealthChanged | None = None
        """As discovery said it, whatever the ledger was told."""
        self._newest: dict[str, tuple[int, int]] = {}
        """Epoch and revision of topology and health, as discovery answered last."""
        self._answered = 0.0
        """Monotonic seconds at which it did."""
        self._confirmed: float | None = None
        """Monotonic seconds at which it last answered with what was heard; None: never yet."""
        self._trouble: str | None = None
        """Why the ledger was told that the health is unknown; None: it was not."""

    async def run(self) -> None:
        """Until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._hear)
            tasks.start_soon(self._ask_regularly)

    def reason(self) -> str | None:
        """Why what is known of the devices cannot be relied on; None if it can."""
        if self._confirmed is None:
            return "discovery has not confirmed how the devices are since this process started"
        if self._clock.monotonic() - self._confirmed > SILENT_SECONDS:
            return f"discovery has not confirmed how the devices are for {SILENT_SECONDS:g} s"
        return None

    async def sure(self) -> None:
        """
        Before anything is given out: where what was heard has not been confirmed for too long, as after this process was
        stopped for a while, discovery is asked first. If it does not answer, the ledger is told that nothing is known.
        """
        if self._health is not None and self.reason() is not None:
            await self._ask()
            self._tell()

    async def _hear(self) -> None:
        async for heard in Client(self._bus, name="topoalign-allocator").nodes(node=self._ledger.node):
            match heard.event:
                case TopologyDiscovered() if await self._is_news("topology", self._topology, heard.event):
                    self._topology = heard.event
                    self._ledger.hear(heard.event)
                    release_other_machines(self._ledger)
                case DeviceHealthChanged() if await self._is_news("health", self._health, heard.event):
                    self._health = heard.event
                case _:
                    continue
            self._compare()
            if self.reason() is not None:
                await self._ask()
            self._tell()

    async def _is_news(self, kind: str, had: Reading | None, reading: Reading) -> bool:
        """Whether this is not a reading of a former discovery that comes after one of the discovery that lives."""
        if had is None or had.epoch == reading.epoch or not await self._ask():
            return True
        return self._newest.get(kind, (reading.epoch, 0))[0] != had.epoch

    async def _ask_regularly(self) -> None:
        unheard = 0
        while True:
            answered = await self._ask()
            self._tell()
            release_other_machines(self._ledger)
            unheard = unheard + 1 if answered and not self._is_newest() else 0
            if unheard == UNHEARD_ANSWERS:
                unheard = 0
                await self._ask_to_announce()
            await self._clock.sleep(ASK_SECONDS if answered and self.reason() is None else ASK_AGAIN_SECONDS)

    async def _ask(self) -> bool:
        """Whether discovery answered."""
        node = self._ledger.node
        question = msgspec.json.encode(AliveRequest(node=node))
        try:
            answer = await self._bus.ask(wire.alive_subject(node), question, ASK_AGAIN_SECONDS)
            self._newest = wire.answered(answer, dict[str, tuple[int, int]])
        except (Unavailable, BadRequest) as error:
            log.debug("discovery does not answer", finding=error.finding)
            if not self._bus.connected and self.reason() is None:
                self._confirmed = self._clock.monotonic()
            return False
        self._answered = self._clock.monotonic()
        self._compare()
        return True

    def _compare(self) -> None:
        """Takes note if what was heard is what discovery last answered with, or newer."""
        if self._answered and self._is_newest():
            self._confirmed = max(self._confirmed or 0.0, self._answered)

    def _is_newest(self) -> bool:
        return is_of(self._topology, self._newest.get("topology")) and is_of(self._health, self._newest.get("health"))

    async def _ask_to_announce(self) -> None:
        """What discovery said last does not come: it may be lost. Said anew, it comes under new numbers."""
        question = msgspec.json.encode(AnnounceRequest(node=self._ledger.node))
        try:
            await self._bus.ask(wire.announce_subject(self._ledger.node), question, ASK_AGAIN_SECONDS)
        except Unavailable as error:
            log.debug("discovery does not announce", finding=error.finding)

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


def is_of(heard: Reading | None, newest: tuple[int, int] | None) -> bool:
    """Whether this reading is the one of this epoch and revision, or one that came after it."""
    return heard is not None and newest is not None and heard.epoch == newest[0] and heard.revision >= newest[1]


def unknown(health: DeviceHealthChanged, reason: str) -> DeviceHealthChanged:
    """
    The same devices, of which nothing is known. It has an epoch of its own, below 0 as discovery's never is, so that the
    fold takes the reading itself again afterwards.
    """
    return msgspec.structs.replace(
        health,
        epoch=~health.epoch,
        devices={
            device: msgspec.structs.replace(was, state=HealthState.UNKNOWN, reason=reason)
            for device, was in health.devices.items()
        },
    )
