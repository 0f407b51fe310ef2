"""
Which MIG instances are ours: a file that is whole whenever the node stops.

Before an instance is made the book has an intent: the slot, the profile, the place, and the ids of the instances that were
there. So an instance at this place that was not there before is ours, also where the process ended before it learned the
id. Then the book has the id and the uuid. An entry goes when the instance is known to be gone.

A reboot ends all MIG instances: what was noted in another boot is forgotten. The driver makes ids, and uuids of them, of
the place: what somebody makes where one of ours was looks like ours. So the book says when it was written last, and what a
process finds that nobody looked after for longer than `AWAY_SECONDS` is doubted: it is never destroyed. A book that cannot
be read is set aside, and nothing is ours then: instances of a former process stay until somebody removes them, and are
never taken for others'.

One line, as in the journal: CRC-32 of the JSON, a blank, the JSON.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from zlib import crc32

import msgspec

from topoalign.allocator.ledger.record import is_whole
from topoalign.allocator.ledger.state_dir import faults, no_link, sync_directory, write_whole
from topoalign.core.model.holdings import base_of
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.mig import MigPlacement

NAME = "instances"
LARGEST = 1 << 20
"""Bytes. An entry has some 300, and a machine has at most a few hundred instances."""
AWAY_SECONDS = 600.0
"""For so long nobody makes instances by hand where an agent has ended: longer than a container waits to be started again."""


class OwnInstance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An instance that is ours, or is about to be."""

    slot: DeviceID
    """Of the GPU, for which it is."""
    profile: str
    """`1g.10gb`."""
    placement: MigPlacement
    before: tuple[int, ...]
    """NVML's ids of the GPU instances that were there before it was made."""
    id: int | None = None
    """NVML's id of it. None: it is not known whether it was made."""
    uuid: DeviceID = DeviceID("")
    """Of the MIG device; empty while `id` is None."""
    doubted: bool = False
    """Whether somebody else may have made what is there now, so that it is not to be destroyed."""

    @property
    def gpu(self) -> DeviceID:
        """The GPU."""
        return base_of(self.slot)


class LogContent(msgspec.Struct, frozen=True, kw_only=True, tag="topoalign.instances"):
    """The content of the file."""

    boot: str
    """The boot of the node in which all of them were made; empty: not known."""
    instances: tuple[OwnInstance, ...]
    at: float
    """Monotonic seconds, of this boot, when it was written."""


class InstanceLog:
    """The instances of ours, in the state directory of the allocator."""

    def __init__(self, directory: Path, boot: str, now: Callable[[], float]) -> None:
        """`boot`: the boot of the node now; empty: not known, and what is noted counts. `now`: monotonic seconds."""
        self._path = directory / NAME
        self._boot = boot
        self._now = now
        self.doubt: str | None = None
        """Why instances of ours may be missing in it; None: none is."""
        self.instances = self._read()

    def replace(self, gone: Sequence[OwnInstance], new: Sequence[OwnInstance] = ()) -> None:
        """Notes `new` instead of `gone`; on disk when this returns. Raises StateFault, and then nothing has changed."""
        kept = (*(each for each in self.instances if each not in gone), *new)
        payload = msgspec.json.encode(LogContent(boot=self._boot, instances=kept, at=self._now()))
        with faults(self._path, "note MIG instances"):
            put_whole(self._path, payload)
        self.instances = kept

    def _read(self) -> tuple[OwnInstance, ...]:
        try:
            with open(self._path, "rb", opener=no_link) as file:
                line = file.read(LARGEST + 1).rstrip(b"\n")
            if not is_whole(line):
                raise ValueError("it does not match its checksum")
            book = msgspec.json.decode(line.partition(b" ")[2], type=LogContent)
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, RecursionError) as error:
            self.doubt = f"{self._path.name} cannot be read ({error}), so MIG instances of ours may be left over"
            with suppress(OSError):
                self._path.rename(self._path.with_name(f"{NAME}.corrupt"))
            return ()
        if self._boot and book.boot not in ("", self._boot):
            return ()
        if 0 <= self._now() - book.at <= AWAY_SECONDS:
            return book.instances
        return tuple(msgspec.structs.replace(each, doubted=True) for each in book.instances)


def put_whole(path: Path, payload: bytes) -> None:
    """The old file or the new one with this JSON, whenever the node stops. Raises OSError."""
    draft = path.with_name(f"{path.name}.new")
    target = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        write_whole(target, b"%08x %s\n" % (crc32(payload), payload))
        os.fsync(target)
    finally:
        os.close(target)
    draft.replace(path)
    sync_directory(path.parent)
