"""
Decodes JSON that has one meaning: no key stands twice in an object, and there is no `NaN` or `Infinity`.

A duplicate key has one meaning for a reader that takes the first value and another for a reader that takes the last; `NaN`
and `Infinity` are not JSON, although some readers accept them.
"""

import json
from collections import Counter
from typing import Any

from topoalign.core.model.errors import quoted


class AmbiguousJson(ValueError):
    """JSON with more than one meaning; the message names the key or the constant."""


def load_strict_json(text: str) -> Any:
    """Raises AmbiguousJson, and what `json.loads` raises."""
    return json.loads(text, object_pairs_hook=_mapping, parse_constant=_refuse_constant)


def _mapping(pairs: list[tuple[str, object]]) -> dict[str, object]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        times = Counter(key for key, _ in pairs)
        raise AmbiguousJson(f"a key stands twice: {quoted([key for key in mapping if times[key] > 1])}")
    return mapping


def _refuse_constant(name: str) -> object:
    raise AmbiguousJson(f"{name} is no number")
