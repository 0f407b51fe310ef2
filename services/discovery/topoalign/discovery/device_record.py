"""
The state of discovery that survives a restart: cordons, devices that wait for a reset, and its last epoch.

It is a small file in the state directory, which is replaced atomically. The list of devices that wait for a reset is
dropped if the node has been rebooted since, because a reboot resets them. Cordons stay until an operator removes them.
A file that cannot be read is renamed, never overwritten, because it contains an operator's cordons.

While a new version takes over, two processes use the file, and both answer requests of operators. So each process reads
the other's changes before it writes, and after every reading of the hardware.
"""

from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from topoalign.core.model.errors import StateFault, clean
from topoalign.core.model.ids import DeviceID
from topoalign.runtime.whole_files import replace_file, sync_directory

NAME = "devices.json"
REMEDY = "make the state directory (TOPOALIGN_STATE_DIR) writable for this service, and see that its disk has room"


class DeviceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file."""

    version: Literal[1] = 1
    boot_id: str = ""
    """The boot id of the kernel that ran when the file was written."""
    cordons: dict[DeviceID, str] = {}
    """Device -> the operator's reason."""
    awaiting_reset: dict[DeviceID, str] = {}
    """Device -> what happened to it."""
    epoch: int = 0
    """The epoch of the last run."""
    unconfirmed: str = ""
    """Why cordons may be missing, until an operator cordons or uncordons a device; empty: none are missing."""


class RecordFile:
    """The record of one node, and its file."""

    def __init__(self, directory: Path, boot_id: str) -> None:
        self._path = directory / NAME
        self._boot_id = boot_id
        self.kept = DeviceRecord(boot_id=boot_id)
        self._seen: tuple[int, int] | None = None
        """Inode and modification time of the file when it was last read or written."""

    def load(self) -> str | None:
        """Reads the file. Returns why cordons may be missing; None: none are missing."""
        self._seen = self._now()
        try:
            read = msgspec.json.decode(self._path.read_bytes(), type=DeviceRecord)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            why = clean(getattr(error, "strerror", None) or str(error), 200)
            unconfirmed = f"{self._path} could not be read ({why}), so cordons are not known; {self._set_aside()}"
            self.kept = DeviceRecord(boot_id=self._boot_id, unconfirmed=unconfirmed)
            return unconfirmed
        self.kept = self._of_this_boot(read)
        return read.unconfirmed or None

    def _set_aside(self) -> str:
        number = 1
        try:
            while (aside := self._path.with_name(f"{NAME}.corrupt-{number}")).exists():
                number += 1
            self._path.rename(aside)
        except OSError as error:
            return f"it could not be set aside: {clean(error.strerror or str(error))}"
        return f"it was set aside as {aside.name}"

    def reload(self) -> None:
        """Reads what another process of this node has written since. A file that cannot be read is ignored."""
        now = self._now()
        if now is None or now == self._seen:
            return
        self._seen = now
        with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.kept = self._of_this_boot(msgspec.json.decode(self._path.read_bytes(), type=DeviceRecord))

    def _of_this_boot(self, read: DeviceRecord) -> DeviceRecord:
        waiting = (read if read.boot_id == self._boot_id else self.kept).awaiting_reset
        return msgspec.structs.replace(read, boot_id=self._boot_id, awaiting_reset=waiting)

    def _now(self) -> tuple[int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def change(self, **fields: object) -> None:
        """Replaces fields of the record and writes it to disk. Raises StateFault; then nothing has changed."""
        changed = msgspec.structs.replace(self.kept, **fields)
        if changed == self.kept:
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            content = msgspec.json.format(msgspec.json.encode(changed, order="sorted"))
            replace_file(self._path, content, mode=0o600, durable=True)
            sync_directory(self._path.parent)
        except OSError as error:
            raise StateFault(
                f"{self._path} cannot be written: {clean(error.strerror or str(error))}", REMEDY
            ) from error
        self.kept, self._seen = changed, self._now()
