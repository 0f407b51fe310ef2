"""Hugepages: the resource names of their sizes in Kubernetes, and the largest plausible number of them."""

from collections.abc import Mapping

from topoalign.core.model.ids import ResourceName
from topoalign.core.model.topology.topology_checks import LARGEST_MEMORY

_UNITS = ((1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki"))


def hugepages_resource(size: int) -> ResourceName:
    """The resource of pages of so many bytes: `hugepages-2Mi`."""
    for unit, name in _UNITS:
        if size % unit == 0:
            return ResourceName(f"hugepages-{size // unit}{name}")
    return ResourceName(f"hugepages-{size}")


def hugepage_totals(pages: Mapping[int, int], memory: int | None) -> dict[ResourceName, int]:
    """
    Bytes in all by resource, of counts by size in bytes: {2 << 20: 3} is {"hugepages-2Mi": 6291456}.

    Memory includes its hugepages, so a size whose pages do not fit in addition to those of smaller sizes is left out.
    """
    found: dict[ResourceName, int] = {}
    left = LARGEST_MEMORY if memory is None else memory
    for size, count in sorted(pages.items()):
        if size * count <= left:
            found[hugepages_resource(size)] = size * count
            left -= size * count
    return found
