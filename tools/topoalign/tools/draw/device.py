"""Makes the content of a drawing for one GPU or NIC: its lines, its holders and the findings about it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from topoalign.cli import formatting
from topoalign.cli.formatting import binary
from topoalign.cli.gpu_partitioning import format_parts, format_remaining, format_strategy, holder_text
from topoalign.core.model.byte_sizes import MIB
from topoalign.core.model.errors import clean
from topoalign.core.model.events import Allocation, DeviceHealth, HealthState, Owner
from topoalign.core.model.ids import AllocationID, DeviceID
from topoalign.core.model.topology.cpuset import format_cpuset
from topoalign.core.model.topology.degraded import degraded_gpus
from topoalign.core.model.topology.model import Gpu, Nic, Topology
from topoalign.core.placement.preference import seam_of
from topoalign.core.state.gpu_partitioning import GpuPartitioning, Parts

SHORT_WAYS = {
    "time slices": "slices",
    "MIG, time slices": "slices",
    "MIG, slots": "slots",
    "not offered": "parts",
}
"""How a GPU is partitioned, in the width of its box; MIG mode has a line of its own."""


@dataclass(frozen=True)
class DrawnDevice:
    """A GPU or NIC as it is drawn."""

    id: DeviceID
    gpu: bool
    index: int
    bridge: str | None
    home: int | None
    """The NUMA node it is drawn in; None: unknown."""
    memory_node: int | None
    """The NUMA node of its own memory, where it has one."""
    lines: tuple[str, ...]
    """The lines below its name: address or RDMA name, its own memory, MIG, and findings."""
    holders: tuple[int, ...]
    """The holders of it or of a part of it, by position in the legend."""
    parts: tuple[tuple[int, str], ...]
    """
    The holders of a partitioned GPU, by position in the legend, with their shares: `20% 4 GiB`; of an init container
    what no later one has as well, so that all of them and what is left are the GPU.
    """
    divided: tuple[str, ...]
    """How a GPU is partitioned, and its remaining amounts: the last two of its lines; () for others."""
    broken: bool
    """Whether it is unhealthy, or its health is not known."""
    cordoned: bool
    degraded: str = ""
    """The finding about a degraded GPU (`topology.degraded`); empty for others."""
    tooltip: str = ""
    """All facts of the device, as the tooltip."""

    @property
    def name(self) -> str:
        """`GPU0` or `NIC3`, as `topoalign topo` prints it."""
        return f"{'GPU' if self.gpu else 'NIC'}{self.index}"

    @property
    def order(self) -> tuple[bool, int]:
        """GPUs first, by index."""
        return (not self.gpu, self.index)

    @property
    def findings(self) -> tuple[str, ...]:
        """The findings about it: some of `unhealthy`, `cordoned` and `degraded`."""
        found = {"unhealthy": self.broken, "cordoned": self.cordoned, "degraded": bool(self.degraded)}
        return tuple(word for word, applies in found.items() if applies)


def holder_letter(holder: int) -> str:
    """`A`, `B`, …, `Z`, `A1`, `B1`, …"""
    again, letter = divmod(holder, 26)
    return chr(ord("A") + letter) + (str(again) if again else "")


def list_holders(topology: Topology, allocations: Iterable[Allocation]) -> tuple[dict[DeviceID, list[str]], list[str]]:
    """
    Device -> its holders, and all holders in the order of the devices they hold.

    A holder is `namespace/pod/container`; while it is not known, each allocation is one. Whoever holds a share, a
    MIG instance or a virtual function holds a part of the device.
    """
    held: dict[DeviceID, dict[str, None]] = {}
    for allocation in allocations:
        name = holder_name(allocation.owner, allocation.id)
        for device in sorted(allocation.device_ids):
            held.setdefault(topology.parent_of(device), {})[name] = None
    devices: tuple[Gpu | Nic, ...] = (*topology.gpus, *topology.nics)
    by_device = {one.id: list(held.get(one.id, ())) for one in devices}
    return by_device, list(dict.fromkeys(name for names in by_device.values() for name in names))


def seams_of(topology: Topology, allocations: Iterable[Allocation]) -> dict[str, str]:
    """Holder -> its set of GPUs, of each that holds several whole ones: `4 GPUs, 18 NVLinks, 371 GB/s`."""
    whole: dict[str, set[DeviceID]] = {}
    for allocation in allocations:
        held = whole.setdefault(holder_name(allocation.owner, allocation.id), set())
        held |= allocation.device_ids & topology.gpu_by_id.keys()
    return {name: f"{len(gpus)} GPUs, {seam_of(topology, gpus)}" for name, gpus in whole.items() if len(gpus) > 1}


def holder_name(owner: Owner | None, allocation: AllocationID) -> str:
    """The name of a holder in the legend."""
    name = formatting.owner(owner)
    return name if owner is not None else f"{name} ({clean(allocation, 80)})"


def device_of(
    one: Gpu | Nic,
    topology: Topology,
    legend: Sequence[str],
    holders: Sequence[str],
    health: DeviceHealth | None,
    partitioning: GpuPartitioning | None = None,
) -> DrawnDevice:
    """Makes the drawing of this GPU or NIC. `holders`: positions in the legend; `partitioning`: of a partitioned GPU."""
    listed = topology.listed_nodes(one.numa_affinity)
    device = DrawnDevice(
        id=one.id,
        gpu=isinstance(one, Gpu),
        index=one.index,
        bridge=one.bridge,
        home=listed[0] if listed else None,
        memory_node=one.memory_node if isinstance(one, Gpu) else None,
        lines=(*describe_gpu(one, topology), *divided_lines(partitioning))
        if isinstance(one, Gpu)
        else (clean(one.id),),
        holders=tuple(map(legend.index, holders)),
        divided=divided_lines(partitioning),
        parts=tuple(
            (legend.index(holder_name(each.owner, each.allocation)), short_parts(each.alone) or "nothing")
            for each in (() if partitioning is None else partitioning.held)
        ),
        broken=health is not None and health.state is not HealthState.HEALTHY,
        cordoned=health is not None and health.cordoned,
        degraded=degraded_gpus(topology).get(one.id, ""),
    )
    return replace(device, tooltip="\n".join(list_facts(one, topology, device, holders, health, partitioning)))


def list_facts(
    one: Gpu | Nic,
    topology: Topology,
    device: DrawnDevice,
    holders: Sequence[str],
    health: DeviceHealth | None,
    partitioning: GpuPartitioning | None,
) -> Iterator[str]:
    """The lines of the tooltip of a GPU or NIC."""
    nodes = format_cpuset(one.numa_affinity) if topology.nodes_known else ""
    yield f"{device.name} {clean(one.id, 130)}"
    yield f"PCI {clean(one.pci or 'unknown')}"
    yield f"NUMA {nodes or 'unknown'}"
    if isinstance(one, Gpu):
        facts = {
            "": clean(one.name),
            "memory": binary(one.memory) if one.memory is not None else "",
            "its memory is NUMA": "" if one.memory_node is None else str(one.memory_node),
            "MIG": ", ".join(clean(instance.profile) for instance in one.mig or ()),
        }
    else:
        facts = {
            "network devices": clean(", ".join(one.netdevs)),
            "virtual functions": str(len(one.virtual_functions) or ""),
            "ports": ", ".join(clean(f"{port.number} {port.link_layer} {port.state}") for port in one.ports),
        }
    if health is not None:
        words = clean(f"{health.state.value} {health.reason}".strip(), 200)
        facts["health"] = words + (", cordoned" if health.cordoned else "")
    facts |= {"degraded:": device.degraded, "held by": ", ".join(holders)}
    if partitioning is not None:
        facts |= {
            "divided:": format_strategy(partitioning),
            "held by": "; ".join(map(holder_text, partitioning.held)),
            "left:": format_remaining(partitioning),
        }
    for label, text in facts.items():
        if text:
            yield f"{label} {text}".strip()


def divided_lines(partitioning: GpuPartitioning | None) -> tuple[str, ...]:
    """Two lines of a partitioned GPU: how it is shared, and its remaining amounts: `slots, 8 left:` and `60% 28 GiB`."""
    if partitioning is None:
        return ()
    left = partitioning.left
    offered = partitioning.offered
    way = SHORT_WAYS.get(format_strategy(partitioning), format_strategy(partitioning))
    if offered.slices and offered.instances:
        way = "parts"
    if offered.slices or offered.instances:
        amount = f"{left.slices + len(left.instances)} of {offered.slices + len(offered.instances)}"
    else:
        amount = short_parts(left) or "nothing"
    slots = f"{left.slots} " if left.slots else ""  # one slot may be left where there is much else
    return f"{way}, {slots}left:", amount


def short_parts(parts: Parts) -> str:
    """`20% 4 GiB`, memory rounded down; `5% 64 MiB`; `3 slices`; `1g.10gb`."""
    tenths = parts.memory * 10 // 2**30
    memory = f"{tenths // 10} GiB" if tenths >= 100 or tenths % 10 == 0 else f"{tenths / 10:.1f} GiB"
    memory = memory if tenths else f"{parts.memory // MIB} MiB"
    amounts = [f"{parts.cores}%"] if parts.cores else []
    amounts += [memory] if parts.memory else []
    return " ".join(amounts) or format_parts(parts)


def describe_gpu(gpu: Gpu, topology: Topology) -> tuple[str, ...]:
    """The lines below a GPU's name. NVLinks to the switch appear only if the GPUs of the machine differ in them."""
    uneven = len({other.switch_links for other in topology.gpus}) > 1
    lines = {
        clean(gpu.pci or ""): gpu.pci is not None,
        f"{(gpu.memory or 0) / 2**30:.0f} GiB": gpu.memory is not None,
        f"{gpu.switch_links} NVLinks": uneven,
        f"HBM: NUMA {gpu.memory_node}": gpu.memory_node is not None,
        f"MIG: {len(gpu.mig or ())}": gpu.mig is not None,
    }
    return tuple(line for line, known in lines.items() if known)
