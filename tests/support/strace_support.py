"""strace on a running process: it is killed at, or refused, the Nth of some calls to the kernel."""

import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

needs_strace = pytest.mark.skipif(
    shutil.which("strace") is None
    or subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, check=False).returncode != 0,
    reason="strace is not installed, or this user may not trace",
)

WAITS = "epoll_wait,epoll_pwait"
"""What an event loop does at least twice a second."""
DETACH_SECONDS = 10.0
"""So long may strace take to let go of a process; the kernel lets go of it when strace itself is killed."""


@asynccontextmanager
async def injected(pid: int, calls: str, fault: str, log: Path) -> AsyncIterator[None]:
    """While open, `fault` (as in strace's `inject`) befalls these calls of the process, which runs on in between."""
    command = [
        "strace",
        "-f",
        "-q",
        "-p",
        str(pid),
        "-o",
        str(log),
        "-e",
        f"trace={calls},{WAITS}",
        "-e",
        f"inject={calls}:{fault}",
    ]
    process = await anyio.open_process(command, stderr=subprocess.PIPE)
    try:
        with anyio.fail_after(60):
            while process.returncode is None and not (is_traced(pid) and is_seen(log)):
                await anyio.lowlevel.checkpoint()
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(DETACH_SECONDS):
                await process.wait()
            if process.returncode is None:
                process.kill()
            await process.wait()
        await process.aclose()


def is_seen(log: Path) -> bool:
    """Whether calls are reported: a thread is seized a moment before that."""
    return log.exists() and log.stat().st_size > 0


def is_traced(pid: int) -> bool:
    """Whether all of its threads are."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return all("TracerPid:\t0\n" not in (thread / "status").read_text() for thread in threads)
    except OSError:
        return True  # it has ended
