"""A program of the terminal that is told to end by SIGTERM ends in order: no process and no file of it is left."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from kubelet_support import short_directory

from topoalign.cli.exit_codes import INTERRUPTED

SECONDS = 60
"""Far above what any of them takes to end."""
LOOK_SECONDS = 0.02


class Program(NamedTuple):
    """A command, and when it is told to end."""

    arguments: tuple[str, ...]
    file: str
    """Which it has written below its temporary directory by then, as a pattern."""
    holding: bytes


PROGRAMS = {
    "simulate": Program(
        ("simulate", "--nodes", "1", "--pods", "2000:gpus=1"),
        "ta-*/0/device-plugins/kubelet_internal_checkpoint",
        b"PodUID",
    ),
    "bench": Program(("bench", "events"), "topoalign-byte-code-*/**/*.pyc", b""),
    "demo": Program(("demo", "--machine", "dgx-a100"), "topoalign-*/device-plugins/topoalign-*.sock", b""),
}


def children(pid: int) -> list[int]:
    """The processes that this one has started."""
    text = "".join(file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children"))
    return [int(each) for each in text.split()]


@contextmanager
def started(directory: Path, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    """The command with its temporary files in this directory."""
    program = [sys.executable, "-c", "from topoalign.cli import main; main()", *arguments]
    ours = ("TOPOALIGN_", "PYTHONPYCACHEPREFIX")  # it makes a folder of its own for byte code
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    settings = {"TMPDIR": str(directory), "XDG_RUNTIME_DIR": str(directory)}
    with subprocess.Popen(
        program, env=environment | settings, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def has_come(directory: Path, program: Program) -> bool:
    """Whether the program has come as far as it is to come."""
    return any(not program.holding or program.holding in file.read_bytes() for file in directory.glob(program.file))


@pytest.mark.parametrize("name", PROGRAMS)
def test_sigterm_ends_a_program_and_all_that_it_started(name: str) -> None:
    program = PROGRAMS[name]
    with short_directory() as directory, started(directory, *program.arguments) as process:
        while not has_come(directory, program) and process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_SECONDS)
        run = children(process.pid)
        process.send_signal(signal.SIGTERM)

        assert INTERRUPTED == process.wait(SECONDS)
        assert process.stderr is not None and b"" == process.stderr.read().strip()
        assert run
        assert [] == [pid for pid in run if Path(f"/proc/{pid}").exists()]
        assert [] == [*directory.iterdir()]
