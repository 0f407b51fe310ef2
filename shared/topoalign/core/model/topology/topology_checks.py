"""
Checks that a topology is consistent. All code that reads machines guarantees this, and users of `Topology` rely on it.

The checks cover names and references (a CPU's node exists, a link's devices exist, no bridge is its own ancestor),
uniqueness, order, and sizes: a description with a million CPUs is a mistake or an attack.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NoReturn

from topoalign.core.model.errors import InvalidField, quoted
from topoalign.core.model.holdings import UnitKind
from topoalign.core.model.ids import GPU, NIC, DeviceID, is_hugepages
from topoalign.core.model.topology.cpuset import LARGEST_ID
from topoalign.core.model.topology.degraded import FABRIC_FINDINGS
from topoalign.core.model.topology.mig import MigPlacement
from topoalign.core.model.topology.model import Cpu, Gpu, Nic, Topology

MOST_CPUS = 8_192
"""The maximum for which Linux can be configured (x86 MAXSMP, NR_CPUS 8192)."""
MOST_NODES = 1_024
"""The maximum for which Linux can be configured (NODES_SHIFT 10)."""
MOST_GPUS = 128
"""Eight times as many as in the largest single machine on sale (16). Composed machines have up to 32."""
MOST_NICS = 256
MOST_BRIDGES = 4_096
MOST_OTHERS = 65_536
MOST_HANDED_OUT = 50_000
"""
Maximum number of ids of devices that are handed out. In the list for the kubelet, each needs at most 70 bytes, and the
kubelet's gRPC accepts messages of at most 4 MiB.
"""
DEVICE_NODE = re.compile(r"/dev/(?:kfd|dri/(?:card|renderD)[0-9]{1,4}|accel/accel[0-9]{1,4})")
"""The device nodes of GPUs that a container can get: the kernel's classes drm and accel, and AMD's kfd."""
LARGEST_MEMORY = 1 << 60
"""Bytes."""
MOST_PROFILES = 64
"""NVML defines 18."""
MOST_SLICES = 64
"""Maximum number of memory slices of a GPU, and of placements of a profile: eight times the number that GPUs have."""
MOST_FABRIC_LINKS = 999
REMEDY = "correct the description of the machine; `topoalign topo import` writes a whole one"


def validate(topology: Topology) -> None:
    """Checks that a topology is consistent. Raises InvalidField, which names the first wrong value by its path."""
    _nodes(topology)
    _check_cpus(topology.cpus, topology.cpus_by_node.keys() - set(topology.node_ids))
    _check_distances(topology)
    _bridges(topology)
    _check_gpus(topology.gpus, set(topology.node_ids))
    _check_nics(topology.nics, set(topology.node_ids))
    _devices(topology)
    _check_links(topology)
    _others(topology)
    _check_device_nodes(topology.gpus)
    _offers(topology)


def check_bounds(topology: Topology) -> None:
    """Checks only limits that every receiver must check, so that unusual hardware is accepted. Raises InvalidField."""
    for path, ids in (
        ("nodes", topology.node_ids),
        ("cpus", tuple(cpu.node for cpu in topology.cpus)),
        *(("gpus", gpu.numa_affinity) for gpu in topology.gpus),
        *(("nics", nic.numa_affinity) for nic in topology.nics),
        *(("others", other.nodes or ()) for other in topology.others),
    ):
        for node in ids:
            if not -1 <= node <= LARGEST_ID:
                _wrong(path, f"there can be no NUMA node {node}: ids end at {LARGEST_ID}")
    _check_device_nodes(topology.gpus)
    _count(
        "offers", sum(max(1, offer.replicas) * len(offer.devices) for offer in topology.offers or ()), MOST_HANDED_OUT
    )


def _nodes(topology: Topology) -> None:
    _count("nodes", len(topology.nodes), MOST_NODES)
    _ascending("nodes", "id", topology.node_ids)
    for i, node in enumerate(topology.nodes):
        path = f"nodes[{i}]"
        _bytes(f"{path}.memory", node.memory)
        for resource, amount in node.hugepages.items():
            if not is_hugepages(resource):
                _wrong(f"{path}.hugepages", f"{quoted([resource])} is no resource such as hugepages-2Mi")
            _bytes(f"{path}.hugepages.{resource}", amount)
        if node.memory is not None and sum(node.hugepages.values()) > node.memory:
            _wrong(f"{path}.memory", "is less than its hugepages, which it includes")


def _check_cpus(cpus: Sequence[Cpu], unknown_nodes: Iterable[int]) -> None:
    _count("cpus", len(cpus), MOST_CPUS)
    _ascending("cpus", "id", [cpu.id for cpu in cpus])
    missing = set(unknown_nodes)
    for i, cpu in enumerate(cpus):
        if not 0 <= cpu.core <= cpu.id:
            _wrong(f"cpus[{i}].core", f"{cpu.core} is not the lowest CPU of its core")
        _check_id(f"cpus[{i}].socket", cpu.socket)
        _check_id(f"cpus[{i}].uncore", cpu.uncore)
        if cpu.node in missing:
            _wrong(f"cpus[{i}].node", f"`nodes` has no NUMA node {cpu.node}")


def _check_distances(topology: Topology) -> None:
    if topology.distances is None:
        return
    size = len(topology.nodes)
    if len(topology.distances) != size:
        _wrong("distances", f"{len(topology.distances)} rows for {size} NUMA nodes")
    for i, row in enumerate(topology.distances):
        if len(row) != size:
            _wrong(f"distances[{i}]", f"{len(row)} values for {size} NUMA nodes")
        for j, value in enumerate(row):
            if not 1 <= value <= LARGEST_ID:
                _wrong(f"distances[{i}][{j}]", f"{value} is no distance")


def _bridges(topology: Topology) -> None:
    _count("bridges", len(topology.bridges), MOST_BRIDGES)
    _once("bridges", (bridge.address for bridge in topology.bridges))
    parents = {bridge.address: bridge.parent for bridge in topology.bridges}
    rooted: set[str] = set()
    for i, bridge in enumerate(topology.bridges):
        _name(f"bridges[{i}].address", bridge.address)
        way: set[str] = set()
        at: str | None = bridge.address
        while at is not None and at not in rooted:
            if at not in parents:
                _wrong(f"bridges[{i}].parent", f"`bridges` has no {quoted([at])}")
            if at in way:
                _wrong(f"bridges[{i}].parent", "the bridge is above itself")
            way.add(at)
            at = parents[at]
        rooted |= way


def _check_gpus(gpus: Sequence[Gpu], nodes: set[int]) -> None:
    _count("gpus", len(gpus), MOST_GPUS)
    _ascending("gpus", "index", [gpu.index for gpu in gpus])
    for i, gpu in enumerate(gpus):
        path = f"gpus[{i}]"
        _name(f"{path}.id", gpu.id)
        _bytes(f"{path}.memory", gpu.memory)
        _affinity(f"{path}.numa_affinity", gpu.numa_affinity, nodes)
        if len(gpu.cpu_affinity) > LARGEST_ID:
            _wrong(f"{path}.cpu_affinity", "is too long")
        for cpu in gpu.cpu_affinity:
            _check_id(f"{path}.cpu_affinity", cpu)
        if gpu.memory_node is not None and gpu.memory_node not in nodes:
            _wrong(f"{path}.memory_node", f"`nodes` has no NUMA node {gpu.memory_node}")
        _check_fabric(path, gpu)
        _check_mig(path, gpu)


def _check_device_nodes(gpus: Sequence[Gpu]) -> None:
    # otherwise, a forged topology could give a container access to a disk of the host
    for i, gpu in enumerate(gpus):
        for node in gpu.device_nodes:
            if not DEVICE_NODE.fullmatch(node):
                finding = f"{quoted([node])} is no device node of a GPU: /dev/kfd, or one of /dev/dri or /dev/accel"
                _wrong(f"gpus[{i}].device_nodes", finding)


def _check_nics(nics: Sequence[Nic], nodes: set[int]) -> None:
    _count("nics", len(nics), MOST_NICS)
    _ascending("nics", "index", [nic.index for nic in nics])
    for i, nic in enumerate(nics):
        _name(f"nics[{i}].id", nic.id)
        _affinity(f"nics[{i}].numa_affinity", nic.numa_affinity, nodes)


def _devices(topology: Topology) -> None:
    ids = [gpu.id for gpu in topology.gpus] + [nic.id for nic in topology.nics]
    ids += [instance.uuid for gpu in topology.gpus for instance in gpu.mig or ()]
    ids += [DeviceID(function.pci) for nic in topology.nics for function in nic.virtual_functions]
    _once("devices and their parts", ids)
    bridges = {bridge.address for bridge in topology.bridges}
    above = [(f"gpus[{i}].bridge", gpu.bridge) for i, gpu in enumerate(topology.gpus)]
    above += [(f"nics[{i}].bridge", nic.bridge) for i, nic in enumerate(topology.nics)]
    for path, bridge in above:
        if bridge is not None and bridge not in bridges:
            _wrong(path, f"`bridges` has no {quoted([bridge])}")


def _check_links(topology: Topology) -> None:
    seen: set[frozenset[str]] = set()
    for i, link in enumerate(topology.links):
        path = f"links[{i}]"
        for end, device in (("a", link.a), ("b", link.b)):
            if device not in topology.gpu_by_id and device not in topology.nic_by_id:
                _wrong(f"{path}.{end}", f"`gpus` and `nics` have no {quoted([device])}")
        if link.a == link.b:
            _wrong(f"{path}.b", "links a device to itself")
        pair = frozenset((link.a, link.b))
        if pair in seen:
            _wrong(path, f"{quoted([link.a, link.b])} are linked twice")
        seen.add(pair)
        if not 0 <= link.fabric_links <= MOST_FABRIC_LINKS:
            _wrong(f"{path}.fabric_links", f"{link.fabric_links} is not from 0 to {MOST_FABRIC_LINKS}")
        if link.fabric_links and not (link.a in topology.gpu_by_id and link.b in topology.gpu_by_id):
            _wrong(f"{path}.fabric_links", "only GPUs have fabric links")


def _others(topology: Topology) -> None:
    _count("others", len(topology.others), MOST_OTHERS)
    _once("others", ((other.resource, other.id) for other in topology.others))
    listed = {**dict.fromkeys(topology.gpu_by_id, GPU), **dict.fromkeys(topology.nic_by_id, NIC)}
    for i, other in enumerate(topology.others):
        resource = listed.setdefault(other.id, other.resource)
        if resource != other.resource:
            finding = f"{quoted([other.id])} is listed under {quoted([resource])} and under {quoted([other.resource])}"
            _wrong(f"others[{i}].id", finding)


def _offers(topology: Topology) -> None:
    """Checks that each device is offered once: whole, in slices, slots or units, and not together with its parts."""
    known = {*topology.gpu_by_id, *topology.nic_by_id, *topology.parents}
    wholes = {
        topology.parents[base] for offer in topology.offers or () for base in offer.devices if base in topology.parents
    }
    offered: dict[DeviceID, set[UnitKind | None]] = {}
    count = 0
    for i, offer in enumerate(topology.offers or ()):
        for base in offer.devices:
            if base not in known:
                _wrong(f"offers[{i}].devices", f"there is no {quoted([base])}")
            if offer.unit is not None and base not in topology.gpu_by_id:
                _wrong(f"offers[{i}].devices", f"units are of whole GPUs, and {quoted([base])} is none")
            if offer.slots is not None and (topology.parent_of(base) not in topology.gpu_by_id or offer.replicas < 2):
                finding = f"{quoted([base])} is not offered in two or more slots of a GPU or MIG instance"
                _wrong(f"offers[{i}].devices", finding)
            others = offered.setdefault(base, set())
            if base in wholes or offer.unit in others or (others and None in {*others, offer.unit}):
                _wrong(f"offers[{i}].devices", f"{quoted([base])} is offered twice")
            others.add(offer.unit)
        if offer.replicas < 1 or (offer.most is not None and offer.most < 1):
            _wrong(f"offers[{i}]", "replicas or most is below 1")
        count += offer.replicas * len(offer.devices)
        _count(f"offers[{i}].replicas", count, MOST_HANDED_OUT)


def _affinity(path: str, affinity: Sequence[int], nodes: set[int]) -> None:
    for node in affinity:
        if node not in nodes:
            _wrong(path, f"`nodes` has no NUMA node {node}")
    _once(path, affinity)


def _count(path: str, found: int, most: int) -> None:
    if found > most:
        _wrong(path, f"{found} of them, and {most} are the most")


def _ascending(path: str, key: str, values: Sequence[int]) -> None:
    for i, value in enumerate(values):
        _check_id(f"{path}[{i}].{key}", value)
        if i and value <= values[i - 1]:
            _wrong(f"{path}[{i}].{key}", f"{value} after {values[i - 1]}: the order is ascending")


def _once(path: str, keys: Iterable[object]) -> None:
    seen = set()
    for key in keys:
        if key in seen:
            _wrong(path, f"{quoted([str(key)])} is there twice")
        seen.add(key)


def _check_id(path: str, value: int) -> None:
    if not 0 <= value <= LARGEST_ID:
        _wrong(path, f"{value} is not from 0 to {LARGEST_ID}")


def _bytes(path: str, value: int | None) -> None:
    if value is not None and not 0 <= value <= LARGEST_MEMORY:
        _wrong(path, f"{value} is no amount of memory in bytes")


def _name(path: str, name: str) -> None:
    if not 1 <= len(name) <= 128 or not name.isprintable() or " " in name:
        _wrong(path, f"{quoted([name])} is not 1 to 128 printable characters without blanks")


def _wrong(field: str, finding: str) -> NoReturn:
    raise InvalidField(field, finding, REMEDY)


def _check_mig(path: str, gpu: Gpu) -> None:
    for i, instance in enumerate(gpu.mig or ()):
        if instance.placement is not None:
            _check_placement(f"{path}.mig[{i}].placement", instance.placement)
    where = f"{path}.mig_profiles"
    _count(where, len(gpu.mig_profiles), MOST_PROFILES)
    _once(where, (profile.name for profile in gpu.mig_profiles))
    for i, profile in enumerate(gpu.mig_profiles):
        has_size = 0 <= profile.slices <= MOST_SLICES and 0 <= profile.cores <= 100
        if not (has_size and 0 <= profile.memory <= LARGEST_MEMORY):
            _wrong(f"{where}[{i}]", f"{quoted([profile.name])} has a size that no instance has")
        _name(f"{where}[{i}].name", profile.name)
        _count(f"{where}[{i}].placements", len(profile.placements), MOST_SLICES)
        for place, placement in enumerate(profile.placements):
            _check_placement(f"{where}[{i}].placements[{place}]", placement)


def _check_placement(path: str, placement: MigPlacement) -> None:
    if not (placement.start >= 0 and placement.size >= 1 and placement.start + placement.size <= MOST_SLICES):
        _wrong(path, f"{placement.size} slices from {placement.start} on are not within 0 to {MOST_SLICES - 1}")


def _check_fabric(path: str, gpu: Gpu) -> None:
    for name, count in (("switch_links", gpu.switch_links), ("links_down", gpu.links_down)):
        if not 0 <= count <= MOST_FABRIC_LINKS:
            _wrong(f"{path}.{name}", f"{count} is not from 0 to {MOST_FABRIC_LINKS}")
    if gpu.fabric_state and gpu.fabric_state not in FABRIC_FINDINGS:
        _wrong(f"{path}.fabric_state", f"{quoted([gpu.fabric_state])} is none of {', '.join(FABRIC_FINDINGS)}")
