"""
Records which MIG instances this allocator created, in a file that survives a crash of the node.

Before an instance is created, an intent is logged: the slot, the profile, the placement, and the ids of the existing
instances. So a new instance at this placement is known to be ours, even before the log has its id. An entry is removed
when the instance is known to be gone.

A reboot destroys all MIG instances, so entries of another boot are dropped. The driver derives ids and uuids from the
placement, so another user's instance at the same placement looks like ours. So entries of a log that was last written
more than `AWAY_SECONDS` ago are unconfirmed, and their instances are not destroyed. An unreadable log is set aside.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from zlib import crc32

import msgspec

from topoalign.allocator.ledger.journal_format import is_whole
from topoalign.allocator.ledger.state_dir import faults, no_link
from topoalign.core.model.holdings import base_of
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.mig import MigPlacement
from topoalign.runtime.whole_files import replace_file, sync_directory

NAME = "instances"
LARGEST = 1 << 20
"""Maximum size in bytes. An entry has about 300, and a machine has at most a few hundred instances."""
AWAY_SECONDS = 600.0
"""Time after an agent stops in which no other user is expected to create instances. It is longer than a restart."""


class OwnInstance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An instance that this allocator created or is about to create."""

    slot: DeviceID
    """The slot, of a GPU, for which the instance is created."""
    profile: str
    """`1g.10gb`."""
    placement: MigPlacement
    before: tuple[int, ...]
    """NVML ids of the GPU instances that existed before this one was created."""
    id: int | None = None
    """NVML id. None: it is unknown whether the instance was created."""
    uuid: DeviceID = DeviceID("")
    """The UUID of the MIG device; empty while `id` is None."""
    unconfirmed: bool = False
    """Whether another user may have created the existing instance, so that it must not be destroyed."""

    @property
    def gpu(self) -> DeviceID:
        """The GPU."""
        return base_of(self.slot)


class LogContent(msgspec.Struct, frozen=True, kw_only=True, tag="topoalign.instances"):
    """The content of the file."""

    boot: str
    """The boot of the node in which all instances were created; empty: unknown."""
    instances: tuple[OwnInstance, ...]
    at: float
    """Monotonic time of this boot, in seconds, at which the file was written."""


class InstanceLog:
    """The log of own instances, in the state directory of the allocator."""

    def __init__(self, directory: Path, boot: str, now: Callable[[], float]) -> None:
        """`boot`: the current boot of the node; empty: unknown, and all entries count. `now`: monotonic seconds."""
        self._path = directory / NAME
        self._boot = boot
        self._now = now
        self.incomplete: str | None = None
        """Why own instances may be missing from the log; None: none are."""
        self.instances = self._read()

    def replace(self, gone: Sequence[OwnInstance], new: Sequence[OwnInstance] = ()) -> None:
        """Replaces the entries `gone` with `new` on disk. If this raises StateFault, nothing has changed."""
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
            content = msgspec.json.decode(line.partition(b" ")[2], type=LogContent)
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, RecursionError) as error:
            self.incomplete = (
                f"{self._path.name} cannot be read ({error}), so MIG instances of this allocator may be left over"
            )
            with suppress(OSError):
                self._path.rename(self._path.with_name(f"{NAME}.corrupt"))
            return ()
        if self._boot and content.boot not in ("", self._boot):
            return ()
        if 0 <= self._now() - content.at <= AWAY_SECONDS:
            return content.instances
        return tuple(msgspec.structs.replace(each, unconfirmed=True) for each in content.instances)


def put_whole(path: Path, payload: bytes) -> None:
    """Replaces the file with this JSON. After a node crash, either the old or the new file exists. Raises OSError."""
    replace_file(path, b"%08x %s\n" % (crc32(payload), payload), mode=0o600, durable=True)
    sync_directory(path.parent)
