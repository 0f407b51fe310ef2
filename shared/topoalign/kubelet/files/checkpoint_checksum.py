"""
The text of a Go value as go-spew prints it for hashing, and its hash.

The checksum in a kubelet's checkpoint is not computed from the file: it is 32-bit FNV-1a over this text of the data.
Map keys are sorted, a type precedes each field, and no type precedes elements (kubelet v1.36.3,
checkpointmanager/checksum).
"""

from collections.abc import Iterable


def fnv1a(text: str) -> int:
    """32-bit FNV-1a of its UTF-8."""
    total = 0x811C9DC5
    for byte in text.encode(errors="surrogatepass"):
        total = (total ^ byte) * 0x01000193 & 0xFFFFFFFF
    return total


def sequence(items: Iterable[object] | None) -> str:
    """A Go slice as go-spew prints it; None is a nil slice."""
    return "<nil>" if items is None else f"[{' '.join(map(str, items))}]"


def mapping(items: Iterable[tuple[int | str, str]]) -> str:
    """Of keys in their order, and values as they are printed."""
    return "map[" + " ".join(f"{key}:{value}" for key, value in items) + "]"
