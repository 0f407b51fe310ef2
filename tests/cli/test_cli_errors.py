"""Every way to fail has its exit code, and says what failed and what to do, for people and with --json for programs."""

import json
import subprocess
import sys

import click
import pytest

from topoalign.cli import exit_codes, root
from topoalign.core.model.errors import (
    BusUnavailable,
    DeviceInUse,
    Failure,
    InvalidField,
    KubeletOwnsDevices,
    NotFound,
    RemoteBadRequest,
    RemoteNoFit,
    RemoteUnavailable,
    TopoalignError,
    Undecodable,
)


def remote(fault: str, code: str) -> Failure:
    return Failure(fault=fault, code=code, finding="found", remedy="do")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NotFound("machine", "x", "look"), 3),
        (RemoteBadRequest(remote("request", "NotFound")), 3),
        (DeviceInUse(["GPU-0"], "a"), 4),
        (RemoteNoFit(remote("fit", "Whatever")), 4),
        (KubeletOwnsDevices("node"), 4),
        (RemoteBadRequest(remote("request", "KubeletOwnsDevices")), 4),
        (InvalidField("gpus", "wrong", "right"), 5),
        (Undecodable("it", "broken"), 5),
        (BusUnavailable("silent"), 69),
        (RemoteUnavailable(remote("service", "StateFault")), 69),
        (ExceptionGroup("tasks", [ExceptionGroup("inner", [BusUnavailable("silent")])]), 69),
        (FileNotFoundError(2, "No such file or directory", "cases.jsonl"), 3),
        (PermissionError(13, "Permission denied", "cases.jsonl"), 1),
        (click.Abort(), 130),
        (KeyboardInterrupt(), 130),
    ],
)
def test_the_exit_code_says_whose_fault_it_is(error: BaseException, status: int) -> None:
    assert status == exit_codes.report(error, as_json=False)


def test_an_error_is_what_failed_and_what_to_do_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    exit_codes.report(NotFound("machine", "dgx-x", "`topoalign topo --machine` takes names"), as_json=False)

    out, err = capsys.readouterr()
    assert "" == out
    assert "error: no machine named 'dgx-x'\n  do: `topoalign topo --machine` takes names\n  code: NotFound\n" == err


def test_with_json_the_error_is_an_object_on_stdout_too(capsys: pytest.CaptureFixture[str]) -> None:
    exit_codes.report(RemoteBadRequest(remote("request", "PodAlreadyAllocated")), as_json=True)

    out, err = capsys.readouterr()
    assert {"code": "PodAlreadyAllocated", "finding": "found", "remedy": "do", "exit": 5} == json.loads(out)["error"]
    assert "error: found" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["draw", "--machine", "cpu-only", "--out", "missing/node.svg"],
        ["conformance", "kubelet/merge", "missing"],
    ],
)
def test_a_file_that_the_system_refuses_has_a_remedy(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert 3 == root.run_command_line(arguments)
    assert "do: give a path that exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("redirected", "status", "said"),
    [(">/dev/full", 1, "error: No space left on device\n  do: free space"), (">&-", 0, "")],
)
@pytest.mark.parametrize("command", ["topo --machine cpu-only", "topo --machine cpu-only --json"])
def test_an_answer_that_cannot_be_printed_is_told_and_is_no_defect(
    command: str, redirected: str, status: int, said: str
) -> None:
    program = f'"{sys.executable}" -c "from topoalign.cli import main; main()"'
    ended = subprocess.run(
        ["sh", "-c", f"{program} {command} {redirected}"], capture_output=True, text=True, timeout=60
    )

    assert status == ended.returncode
    assert said == ended.stderr[: len(said)]
    assert "Traceback" not in ended.stderr


def test_foreign_text_in_an_error_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    exit_codes.report(TopoalignError("pod \x1b[2J\x9b1m\nerror: forged", "\x07"), as_json=True)

    assert {"\n"} == {c for c in "".join(capsys.readouterr()) if not c.isprintable()}


def test_a_defect_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        exit_codes.report(ZeroDivisionError(), as_json=False)
    with pytest.raises(ExceptionGroup):
        exit_codes.report(ExceptionGroup("tasks", [ZeroDivisionError(), ValueError()]), as_json=False)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "Usage: topoalign"),
        ("alocate", "No such command 'alocate'"),
        ("version --jsn", "Did you mean '--json'"),
        ("allocate --gpus 1.5", "'--gpus': '1.5' is not a valid integer"),
        ("allocate --memory lots", "'--memory': 'lots' is not a size"),
        ("allocate --policy strict", "'--policy'"),
        ("allocate", "nothing is requested"),
        ("allocate --gpus 1 --pod a/b/c", "--pod: 'a/b/c' is not NAMESPACE/NAME"),
        ("conformance kubelet/merg", "there are"),
        ("bench admt", "there are"),
        ("completion tcsh", "'tcsh' is not one of"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_says_what_was_meant(
    line: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = root.run_command_line(line.split())

    out, err = capsys.readouterr()
    assert (2, "") == (status, out)
    assert words in err


def test_a_usage_error_with_json_is_an_object_too(capsys: pytest.CaptureFixture[str]) -> None:
    status = root.run_command_line(["version", "--json", "--nope"])

    assert 2 == status
    assert "Usage" == json.loads(capsys.readouterr().out)["error"]["code"]


def test_a_list_of_choices_is_told_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    status = root.run_command_line(["completion"])

    assert 2 == status
    assert "Choose from: bash, zsh, fish" in capsys.readouterr().err.splitlines()[0]
