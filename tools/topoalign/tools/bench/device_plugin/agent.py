"""Runs a topoalign command as a process of its own, for as long as it is measured."""

import atexit
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import BinaryIO

from topoalign.runtime.settings import PREFIX

PROCESS_CPU_CLOCK = 2
"""The low bits of a clock id whose high bits are those of a process's id, inverted: clock_getcpuclockid(3) of Linux."""
STOP_SECONDS = 20.0
"""After that it is killed."""

BYTE_CODE = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
"""Variables of Python that say where byte code is kept. An agent always keeps it: see `running`."""

LAST_LINES = 4
"""Of the log, in what is said of a process that has ended."""

PLAIN = ("-c", "from topoalign.cli import main; main()")
OBSERVED = ("-m", "topoalign.tools.bench.device_plugin.observed")


class Agent:
    """A process that is measured."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: BinaryIO, started: float) -> None:
        self._process = process
        self._log = log
        self.started = started
        """Monotonic seconds."""

    @property
    def rss_mb(self) -> float:
        """The memory that it keeps now, in units of 2^20 bytes."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:"))
        return round(int(kib) / 1024, 1)

    @property
    def cpu_seconds(self) -> float:
        """The CPU time that it has used, in user and system mode, with all its threads, to the nanosecond."""
        return time.clock_gettime(~self._process.pid << 3 | PROCESS_CPU_CLOCK)

    def wait(self) -> None:
        """Until it has ended by itself; raises TimeoutExpired. Popen would look whether it has, at most every 50 ms."""
        ended = os.pidfd_open(self._process.pid)
        try:
            select.select([ended], [], [], STOP_SECONDS)
        finally:
            os.close(ended)
        self._process.wait(0)

    def stop(self) -> float:
        """Ends it as a kubelet ends a pod. Returns the seconds that it took."""
        began = time.monotonic()
        self._process.terminate()
        self.wait()
        return time.monotonic() - began

    def ended(self) -> str | None:
        """How it has ended by itself, with the last lines of its log; None while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        self._log.seek(0)
        last = self._log.read().decode(errors="replace").splitlines()[-LAST_LINES:]
        return "; ".join([f"the process ended with {status}", *(line.strip() for line in last)])

    def longest_block_ms(self) -> float:
        """Of one that is observed: the longest that a callback has kept its event loop since this was asked last."""
        assert self._process.stdout is not None
        self._process.send_signal(signal.SIGUSR1)
        return float(self._process.stdout.readline())


@cache
def byte_code() -> str:
    """A folder for the byte code of all agents: where Python keeps that of this process, or one that is removed with it."""
    if sys.pycache_prefix is not None and not sys.dont_write_bytecode:
        return sys.pycache_prefix
    folder = tempfile.mkdtemp(prefix="topoalign-byte-code-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextmanager
def running(
    command: str, settings: Mapping[str, str], environment: Mapping[str, str] | None = None, *, observed: bool = False
) -> Iterator[Agent]:
    """
    `topoalign COMMAND` under these settings, which go without the prefix, and none of the environment's own.

    `environment`: what is not for us. `observed`: see `Agent.longest_block_ms`. It runs from byte code, as an installed
    package does; the first agent of this process compiles it, and is not to be measured. Its log comes on stderr at the end.
    """
    others = {name: value for name, value in os.environ.items() if not name.startswith((PREFIX, *BYTE_CODE))}
    with tempfile.TemporaryFile() as log:
        started = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, *(OBSERVED if observed else PLAIN), command],
            env={
                **others,
                "PYTHONPYCACHEPREFIX": byte_code(),
                **(environment or {}),
                **{PREFIX + name: value for name, value in settings.items()},
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if observed else subprocess.DEVNULL,
            stderr=log,
        )
        try:
            yield Agent(process, log, started)
        finally:
            end(process)
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace"))


def end(process: "subprocess.Popen[bytes]") -> None:
    """Ends a process, with force where it does not end by itself."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
