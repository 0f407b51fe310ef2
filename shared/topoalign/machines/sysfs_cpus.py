"""
Reads CPUs and NUMA nodes from /sys/devices/system.

Only online CPUs are listed; cpu0 need not be among them. A cgroup that limited the capturing process has no effect.
Node ids are the kernel's and may have gaps. If the kernel reports nothing, or contradicts itself:

- a CPU without siblings is its own core. Siblings with different `core_id` are different cores: the two halves of an
  AMD compute unit (Bulldozer) share a list of siblings, and the kubelet counts them as two
- the CPUs of one package are those that list one another as package siblings and have the same `physical_package_id`
- a CPU that no node lists is on the lowest node that has CPUs
- a CPU that several nodes list is on the lowest of them, and a node that lists only CPUs of lower nodes is left out:
  some virtual machines have eight nodes that each list all CPUs
- a kernel without NUMA has node 0 with all memory and all hugepages
"""

import re
from collections.abc import Mapping, Sequence

from topoalign.core.model.errors import InvalidMachine
from topoalign.core.model.topology.model import Cpu, NumaNode
from topoalign.core.model.topology.topology_checks import LARGEST_MEMORY, MOST_CPUS, MOST_NODES
from topoalign.machines.reader_rules import hugepage_totals, number_sockets
from topoalign.machines.sysfs_files import Tree, parse_number

CPUS = "sys/devices/system/cpu"
NODES = "sys/devices/system/node"

UNCORE_LEVEL = 3
"""The lowest level of cache that counts as shared by an uncore domain, as for the kubelet."""

_GATHER = f"give a root that has {CPUS}, such as one that hwloc-gather-topology makes"

Distances = tuple[tuple[int, ...], ...]


def read_cpus(tree: Tree) -> tuple[Cpu, ...]:
    """The CPUs that are online, by id. Raises InvalidMachine if the tree has none."""
    online = online_cpus(tree)
    nodes = cpus_of_nodes(tree, online)
    node_of = {cpu: node for node, cpus in reversed(list(nodes.items())) for cpu in cpus}
    fallback = next((node for node, cpus in nodes.items() if cpus), next(iter(nodes)))
    sockets = number_sockets(_packages(tree, online))
    uncores = _uncores(tree, online)
    return tuple(
        Cpu(
            id=cpu,
            core=_lowest_sibling(tree, cpu, online),
            socket=sockets[cpu],
            node=node_of.get(cpu, fallback),
            uncore=uncores.get(cpu, sockets[cpu]),
        )
        for cpu in sorted(online)
    )


def read_numa_nodes(tree: Tree) -> tuple[tuple[NumaNode, ...], Distances | None]:
    """The NUMA nodes that are online, by id, and their distances; None if the kernel does not report all of them."""
    listed = _listed_nodes(tree)
    if not listed:
        return (_read_node(tree, 0, "sys/kernel/mm/hugepages", "proc/meminfo"),), None
    folders = {node: f"{NODES}/node{node}" for node in _kept(listed)}
    nodes = [_read_node(tree, node, f"{folder}/hugepages", f"{folder}/meminfo") for node, folder in folders.items()]
    return tuple(nodes), _read_distances(tree, list(folders), list(listed))


def online_cpus(tree: Tree) -> frozenset[int]:
    """The CPUs that are online. Raises InvalidMachine if there are none."""
    online = tree.ids(f"{CPUS}/online")
    if online is None:
        there = [int(name[3:]) for name in tree.names(CPUS) if re.fullmatch(r"cpu[0-9]{1,5}", name)]
        online = frozenset(cpu for cpu in there if tree.number(f"{CPUS}/cpu{cpu}/online") != 0)
    online = frozenset(cpu for cpu in online if cpu < MOST_CPUS)
    if not online:
        raise InvalidMachine("the tree has no CPU that is online", _GATHER)
    return online


def cpus_of_nodes(tree: Tree, online: frozenset[int]) -> Mapping[int, frozenset[int]]:
    """NUMA node -> its CPUs that are online, for every node, ascending. A kernel without NUMA has node 0."""
    listed = _listed_nodes(tree)
    if not listed:
        return {0: online}
    return {node: listed[node] & online for node in _kept(listed)}


def _listed_nodes(tree: Tree) -> dict[int, frozenset[int]]:
    # ascending: each node that has a directory and, if the kernel lists online nodes, is online
    there = {int(name[4:]) for name in tree.names(NODES) if re.fullmatch(r"node[0-9]{1,4}", name)}
    online = tree.ids(f"{NODES}/online")
    nodes = sorted(node for node in (there if online is None else there & online) if node < MOST_NODES)
    return {node: _read_ids(tree, f"{NODES}/node{node}/cpulist", f"{NODES}/node{node}/cpumap") for node in nodes}


def _kept(listed: Mapping[int, frozenset[int]]) -> list[int]:
    # leaves out nodes that list CPUs, but only CPUs of lower nodes
    kept = []
    taken = frozenset[int]()
    for node, cpus in listed.items():
        if not cpus or cpus - taken:
            kept.append(node)
        taken |= cpus
    return kept


def _read_ids(tree: Tree, as_list: str, as_mask: str) -> frozenset[int]:
    found = tree.ids(as_list)
    return found if found is not None else tree.mask(as_mask) or frozenset()


def _packages(tree: Tree, online: frozenset[int]) -> dict[int, tuple[int | None, int]]:
    # CPU -> `physical_package_id` (None: unknown) and the lowest CPU of its package
    packages: dict[int, tuple[int | None, int]] = {}
    ids = {cpu: tree.number(f"{CPUS}/cpu{cpu}/topology/physical_package_id") for cpu in sorted(online)}
    alone: dict[int | None, int] = {}
    for cpu, package_id in ids.items():
        topology = f"{CPUS}/cpu{cpu}/topology"
        siblings = _read_ids(tree, f"{topology}/package_cpus_list", f"{topology}/package_cpus")
        siblings = siblings or _read_ids(tree, f"{topology}/core_siblings_list", f"{topology}/core_siblings")
        if cpu not in siblings:
            packages.setdefault(cpu, (package_id, alone.setdefault(package_id, cpu)))
            continue
        for sibling in siblings & online:
            if ids[sibling] == package_id:
                packages.setdefault(sibling, (package_id, cpu))
    return packages


def _lowest_sibling(tree: Tree, cpu: int, online: frozenset[int]) -> int:
    topology = f"{CPUS}/cpu{cpu}/topology"
    siblings = tree.ids(f"{topology}/core_cpus_list") or tree.ids(f"{topology}/thread_siblings_list")
    siblings = siblings or tree.mask(f"{topology}/thread_siblings") or frozenset()
    if cpu not in siblings:
        return cpu
    core_ids = {other: tree.number(f"{CPUS}/cpu{other}/topology/core_id") for other in siblings & online}
    own = core_ids[cpu]
    return min(other for other, core_id in core_ids.items() if core_id == own or None in (core_id, own))


def _uncores(tree: Tree, online: frozenset[int]) -> dict[int, int]:
    # by the kernel's id if each CPU's cache has one, else by the lowest CPU that shares it
    caches = {cpu: cache for cpu in online if (cache := _last_cache(tree, cpu)) is not None}
    ids = {cpu: tree.number(f"{cache}/id") for cpu, cache in caches.items()}
    known = {cpu: cache_id for cpu, cache_id in ids.items() if cache_id is not None and cache_id < MOST_CPUS}
    if len(known) == len(caches):
        return known
    shared = {
        cpu: tree.ids(f"{cache}/shared_cpu_list") or tree.mask(f"{cache}/shared_cpu_map") or frozenset()
        for cpu, cache in caches.items()
    }
    return {cpu: min(cpus & online) for cpu, cpus in shared.items() if cpu in cpus}


def _last_cache(tree: Tree, cpu: int) -> str | None:
    # the directory of the highest level of unified cache
    best = None
    highest = UNCORE_LEVEL - 1
    for name in tree.names(f"{CPUS}/cpu{cpu}/cache"):
        cache = f"{CPUS}/cpu{cpu}/cache/{name}"
        level = tree.number(f"{cache}/level") or 0
        if level > highest and tree.text(f"{cache}/type") == "Unified":
            best = cache
            highest = level
    return best


def _read_node(tree: Tree, node: int, folder: str, meminfo: str) -> NumaNode:
    pages: dict[int, int] = {}
    for name in tree.names(folder):
        size = parse_number(name.removeprefix("hugepages-").removesuffix("kB"))
        count = tree.number(f"{folder}/{name}/nr_hugepages")
        if size and count is not None and size * count << 10 <= LARGEST_MEMORY:
            pages[size << 10] = count
    found = re.search(r"MemTotal:\s*([0-9]{1,15}) kB", tree.text(meminfo) or "")
    memory = min(int(found[1]) << 10, LARGEST_MEMORY) if found else None
    return NumaNode(id=node, memory=memory, hugepages=hugepage_totals(pages, memory))


def _read_distances(tree: Tree, ids: Sequence[int], listed: Sequence[int]) -> Distances | None:
    # between the nodes `ids`; the kernel writes a column for each of the nodes `listed`
    rows = []
    for node in ids:
        row = [parse_number(word) for word in (tree.text(f"{NODES}/node{node}/distance") or "").split()]
        known = [value for value in row if value is not None and 1 <= value <= 255]
        if len(known) != len(listed) or len(row) != len(listed):
            return None
        rows.append(tuple(value for value, column in zip(known, listed, strict=True) if column in ids))
    return tuple(rows)
