"""
CPUs and NUMA nodes out of /sys/devices/system.

Only CPUs that are online are there; cpu0 need not be. Node ids are the kernel's and may have gaps. Where the kernel says
nothing: a CPU without siblings is its own core, one without a package is in socket 0, one that no node lists is on the
lowest node that has CPUs, and a kernel without NUMA has node 0 with all memory.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from topoalign.core.errors import InvalidMachine
from topoalign.core.ids import ResourceName
from topoalign.core.topology.model import Cpu, NumaNode
from topoalign.core.topology.validate import LARGEST_MEMORY, MOST_CPUS, MOST_NODES
from topoalign.machines.pages import hugepages
from topoalign.machines.sysfs_files import Tree, number, opened

CPUS = "sys/devices/system/cpu"
NODES = "sys/devices/system/node"

UNCORE_LEVEL = 3
"""The lowest level of cache that counts as shared by an uncore domain, as for the kubelet."""

_GATHER = f"give a root that has {CPUS}, such as one that hwloc-gather-topology makes"

Distances = tuple[tuple[int, ...], ...]


def read_cpus(root: Path | Tree) -> tuple[Cpu, ...]:
    """The CPUs that are online, by id. Raises InvalidMachine if the tree tells of none."""
    tree = opened(root)
    online = online_cpus(tree)
    nodes = cpus_of_nodes(tree, online)
    node_of = {cpu: node for node, cpus in reversed(list(nodes.items())) for cpu in cpus}
    fallback = next((node for node, cpus in nodes.items() if cpus), next(iter(nodes)))
    sockets = {cpu: tree.number(f"{CPUS}/cpu{cpu}/topology/physical_package_id") or 0 for cpu in online}
    uncores = _uncores(tree, online)
    return tuple(
        Cpu(
            id=cpu,
            core=_core(tree, cpu, online),
            socket=min(sockets[cpu], MOST_CPUS),
            node=node_of.get(cpu, fallback),
            uncore=uncores.get(cpu, min(sockets[cpu], MOST_CPUS)),
        )
        for cpu in sorted(online)
    )


def read_nodes(root: Path | Tree) -> tuple[tuple[NumaNode, ...], Distances | None]:
    """The NUMA nodes that are online, by id, and their distances; None if the kernel does not tell all of them."""
    tree = opened(root)
    ids = _node_ids(tree)
    if not ids:
        return (NumaNode(id=0, memory=_memory(tree, "proc/meminfo")),), None
    return tuple(_node(tree, node) for node in ids), _distances(tree, ids)


def online_cpus(tree: Tree) -> frozenset[int]:
    """Raises InvalidMachine if there are none."""
    online = tree.ids(f"{CPUS}/online")
    if online is None:
        there = [int(name[3:]) for name in tree.names(CPUS) if re.fullmatch(r"cpu[0-9]{1,5}", name)]
        online = frozenset(cpu for cpu in there if tree.number(f"{CPUS}/cpu{cpu}/online") != 0)
    online = frozenset(cpu for cpu in online if cpu < MOST_CPUS)
    if not online:
        finding = "the tree tells of no CPU that is online"
        raise InvalidMachine(finding, _GATHER)
    return online


def cpus_of_nodes(tree: Tree, online: frozenset[int]) -> Mapping[int, frozenset[int]]:
    """NUMA node -> its CPUs that are online, for every node, ascending. A kernel without NUMA has node 0."""
    ids = _node_ids(tree)
    if not ids:
        return {0: online}
    lists = {node: tree.ids(f"{NODES}/node{node}/cpulist") for node in ids}
    masks = {node: tree.mask(f"{NODES}/node{node}/cpumap") for node, cpus in lists.items() if cpus is None}
    return {node: (cpus if cpus is not None else masks[node] or frozenset()) & online for node, cpus in lists.items()}


def _node_ids(tree: Tree) -> list[int]:
    """Those that have a directory and, if the kernel says which, are online."""
    there = {int(name[4:]) for name in tree.names(NODES) if re.fullmatch(r"node[0-9]{1,4}", name)}
    online = tree.ids(f"{NODES}/online")
    return sorted(node for node in (there if online is None else there & online) if node < MOST_NODES)


def _core(tree: Tree, cpu: int, online: frozenset[int]) -> int:
    """The lowest of the CPU's siblings that are online; itself if it is not among them."""
    topology = f"{CPUS}/cpu{cpu}/topology"
    siblings = tree.ids(f"{topology}/core_cpus_list") or tree.ids(f"{topology}/thread_siblings_list")
    siblings = siblings or tree.mask(f"{topology}/thread_siblings") or frozenset()
    return min(siblings & online) if cpu in siblings else cpu


def _uncores(tree: Tree, online: frozenset[int]) -> dict[int, int]:
    """CPU -> its last-level cache: by the kernel's id if each CPU's cache has one, else by the lowest CPU that shares it."""
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
    """The directory of the highest level of unified cache, if that is an uncore cache."""
    best, highest = None, UNCORE_LEVEL - 1
    for name in tree.names(f"{CPUS}/cpu{cpu}/cache"):
        cache = f"{CPUS}/cpu{cpu}/cache/{name}"
        level = tree.number(f"{cache}/level") or 0
        if level > highest and tree.text(f"{cache}/type") == "Unified":
            best, highest = cache, level
    return best


def _node(tree: Tree, node: int) -> NumaNode:
    pages: dict[ResourceName, int] = {}
    for name in tree.names(f"{NODES}/node{node}/hugepages"):
        size = number(name.removeprefix("hugepages-").removesuffix("kB"))
        count = tree.number(f"{NODES}/node{node}/hugepages/{name}/nr_hugepages")
        if size and count is not None and size * count << 10 <= LARGEST_MEMORY:
            pages[hugepages(size << 10)] = size * count << 10
    memory = _memory(tree, f"{NODES}/node{node}/meminfo")
    if memory is not None:
        memory = min(max(memory, sum(pages.values())), LARGEST_MEMORY)
    return NumaNode(id=node, memory=memory, hugepages=pages if memory is None or sum(pages.values()) <= memory else {})


def _memory(tree: Tree, path: str) -> int | None:
    """MemTotal, in bytes."""
    found = re.search(r"MemTotal:\s*([0-9]{1,15}) kB", tree.text(path) or "")
    return min(int(found[1]) << 10, LARGEST_MEMORY) if found else None


def _distances(tree: Tree, ids: list[int]) -> Distances | None:
    rows = []
    for node in ids:
        row = [number(word) for word in (tree.text(f"{NODES}/node{node}/distance") or "").split()]
        known = tuple(value for value in row if value is not None and 1 <= value <= 255)
        if len(known) != len(ids) or len(row) != len(ids):
            return None
        rows.append(known)
    return tuple(rows)
