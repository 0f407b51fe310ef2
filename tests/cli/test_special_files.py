"""Named pipes, devices and sockets where a file is meant: refused at once, with a remedy, and never waited for or read."""

import os
import socket
from collections.abc import Iterator

import pytest
from kubelet_support import short_directory

from topoalign.cli import root
from topoalign.core.model.errors import InvalidField
from topoalign.runtime.nats_bus.access import read_setting_file

COMMANDS = {
    "topo": ("topo", "--machine", "{}"),
    "draw": ("draw", "--of", "ascii", "--machine", "{}"),
    "what-if": ("what-if", "--machine", "{}", "--gpus", "1"),
    "pod-file": ("what-if", "--machine", "dgx2", "--pod-file", "{}"),
    "kubelet-config": ("what-if", "--machine", "dgx2", "--gpus", "1", "--kubelet-config", "{}"),
    "config": ("config", "check", "{}"),
    "hook": ("hook", "install", "--library", "{}", "--to", "/nonexistent"),
    "conformance": ("conformance", "kubelet/merge", "{}"),
}


@pytest.fixture(params=["pipe", "device", "socket"])
def special(request: pytest.FixtureRequest) -> Iterator[str]:
    """No regular file: nobody writes to the pipe, and the device has no end."""
    with short_directory() as directory, socket.socket(socket.AF_UNIX) as held:
        match request.param:
            case "pipe":
                os.mkfifo(directory / "it")
                yield str(directory / "it")
            case "device":
                yield "/dev/zero"
            case "socket":
                held.bind(str(directory / "it"))
                yield str(directory / "it")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_refuses_what_is_no_file_and_says_what_to_do(
    name: str, special: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = root.run_command_line([word.format(special) for word in COMMANDS[name]])
    said = capsys.readouterr()

    assert status != 0
    assert "" == said.out
    assert "file" in said.err


def test_the_files_of_credentials_are_regular_files(special: str) -> None:
    with pytest.raises(InvalidField, match="TOPOALIGN_NATS_TLS_CA"):
        read_setting_file("TOPOALIGN_NATS_TLS_CA", special)
