"""
Loads descriptions of machines by a name of the catalogue, or from a file.

`load_machine` accepts a name of the catalogue, the root folder of a sysfs tree, a file or `-`. A file contains
topoalign's own JSON. The distribution topoalign-tools registers a reader of all other formats as an entry point.
Readers are imported when they are needed, because most commands name a machine of the catalogue.
"""

import sys
from pathlib import Path

from topoalign.core.model.errors import InvalidMachine, NotFound, quoted
from topoalign.core.model.topology.model import Topology
from topoalign.machines.document import Machine

__all__ = ["MOST_BYTES", "Machine", "load_machine"]

MOST_BYTES = 64 << 20
"""Maximum size of a file in bytes. The largest useful one, a packed sysfs tree, has less than one MiB."""

ENTRY_POINTS = "topoalign.machine_formats"
"""The group in which a distribution registers a function `(bytes) -> Topology` that raises InvalidMachine."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def load_machine(source: str) -> Machine:
    """
    Loads the machine with this name in the catalogue, or from the file or folder with this name, or from stdin (`-`). Raises
    NotFound for a name that is neither, InvalidMachine for a file that cannot be read, InvalidField for a wrong JSON value.
    """
    from topoalign.machines import catalogue

    if source in catalogue.names():
        return Machine(name=source, topology=catalogue.machine(source), source="catalogue")
    if source == "-":
        return _read(sys.stdin.buffer.read(MOST_BYTES + 1), "stdin", "")
    path = Path(source)
    try:
        if path.is_dir():
            from topoalign.machines.sysfs_files import Tree
            from topoalign.machines.sysfs_machine import read_sysfs

            return Machine(name=path.resolve().name, topology=read_sysfs(Tree(path)), source=source)
        if path.exists() and not path.is_file():  # reading a pipe or a device might never end
            raise InvalidMachine(
                f"{quoted([source])} is neither a file nor a folder", "give a regular file, or - and pipe the text in"
            )
        with path.open("rb") as file:
            return _read(file.read(MOST_BYTES + 1), path.name.split(".")[0] or path.name, source)
    except FileNotFoundError:
        remedy = f"the catalogue has {', '.join(catalogue.names())}; anything else is taken for a file"
        raise NotFound("machine or file", source, remedy) from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        raise InvalidMachine(f"{quoted([source])} cannot be read: {error}", "give a file that you may read") from error


def _read(raw: bytes, name: str, source: str) -> Machine:
    # a JSON document has its own name
    if len(raw) > MOST_BYTES:
        raise InvalidMachine(f"it is larger than {MOST_BYTES >> 20} MiB", "give a description of one machine")
    text = raw.removeprefix(_BYTE_ORDER_MARK)
    if text.lstrip().startswith(b"{"):
        from topoalign.machines import document

        return document.decode_machine(text, name)
    return Machine(name=name, topology=_read_other_format(raw), source=source)


def _read_other_format(raw: bytes) -> Topology:
    from importlib import metadata

    for point in metadata.entry_points(group=ENTRY_POINTS):
        topology: Topology = point.load()(raw)
        return topology
    raise InvalidMachine(
        "it is not topoalign's own JSON, and no reader of other formats is installed",
        "install topoalign-tools, which reads the output of `nvidia-smi topo -m`, lstopo's XML and archives of sysfs trees;"
        " or give a name of the catalogue, topoalign's own JSON or the root folder of a sysfs tree",
    )
