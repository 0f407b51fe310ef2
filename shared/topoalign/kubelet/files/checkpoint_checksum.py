"""
The text of a Go value as go-spew prints it for hashing, and its hash.

The checksum in a kubelet's checkpoint is not computed from the file: it is 32-bit FNV-1a over this text of the data.
Map keys are sorted, a type precedes each field, and no type precedes elements (kubelet v1.36.3,
checkpointmanager/checksum).
"""

from collections.abc import Mapping


def fnv1a(text: str) -> int:
    """32-bit FNV-1a of its UTF-8."""
    total = 0x811C9DC5
    for byte in text.encode(errors="surrogatepass"):
        total = (total ^ byte) * 0x01000193 & 0xFFFFFFFF
    return total


def printed(value: object) -> str:
    """A Go value as go-spew prints it: None is nil, and a struct of ours says by `__str__` how it is printed."""
    match value:
        case None:
            return "<nil>"
        case Mapping():
            return f"map[{' '.join(f'{key}:{printed(item)}' for key, item in sorted(value.items()))}]"
        case list() | tuple() | bytes():
            return f"[{' '.join(map(printed, value))}]"
        case _:
            return str(value)
