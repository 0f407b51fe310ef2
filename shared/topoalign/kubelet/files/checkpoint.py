"""
Reads the common format of the checkpoints of the CPU and the memory manager.

Each checkpoint is JSON with a checksum of its struct, printed as text. The struct differs between releases, so the
texts of all releases up to v1.36.3 are tried. A checksum of 0 marks an old file without a checksum, and is accepted, as
in the kubelet. Later releases store the content in the field `data`, with a separate checksum. This field takes
precedence over all others.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from topoalign.core.model.errors import StateFault, clean
from topoalign.kubelet.files import reading

MOST_BYTES = 16 << 20
"""Maximum size of a checkpoint in bytes. That of a thousand containers has a fiftieth of it."""

READS = 4
BETWEEN_READS = 0.02
"""Seconds between two reads. The two writes of a manager are some milliseconds apart: each syncs and renames a file."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The fields next to the content."""

    pod_entries: dict[str, msgspec.Raw] | None = None
    checksum: int = 0
    data: str = ""
    data_checksum: int = 0


# The decoders of the files are created when their modules are imported. The kubelet's files are read in several
# threads, and msgspec 0.22.0 crashes the process if two threads use a type for the first time at the same time.

E = TypeVar("E", bound=Envelope)
T = TypeVar("T")


def load_settled(
    load: Callable[[], T], wait: Callable[[float], None] = time.sleep, between: Callable[[T], bool] = lambda _: False
) -> T:
    """
    Calls `load` until its result is consistent, at most `READS` times. The CPU and the memory manager write their files
    twice for each change: the allocations of the containers and the remaining amounts, in either order. So if `load`
    fails, or its result is `between` two writes, the file is read again. Raises the StateFault of the last call.
    """
    for _ in range(READS - 1):
        try:
            if not between(found := load()):
                return found
        except StateFault:
            pass
        wait(BETWEEN_READS)
    return load()


def read_checkpoint_file(path: Path) -> bytes | None:
    """Reads the file; None if there is none. Raises StateFault."""
    try:
        with reading.open_regular_file(path) as file:
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        why = f"{path} cannot be read: {error.strerror or clean(str(error))}"
        raise StateFault(why, "run as a user who may read the kubelet's files, usually root") from error
    if len(content) > MOST_BYTES:
        raise damaged_file(path.name, f"it is larger than {MOST_BYTES >> 20} MiB")
    return content


def decode_checkpoint(name: str, content: bytes, reader: "msgspec.json.Decoder[E]") -> E:
    """Decodes the file, or its field `data` if it has one. Checks the checksum of `data`. Raises StateFault."""
    try:
        file = reader.decode(content)
        if file.data:
            expect_checksum(name, file.data_checksum, [f"(string){file.data}"])
            file = reader.decode(file.data.encode())
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise damaged_file(name, undecoded(error)) from error
    if file.pod_entries:
        raise StateFault(
            f"{name} holds resources of whole pods (feature gate PodLevelResourceManagers)",
            "switch the alpha gate off: this file does not show what such pods hold",
        )
    return file


def undecoded(error: Exception) -> str:
    """The finding about a file that cannot be decoded."""
    why = clean(str(error), 200)
    return f"it is cut off ({why})" if "truncated" in why else why


def expect_checksum(name: str, recorded: int, texts: Iterable[str]) -> None:
    """Raises StateFault unless the checksum is that of one of these texts."""
    if recorded not in map(fnv1a, texts):
        raise damaged_file(name, f"its checksum {recorded} is not that of its content")


def damaged_file(name: str, finding: str) -> StateFault:
    """The error for a checkpoint that cannot be used, with the file's name and the finding."""
    return StateFault(
        f"{name} cannot be trusted: {finding}",
        "see the kubelet's log; if it cannot use the file either, drain the node, delete the file and restart the kubelet",
    )


def fnv1a(text: str) -> int:
    """The 32-bit FNV-1a hash of a text in UTF-8."""
    total = 0x811C9DC5
    for byte in text.encode(errors="surrogatepass"):
        total = (total ^ byte) * 0x01000193 & 0xFFFFFFFF
    return total


def spew_value(value: object) -> str:
    """
    Prints a Go value as go-spew prints it for hashing: None is nil, and the structs of this package define their text
    by `__str__`. The checksum in a kubelet's checkpoint is the 32-bit FNV-1a hash of this text. Map keys are sorted,
    and a type precedes each field, but not each element (kubelet v1.36.3, checkpointmanager/checksum).
    """
    match value:
        case None:
            return "<nil>"
        case Mapping():
            return f"map[{' '.join(f'{key}:{spew_value(item)}' for key, item in sorted(value.items()))}]"
        case list() | tuple() | bytes():
            return f"[{' '.join(map(spew_value, value))}]"
        case _:
            return str(value)
