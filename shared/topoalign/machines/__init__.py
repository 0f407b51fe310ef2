"""
Loads descriptions of machines by a name of the catalogue, or from a file.

`load_machine` takes a name of the catalogue, a file or `-`. The content of a file decides its format: the output of
`nvidia-smi topo -m`, lstopo's XML, a captured sysfs tree (a folder or an archive of one), or topoalign's own JSON.
Readers are imported when they are needed, because a command that prints a matrix must not load an XML parser.
"""

import re
import sys
from pathlib import Path

from topoalign.core.model.errors import InvalidMachine, NotFound, quoted
from topoalign.core.model.topology.model import Topology
from topoalign.machines.document import Machine

__all__ = ["MOST_BYTES", "Machine", "load_machine", "read"]

MOST_BYTES = 64 << 20
"""Bytes of a file on disk. The largest useful one, a packed sysfs tree, has less than one MiB."""

_ARCHIVE_STARTS = (b"BZh", b"\x1f\x8b", b"\xfd7zXZ")
DEEPEST_ROOT = 2
"""Levels of folders that may enclose the `sys` of a captured tree."""

_TEXT_IN_MARKUP = re.compile(
    rb"(?:<\?xml[^>]{0,100}>\s*)?(?:<!DOCTYPE (?:html|nvidia_smi_log)|"
    rb"<(?:html|head|body|pre|code|div|span|p|br|table|tr|td|details|blockquote|nvidia_smi_log)\b)",
    re.IGNORECASE,
)
"""The start of a web page, or of `nvidia-smi -q -x`: the text in them is read, or refused."""

_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_SUPPORTED = "give the output of `nvidia-smi topo -m`, lstopo's XML, a sysfs tree or topoalign's own JSON"


def load_machine(source: str) -> Machine:
    """
    Loads the machine with this name in the catalogue, or from the file or folder with this name, or from stdin (`-`). Raises
    NotFound for a name that is neither, InvalidMachine for a file that cannot be read, InvalidField for a wrong JSON value.
    """
    from topoalign.machines import catalogue

    if source in catalogue.names():
        return Machine(name=source, topology=catalogue.machine(source), source="catalogue")
    if source == "-":
        return read(sys.stdin.buffer.read(MOST_BYTES + 1), "stdin")
    path = Path(source)
    try:
        if path.is_dir():
            return Machine(name=path.resolve().name, topology=_folder(path), source=source)
        if path.exists() and not path.is_file():  # a pipe would be waited for, and a device read, without end
            raise InvalidMachine(
                f"{quoted([source])} is neither a file nor a folder", "give a regular file, or - and pipe the text in"
            )
        with path.open("rb") as file:
            return read(file.read(MOST_BYTES + 1), path.name.split(".")[0] or path.name, source)
    except FileNotFoundError:
        from difflib import get_close_matches

        names = catalogue.names()
        close = "".join(f"did you mean {name}? " for name in get_close_matches(source, names, n=1))
        remedy = f"{close}the catalogue has {', '.join(names)}; anything else is taken for a file"
        raise NotFound("machine or file", source, remedy) from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        raise InvalidMachine(f"{quoted([source])} cannot be read: {error}", "give a file that you may read") from error


def read(raw: bytes, name: str, source: str = "") -> Machine:
    """The machine that these bytes describe; a JSON document has its own name. Raises InvalidMachine and InvalidField."""
    if len(raw) > MOST_BYTES:
        raise InvalidMachine(f"it is larger than {MOST_BYTES >> 20} MiB", _SUPPORTED)
    if raw.startswith(_ARCHIVE_STARTS) or raw[257:262] == b"ustar":
        from io import BytesIO

        from topoalign.machines.sysfs_archive import read_archive

        return Machine(name=name, topology=read_archive(BytesIO(raw)), source=source)
    start = raw[:1024].removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"<") and not _TEXT_IN_MARKUP.match(start):
        from io import BytesIO

        from topoalign.machines.lstopo import read_lstopo

        return Machine(name=name, topology=read_lstopo(BytesIO(raw)), source=source)
    if start.startswith(b"{"):
        from topoalign.machines import document

        return document.decode_machine(raw.removeprefix(b"\xef\xbb\xbf"), name)
    from topoalign.machines import nvidia_smi

    return Machine(name=name, topology=nvidia_smi.read_pasted_matrix(_decoded(raw)), source=source)


def _decoded(raw: bytes) -> str:
    try:  # PowerShell writes UTF-16
        return raw.decode("utf-16" if raw.startswith(_UTF16) else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - raw.rfind(b"\n", 0, error.start)
        raise InvalidMachine(f"byte 0x{raw[error.start]:02X} is no text", _SUPPORTED, line, column) from error


def _folder(path: Path) -> Topology:
    # the root of the captured tree is this folder or one inside it
    from topoalign.machines.sysfs_cpus import CPUS
    from topoalign.machines.sysfs_files import describe_missing_tree
    from topoalign.machines.sysfs_machine import read_sysfs

    places = [path]
    files = set[str]()
    for _ in range(DEEPEST_ROOT + 1):
        for place in places:
            if (place / CPUS).is_dir():
                return read_sysfs(place)
        found = [inner for place in places for inner in place.iterdir() if not inner.is_symlink()]
        files |= {inner.name for inner in found}
        places = [inner for inner in found if inner.is_dir()]
    raise InvalidMachine(describe_missing_tree(f"no folder in {quoted([str(path)])} holds {CPUS}", files), _SUPPORTED)
