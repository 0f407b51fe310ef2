"""A pasted matrix that was damaged on the way is read as what it still says, or refused where it is wrong."""

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults_support import THOROUGH, sample

from topoalign.core.model.errors import InvalidMachine
from topoalign.core.model.topology.topology_checks import validate
from topoalign.machines.nvidia_smi_print import print_matrix
from topoalign.tools.bench.parse import KINDS
from topoalign.tools.machine_formats.nvidia_smi import read_pasted_matrix

DAMAGES: dict[str, Callable[[str, int], str]] = {
    "a character is missing": lambda text, at: text[:at] + text[at + 1 :],
    "a character is there twice": lambda text, at: text[: at + 1] + text[at:],
    "a control character": lambda text, at: text[:at] + "\x07" + text[at:],
    "a character of nothing": lambda text, at: text[:at] + "\x00" + text[at:],
    "a colour": lambda text, at: text[:at] + "\x1b[31;1m" + text[at:],
    "the screen is cleared": lambda text, at: text[:at] + "\x1b[2J\x1b[H" + text[at:],
    "a title is set": lambda text, at: text[:at] + "\x1b]0;x\x07" + text[at:],
    "a code that is cut": lambda text, at: text[:at] + "\x1b[" + text[at:],
    "turned round": lambda text, at: text[:at] + "\u202e" + text[at:],
    "invisible": lambda text, at: text[:at] + "\u200b\ufeff" + text[at:],
    "digits of another script": lambda text, at: text[:at] + "٣" + text[at + 1 :],
    "a line ends": lambda text, at: text[:at] + "\r\n" + text[at:],
    "a tab more": lambda text, at: text[:at] + "\t" + text[at:],
    "a huge number": lambda text, at: text[:at] + "9" * 5_000 + text[at:],
    "a huge range": lambda text, at: text[:at] + "0-99999999999" + text[at:],
    "cut": lambda text, at: text[:at],
    "begun late": lambda text, at: text[at:],
}


def pastes(folder: Path) -> Iterator[str]:
    yield from (path.read_text() for path in sorted((folder / "nvidia_smi_topo").glob("*.txt")))


def says_what_is_not_there(error: InvalidMachine) -> bool:
    """What is missing altogether has no place: rows, or the line with the labels."""
    return "missing" in error.finding or "no line holds" in error.finding


@pytest.mark.timeout(3600 if THOROUGH else 300)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_paste_is_a_machine_or_refused_with_its_line(vectors: Path, damage: str) -> None:
    """C23: at every place of every published output, in a quick run at some of each."""
    for text in pastes(vectors):
        places = sample(range(len(text)), 6)
        for at in places if THOROUGH else [*random.Random(len(text)).sample(range(len(text)), 3), *places]:
            try:
                machine = read_pasted_matrix(DAMAGES[damage](text, at))
            except InvalidMachine as error:
                assert error.line is not None or says_what_is_not_there(error), (error.finding, at)
                assert str(error).isprintable() and len(str(error)) < 1_000
                assert error.remedy
            else:
                validate(machine)
                assert machine == read_pasted_matrix(print_matrix(machine))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", sample(sorted(KINDS), 4))
def test_the_command_refuses_ten_megabytes_and_5000_columns(kind: str) -> None:
    """C23: `topo import -`, in a process that may take no more than 400 MB."""
    limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20)); "
    program = (
        limited + "from topoalign.cli.root import run_command_line; sys.exit(run_command_line(['topo', 'import', '-']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=KINDS[kind](), capture_output=True, text=True, timeout=240, check=False
    )

    assert (5, "") == (done.returncode, done.stdout), done.stderr[-500:]
    assert any(words in done.stderr for words in ("error: line ", "are missing", "no line holds"))
    assert "code: InvalidMachine" in done.stderr
    assert {"\n"} >= {c for c in done.stderr if not c.isprintable()}
