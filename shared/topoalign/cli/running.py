"""
Keeps the file with which `topoalign allocate` in another terminal finds a running `topoalign up`.

`up` writes a small file when it is ready and removes it when it ends. A killed `up` leaves the file behind; it is ignored,
because its process does not exist. The file belongs to the user, in a directory that no other user can read.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from topoalign.cli import output
from topoalign.core.model.ids import NodeName


class RunningUp(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses of a running `up`, for commands in other terminals."""

    pid: int
    nats: str
    """URL."""
    http: str
    """URL, without a slash at the end."""
    node: NodeName


def folder() -> Path:
    """The folder of the files: in the user's run-time directory, or below the home directory if there is none."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return (Path(runtime) if runtime else Path.home() / ".local" / "state") / "topoalign"


@contextmanager
def announce_running(running: RunningUp) -> Iterator[None]:
    """Keeps a file while the context is open. If it cannot be written, other terminals need --nats."""
    file = folder() / f"up-{running.pid}.json"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = file.with_suffix(".new")
        fresh.touch(mode=0o600)
        fresh.write_bytes(msgspec.json.encode(running))
        fresh.rename(file)
    except OSError as error:
        output.note(f"note: give --nats in other terminals, because {file.parent} cannot be written: {error.strerror}")
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def find_running() -> RunningUp | None:
    """The `up` that runs for this user now, if any; of several the one that started last."""
    files: list[Path] = []
    with suppress(OSError):  # the folder is another user's, or one that ends at this moment takes its file along
        files = [*folder().glob("up-*.json")]
        files.sort(key=lambda file: file.stat().st_mtime_ns, reverse=True)
    found = (read_running_file(file) for file in files)
    return next((running for running in found if running is not None and alive(running.pid)), None)


def read_running_file(file: Path) -> RunningUp | None:
    """The content of such a file; None if it is missing or damaged."""
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(file.read_bytes(), type=RunningUp)
    return None


def alive(pid: int) -> bool:
    """Whether a process with this id exists, of this user or another."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return pid < 2**31
    return pid > 0
