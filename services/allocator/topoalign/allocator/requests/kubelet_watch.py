"""
Keeps up with what the node's kubelet decides by, so that the node and every listener predict from the same facts.

The files are polled, by their times alone, which are asked for on the event loop as those of the sockets beside them are (a
configuration outside the kubelet's root directory is not): at the next half second after the kernel has told of a change in
their directories, and every half second where it cannot tell (`runtime.directory_changes`). They are read, and plugins'
devices are asked for, where one has changed, and every five seconds in any case, because the volumes of a pod go without a
trace in their times. What is found becomes a part of the node's `UsageObserved` where it has changed. A prediction of the
node reads everything first; one that a scheduler waits for looks at the times and reads what has to be read.

A pod that succeeds or fails changes none of these times. So while allocations are live, PodResources is asked every half
second which of their containers have ended, and everything is read when another one has.

As long as other plugins than ours are shown, or the question fails, devices are asked for every half second: a kubelet
writes its checkpoint when a plugin lists devices, and leaves it as it is when one goes away (kubelet v1.36.3, devicemanager
`genericDeviceUpdateCallback`, `PluginDisconnected`).

Where the files cannot be read in time, what was read last stands, with the time of that reading, and they are read again
after 1, 2, 4 ... 30 seconds.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from datetime import UTC, datetime

import anyio
import msgspec

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.ports import nothing_ended
from topoalign.allocator.reconciliation.pod_resources import Listed
from topoalign.allocator.requests.kubelet_files import LONGEST, KubeletFiles
from topoalign.core.model.errors import Unavailable, clean
from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import AllocationID, ResourceName
from topoalign.core.model.kubelet import KubeletObserved
from topoalign.core.ports import Clock
from topoalign.runtime.backoff import backoff_seconds
from topoalign.runtime.clock import until_tick
from topoalign.runtime.directory_changes import DirectoryChanges

POLL_SECONDS = 0.5
"""Between two polls: what changes is announced within a second."""
READ_SECONDS = 5.0
"""Between two readings of files that have not changed by their times."""
LAGS = "the record may lag behind the kubelet, and what containers had that have ended meanwhile counts as held"
"""What answers say while it is not known which containers have ended."""
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0
"""Seconds before files that could not be read in time are read again, doubled each time."""


class KubeletWatch:
    """Reads the kubelet's files and its plugins' devices into the ledger."""

    def __init__(
        self,
        ledger: Ledger,
        files: KubeletFiles,
        clock: Clock,
        devices: Callable[[Collection[ResourceName]], Awaitable[Listed]] | None = None,
        ended: Callable[[], Awaitable[Sequence[Allocation]]] = nothing_ended,
        changes: DirectoryChanges | None = None,
    ) -> None:
        """
        `devices` is asked for the devices of all plugins apart from those of our resources, and raises Unavailable; None:
        there is nobody to ask. `ended` is asked for what the record still has of containers that have ended, as the kubelet
        says now, and raises Unavailable. `changes` tells of changes in directories; None: nobody does.
        """
        self._ledger = ledger
        self._files = files
        self._clock = clock
        self._devices = devices
        self._ended = ended
        self._changes = changes or DirectoryChanges()
        self._turn = anyio.Lock(fast_acquire=True)
        self._begun = self._done = 0
        """Whole readings: how many began, and which was the last to come to an end."""
        self._stamp: tuple[object, ...] | None = None
        """Of the files as they were read last; None: they are to be read anew."""
        self._read_at = 0.0
        """Monotonic seconds."""
        self._late = 0
        self._again = 0.0
        """Readings in a row that were late, and the monotonic seconds before which `poll` begins no other."""
        self._answer: tuple[Listed | None, str] = (None, "")
        """The devices as they were listed last, or None and why they are not known."""
        self._is_ended_known = True
        """Whether the last reading knew which containers have ended."""
        self._last: tuple[KubeletObserved, float] | None = None
        """What was read last, and when, in seconds since 1970."""

    async def run(self) -> None:
        """
        Polls every `POLL_SECONDS` while an allocation is live or a file may have changed, and every `READ_SECONDS`, until
        cancelled.
        """
        while True:
            change = self._changes.next_change
            is_told = self._known() is not None and self._changes.watch(*self._files.directories)
            await self.poll()
            is_idle = not self._may_have_gone() and not self._ledger.state.allocations
            if is_told and is_idle and self._clock.monotonic() >= self._again:
                await self._changes.wait(change, self._clock, until_tick(self._clock, READ_SECONDS))
                if not change.is_set():
                    self._stamp = None
                    continue
            await self._clock.sleep(until_tick(self._clock, POLL_SECONDS))

    async def read_all(self) -> None:
        """Reads all files and devices now. One reading serves every caller that asked before it began."""
        begun = self._begun
        async with self._turn:
            if self._done <= begun:
                self._begun += 1
                await self._read(self._changed())
                self._done = self._begun

    async def poll(self) -> None:
        """
        As `read_changed`, and reads everything where another container has ended. Files that were late wait for their time.
        Does nothing before the hardware is known.
        """
        ended = set[AllocationID]()
        if self._known() is not None:
            with suppress(Unavailable):
                ended = {each.id for each in await self._ended()}
                self._stamp = self._stamp if self._is_ended_known else None
        async with self._turn:
            if self._ledger.state.topology is None:
                return
            known = self._known()
            if known is not None and self._clock.monotonic() < self._again:
                self._observe(known, *await self._listed())
            else:
                if known is not None and not ended <= {*known.ended}:
                    self._stamp = None
                await self._read_changed()

    async def read_changed(self) -> None:
        """
        Reads the files unless they are, by their times as they are now, those that were read in the last `READ_SECONDS`; and
        the devices if they may have changed.
        """
        async with self._turn:
            await self._read_changed()

    async def _read_changed(self) -> None:
        known = self._known()
        stamp = self._changed()
        if known is None or stamp != self._stamp or self._clock.monotonic() >= self._read_at + READ_SECONDS:
            await self._read(stamp)
        else:
            self._observe(known, *(await self._listed() if self._may_have_gone() else self._answer))

    def _known(self) -> KubeletObserved | None:
        """What was said last."""
        usage = self._ledger.state.usage
        return usage.kubelet if usage is not None else None

    def _changed(self) -> tuple[object, ...]:
        """What differs when a file or the hardware has changed."""
        topology = self._ledger.state.topology
        place = (topology.epoch, topology.revision) if topology is not None else ()
        return (*self._files.stamp(), place)

    async def _read(self, stamp: tuple[object, ...]) -> None:
        """`stamp`: of before the reading, so that what changes meanwhile is read again."""
        found: list[tuple[Listed | None, str]] = []

        async def ask() -> None:
            found.append(await self._listed())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            notes: tuple[str, ...] = ()
            ended: list[AllocationID] = []
            try:
                ended = [each.id for each in await self._ended()]
            except Unavailable as error:
                notes = (f"{error.finding}: {LAGS}",)
            self._is_ended_known = not notes
            kubelet = await self._files.read(self._ledger.state, ended)
        self._read_at = self._again = self._clock.monotonic()
        if kubelet.unknown:
            self._stamp = None
            self._late = self._late + 1
            self._again += backoff_seconds(self._late, FIRST_PAUSE, LONGEST_PAUSE)
        else:
            self._stamp = stamp
            self._late = 0
            self._last = kubelet, self._clock.wall()
        kubelet = self._instead_of(kubelet)
        self._observe(msgspec.structs.replace(kubelet, notes=(*kubelet.notes, *notes)), *found[0])

    def _instead_of(self, kubelet: KubeletObserved) -> KubeletObserved:
        """What was read last where this was not read in time, and when it was; else this."""
        if not kubelet.unknown or self._last is None:
            return kubelet
        last, at = self._last
        stale = f"{kubelet.unknown}: what they said at {datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ} counts"
        return msgspec.structs.replace(last, ended=kubelet.ended, stale=stale)

    def _may_have_gone(self) -> bool:
        """Whether devices of other plugins were shown, which may go without a change of the files, or nobody knows."""
        listed, _ = self._answer
        return listed is None or not listed.keys() <= self._ledger.state.hardware.offers_of.keys()

    async def _listed(self) -> tuple[Listed | None, str]:
        """The devices of all plugins, or None and why they are not known."""
        if self._devices is None:
            return None, ""
        try:
            self._answer = await self._devices(self._ledger.state.hardware.offers_of.keys()), ""
        except Unavailable as error:
            self._answer = None, clean(error.finding, LONGEST)
        return self._answer

    def _observe(self, kubelet: KubeletObserved, listed: Listed | None, unknown: str) -> None:
        """
        Takes in the kubelet with these devices of plugins; None: they are not known, and why. Those that are offered here
        are left out: discovery announces them, and there may be tens of thousands of shares.
        """
        unconfirmed = clean(self._ledger.unconfirmed or "", LONGEST)
        ours = self._ledger.state.hardware.offers_of
        others = {name: parts for name, parts in listed.items() if name not in ours} if listed is not None else None
        found = msgspec.structs.replace(kubelet, devices=others, devices_unknown=unknown, record_doubt=unconfirmed)
        self._ledger.observe(kubelet=found)
