"""
Parses numbers and booleans in annotations as Go does, with Go's error messages for invalid values.

HAMi's components are written in Go, so topoalign must accept the same values as Go. Source: Go 1.26, package strconv.
"""

import json
import re

_INTEGER = re.compile(r"[+-]?[0-9]+")
_BOOLS = {
    **dict.fromkeys(("1", "t", "T", "true", "TRUE", "True"), True),
    **dict.fromkeys(("0", "f", "F", "false", "FALSE", "False"), False),
}


def parse_int(text: str, bits: int = 32, function: str = "ParseInt") -> int:
    """Parses a decimal integer of `bits` bits. Raises ValueError with Go's message."""
    if not _INTEGER.fullmatch(text):
        raise ValueError(f"strconv.{function}: parsing {go_quoted(text)}: invalid syntax")
    value = int(text) if len(text) <= 1000 else 1 << 100  # int() of thousands of digits would raise
    if not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise ValueError(f"strconv.{function}: parsing {go_quoted(text)}: value out of range")
    return value


def parse_bool(text: str) -> bool:
    """Parses a boolean. Raises ValueError with Go's message."""
    if text not in _BOOLS:
        raise ValueError(f"strconv.ParseBool: parsing {go_quoted(text)}: invalid syntax")
    return _BOOLS[text]


def is_bool(text: str) -> bool:
    """Whether `parse_bool` accepts the text."""
    return text in _BOOLS


def is_true(text: str | None) -> bool:
    """Whether the text is present and means true. An invalid value counts as false."""
    return text is not None and _BOOLS.get(text, False)


def go_quoted(text: str) -> str:
    """The text in double quotes, as Go quotes it except for control characters."""
    return json.dumps(text, ensure_ascii=False)
