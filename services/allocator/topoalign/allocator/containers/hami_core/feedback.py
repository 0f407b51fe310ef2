"""
Makes low-priority containers wait while a high-priority one computes on their GPU, through HAMi-core's shared files.

Every few seconds the kernel launches of all containers are read, and a 4-byte note is written to each file through the
descriptor just checked. A container with an unusable file neither waits nor makes others wait (`shared_files` logs it).
A container waits until its note changes, so all notes are reset when this is disabled or the agent stops.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from anyio import CancelScope, to_thread

from topoalign.allocator.containers.hami_core import slot_directories
from topoalign.allocator.containers.hami_core.shared_files import (
    RECENT_KERNEL,
    RECENT_KERNEL_AT,
    Unusable,
    all_limited,
    opened_file,
    read_region,
)
from topoalign.allocator.containers.limiter_files import list_own_directories
from topoalign.core.model.ids import DeviceID
from topoalign.core.ports import Clock
from topoalign.core.sharing.priorities import Launches, next_notes
from topoalign.core.state.fold import NodeState
from topoalign.runtime.clock import until_tick

ROUND_SECONDS = 5.0
"""The same as in HAMi's monitor."""


class Feedback:
    """Reads and writes the files of all containers of a node."""

    def __init__(self, root: Callable[[], str], is_on: Callable[[], bool], state: Callable[[], NodeState]) -> None:
        """`root`, `is_on`, `state`: the current `flags.hamiRoot`, `sharing.slots.priorities` and state of the node."""
        self._root = root
        self._is_on = is_on
        self._state = state

    async def run(self, clock: Clock) -> None:
        """Updates all notes every `ROUND_SECONDS` until cancelled, and then resets them."""
        try:
            while True:
                await self.update_notes()
                await clock.sleep(until_tick(clock, ROUND_SECONDS))
        finally:
            with CancelScope(shield=True):
                await self._write({})

    async def update_notes(self) -> None:
        """Updates the notes of all containers once. If this is disabled, no container waits."""
        limited = all_limited(self._state()) if self._is_on() else ()
        await self._write({each.directory: each.gpus for each in limited})

    async def _write(self, gpus: Mapping[str, frozenset[DeviceID]]) -> None:
        if root := self._root().rstrip("/"):
            await to_thread.run_sync(write_notes, Path(root), gpus)


def write_notes(root: Path, gpus: Mapping[str, frozenset[DeviceID]]) -> None:
    """
    Reads the kernel launches of all containers, and writes their notes. `gpus`: directory -> GPUs of its container. A
    container without an entry holds nothing and stops waiting.
    """
    found: list[tuple[str, Launches]] = []
    with suppress(OSError):
        for name in list_own_directories(root, slot_directories.NAME):
            with suppress(Unusable, OSError), opened_file(root, name, os.O_RDONLY) as opened:
                region = read_region(*opened) if opened is not None else None
                if region is not None:
                    _, tail = region
                    found.append((name, Launches(gpus.get(name, frozenset()), tail.recent_kernel, tail.priority)))
    notes = next_notes([each for _, each in found])
    for (name, each), note in zip(found, notes, strict=True):
        if note != each.recent_kernel and (gpus or each.recent_kernel < 0):
            write_note(root, name, each.recent_kernel, note)


def write_note(root: Path, name: str, before: int, note: int) -> None:
    """Writes a container's note, unless it does not need to wait and has launched a kernel since `before` was read."""
    with suppress(Unusable, OSError), opened_file(root, name, os.O_RDWR) as found:
        if found is None or (region := read_region(*found)) is None:
            return
        file, layout = found
        _, tail = region
        if note < 0 or tail.recent_kernel == before:
            os.pwrite(file, RECENT_KERNEL.pack(note), layout.tail_at + RECENT_KERNEL_AT)
