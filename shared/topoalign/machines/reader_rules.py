"""
The rules that all readers of machines share: socket ids if the kernel reports no usable ones, the resources of
hugepages, and the refusal of a machine that cannot exist.
"""

from collections.abc import Hashable, Mapping

from topoalign.core.model.errors import InvalidField, InvalidMachine
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.topology.cpuset import LARGEST_ID
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.topology_checks import LARGEST_MEMORY, validate

_UNITS = ((1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki"))


def hugepages_resource(size: int) -> ResourceName:
    """The resource of hugepages of this size in bytes: `hugepages-2Mi`."""
    for unit, name in _UNITS:
        if size % unit == 0:
            return ResourceName(f"hugepages-{size // unit}{name}")
    return ResourceName(f"hugepages-{size}")


def hugepage_totals(pages: Mapping[int, int], memory: int | None) -> dict[ResourceName, int]:
    """Total bytes by resource, from counts by page size in bytes: {2 << 20: 3} becomes {"hugepages-2Mi": 6291456}."""
    found: dict[ResourceName, int] = {}
    left = LARGEST_MEMORY if memory is None else memory
    for size, count in sorted(pages.items()):
        # memory includes its hugepages, so a size that does not fit in addition to the smaller ones is left out
        if size * count <= left:
            found[hugepages_resource(size)] = size * count
            left -= size * count
    return found


def number_sockets(packages: Mapping[int, tuple[int | None, Hashable]]) -> dict[int, int]:
    """
    CPU -> id of its socket. `packages`: CPU -> the kernel's id of its package, and a key that distinguishes it.

    The kernel's ids are kept if each package has its own id. On some machines, packages have no id (s390, POWER), two
    packages share an id, or ids are far above the number of packages (ia64). Then the packages are numbered from 0, in
    the order of their lowest CPU: {0: (None, "a"), 1: (None, "b"), 2: (None, "a")} gives {0: 0, 1: 1, 2: 0}.
    """
    distinct = dict.fromkeys(package for _, package in sorted(packages.items()))
    ids = {number for number, _ in distinct}
    if len(ids) == len(distinct) and all(number is not None and number <= LARGEST_ID for number in ids):
        return {cpu: number for cpu, (number, _) in packages.items() if number is not None}
    positions = {package: position for position, package in enumerate(distinct)}
    return {cpu: positions[package] for cpu, package in packages.items()}


def check_possible(topology: Topology, what: str, remedy: str = "") -> Topology:
    """Returns the machine that was read. Raises InvalidMachine if it cannot exist; `remedy` replaces the field's."""
    try:
        validate(topology)
    except InvalidField as error:
        raise InvalidMachine(f"{what} is of no possible machine: {error.finding}", remedy or error.remedy) from error
    return topology
