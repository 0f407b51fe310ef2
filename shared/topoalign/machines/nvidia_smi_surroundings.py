"""
Takes away what surrounds the lines of a matrix: markup of a web page, escapes of JSON, and a prefix of every line.

Logs put something in front of each line: a time stamp, the name of a pod or a host, a line number, the mark of a diff, a
quote. Such a prefix is found by its place, not by a list of formats: it is what stands before the first label in the
header, and a row has the same, apart from its numbers and blanks. Where a line has the prefix, blanks of the same
length take its place, so that an error still names the right line and column.

    2026-09-01T10:00:00.1Z     GPU0   GPU1          prefix of the header: `2026-09-01T10:00:00.1Z`
    2026-09-01T10:00:00.2Z GPU0  X    NV18          the same, apart from a number
"""

import html
import re
from collections.abc import Callable, Iterator
from itertools import islice

from topoalign.machines.nvidia_smi_cells import CELL

LONGEST_PREFIX = 256
"""Characters: a time, and the names of a namespace, a pod and a container."""
LONGEST_HEADER = 8_192
"""Characters: at the limits of `validate` a header has about 3,000."""
MOST_CANDIDATES = 1_000
"""So many labels of GPUs are looked at."""

MOST_SHAPES = 8
"""So many different prefixes of headers are looked for in the rows."""

_LABEL = re.compile(r"(?<!\w)GPU[0-9]{1,4}(?!\w)")
_ROW_START = rf"[ \t]*GPU[0-9]{{1,4}}[ \t]+{CELL}(?!\w)"
_NUMBER = r"(?>0x[0-9a-fA-F]{1,64}|[0-9]{1,64}(?:\.[0-9]{1,64})?)"
"""
A number in a prefix: `07`, `02.123Z`, `0x1f`. Its fraction may be missing on some lines. Atomic, because many numbers with
dots would else be compared in very many ways.
"""
_ESCAPED = re.compile(r"\\t *GPU[0-9]")
_QUOTE_ENDS = re.compile(r"""["'],?[ \t]*$""", re.MULTILINE)
_QUOTES = ('"', "'")

_MARKUP = re.compile(r"<(?:pre|td|th|br|div|span|p|code|html|body)\b|&(?:nbsp|#160|#xa0|#9|#x9);", re.IGNORECASE)
_BLANKS = r"(?:(?<!\s)\s++)?"
"""Blanks from the first one on: looked for at each of them, they would take quadratic time."""
_CELL_START = re.compile(rf"{_BLANKS}<t[dh]\b[^<>]{{0,1000}}>\s*", re.IGNORECASE)
_CELL_END = re.compile(rf"{_BLANKS}</t[dh]\s*>", re.IGNORECASE)
_LINE_END = re.compile(r"<br\s*/?>\n?|</(?:p|div|tr|li|pre|h[1-6])\s*>", re.IGNORECASE)
_TAG = re.compile(r"<[A-Za-z/!][^<>]{0,1000}>")


def other_forms(text: str, is_header: Callable[[str], bool]) -> Iterator[str]:
    """
    The text without what may surround the matrix, one form after another: without markup, and without a prefix.

    `is_header`: whether a text that begins with a label is the rest of a header.
    """
    if _MARKUP.search(text):
        text = without_markup(text)
        yield text
    if _ESCAPED.search(text):
        text = text.replace("\\t", "\t").replace("\\n", "\n")
    prefixed = without_prefix(text, is_header)
    if prefixed is not None:
        yield prefixed


def without_markup(text: str) -> str:
    """The text of an HTML page, with a tab for each edge of a table's cells and a line for each row."""
    text = _CELL_END.sub("\t", _CELL_START.sub("", text))
    return html.unescape(_TAG.sub("", _LINE_END.sub("\n", text))).replace("\xa0", " ")


def without_prefix(text: str, is_header: Callable[[str], bool]) -> str | None:
    """The text with blanks in the place of the header's prefix, on every line that has it. None: there is no such prefix."""
    tried: set[str] = set()
    for match in islice(_LABEL.finditer(text), MOST_CANDIDATES):
        start = text.rfind("\n", max(0, match.start() - LONGEST_PREFIX - 1), match.start()) + 1
        prefix = text[start : match.start()].rstrip()
        if not prefix or match.start() - start > LONGEST_PREFIX:
            continue
        end = text.find("\n", match.start(), match.start() + LONGEST_HEADER)
        quoted = prefix.endswith(_QUOTES)
        header = text[match.start() : end if end > 0 else match.start() + LONGEST_HEADER]
        if not is_header(_QUOTE_ENDS.sub("", header) if quoted else header):
            continue
        shape = shape_of(prefix)
        if shape in tried:
            continue
        if len(tried) == MOST_SHAPES:
            return None
        tried.add(shape)
        if quoted or re.search(rf"(?m)^{shape}{_ROW_START}", text):
            text = re.sub(rf"(?m)^{shape}", _blanks, text)
            return _QUOTE_ENDS.sub("", text) if quoted else text
    return None


def shape_of(prefix: str) -> str:
    """A regular expression for this prefix with any numbers, and with any blanks in the place of its blanks."""
    words = re.split(rf"({_NUMBER}|[ \t\xa0]+)", prefix.strip())
    any_of = "".join(
        _NUMBER if word[:1].isdigit() else r"[ \t\xa0]{1,64}" if word[:1].isspace() else re.escape(word)
        for word in words
        if word
    )
    return rf"[ \t\xa0]{{0,64}}{any_of}"


def _blanks(match: re.Match[str]) -> str:
    return " " * len(match[0])
