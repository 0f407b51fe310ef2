"""Reads CPUs, NUMA nodes and distances from the objects of an lstopo export."""

import re
from collections.abc import Callable, Sequence
from itertools import product

from topoalign.core.model.errors import InvalidMachine, clean
from topoalign.core.model.topology.cpuset import LARGEST_ID
from topoalign.core.model.topology.model import Cpu, NumaNode
from topoalign.core.model.topology.validate import MOST_CPUS, MOST_NODES
from topoalign.machines.lstopo_xml import EXPORT_AGAIN, Element
from topoalign.machines.pages import fitting
from topoalign.machines.sockets import numbered
from topoalign.machines.sysfs_files import number

PACKAGES = ("Package", "Socket")
GPU_MEMORY = "GPUMemory"
"""hwloc's subtype of a NUMA node that is a GPU's own memory."""

_SHARED_CACHE = re.compile(r"L[3-9]Cache")
_MEANS_LATENCY = 1 << 2
"""Bit of hwloc's kind of distances (HWLOC_DISTANCES_KIND_MEANS_LATENCY)."""

Distances = tuple[tuple[int, ...], ...]


class Cores:
    """Which CPUs there are, and what is around each of them."""

    def __init__(self, root: Element) -> None:
        """Raises InvalidMachine if there is no CPU, one is there twice, or there are too many."""
        elements = list(root.all())
        self.nodes = _by_index([e for e in elements if e.type == "NUMANode"], MOST_NODES)
        self._units = _by_index([e for e in elements if e.type == "PU"], MOST_CPUS)
        if not self._units:
            raise InvalidMachine("the topology has no CPUs (objects of type PU)", EXPORT_AGAIN)
        self._memory: dict[int, int | None] = {}
        self._machine = next((e for e in elements if e.type == "Machine"), root)
        self.node_of = {cpu: self._home(unit) for cpu, unit in self._units.items()}

    def cpus(self) -> tuple[Cpu, ...]:
        """
        All CPUs, by ascending id. Cores, caches and sockets without an id of their own are numbered by their lowest
        CPU.
        """
        cores = self._lowest(_core)
        caches = self._lowest(_cache)
        cache_ids = {cpu: number(cache.get("os_index")) for cpu in caches if (cache := _cache(self._units[cpu]))}
        uncores = {cpu: cache_id for cpu, cache_id in cache_ids.items() if cache_id is not None}
        if len(uncores) < len(caches):
            uncores = caches
        sockets = numbered({cpu: _package(unit) for cpu, unit in self._units.items()})
        return tuple(
            Cpu(
                id=cpu,
                core=cores.get(cpu, cpu),
                socket=sockets[cpu],
                node=self.node_of[cpu],
                uncore=uncores.get(cpu, sockets[cpu]),
            )
            for cpu in sorted(self._units)
        )

    def numa_nodes(self) -> tuple[NumaNode, ...]:
        """
        By id. A machine without NUMA nodes has node 0 with all its memory.

        hwloc writes no `local_memory` for a node that has none, so where other nodes have some, this one has 0.
        """
        if not self.nodes:
            return (_node(0, self._machine, None),)
        unsaid = 0 if any(element.get("local_memory") for element in self.nodes.values()) else None
        return tuple(_node(node, element, unsaid) for node, element in sorted(self.nodes.items()))

    def inside(self, place: Element) -> tuple[int, ...]:
        """The CPUs inside an object, ascending."""
        return tuple(sorted(os_index(element) for element in place.all() if element.type == "PU"))

    def _home(self, unit: Element) -> int:
        """The node around the CPU, or the first one beside an object around it; the lowest if there is none."""
        for place in unit.above():
            if place.type == "NUMANode":
                return os_index(place)
            beside = self._beside(place)
            if beside is not None:
                return beside
        return min(self.nodes, default=0)

    def _beside(self, place: Element) -> int | None:
        """The lowest node that stands in the object as its memory, GPUs' memory last."""
        if id(place) not in self._memory:
            caches = [child for child in place.children if child.type == "MemCache"]
            nodes = [child for around in (place, *caches) for child in around.children if child.type == "NUMANode"]
            nodes = [node for node in nodes if not any(child.type for child in node.children)]
            ranked = sorted((node.get("subtype") == GPU_MEMORY, os_index(node)) for node in nodes)
            self._memory[id(place)] = ranked[0][1] if ranked else None
        return self._memory[id(place)]

    def _lowest(self, around: Callable[[Element], Element | None]) -> dict[int, int]:
        """CPU -> the lowest CPU inside the same object of a kind, for those that are inside one."""
        places = {cpu: place for cpu, unit in sorted(self._units.items()) if (place := around(unit)) is not None}
        lowest: dict[int, int] = {}
        for cpu, place in places.items():
            lowest.setdefault(id(place), cpu)
        return {cpu: lowest[id(place)] for cpu, place in places.items()}


def os_index(element: Element) -> int:
    """Raises InvalidMachine if it has none: then it cannot be told which CPU or node it is."""
    index = number(element.get("os_index"))
    if index is None:
        raise InvalidMachine(f"an object {clean(element.type)} has no os_index", EXPORT_AGAIN)
    return index


def _by_index(elements: Sequence[Element], most: int) -> dict[int, Element]:
    if len(elements) > most:
        raise InvalidMachine(f"{len(elements)} objects {elements[0].type}: there can be {most}", EXPORT_AGAIN)
    found: dict[int, Element] = {}
    for element in elements:
        if found.setdefault(os_index(element), element) is not element:
            raise InvalidMachine(f"two objects {element.type} have os_index {os_index(element)}", EXPORT_AGAIN)
    return found


def read_distances(root: Element, nodes: Sequence[NumaNode]) -> Distances | None:
    """The latencies between the nodes, in their order. None if the file has none that fit."""
    numa_nodes = [element for element in root.all() if element.type == "NUMANode"]
    ids = [node.id for node in nodes]
    for element in root.all():
        values = None
        if element.tag == "distances2" and _tells_latency(element):
            values = _distances(element)
        elif element.tag == "distances":
            values = _old_distances(element, numa_nodes)
        if values is not None and all((a, b) in values for a in ids for b in ids):
            return tuple(tuple(values[a, b] for b in ids) for a in ids)
    return None


def _tells_latency(element: Element) -> bool:
    return element.get("type") == "NUMANode" and bool((number(element.get("kind")) or 0) & _MEANS_LATENCY)


def _distances(element: Element) -> dict[tuple[int, int], int] | None:
    """hwloc 2: ids and values as text, perhaps in several pieces."""
    texts = {tag: [e.text for e in element.children if e.tag == tag] for tag in ("indexes", "u64values")}
    ids = [number(word) for word in " ".join(texts["indexes"]).split()]
    return _pairs(ids, [number(word) for word in " ".join(texts["u64values"]).split()])


def _old_distances(element: Element, nodes: Sequence[Element]) -> dict[tuple[int, int], int] | None:
    """hwloc 1: a value per pair of nodes in the order of the document, as a multiple of a base."""
    try:
        base = float(element.get("latency_base"))
        values = [round(float(child.get("value")) * base) for child in element.children if child.tag == "latency"]
    except (ValueError, OverflowError):
        return None
    return _pairs([os_index(node) for node in nodes], values)


def _pairs(ids: Sequence[int | None], values: Sequence[int | None]) -> dict[tuple[int, int], int] | None:
    known = [value for value in values if value is not None and 1 <= value <= LARGEST_ID]
    if len(values) != len(ids) ** 2 or len(known) != len(values):
        return None
    return {
        (a, b): value for (a, b), value in zip(product(ids, ids), known, strict=True) if a is not None and b is not None
    }


def _node(node: int, element: Element, unsaid: int | None) -> NumaNode:
    """`unsaid`: its memory where the document does not tell it."""
    memory = number(element.get("local_memory")) if element.get("local_memory") else unsaid
    sizes = {
        number(page.get("size")) or 0: number(page.get("count")) for page in element.children if page.tag == "page_type"
    }
    base = min(sizes, default=0)
    pages = {size: count for size, count in sizes.items() if size > base and count is not None}
    return NumaNode(id=node, memory=memory, hugepages=fitting(pages, memory))


def _core(unit: Element) -> Element | None:
    return next((place for place in unit.above() if place.type == "Core"), None)


def _cache(unit: Element) -> Element | None:
    """The outermost cache around the CPU that is of level 3 or more."""
    shared = [place for place in unit.above() if _SHARED_CACHE.fullmatch(place.type) or _is_old_shared_cache(place)]
    return shared[-1] if shared else None


def _is_old_shared_cache(place: Element) -> bool:
    return place.type == "Cache" and (number(place.get("depth")) or 0) >= 3


def _package(unit: Element) -> tuple[int | None, int]:
    """hwloc's id of the package around the CPU, and what tells it from others; CPUs outside of all packages share one."""
    package = next((place for place in unit.above() if place.type in PACKAGES), None)
    return (None, 0) if package is None else (number(package.get("os_index")), id(package))
