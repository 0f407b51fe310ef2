"""
Refuses JSON that is ambiguous or invalid, with the path of the field.

A duplicate key has one meaning for a reader that takes the first value and another for a reader that takes the last;
`NaN` and `Infinity` are not JSON, although some readers accept them. Other errors of a body are left to its decoder.
"""

import json
from collections import Counter
from collections.abc import Iterator

from topoalign.core.model.errors import Undecodable, clean
from topoalign.core.wire import LARGEST_BODY

TWICE = "stands twice"


class Malformed:
    """Stands in a decoded document for a value that is ambiguous or invalid."""

    def __init__(self, why: str) -> None:
        self.why = why


def refuse_malformed(body: bytes) -> None:
    """Raises Undecodable that names the field. The work is in proportion to the length of the body."""
    malformed = False

    def mapping(pairs: list[tuple[str, object]]) -> dict[str, object]:
        nonlocal malformed
        found = dict(pairs)
        if len(found) < len(pairs):
            malformed = True
            times = Counter(key for key, _ in pairs)
            found |= {key: Malformed(TWICE) for key in found if times[key] > 1}
        return found

    def constant(name: str) -> Malformed:
        nonlocal malformed
        malformed = True
        return Malformed(f"is {name}, which is no JSON")

    if len(body) > LARGEST_BODY:
        return
    try:
        document = json.loads(body.decode(), object_pairs_hook=mapping, parse_constant=constant)
    except (ValueError, RecursionError):
        return
    if malformed:
        path, finding = next(repeated_or_constant(document))
        raise Undecodable("the request", f"{clean(path or 'the whole', 200)} {finding.why}")


def repeated_or_constant(document: object) -> Iterator[tuple[str, Malformed]]:
    """Yields each such value with its path, in the order of the document."""
    waiting: list[tuple[str, object]] = [("", document)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, Malformed):
            yield path, value
        elif isinstance(value, dict):
            waiting += [(key_path(path, key), inner) for key, inner in reversed(value.items())]
        elif isinstance(value, list):
            waiting += [(f"{path}[{place}]", inner) for place, inner in reversed([*enumerate(value)])]


def key_path(path: str, key: str) -> str:
    """`limits[nvidia.com/gpu]` for a key that is no plain word."""
    name = clean(key, 80)
    if not key.isidentifier():
        return f"{path}[{name}]"
    return f"{path}.{name}" if path else name
