"""
The kind of an OS device of an lstopo export: a disk, memory, a GPU, a network interface, an RDMA device.

hwloc changed the meaning of `osdev_type` with its version 3; the version of the document decides which meaning applies:

- from 3.0 on it is a set of bits: 1 storage, 2 memory, 4 GPU, 8 co-processor, 16 network, 32 OpenFabrics, 64 DMA. An
  RDMA device is 16 + 32 = 48, and a CXL memory device with persistent memory is 1 + 2 = 3
- before 3.0 it is one number: 0 block, 1 GPU, 2 network, 3 OpenFabrics, 4 DMA, 5 co-processor. There a BXI interface is
  3 as well, with subtype `BXI`, although it has no RDMA device; from 3.0 on it is network alone
"""

import re
from enum import IntFlag

from topoalign.machines.lstopo_xml import Element
from topoalign.machines.sysfs_files import number

_MAJOR = re.compile(r"([0-9]{1,4})(?:\.|$)")


class Kind(IntFlag):
    """Those of hwloc's bits since version 3 that tell a network interface and an RDMA device (HWLOC_OBJ_OSDEV_*)."""

    NETWORK = 16
    OPENFABRICS = 32


_OLD_KINDS = {"2": Kind.NETWORK, "3": Kind.NETWORK | Kind.OPENFABRICS}


def major_version(root: Element) -> int:
    """Of the document's format: 3 of `version="3.0"`. hwloc 1 writes none, which is 1."""
    found = _MAJOR.match(root.get("version"))
    return int(found[1]) if found else 1


def os_devices(element: Element) -> list[Element]:
    """The OS devices of a PCI device."""
    return [child for child in element.children if child.type == "OSDev"]


def kinds_of(device: Element, version: int) -> Kind:
    """What an OS device is, by the major version of its document; nothing for a type that is unknown or no number."""
    kind = device.get("osdev_type")
    if version >= 3:
        return Kind(number(kind) or 0)
    if device.get("subtype") == "BXI":
        return Kind.NETWORK
    return _OLD_KINDS.get(kind, Kind(0))
