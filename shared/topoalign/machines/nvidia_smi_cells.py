"""
The cells of a matrix: `X`, `NV4` or a PCIe class; after them lists of CPUs and of NUMA nodes.

Besides the classes of the current legend there are `SOC`, which older drivers print for `SYS`, and `N/A`: not known.
Affinities are lists in the kernel's format. nvidia-smi cuts long lists. A list that was cut inside a number cannot be
recognised; a list that begins with `-` or ends in `-` or `,` can, and is an error.
"""

import re

from topoalign.core.model.errors import clean
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.cpuset import parse_cpuset
from topoalign.core.model.topology.links import Link, PcieClass
from topoalign.core.model.topology.validate import MOST_CPUS, MOST_NODES

SELF = "X"
UNKNOWN = "N/A"
CPU_AFFINITY = "CPU Affinity"
NUMA_AFFINITY = "NUMA Affinity"
GPU_NUMA_ID = "GPU NUMA ID"

_PATH = "|".join(["NV[1-9][0-9]{0,2}", *PcieClass, "SOC"])
CELL = rf"(?:{SELF}|{_PATH}|{UNKNOWN})"
"""A regular expression for one cell."""
_CELL = re.compile(CELL)
_GLUED = re.compile(rf"(?:{SELF}|{_PATH}){{2,}}")
_AFFINITY = re.compile(r"N/A|[0-9][0-9,-]*")
_P2P = frozenset({"OK", "NS", "CNS", "GNS", "TNS"})


def is_cell(word: str) -> bool:
    """Whether a word can be a cell of a matrix: `X`, `NV4`, `PIX`, `N/A` and so on."""
    return _CELL.fullmatch(word) is not None


def is_affinity(word: str) -> bool:
    """Whether this looks like an affinity, right or cut short."""
    return _AFFINITY.fullmatch(word) is not None


def is_nvlink(cell: str) -> bool:
    """Whether a cell gives a number of NVLinks, as `NV4` does."""
    return cell.startswith("NV")


def link(a: DeviceID, b: DeviceID, cell: str) -> Link | None:
    """What the cell says of two devices; None if it says nothing."""
    if cell in ("", UNKNOWN):
        return None
    if is_nvlink(cell):
        return Link(a=a, b=b, nvlinks=int(cell.removeprefix("NV")))
    return Link(a=a, b=b, pcie=PcieClass.SYS if cell == "SOC" else PcieClass(cell))


def ids_of(affinity: str) -> frozenset[int]:
    """The ids in an affinity cell; none if it is blank or `N/A`. Raises ValueError."""
    return frozenset() if affinity == UNKNOWN else parse_cpuset(affinity)


def cell_fault(word: str) -> str:
    """Why this is no cell."""
    if len(word) <= 256 and _GLUED.fullmatch(word):
        return f"{clean(word)!r} is several cells glued together"
    if word in _P2P:
        return f"{clean(word)!r} is a peer-to-peer state, as `nvidia-smi topo -p2p` prints it, not a connection"
    return f"{clean(word)!r} is not a cell such as PIX, SYS or NV4"


def affinity_fault(title: str, word: str) -> str:
    """Why this cannot stand below the title; "" if it can."""
    most = MOST_CPUS if title == CPU_AFFINITY else MOST_NODES
    try:
        ids = ids_of(word)
    except ValueError as error:
        return f"{title} {clean(word)!r} is no list of ids, or a list that was cut: {error}"
    if ids and max(ids) >= most:
        return f"{title} {clean(word)!r} goes beyond {most - 1}"
    if title == GPU_NUMA_ID and len(ids) > 1:
        return f"{title} {clean(word)!r} is not one number"
    return ""
