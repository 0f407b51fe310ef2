"""
Reads the rows of a matrix: a device's label, a cell per device column, and, for a GPU, its affinities.

Rows are found by their labels, in any order, with other lines between them. Affinity cells may be empty. In a row with
tabs the tabs show the columns. In a row with spaces the columns are known if the words are at tab stops of 8 columns,
or right below the titles; else, if the first word is below the first title, the others follow it from the left.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from topoalign.core.model.errors import quoted
from topoalign.machines.nvidia_smi_header import TITLE_WORDS, MatrixHeader, is_glued, is_gpu, is_header_line, is_label
from topoalign.machines.nvidia_smi_lines import (
    SELF,
    PastedLine,
    Word,
    affinity_fault,
    cell_fault,
    is_affinity,
    is_cell,
    lines_from,
    word_error,
)

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
