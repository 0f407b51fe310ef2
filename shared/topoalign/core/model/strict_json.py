"""
Decodes JSON, and refuses duplicate keys in an object, `NaN` and `Infinity`.

Text with duplicate keys is ambiguous: some parsers use the first value, others the last. `NaN` and `Infinity` are not
valid JSON, although some parsers accept them.
"""

import json
from collections import Counter
from typing import Any

from topoalign.core.model.errors import quoted


class AmbiguousJson(ValueError):
    """The JSON is ambiguous; the message names the key or the constant."""


def load_strict_json(text: str) -> Any:
    """Raises AmbiguousJson, and the errors of `json.loads`."""
    return json.loads(text, object_pairs_hook=_mapping, parse_constant=_refuse_constant)


def _mapping(pairs: list[tuple[str, object]]) -> dict[str, object]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        times = Counter(key for key, _ in pairs)
        raise AmbiguousJson(f"a key stands twice: {quoted([key for key in mapping if times[key] > 1])}")
    return mapping


def _refuse_constant(name: str) -> object:
    raise AmbiguousJson(f"{name} is no number")
