"""A state directory that cannot be used is told apart before anything is begun, with what to do about it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from e2e_support import environment
from faults_support import sample

from topoalign.allocator.ledger.journal import open_journal
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.ids import NodeName

pytestmark = pytest.mark.anyio
NODE = NodeName("node-1")
NOBODY = 65_534


def used(directory: Path) -> None:
    with open_journal(directory, NODE) as journal:
        journal.load()


def read_only(directory: Path) -> None:
    used(directory)
    directory.chmod(0o500)


def foreign(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    os.chown(directory, NOBODY, NOBODY)


def linked(directory: Path) -> None:
    elsewhere = directory.with_name(f"{directory.name}-elsewhere")
    used(elsewhere)
    directory.symlink_to(elsewhere)


def journal_linked(directory: Path) -> None:
    used(directory)
    (directory / "journal").rename(directory.with_name(f"{directory.name}-journal"))
    (directory / "journal").symlink_to(directory.with_name(f"{directory.name}-journal"))


def open_to_all(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o777)


def a_file(directory: Path) -> None:
    directory.write_text("")


def journal_of_another(directory: Path) -> None:
    used(directory)
    (directory / "journal").chmod(0o000)


CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "read-only": (read_only, "may not write"),
    "other-uid": (foreign, f"belongs to user {NOBODY}"),
    "link": (linked, "is a symbolic link"),
    "journal-link": (journal_linked, "Too many levels of symbolic links"),
    "open-to-all": (open_to_all, "other users may write"),
    "file": (a_file, "File exists"),
    "journal-unreadable": (journal_of_another, "Permission denied"),
}
PRIVILEGED = "read-only", "journal-unreadable"
"""Cases that root with all its capabilities does not even notice."""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
@pytest.mark.parametrize("case", [case for case in CASES if case not in PRIVILEGED])
def test_a_directory_that_cannot_be_used_is_a_wrong_setting_with_a_remedy(tmp_path: Path, case: str) -> None:
    make, finding = CASES[case]
    make(tmp_path / "state")
    with pytest.raises(InvalidField, match=finding) as refused, open_journal(tmp_path / "state", NODE):
        pass

    assert "TOPOALIGN_STATE_DIR" == refused.value.field
    assert refused.value.remedy


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root, and setpriv to give up its capabilities"
)
async def test_an_agent_with_an_unusable_state_directory_exits_with_5(tmp_path: Path) -> None:
    """
    An agent whose state directory cannot be used exits with 5 before it registers. As root without the power to pass over
    modes, which is what a container without privileges has.
    """
    ended: dict[str, tuple[int, str, list[str]]] = {}

    async def start(case: str) -> None:
        folder = tmp_path / case
        (folder / "device-plugins").mkdir(parents=True)
        CASES[case][0](folder / "state")
        topoalign = str(Path(sys.executable).with_name("topoalign"))
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", topoalign, "node"]
        result = await anyio.run_process(
            command,
            env={**os.environ, **environment(NODE, "nats://127.0.0.1:1", folder)},
            check=False,
            stderr=subprocess.STDOUT,
        )
        made = [path.name for path in (folder / "device-plugins").iterdir()]
        ended[case] = (result.returncode, result.stdout.decode(), made)

    async with anyio.create_task_group() as tasks:
        for case in sample(list(CASES), 4):
            tasks.start_soon(start, case)

    for case, (status, said, made) in ended.items():
        assert (5, []) == (status, made), (case, said)
        assert CASES[case][1] in said, (case, said)
        assert "TOPOALIGN_STATE_DIR" in said, (case, said)
        assert "Traceback" not in said, (case, said)
