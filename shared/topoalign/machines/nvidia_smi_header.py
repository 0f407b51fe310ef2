"""
Finds the header of a matrix: the devices that have a column, and the affinity columns that follow them.

The header may be anywhere in the text, because prompts, warnings and other output may precede it. A line counts as the
header if it begins with a GPU's label and every word of it is a label or part of a title; it may continue on the next
line.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from topoalign.core.model.errors import InvalidMachine, quoted
from topoalign.core.model.topology.topology_checks import MOST_GPUS, MOST_NICS
from topoalign.machines.nvidia_smi_instead import no_matrix
from topoalign.machines.nvidia_smi_lines import (
    CPU_AFFINITY,
    GPU_NUMA_ID,
    NUMA_AFFINITY,
    PastedLine,
    Word,
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
