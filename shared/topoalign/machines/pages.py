"""Names of hugepage sizes, as Kubernetes writes them."""

from topoalign.core.ids import ResourceName

_UNITS = ((1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki"))


def hugepages(size: int) -> ResourceName:
    """The resource of pages of so many bytes: `hugepages-2Mi`."""
    for unit, name in _UNITS:
        if size % unit == 0:
            return ResourceName(f"hugepages-{size // unit}{name}")
    return ResourceName(f"hugepages-{size}")
