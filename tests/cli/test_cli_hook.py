"""`topoalign hook install`: a library is in place as a whole or as it was, and nothing else ever is."""

import errno
import json
import os
import platform
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from disk_support import syncs_and_renames

from topoalign.cli import root
from topoalign.cli.hook import install_library
from topoalign.plugin_config.hook_files import (
    LIBRARY,
    MACHINES,
    PRELOAD,
    NoLibrary,
    check_library,
    find_missing_file,
)

LIBRARY_FILE = Path(str(msgspec._core.__file__))  # a shared object that is there wherever this runs
MACHINE = platform.machine()
WHOLE = LIBRARY_FILE.read_bytes()
CALLS = ("mkdir", "open", "write", "fsync", "fchmod", "replace")


def run(library: Path, to: Path, *more: str) -> int:
    return root.run_command_line(["hook", "install", "--library", str(library), "--to", str(to), *more])


def test_library_and_list_are_put_into_place_and_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = tmp_path / "opt" / "vgpu"

    assert 0 == run(LIBRARY_FILE, to)
    first = capsys.readouterr().out
    assert 2 == first.count("installed: ")
    assert WHOLE == (to / LIBRARY).read_bytes()
    assert "/usr/local/vgpu/libvgpu.so\n" == (to / PRELOAD).read_text()
    assert [0o755, 0o644] == [stat.S_IMODE((to / name).stat().st_mode) for name in (LIBRARY, PRELOAD)]
    assert 0o700 == stat.S_IMODE(to.stat().st_mode)
    assert 0 == run(LIBRARY_FILE, to, "--json")
    assert [str(to / LIBRARY), str(to / PRELOAD)] == json.loads(capsys.readouterr().out)["files"]
    assert {LIBRARY, PRELOAD} == {each.name for each in to.iterdir()}


def changed(at: int, value: bytes) -> bytes:
    return WHOLE[:at] + value + WHOLE[at + len(value) :]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no ELF"),
        (b"#!/bin/sh\n" * 100, "no ELF"),
        (changed(4, b"\1"), "64 bits"),
        (changed(18, b"\x08\0"), "built for machine 8"),
        (changed(16, b"\2\0"), "program"),
        (WHOLE[:-1], "end is missing"),
        (WHOLE[: len(WHOLE) // 2], "end is missing"),
        (Path(sys.executable).read_bytes(), "program"),
    ],
    ids=["empty", "script", "32 bits", "mips", "executable", "a byte less", "half", "python"],
)
def test_what_is_no_library_of_this_machine_is_refused(content: bytes, why: str, tmp_path: Path) -> None:
    to = tmp_path / "to"
    (tmp_path / "file").write_bytes(content)

    with pytest.raises(NoLibrary, match=why):
        check_library(content, MACHINE)
    assert 0 != run(tmp_path / "file", to)
    assert not to.exists()


def test_a_library_of_another_architecture_is_refused() -> None:
    (other,) = MACHINES.keys() - {MACHINE}

    check_library(WHOLE, MACHINE)
    with pytest.raises(NoLibrary, match="built for"):
        check_library(WHOLE, other)
    with pytest.raises(NoLibrary, match="there is none for riscv64"):
        check_library(WHOLE, "riscv64")


def test_killed_at_any_step_the_former_or_the_new_one_is_there(tmp_path: Path) -> None:
    """SIGKILL, one step later each time, until an installation comes to its end; the next one always does."""
    former, seen = WHOLE + b"former", set()
    for steps in range(1, 100):
        install_library(former, tmp_path)
        if not (child := os.fork()):
            armed(steps)
            install_library(WHOLE, tmp_path)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found = (tmp_path / LIBRARY).read_bytes()
        assert found in (former, WHOLE)
        assert find_missing_file(tmp_path) is None
        seen.add(found)
        install_library(WHOLE, tmp_path)
        assert {LIBRARY, PRELOAD} == {each.name for each in tmp_path.iterdir()}
        if not status:
            break

    assert {former, WHOLE} == seen
    assert 5 < steps < 99


def test_both_files_are_on_the_disk_when_they_are_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The content of each before its name: after a power cut a file is the former one or the new one."""
    calls = syncs_and_renames(monkeypatch)
    install_library(WHOLE, tmp_path)
    expected = [each for name in (LIBRARY, PRELOAD) for each in (f"sync .{name}.new", f"rename to {name}")]

    assert [*expected, "sync directory"] == calls


def armed(steps: int) -> None:
    """This process is killed before so many calls that change or open a file."""
    left = [steps]
    for name in CALLS:
        call = getattr(os, name)

        def counted(*args: Any, call: Any = call, **kwargs: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        setattr(os, name, counted)


def test_a_full_disk_leaves_the_former_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install_library(WHOLE + b"former", tmp_path)
    capsys.readouterr()
    written = os.write
    calls = iter(range(1))

    def write(file: int, content: bytes) -> int:
        if next(calls, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written(file, content[:100])

    monkeypatch.setattr(os, "write", write)

    assert 0 != run(LIBRARY_FILE, tmp_path)
    assert "No space left" in capsys.readouterr().err
    assert WHOLE + b"former" == (tmp_path / LIBRARY).read_bytes()
    assert {LIBRARY, PRELOAD} == {each.name for each in tmp_path.iterdir()}


def test_links_are_replaced_and_never_written_through(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"of somebody else")
    to = tmp_path / "to"
    to.mkdir()
    (to / LIBRARY).symlink_to(other)
    (to / f".{PRELOAD}.new").write_bytes(b"left by one that was killed")

    install_library(WHOLE, to)

    assert b"of somebody else" == other.read_bytes()
    assert WHOLE == (to / LIBRARY).read_bytes()
    assert not (to / LIBRARY).is_symlink()
    assert find_missing_file(to) is None


@pytest.mark.parametrize("put", [os.mkfifo, lambda draft: draft.symlink_to("/dev/null"), Path.touch])
def test_whatever_has_the_name_of_a_draft_makes_room(put: Callable[[Path], object], tmp_path: Path) -> None:
    """A pipe is waited for by who opens it, and a link leads elsewhere."""
    put(tmp_path / f".{LIBRARY}.new")

    install_library(WHOLE, tmp_path)

    assert WHOLE == (tmp_path / LIBRARY).read_bytes()
    assert {LIBRARY, PRELOAD} == {each.name for each in tmp_path.iterdir()}
