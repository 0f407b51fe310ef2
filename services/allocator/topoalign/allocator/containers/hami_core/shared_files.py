"""
Reads what HAMi-core shares between the processes of each container, for whoever asks what containers use.

A container writes its file, and may replace, cut off or exchange it at any time: so it is opened as a regular file or not at
all, its size is checked by the descriptor, and it is read in parts of a bounded size and never mapped. What is wrong with a
file costs its container's part of the answer, is logged once, and counted.

Reading is done in a thread, at most once a second and for a second or so: the next reading goes on with the containers that
had no turn. Where a disk does not answer, the next reading says so and begins none.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from re import compile as pattern
from typing import NamedTuple

import structlog
from anyio import Lock, move_on_after, to_thread

from topoalign.allocator.containers.hami_core import region
from topoalign.allocator.containers.hami_core.directories import CACHE, name_of, owner_of
from topoalign.allocator.containers.hami_core.region import Unusable
from topoalign.allocator.containers.hami_core.sweeps import held_slots
from topoalign.allocator.containers.limiter_files import entries, open_regular, opened
from topoalign.core.model.errors import clean
from topoalign.core.model.holdings import base_of
from topoalign.core.model.ids import AllocationID, DeviceID
from topoalign.core.model.library_use import LibraryReading, LibraryUse
from topoalign.core.ports import Clock
from topoalign.core.state.fold import NodeState

FILE = pattern(r"[0-9a-f]{32}\.cache")
MOST_ENTRIES = 64
"""Of a container's directory: the library makes one file, and the runtime the place to mount it."""
MOST_CONTAINERS = 1_000
"""Of one reading."""
FRESH_SECONDS = 1.0
READ_SECONDS = 2.0
WORK_SECONDS = 1.0
"""After which no other file is begun: a large one takes milliseconds, and containers may make theirs so."""

log = structlog.get_logger("topoalign.allocator.containers.hami_core")


class Limited(NamedTuple):
    """An allocation whose container has a directory."""

    allocation: AllocationID
    directory: str
    gpus: frozenset[DeviceID]


class SharedFiles:
    """Reads the files of all containers of a node."""

    def __init__(self, root: Callable[[], str], state: Callable[[], NodeState], clock: Clock) -> None:
        """`root`: `flags.hamiRoot` of the newest configuration, empty: there is none. `state`: of the node now."""
        self._root = root
        self._state = state
        self._clock = clock
        self._turn = Lock(fast_acquire=True)
        self._newest: tuple[LibraryReading, float] | None = None
        """With the monotonic seconds at which it was complete."""
        self._is_reading = False
        """Whether a thread is at it still."""
        self._first = 0
        """The place of the container with which the next reading begins."""
        self._failing: dict[AllocationID, str] = {}
        self.refused = 0
        """Files that could not be used, in all readings."""

    async def read(self) -> LibraryReading:
        """What the files say now, or said a second ago at most."""
        async with self._turn:
            now = self._clock.monotonic()
            if self._newest is None or now - self._newest[1] >= FRESH_SECONDS:
                self._newest = await self._read(), self._clock.monotonic()
            return self._newest[0]

    async def _read(self) -> LibraryReading:
        state = self._state()
        root = self._root().rstrip("/")
        limited = [*all_limited(state)] if root else []
        if not limited:
            return LibraryReading(node=state.node)
        found: tuple[list[LibraryUse], int] | None = None
        if not self._is_reading:
            with move_on_after(READ_SECONDS):
                work = partial(self._read_all, Path(root), limited)
                found = await to_thread.run_sync(work, abandon_on_cancel=True)
        if found is None:
            return LibraryReading(node=state.node, finding="the disk with the files of HAMi-core does not answer")
        uses, left_out = found
        self._note(uses, {each.allocation for each in limited})
        return LibraryReading(node=state.node, containers=tuple(uses), left_out=left_out)

    def _read_all(self, root: Path, limited: Sequence[Limited]) -> tuple[list[LibraryUse], int]:
        """In the thread: what could be read in time, from where the reading before ended, and how many could not."""
        self._is_reading = True
        try:
            began = self._clock.monotonic()
            first = self._first % len(limited)
            found = list[LibraryUse]()
            turns = [*limited[first:], *limited[:first]][:MOST_CONTAINERS]
            for done, each in enumerate(turns):
                if done and self._clock.monotonic() - began >= WORK_SECONDS:
                    turns = turns[:done]
                    break
                if (use := read_use(root, each)) is not None:
                    found.append(use)
            self._first = first + len(turns) if len(turns) < len(limited) else 0
            return found, len(limited) - len(turns)
        finally:
            self._is_reading = False

    def _note(self, found: Sequence[LibraryUse], present: AbstractSet[AllocationID]) -> None:
        """Counts what could not be used, and logs each once. `present`: all, also those that were not read this time."""
        failing = {each.allocation: each.failure for each in found if each.failure}
        self.refused += len(failing)
        for allocation in failing.keys() - self._failing.keys():
            log.warning(
                "the file that HAMi-core shares in a container cannot be used",
                allocation=allocation,
                reason=failing[allocation],
            )
        kept = present - {each.allocation for each in found}
        self._failing = {name: why for name, why in self._failing.items() if name in kept} | failing


def all_limited(state: NodeState) -> Iterator[Limited]:
    """The allocations whose containers are limited by HAMi-core now."""
    offers = state.hardware.offers_of
    for allocation, (resource, slots) in held_slots(state):
        limiters = {each.limiter for each in offers.get(resource, ())}
        if allocation is not None and "hami-core" in limiters:
            yield Limited(allocation.id, name_of(resource, slots), frozenset(map(base_of, slots)))


def read_use(root: Path, limited: Limited) -> LibraryUse | None:
    """What the file of one container says, or why it cannot be used. None: there is none, as before it uses CUDA."""
    owner = owner_of(root, limited.directory)
    if owner is None or owner.allocation != limited.allocation:
        return None  # the slots were another container's, and Allocate is about to make the directory anew
    try:
        with opened_file(root, limited.directory, os.O_RDONLY) as found:
            if found is None:
                return None
            file, layout = found
            head = os.pread(file, layout.processes_at, 0)
            if not region.is_written(head):
                return None
            uuids = layout.uuids_of(head)
            tail = region.tail_of(os.pread(file, region.TAIL.size, layout.tail_at))
            processes = os.pread(file, tail.processes * region.PROCESS_SIZE, layout.processes_at)
            counts = tuple(layout.counts_of(uuids, processes, tail, limited.gpus))
    except Unusable as error:
        return LibraryUse(allocation=limited.allocation, failure=str(error))
    except OSError as error:
        return LibraryUse(allocation=limited.allocation, failure=f"it cannot be read: {error.strerror}")
    return LibraryUse(allocation=limited.allocation, counts=counts)


@contextmanager
def opened_file(root: Path, name: str, flags: int) -> Iterator[tuple[int, region.Layout] | None]:
    """
    The descriptor of the file in a container's directory, and the layout that a region of its size has; None: there is none,
    or it is empty still. Raises Unusable and OSError.
    """
    with opened(root) as at, opened(name, at) as directory, opened(CACHE, directory) as cache:
        found = entries(cache, MOST_ENTRIES + 1)
        if len(found) > MOST_ENTRIES:
            raise Unusable(f"there is more than {MOST_ENTRIES} of what the container has written beside it")
        names = [each for each in found if FILE.fullmatch(each)]
        if len(names) > 1:
            raise Unusable(f"there are {len(names)} of them: {clean(min(names))}")
        file = open_regular(cache, names[0], flags) if names else None
    if file is None:
        yield None
        return
    try:
        size = os.fstat(file).st_size
        yield (file, region.layout_of(size)) if size else None
    finally:
        os.close(file)
