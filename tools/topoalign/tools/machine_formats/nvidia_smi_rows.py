"""
Finds the header of a matrix, with the labels of devices and the titles of affinity columns, and reads the rows below it.

The header may be anywhere in the text, because prompts, warnings and other output may precede it. A line counts as the
header if it begins with a GPU's label and every word of it is a label or part of a title; it may continue on the next line.

Rows are found by their labels, in any order, with other lines between them. Affinity cells may be empty. In a row with
tabs the tabs show the columns. In a row with spaces the columns are known if the words are at tab stops of 8 columns,
or right below the titles; else, if the first word is below the first title, the others follow it from the left.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from topoalign.core.model.errors import InvalidMachine, quoted
from topoalign.core.model.topology.topology_checks import MOST_GPUS, MOST_NICS
from topoalign.machines.nvidia_smi_print import CPU_AFFINITY, GPU_NUMA_ID, NUMA_AFFINITY
from topoalign.tools.machine_formats.nvidia_smi_instead import no_matrix
from topoalign.tools.machine_formats.nvidia_smi_lines import (
    SELF,
    PastedLine,
    Word,
    affinity_fault,
    cell_fault,
    is_affinity,
    is_cell,
    lines_from,
    locate_line,
    word_error,
)

MOST_CANDIDATES = 1_000
"""Lines with a GPU's label at the start that are checked; after them, the text is no `topo -m` output."""

_CANDIDATE = re.compile(r"^(?:[ \t\xa0#>|*`]|\x1b\[[0-9;]{0,16}m){0,256}GPU[0-9]", re.MULTILINE)
_GPU = re.compile(r"GPU[0-9]{1,4}")
_NIC = re.compile(r"NIC[0-9]{1,4}")
_RDMA_NAME = re.compile(r"[a-z](?=[A-Za-z_.:-]*[0-9])[A-Za-z0-9_.:-]{1,63}")
_GLUED = re.compile(r"(?:GPU|NIC|mlx[0-9]_)[0-9]+(?:GPU|NIC|mlx[0-9]_)")
TITLE_WORDS = frozenset({"CPU", "NUMA", "Affinity", "GPU", "ID"})


@dataclass(frozen=True)
class MatrixHeader:
    """The header of a matrix: labels, titles, and where they are in the text."""

    labels: tuple[str, ...]
    """The labels of the device columns, in order."""
    titles: tuple[str, ...]
    """The titles of the affinity columns, in order."""
    title_columns: tuple[int, ...]
    """The column of each title, if they are in one line; else empty."""
    line: int
    """The line in which the header begins."""
    number: int
    """The number of the first line below the header."""
    after: int
    """The position in the text at which that line begins."""

    @property
    def gpus(self) -> tuple[str, ...]:
        """The labels of GPUs, in the order of their columns."""
        return tuple(label for label in self.labels if is_gpu(label))


def is_gpu(label: str) -> bool:
    """Whether a label is that of a GPU: `GPU0`."""
    return _GPU.fullmatch(label) is not None


def is_label(word: str) -> bool:
    """Whether this can be a device's label: `GPU0`, `NIC0`, or an RDMA device name as older drivers print it."""
    if len(word) > 64 or is_glued(word):
        return False
    return any(kind.fullmatch(word) for kind in (_GPU, _NIC, _RDMA_NAME))


def is_glued(word: str) -> bool:
    """Whether a word is two labels without a space between them, which a damaged paste has."""
    return _GLUED.match(word) is not None


def is_header_line(line: PastedLine) -> bool:
    """Whether a line begins with a GPU's label and has only labels and parts of titles."""
    return len(line.words) > 1 and is_gpu(line.first) and all(_is_header_word(word.text) for word in line.words)


def find_header(text: str, start: int = 0) -> MatrixHeader:
    """The first header from this position on. Raises InvalidMachine, if possible at the line most similar to a header."""
    closest: InvalidMachine | None = None
    number, at = locate_line(text, start)
    for match in islice(_CANDIDATE.finditer(text, start), MOST_CANDIDATES):
        number += text.count("\n", at, match.start())
        at = match.start()
        line = next(lines_from(text, at, number))
        if all(_is_header_word(word.text) for word in line.words):
            return _read_header(text, line)
        closest = closest or _near_miss(line)
    raise closest or no_matrix(text)


def is_header_text(text: str) -> bool:
    """Whether a text that begins with a GPU's label has only labels and parts of titles."""
    return all(_is_header_word(word) for word in text.split())


def _is_header_word(word: str) -> bool:
    return word in TITLE_WORDS or is_label(word)


def _near_miss(line: PastedLine) -> InvalidMachine | None:
    meant = line.words[:2]
    if all(_is_header_word(word.text) or is_glued(word.text) for word in meant):
        word = next(word for word in line.words if not _is_header_word(word.text))
        what = "two labels glued together" if is_glued(word.text) else "not the label or title of a column"
        return word_error(word, f"{quoted([word.text])} is {what}")
    if len(meant) == 2 and is_gpu(meant[0].text) and is_cell(meant[1].text):
        return word_error(meant[0], f"the row {meant[0].text} has no header with the labels of the columns above it")
    return None


def _read_header(text: str, line: PastedLine) -> MatrixHeader:
    words = list(line.words)
    after = line.after
    number = line.number + 1
    for more in lines_from(text, line.after, line.number + 1):
        if not more.words:
            continue
        first_is_row = any(more.first == word.text for word in words if is_label(word.text))
        if first_is_row or not all(_is_header_word(word.text) for word in more.words):
            break
        words.extend(more.words)
        after = more.after
        number = more.number + 1
    split = next((i for i, word in enumerate(words) if word.text in TITLE_WORDS), len(words))
    titles = _titles(words[split:])
    columns = _title_columns(titles, words[split:])
    return MatrixHeader(_labels(words[:split]), titles, columns, line.number, number, after)


def _labels(words: Sequence[Word]) -> tuple[str, ...]:
    seen: set[str] = set()
    for word in words:
        if word.text in seen:
            raise word_error(word, f"there are two columns {word.text}")
        seen.add(word.text)
    gpus = sum(is_gpu(label) for label in seen)
    if gpus > MOST_GPUS or len(seen) - gpus > MOST_NICS:
        finding = f"{gpus} GPUs and {len(seen) - gpus} NICs: a machine has at most {MOST_GPUS} and {MOST_NICS}"
        raise word_error(words[0], finding)
    return tuple(word.text for word in words)


def _titles(words: Sequence[Word]) -> tuple[str, ...]:
    # they may be stacked: `CPU NUMA` above `Affinity Affinity`
    label = next((word for word in words if is_label(word.text)), None)
    if label is not None:
        raise word_error(label, f"the column {label.text} stands behind the affinity columns")
    count = Counter(word.text for word in words)
    titles = []
    if count["CPU"]:
        titles.append(CPU_AFFINITY)
    if count["NUMA"] > count["ID"]:
        titles.append(NUMA_AFFINITY)
    if count["ID"]:
        titles.append(GPU_NUMA_ID)
    if count != Counter(word for title in titles for word in title.split()):
        found = " ".join(word.text for word in words)
        raise word_error(words[-1], f"{quoted([found])} is not `{CPU_AFFINITY}`, `{NUMA_AFFINITY}`, `{GPU_NUMA_ID}`")
    return tuple(titles)


def _title_columns(titles: Sequence[str], words: Sequence[Word]) -> tuple[int, ...]:
    if len({word.line for word in words}) != 1 or [word.text for word in words] != " ".join(titles).split():
        return ()
    starts = []
    at = 0
    for title in titles:
        starts.append(words[at].column)
        at += len(title.split())
    return tuple(starts)


TAB = 8
"""Columns between the stops at which terminals put what stands behind a tab."""
_KEEP_TABS = (
    "an empty cell cannot be seen where its tabs have become blanks: keep the tabs, `nvidia-smi topo -m > FILE`"
)

MOST_OTHER_LINES = 100
"""Lines in succession without a row after which the matrix ends."""

_WORD = re.compile(r"\S")

LEGEND = re.compile(r"^[ \t\xa0#>|]{0,256}(?:NIC )?Legend:", re.MULTILINE)


@dataclass(frozen=True)
class MatrixRow:
    """One row of a matrix: label, cells and, for a GPU, affinities."""

    label: Word
    cells: tuple[Word, ...]
    affinities: Mapping[str, str]
    """Title -> text, for each column that the header has; "" if it is blank."""


def read_rows(text: str, header: MatrixHeader) -> tuple[dict[str, MatrixRow], int]:
    """The rows by label in the order of the text, and where in it they end. Raises InvalidMachine."""
    rows: dict[str, MatrixRow] = {}
    columns = frozenset(header.labels)
    end = header.after
    others = 0
    adjacent = True
    for line in lines_from(text, header.after, header.number):
        if LEGEND.match(line.text) or others == MOST_OTHER_LINES or is_header_line(line):
            break
        if line.first not in columns:
            _check_other(line, adjacent)
            others = others + 1
            adjacent = False
            continue
        also = ""
        if not _WORD.search(text, line.after):  # the text may have been cut in its last row
            lost = [name for name in header.labels if name != line.first and name not in rows]
            also = f"; the rows {', '.join(lost)} are missing below it" if lost else ""
        row = _row(line, header, also)
        if line.first in rows:
            raise word_error(row.label, f"row {line.first} is there twice, first in line {rows[line.first].label.line}")
        rows[line.first] = row
        end = line.after
        others = 0
        adjacent = True
    return rows, end


def _check_other(line: PastedLine, adjacent: bool) -> None:
    if not line.words:
        return
    first = line.words[0]
    second = line.words[1].text if len(line.words) > 1 else ""
    if adjacent and (is_cell(first.text) or is_affinity(first.text) or first.text in TITLE_WORDS - {"GPU"}):
        raise word_error(
            first, f"the line begins with {quoted([first.text])}: it is the rest of the line above, wrapped"
        )
    if is_glued(first.text):
        raise word_error(first, f"{quoted([first.text])} is two labels glued together")
    if is_label(first.text) and (is_cell(second) or first.text.startswith(("GPU", "NIC"))):
        raise word_error(first, f"row {first.text} has no column in the header")


def _row(line: PastedLine, header: MatrixHeader, also: str) -> MatrixRow:
    label = line.words[0]
    columns = len(header.labels)
    cells = line.words[1 : columns + 1]
    rest = line.words[columns + 1 :]
    bad = next((word for word in cells if not is_cell(word.text)), None)
    if bad is not None:
        raise word_error(bad, f"{cell_fault(bad.text)}, in row {label.text}{also}")
    if len(cells) < (columns if is_gpu(label.text) else len(header.gpus)):
        raise word_error(line.words[-1], f"row {label.text} ends after {len(cells)} of {columns} cells{also}")
    if len(rest) > len(header.titles):
        extra = rest[len(header.titles)]
        raise word_error(extra, f"row {label.text} goes on with {quoted([extra.text])}, which is below no column")
    affinities = _affinities(line, cells, rest, header)
    for title, word in affinities.items():
        fault = affinity_fault(title, word.text)
        if fault:
            raise word_error(word, f"{fault}, in row {label.text}{also}")
    return MatrixRow(
        label, cells, {title: affinities[title].text if title in affinities else "" for title in header.titles}
    )


def _affinities(line: PastedLine, cells: Sequence[Word], rest: Sequence[Word], header: MatrixHeader) -> dict[str, Word]:
    titles = header.titles
    if len(rest) == len(titles) or not rest:
        return dict(zip(titles, rest, strict=False))
    begin = cells[-1].column - 1 + len(cells[-1].text)
    if "\t" in line.text[begin:]:
        # The cells after the device columns; an empty one too many stands before the last, as drivers print it.
        places = [line.text.count("\t", begin, word.column - 1) - 1 for word in rest]
        indices = [min(max(place, 0), len(titles) - 1) for place in places]
    elif (stops := _tab_stops(line, rest)) is not None:
        indices = [min(stop - len(header.labels) - 1, len(titles) - 1) for stop in stops]
    elif all(word.column in header.title_columns for word in rest):
        indices = [header.title_columns.index(word.column) for word in rest]
    elif not header.title_columns or rest[0].column == header.title_columns[0]:
        indices = list(range(len(rest)))
    else:
        indices = []
    if len(set(indices)) < len(rest):
        raise word_error(rest[-1], f"the column of {quoted([rest[-1].text])} is not clear", _KEEP_TABS)
    return {titles[index]: word for index, word in zip(indices, rest, strict=True)}


def _tab_stops(line: PastedLine, rest: Sequence[Word]) -> list[int] | None:
    # Which cell of its row each of the last words is, 0 being the label; None unless every word is where tabs of 8 columns
    # put it. A cell begins at the first stop behind the one before it, and an empty one takes 8 columns: in
    # `GPU0     X              7`, where `X` has a blank on either side, `X` is cell 1, cell 2 is empty, and 7 is cell 3.
    origin = line.words[0].column
    at = 0
    cell = -1
    cells = []
    for word in line.words:
        start = word.column - origin - (word.text == SELF)
        if start < at or start % TAB:
            return None
        cell += 1 + (start - at) // TAB
        cells.append(cell)
        at = (word.column - origin + len(word.text) + (word.text == SELF)) // TAB * TAB + TAB
    whole = cells[: len(line.words) - len(rest)] == list(range(len(line.words) - len(rest)))
    return cells[-len(rest) :] if whole else None
