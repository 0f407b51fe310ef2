"""
Checks that a topology is consistent. Every reader of machines promises it, and every user of a `Topology` assumes it.

Checked are names and references (a CPU's node exists, a link's devices exist, no bridge is its own ancestor),
uniqueness, order, and sizes: a description that claims a million CPUs is a mistake or an attack.
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
"""The most that Linux can be built for (x86 MAXSMP, NR_CPUS 8192)."""
MOST_NODES = 1_024
"""The most that Linux can be built for (NODES_SHIFT 10)."""
MOST_GPUS = 128
"""Eight times the largest single machine that is sold (16); composed ones reach 32."""
MOST_NICS = 256
MOST_BRIDGES = 4_096
MOST_OTHERS = 65_536
MOST_HANDED_OUT = 50_000
"""Each takes 70 bytes at most in what is listed to the kubelet, whose gRPC takes no message above 4 MiB."""
DEVICE_NODE = re.compile(r"/dev/(?:kfd|dri/(?:card|renderD)[0-9]{1,4}|accel/accel[0-9]{1,4})")
"""The device nodes of GPUs that a container may get: the kernel's classes drm and accel, and AMD's kfd."""
LARGEST_MEMORY = 1 << 60
"""Bytes."""


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
    """Checks sizes alone, which every receiver of a topology must: unusual hardware passes. Raises InvalidField."""
    for path, ids in (
        ("nodes", topology.node_ids),
        ("cpus", tuple(cpu.node for cpu in topology.cpus)),
        *(("gpus", gpu.numa_affinity) for gpu in topology.gpus),
        *(("nics", nic.numa_affinity) for nic in topology.nics),
        *(("others", other.nodes or ()) for other in topology.others),
    ):
        for node in ids:
            if not -1 <= node <= LARGEST_ID:
                _wrong(path, f"there can be no NUMA node {node}", f"ids end at {LARGEST_ID}")
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
                remedy = "name it as `hugepages-2Mi`"
                _wrong(f"{path}.hugepages", f"{quoted([resource])} is no hugepages resource", remedy)
            _bytes(f"{path}.hugepages.{resource}", amount)
        if node.memory is not None and sum(node.hugepages.values()) > node.memory:
            finding = "is less than its hugepages, which it includes"
            _wrong(f"{path}.memory", finding, "give all memory of the node, in bytes")


def _check_cpus(cpus: Sequence[Cpu], unknown_nodes: Iterable[int]) -> None:
    _count("cpus", len(cpus), MOST_CPUS)
    _ascending("cpus", "id", [cpu.id for cpu in cpus])
    missing = set(unknown_nodes)
    for i, cpu in enumerate(cpus):
        if not 0 <= cpu.core <= cpu.id:
            _wrong(
                f"cpus[{i}].core", f"{cpu.core} is not the lowest CPU of its core", "give the lowest id of its siblings"
            )
        _check_id(f"cpus[{i}].socket", cpu.socket)
        _check_id(f"cpus[{i}].uncore", cpu.uncore)
        if cpu.node in missing:
            _wrong(f"cpus[{i}].node", f"there is no NUMA node {cpu.node}", "name a node of `nodes`, or add it there")


def _check_distances(topology: Topology) -> None:
    if topology.distances is None:
        return
    size = len(topology.nodes)
    if len(topology.distances) != size:
        _wrong("distances", f"{len(topology.distances)} rows for {size} NUMA nodes", "give a row for each node")
    for i, row in enumerate(topology.distances):
        if len(row) != size:
            _wrong(f"distances[{i}]", f"{len(row)} values for {size} NUMA nodes", "give a value for each node")
        for j, value in enumerate(row):
            if not 1 <= value <= LARGEST_ID:
                _wrong(f"distances[{i}][{j}]", f"{value} is no distance", "10 is local, a remote node is farther")


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
                _wrong(
                    f"bridges[{i}].parent", f"there is no bridge {quoted([at])}", "name a bridge of `bridges`, or none"
                )
            if at in way:
                _wrong(
                    f"bridges[{i}].parent", "the bridge is above itself", "give each bridge the one nearer to the CPU"
                )
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
            _wrong(f"{path}.cpu_affinity", "is too long", "name each CPU once")
        for cpu in gpu.cpu_affinity:
            _check_id(f"{path}.cpu_affinity", cpu)
        if gpu.memory_node is not None and gpu.memory_node not in nodes:
            _wrong(f"{path}.memory_node", f"there is no NUMA node {gpu.memory_node}", "name a node of `nodes`")
        _check_fabric(path, gpu)
        _check_mig(path, gpu)


def _check_device_nodes(gpus: Sequence[Gpu]) -> None:
    # a forged topology could otherwise give a disk of the host to a container
    for i, gpu in enumerate(gpus):
        for node in gpu.device_nodes:
            if not DEVICE_NODE.fullmatch(node):
                finding = f"{quoted([node])} is no device node of a GPU"
                _wrong(f"gpus[{i}].device_nodes", finding, "give /dev/kfd or nodes of /dev/dri or /dev/accel")


def _check_nics(nics: Sequence[Nic], nodes: set[int]) -> None:
    _count("nics", len(nics), MOST_NICS)
    _ascending("nics", "index", [nic.index for nic in nics])
    for i, nic in enumerate(nics):
        _name(f"nics[{i}].id", nic.id)
        _affinity(f"nics[{i}].numa_affinity", nic.numa_affinity, nodes)


def _devices(topology: Topology) -> None:
    _once("gpus and nics", [*topology.gpu_by_id, *topology.nic_by_id])
    _once("gpus", (gpu.id for gpu in topology.gpus))
    _once("nics", (nic.id for nic in topology.nics))
    parts = [instance.uuid for gpu in topology.gpus for instance in gpu.mig or ()]
    parts += [DeviceID(function.pci) for nic in topology.nics for function in nic.virtual_functions]
    _once("devices and their parts", [*topology.gpu_by_id, *topology.nic_by_id, *parts])
    bridges = {bridge.address for bridge in topology.bridges}
    above = [(f"gpus[{i}].bridge", gpu.bridge) for i, gpu in enumerate(topology.gpus)]
    above += [(f"nics[{i}].bridge", nic.bridge) for i, nic in enumerate(topology.nics)]
    for path, bridge in above:
        if bridge is not None and bridge not in bridges:
            _wrong(path, f"there is no bridge {quoted([bridge])}", "name one of `bridges`")


def _check_links(topology: Topology) -> None:
    seen: set[frozenset[str]] = set()
    for i, link in enumerate(topology.links):
        path = f"links[{i}]"
        for end, device in (("a", link.a), ("b", link.b)):
            if device not in topology.gpu_by_id and device not in topology.nic_by_id:
                _wrong(f"{path}.{end}", f"there is no device {quoted([device])}", "name a device of `gpus` or `nics`")
        if link.a == link.b:
            _wrong(f"{path}.b", "links a device to itself", "leave it out")
        pair = frozenset((link.a, link.b))
        if pair in seen:
            _wrong(path, f"{quoted([link.a, link.b])} are linked twice", "give each pair one link")
        seen.add(pair)
        if not 0 <= link.fabric_links <= MOST_FABRIC_LINKS:
            _wrong(
                f"{path}.fabric_links", f"{link.fabric_links} is no number of links", f"give 0 to {MOST_FABRIC_LINKS}"
            )
        if link.fabric_links and not (link.a in topology.gpu_by_id and link.b in topology.gpu_by_id):
            _wrong(f"{path}.fabric_links", "only GPUs have fabric links", "give the PCIe class alone")


def _others(topology: Topology) -> None:
    _count("others", len(topology.others), MOST_OTHERS)
    _once("others", ((other.resource, other.id) for other in topology.others))
    listed = {**dict.fromkeys(topology.gpu_by_id, GPU), **dict.fromkeys(topology.nic_by_id, NIC)}
    for i, other in enumerate(topology.others):
        resource = listed.setdefault(other.id, other.resource)
        if resource != other.resource:
            _wrong(
                f"others[{i}].id",
                f"{quoted([other.id])} is listed under {quoted([resource])} and under {quoted([other.resource])}",
                "give each device an id of its own: who holds it and how it is are known by its id alone",
            )


def _offers(topology: Topology) -> None:
    """Each device is offered once, whole, in slices, in slots or in units, and not together with its parts."""
    known = {*topology.gpu_by_id, *topology.nic_by_id, *topology.parents}
    wholes = {
        topology.parents[base] for offer in topology.offers or () for base in offer.devices if base in topology.parents
    }
    offered: dict[DeviceID, set[UnitKind | None]] = {}
    count = 0
    for i, offer in enumerate(topology.offers or ()):
        for base in offer.devices:
            if base not in known:
                _wrong(
                    f"offers[{i}].devices",
                    f"there is no {quoted([base])}",
                    "name GPUs, MIG instances, NICs or functions",
                )
            if offer.unit is not None and base not in topology.gpu_by_id:
                _wrong(f"offers[{i}].devices", f"{quoted([base])} is no GPU", "offer units of whole GPUs")
            if offer.slots is not None and (topology.parent_of(base) not in topology.gpu_by_id or offer.replicas < 2):
                remedy = "offer 2 or more slots of GPUs or MIG instances"
                _wrong(f"offers[{i}].devices", f"no slots of {quoted([base])}", remedy)
            others = offered.setdefault(base, set())
            if base in wholes or offer.unit in others or (others and None in {*others, offer.unit}):
                _wrong(f"offers[{i}].devices", f"{quoted([base])} is offered twice", "offer it once, whole or in parts")
            others.add(offer.unit)
        if offer.replicas < 1 or (offer.most is not None and offer.most < 1):
            _wrong(f"offers[{i}]", "replicas or most below 1", "give 1 or more")
        count += offer.replicas * len(offer.devices)
        _count(f"offers[{i}].replicas", count, MOST_HANDED_OUT)


def _affinity(path: str, affinity: Sequence[int], nodes: set[int]) -> None:
    for node in affinity:
        if node not in nodes:
            _wrong(path, f"there is no NUMA node {node}", "name nodes of `nodes`; leave it empty if unknown")
    _once(path, affinity)


def _count(path: str, found: int, most: int) -> None:
    if found > most:
        _wrong(path, f"{found} of them", f"a machine has at most {most}")


def _ascending(path: str, key: str, values: Sequence[int]) -> None:
    for i, value in enumerate(values):
        _check_id(f"{path}[{i}].{key}", value)
        if i and value <= values[i - 1]:
            _wrong(f"{path}[{i}].{key}", f"{value} after {values[i - 1]}", "list each once, in ascending order")


def _once(path: str, keys: Iterable[object]) -> None:
    seen = set()
    for key in keys:
        if key in seen:
            _wrong(path, f"{quoted([str(key)])} is there twice", "name each once")
        seen.add(key)


def _check_id(path: str, value: int) -> None:
    if not 0 <= value <= LARGEST_ID:
        _wrong(path, f"{value} is out of range", f"give 0 to {LARGEST_ID}")


def _bytes(path: str, value: int | None) -> None:
    if value is not None and not 0 <= value <= LARGEST_MEMORY:
        _wrong(path, f"{value} is no amount of memory", "give bytes; leave it out if unknown")


def _name(path: str, name: str) -> None:
    if not 1 <= len(name) <= 128 or not name.isprintable() or " " in name:
        _wrong(path, f"{quoted([name])} is no name", "use 1 to 128 printable characters without blanks")


def _wrong(field: str, finding: str, remedy: str) -> NoReturn:
    raise InvalidField(field, finding, remedy)


MOST_PROFILES = 64
"""NVML counts 18."""
MOST_SLICES = 64
"""Of a GPU, and as many places has a profile: eight times what GPUs have."""
MOST_FABRIC_LINKS = 999


def _check_mig(path: str, gpu: Gpu) -> None:
    _once(f"{path}.mig", (instance.uuid for instance in gpu.mig or ()))
    for i, instance in enumerate(gpu.mig or ()):
        if instance.placement is not None:
            _check_placement(f"{path}.mig[{i}].placement", instance.placement)
    where = f"{path}.mig_profiles"
    if len(gpu.mig_profiles) > MOST_PROFILES:
        _wrong(where, f"{len(gpu.mig_profiles)} of them", f"a GPU has at most {MOST_PROFILES}")
    _once(where, (profile.name for profile in gpu.mig_profiles))
    for i, profile in enumerate(gpu.mig_profiles):
        has_size = 0 <= profile.slices <= MOST_SLICES and 0 <= profile.cores <= 100
        if not (has_size and 0 <= profile.memory <= LARGEST_MEMORY):
            finding = f"{quoted([profile.name])} has a size that no instance has"
            _wrong(f"{where}[{i}]", finding, "give bytes, compute slices and hundredths of the GPU")
        if not 1 <= len(profile.name) <= 128 or not profile.name.isprintable():
            _wrong(f"{where}[{i}].name", f"{quoted([profile.name])} is no name", "write it as 1g.10gb")
        if len(profile.placements) > MOST_SLICES:
            _wrong(f"{where}[{i}].placements", "too many", f"a profile has at most {MOST_SLICES}")
        for place, placement in enumerate(profile.placements):
            _check_placement(f"{where}[{i}].placements[{place}]", placement)


def _check_placement(path: str, placement: MigPlacement) -> None:
    if not (placement.start >= 0 and placement.size >= 1 and placement.start + placement.size <= MOST_SLICES):
        finding = f"{placement.size} slices from {placement.start} on"
        _wrong(path, finding, f"name slices of 0 to {MOST_SLICES - 1}, one at least")


def _check_fabric(path: str, gpu: Gpu) -> None:
    for name, count in (("switch_links", gpu.switch_links), ("links_down", gpu.links_down)):
        if not 0 <= count <= MOST_FABRIC_LINKS:
            _wrong(f"{path}.{name}", f"{count} is no number of links", f"give 0 to {MOST_FABRIC_LINKS}")
    if gpu.fabric_state and gpu.fabric_state not in FABRIC_FINDINGS:
        finding = f"{quoted([gpu.fabric_state])} is no state"
        _wrong(f"{path}.fabric_state", finding, f"give one of {', '.join(FABRIC_FINDINGS)}")
