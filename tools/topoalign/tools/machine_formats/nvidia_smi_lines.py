"""
Splits a paste into lines and words with their positions, without additions of a terminal or a comment.

Nothing is copied before it is searched: one search skips ten megabytes of noise, and only the lines of the
matrix itself become objects.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from topoalign.core.model.errors import InvalidMachine, clean
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.cpuset import parse_cpuset
from topoalign.core.model.topology.device_links import Link, PcieClass
from topoalign.core.model.topology.topology_checks import MOST_CPUS, MOST_NODES
from topoalign.machines.nvidia_smi_print import CPU_AFFINITY, GPU_NUMA_ID, UNKNOWN

LONGEST_LINE = 65_536
"""Characters. The longest line of a matrix at the limits of `validate` has about 3,000."""

COPY_AGAIN = "copy the whole output again, with no line wrapped: `nvidia-smi topo -m > FILE`"

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u2028\u2029]")
_ANSI = re.compile(r"\x1b\[[0-9;?]{0,32}[A-Za-z]")
_COMMENT = re.compile(r"[ \t\xa0]*[#>]+")
_TABLE_ROW = re.compile(r"[ \t\xa0]*\|[ \t\xa0|*`]*[A-Za-z][A-Za-z_.:-]*[0-9]")
"""A row of a Markdown table with a label in its first non-empty cell."""
_WORD = re.compile(r"\S+")
_MARKDOWN = str.maketrans("|*`", "\t  ")


class Word(NamedTuple):
    """A text between blanks, and its position, counted from 1."""

    text: str
    line: int
    column: int


@dataclass(frozen=True)
class PastedLine:
    """One line of a paste, cleaned; `number` counts from 1."""

    number: int
    text: str
    """Without terminal codes; a comment sign has become a blank and a Markdown cell's edge a tab, so that columns stay."""
    after: int
    """The position in the text at which the next line begins."""

    @cached_property
    def words(self) -> tuple[Word, ...]:
        """The words of the line with their columns, which count from 1."""
        return tuple(Word(match[0], self.number, match.start() + 1) for match in _WORD.finditer(self.text))

    @property
    def first(self) -> str:
        """The text of the first word; "" for an empty line."""
        return self.words[0].text if self.words else ""


def prepared(text: str) -> str:
    """The text with plain line ends. Raises InvalidMachine at the first control character: then it is no text."""
    if "\r" in text:
        text = text.replace("\r\n", "\n")
    bad = _CONTROL.search(text)
    if bad is not None:
        number, start = locate_line(text, bad.start())
        raise InvalidMachine(f"control character U+{ord(bad[0]):04X}", COPY_AGAIN, number, bad.start() - start + 1)
    return text


def locate_line(text: str, at: int) -> tuple[int, int]:
    """The number of the line that this position is in, and where that line starts."""
    start = text.rfind("\n", 0, at) + 1
    return text.count("\n", 0, start) + 1, start


def lines_from(text: str, start: int, number: int) -> Iterator[PastedLine]:
    """The lines from a line's start on, one at a time. Raises InvalidMachine for a line that no matrix can have."""
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        if end - start > LONGEST_LINE:
            finding = f"the line is longer than {LONGEST_LINE} characters"
            raise InvalidMachine(finding, COPY_AGAIN, number, LONGEST_LINE + 1)
        yield PastedLine(number, _cleaned(text[start:end], number), end + 1)
        start = end + 1
        number += 1


def _cleaned(line: str, number: int) -> str:
    if "\x1b" in line:
        line = _ANSI.sub("", line)
        if "\x1b" in line:
            raise InvalidMachine("a terminal code that is cut short", COPY_AGAIN, number, line.index("\x1b") + 1)
    comment = _COMMENT.match(line)
    if comment is not None:
        line = comment[0].replace("#", " ").replace(">", " ") + line[comment.end() :]
    return line.translate(_MARKDOWN) if _TABLE_ROW.match(line) else line


def word_error(word: Word, finding: str, remedy: str = COPY_AGAIN) -> InvalidMachine:
    """The error about this word, or about what begins there."""
    return InvalidMachine(finding, remedy, word.line, word.column)


# The cells of a matrix: `X`, `NV4` or a PCIe class; after them lists of CPUs and of NUMA nodes.
#
# Besides the classes of the current legend there are `SOC`, which older drivers print for `SYS`, and `N/A`: not known.
# Affinities are lists in the kernel's format. nvidia-smi cuts long lists. A list that was cut inside a number cannot be
# recognised; a list that begins with `-` or ends in `-` or `,` can, and is an error.


SELF = "X"

_PATH = "|".join(["NV[1-9][0-9]{0,2}", *PcieClass, "SOC"])
CELL = rf"(?:{SELF}|{_PATH}|{UNKNOWN})"
"""A regular expression for one cell."""
_CELL = re.compile(CELL)
_GLUED = re.compile(rf"(?:{SELF}|{_PATH}){{2,}}")
_AFFINITY = re.compile(r"N/A|[0-9][0-9,-]*")
_P2P = frozenset({"OK", "NS", "CNS", "GNS", "TNS"})


def is_cell(word: str) -> bool:
    """Whether a word can be a cell of a matrix: `X`, `NV4`, `PIX`, `N/A` and so on."""
    return _CELL.fullmatch(word) is not None


def is_affinity(word: str) -> bool:
    """Whether this looks like an affinity, right or cut short."""
    return _AFFINITY.fullmatch(word) is not None


def is_nvlink(cell: str) -> bool:
    """Whether a cell gives a number of NVLinks, as `NV4` does."""
    return cell.startswith("NV")


def parse_link(a: DeviceID, b: DeviceID, cell: str) -> Link | None:
    """The link of two devices that a cell describes; None for a cell without a link."""
    if cell in ("", UNKNOWN):
        return None
    if is_nvlink(cell):
        return Link(a=a, b=b, fabric_links=int(cell.removeprefix("NV")))
    return Link(a=a, b=b, pcie=PcieClass.SYS if cell == "SOC" else PcieClass(cell))


def parse_affinity(affinity: str) -> frozenset[int]:
    """The ids in an affinity cell; none if it is blank or `N/A`. Raises ValueError."""
    return frozenset() if affinity == UNKNOWN else parse_cpuset(affinity)


def cell_fault(word: str) -> str:
    """The finding about a text that is no cell."""
    if len(word) <= 256 and _GLUED.fullmatch(word):
        return f"{clean(word)!r} is several cells glued together"
    if word in _P2P:
        return f"{clean(word)!r} is a peer-to-peer state, as `nvidia-smi topo -p2p` prints it, not a connection"
    return f"{clean(word)!r} is not a cell such as PIX, SYS or NV4"


def affinity_fault(title: str, word: str) -> str:
    """The finding about a text that cannot be below the title; "" if it can."""
    most = MOST_CPUS if title == CPU_AFFINITY else MOST_NODES
    try:
        ids = parse_affinity(word)
    except ValueError as error:
        return f"{title} {clean(word)!r} is no list of ids, or a list that was cut: {error}"
    if ids and max(ids) >= most:
        return f"{title} {clean(word)!r} goes beyond {most - 1}"
    if title == GPU_NUMA_ID and len(ids) > 1:
        return f"{title} {clean(word)!r} is not one number"
    return ""
