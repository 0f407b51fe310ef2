"""The command finds what it runs by a table, imports only that, and shows examples everywhere."""

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import click
import pytest

from topoalign.cli import root

HEAVY = ("nats", "grpclib", "structlog", "starlette", "uvicorn", "rich", "anyio", "prometheus_client", "pynvml")


def imported(*arguments: str) -> set[str]:
    """Top-level modules that a process has imported after running this command line."""
    script = (
        "import sys, json\n"
        "from topoalign.cli.root import run_command_line\n"
        f"status = run_command_line({list(arguments)!r})\n"
        "json.dump([status, sorted({name.split('.')[0] for name in sys.modules})], sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30)
    status, modules = json.loads(done.stderr)
    assert 0 == status
    return set(modules)


@pytest.mark.parametrize(
    "arguments", [("topo", "--machine", "dgx-a100"), ("topo", "--machine", "dgx-a100", "--json"), ("--help",)]
)
def test_printing_a_machine_or_the_help_imports_nothing_that_talks_or_runs(arguments: tuple[str, ...]) -> None:
    assert set() == imported(*arguments) & set(HEAVY)


def test_every_command_of_the_table_exists_and_has_an_example() -> None:
    """Every command of the table can be loaded under its name, and its help has an example."""
    for name, entry in root.COMMANDS.items():
        module, attribute = entry.target.split(":")
        command = getattr(import_module(f"topoalign.{module}"), attribute)

        assert isinstance(command, click.Command), name
        assert name == command.name
        assert "topoalign " in (command.help or "") or name == "version", f"{name} shows no example"


def test_the_help_lists_every_command_with_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    status = root.run_command_line(["--help"])

    out = capsys.readouterr().out
    assert 0 == status
    assert [] == [name for name, entry in root.COMMANDS.items() if f"{name} " not in out or entry.help not in out]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_the_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = root.run_command_line(["completion", shell])

    assert 0 == status
    assert "_TOPOALIGN_COMPLETE" in capsys.readouterr().out


def test_commands_are_completed_without_importing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    items = root.topoalign.shell_complete(click.Context(root.topoalign), "al")

    assert ["allocator", "allocate"] == [item.value for item in items]


def test_version_names_what_the_program_stands_on(capsys: pytest.CaptureFixture[str]) -> None:
    status = root.run_command_line(["version", "--json"])

    shown = json.loads(capsys.readouterr().out)
    assert 0 == status
    assert {"topoalign", "python", "packages"} == shown.keys()
    assert shown["packages"]["msgspec"]


def test_a_package_adds_commands_by_entry_point_and_replaces_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A package adds commands by entry point, and cannot replace a command of the table."""
    info = tmp_path / "extra-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[topoalign.commands]\nhello = hello_extra:hello\ntopo = hello_extra:hello\n"
    )
    (tmp_path / "hello_extra.py").write_text(
        "import click\n\n\n@click.command()\ndef hello():\n    click.echo('from outside')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    statuses = (
        root.run_command_line(["hello"]),
        root.run_command_line(["topo", "--help"]),
        root.run_command_line(["--help"]),
    )

    out = capsys.readouterr().out
    assert (0, 0, 0) == statuses
    assert out.startswith("from outside\n")
    assert "Show how the GPUs and NICs of a machine are connected" in out
    assert re.search(r"hello +See `topoalign hello --help`\.", out)
