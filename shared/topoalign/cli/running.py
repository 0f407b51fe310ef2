"""
Keeps the file with which `topoalign allocate` in another terminal finds a running `topoalign up`.

`up` writes a small file when it is ready and removes it when it ends. A killed `up` leaves the file behind; it is ignored,
because its process does not exist. The file belongs to the user, in a directory that no other user can read.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import msgspec

from topoalign.cli import output
from topoalign.core.model.ids import NodeName


class RunningUp(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses of a running `up`, for commands in other terminals."""

    pid: Annotated[int, msgspec.Meta(gt=0, lt=2**31)]
    nats: str
    """URL."""
    http: str
    """URL, without a slash at the end."""
    node: NodeName


def running_file() -> Path:
    """The file: in the user's run-time directory, or below the home directory if there is none."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return (Path(runtime) if runtime else Path.home() / ".local" / "state") / "topoalign" / "up.json"


@contextmanager
def announce_running(running: RunningUp) -> Iterator[None]:
    """Keeps a file while the context is open. If it cannot be written, other terminals need --nats."""
    file = running_file()
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
        if find_running() == running:  # else another one has started since
            with suppress(OSError):
                file.unlink(missing_ok=True)


def find_running() -> RunningUp | None:
    """The running `up` of this user, or the one that started last if there are several; None if there is none."""
    try:
        running = msgspec.json.decode(running_file().read_bytes(), type=RunningUp)
        os.kill(running.pid, 0)
    except (OSError, msgspec.DecodeError):  # no file, or no such process
        return None
    return running
