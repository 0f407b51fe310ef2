"""Socket ids for machines whose kernel reports no usable ones."""

from collections.abc import Hashable, Mapping

from topoalign.core.model.topology.cpuset import LARGEST_ID


def number_sockets(packages: Mapping[int, tuple[int | None, Hashable]]) -> dict[int, int]:
    """
    CPU -> id of its socket. `packages`: CPU -> the kernel's id of its package, and a key that distinguishes the package.

    The kernel's ids are kept if each names one package, and every package has one. On some machines it has none (s390,
    POWER), one that two packages share, or one far above any count (ia64). There the packages are numbered from 0, in the
    order of their lowest CPU: {0: (None, "a"), 1: (None, "b"), 2: (None, "a")} gives {0: 0, 1: 1, 2: 0}.
    """
    distinct = dict.fromkeys(package for _, package in sorted(packages.items()))
    ids = {number for number, _ in distinct}
    if len(ids) == len(distinct) and all(number is not None and number <= LARGEST_ID for number in ids):
        return {cpu: number for cpu, (number, _) in packages.items() if number is not None}
    positions = {package: position for position, package in enumerate(distinct)}
    return {cpu: positions[package] for cpu, package in packages.items()}
