"""The content of a drawing for one GPU or NIC: its lines, its holders and its problems."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from topoalign.cli import formatting
from topoalign.cli.divisions import MIB, holder_text, left_text, parts_text, way_text
from topoalign.cli.formatting import binary
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
"""How a GPU is divided, in the width of its box; one in MIG mode says so in a line of its own."""


@dataclass(frozen=True)
class Device:
    """One GPU or NIC."""

    id: DeviceID
    gpu: bool
    index: int
    bridge: str | None
    home: int | None
    """The NUMA node it is drawn in; None: unknown."""
    memory_node: int | None
    """The NUMA node of its own memory, where it has one."""
    lines: tuple[str, ...]
    """What stands below its name: address or RDMA name, its own memory, MIG, and what is wrong with it."""
    holders: tuple[int, ...]
    """Who holds it or a part of it, by position in the legend."""
    parts: tuple[tuple[int, str], ...]
    """
    Of a GPU that is divided: who has a part of it, by position in the legend, and what: `20% 4 GiB`; of an init container
    what no later one has as well, so that all of them and what is left are the GPU.
    """
    divided: tuple[str, ...]
    """How a GPU is divided, and what is left of it: the last two of its lines; () for others."""
    broken: bool
    """Unhealthy, or never judged."""
    cordoned: bool
    degraded: str = ""
    """The finding about a degraded GPU (`topology.degraded`); empty for others."""
    story: str = ""
    """All there is to say, for whoever points at it."""

    @property
    def name(self) -> str:
        """`GPU0` or `NIC3`, as `topoalign topo` prints it."""
        return f"{'GPU' if self.gpu else 'NIC'}{self.index}"

    @property
    def order(self) -> tuple[bool, int]:
        """GPUs first, by index."""
        return (not self.gpu, self.index)

    @property
    def troubles(self) -> tuple[str, ...]:
        """The words for its problems: some of `unhealthy`, `cordoned` and `degraded`."""
        found = {"unhealthy": self.broken, "cordoned": self.cordoned, "degraded": bool(self.degraded)}
        return tuple(word for word, applies in found.items() if applies)


def key(holder: int) -> str:
    """`A`, `B`, …, `Z`, `A1`, `B1`, …"""
    again, letter = divmod(holder, 26)
    return chr(ord("A") + letter) + (str(again) if again else "")


def holders_of(topology: Topology, allocations: Iterable[Allocation]) -> tuple[dict[DeviceID, list[str]], list[str]]:
    """
    Device -> its holders, and all holders in the order of the devices they hold.

    A holder is `namespace/pod/container`; while it is not known, each allocation is one. Whoever holds a share, a
    MIG instance or a virtual function holds a part of the device.
    """
    held: dict[DeviceID, dict[str, None]] = {}
    for allocation in allocations:
        name = holder_name(allocation.owner, allocation.id)
        for device in sorted(allocation.device_ids):
            held.setdefault(topology.card_of(device), {})[name] = None
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
    """What the legend calls a holder."""
    name = formatting.owner(owner)
    return name if owner is not None else f"{name} ({clean(allocation, 80)})"


def device_of(
    one: Gpu | Nic,
    topology: Topology,
    legend: Sequence[str],
    holders: Sequence[str],
    health: DeviceHealth | None,
    division: GpuPartitioning | None = None,
) -> Device:
    """What is drawn of this GPU or NIC. `holders` are some of those in the legend; `division`: of a GPU that is divided."""
    listed = topology.listed_nodes(one.numa_affinity)
    device = Device(
        id=one.id,
        gpu=isinstance(one, Gpu),
        index=one.index,
        bridge=one.bridge,
        home=listed[0] if listed else None,
        memory_node=one.memory_node if isinstance(one, Gpu) else None,
        lines=(*gpu_lines(one, topology), *divided_lines(division)) if isinstance(one, Gpu) else (clean(one.id),),
        holders=tuple(map(legend.index, holders)),
        divided=divided_lines(division),
        parts=tuple(
            (legend.index(holder_name(each.owner, each.allocation)), short_parts(each.alone) or "nothing")
            for each in (() if division is None else division.held)
        ),
        broken=health is not None and health.state is not HealthState.HEALTHY,
        cordoned=health is not None and health.cordoned,
        degraded=degraded_gpus(topology).get(one.id, ""),
    )
    facts = gpu_facts(one) if isinstance(one, Gpu) else nic_facts(one)
    facts |= health_facts(health) | {"degraded:": device.degraded, "held by": ", ".join(holders)}
    if division is not None:
        held = "; ".join(map(holder_text, division.held))
        facts |= {"divided:": way_text(division), "held by": held, "left:": left_text(division)}
    story = [f"{device.name} {clean(one.id, 130)}", f"PCI {clean(one.pci or 'unknown')}"]
    nodes = format_cpuset(one.numa_affinity) if topology.nodes_known else ""
    story.append(f"NUMA {nodes or 'unknown'}")
    story += [f"{what} {text}".strip() for what, text in facts.items() if text]
    return replace(device, story="\n".join(story))


def divided_lines(division: GpuPartitioning | None) -> tuple[str, ...]:
    """Two lines of a GPU that is divided: how, and what is left: `slots, 8 left:` and `60% 28 GiB`."""
    if division is None:
        return ()
    left = division.left
    offered = division.offered
    way = SHORT_WAYS.get(way_text(division), way_text(division))
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
    said = [f"{parts.cores}%"] if parts.cores else []
    said += [memory] if parts.memory else []
    return " ".join(said) or parts_text(parts)


def gpu_lines(gpu: Gpu, topology: Topology) -> tuple[str, ...]:
    """The lines below a GPU's name. NVLinks to the switch appear only if the GPUs of the machine differ in them."""
    uneven = len({other.nvswitch_links for other in topology.gpus}) > 1
    lines = {
        clean(gpu.pci or ""): gpu.pci is not None,
        f"{(gpu.memory or 0) / 2**30:.0f} GiB": gpu.memory is not None,
        f"{gpu.nvswitch_links} NVLinks": uneven,
        f"HBM: NUMA {gpu.memory_node}": gpu.memory_node is not None,
        f"MIG: {len(gpu.mig or ())}": gpu.mig is not None,
    }
    return tuple(line for line, known in lines.items() if known)


def gpu_facts(gpu: Gpu) -> dict[str, str]:
    """Label -> text for a GPU's tooltip; an empty text is left out later."""
    return {
        "": clean(gpu.name),
        "memory": binary(gpu.memory) if gpu.memory is not None else "",
        "its memory is NUMA": "" if gpu.memory_node is None else str(gpu.memory_node),
        "MIG": ", ".join(clean(instance.profile) for instance in gpu.mig or ()),
    }


def nic_facts(nic: Nic) -> dict[str, str]:
    """Label -> text for a NIC's tooltip; an empty text is left out later."""
    return {
        "network devices": clean(", ".join(nic.netdevs)),
        "virtual functions": str(len(nic.virtual_functions) or ""),
        "ports": ", ".join(clean(f"{port.number} {port.link_layer} {port.state}") for port in nic.ports),
    }


def health_facts(health: DeviceHealth | None) -> dict[str, str]:
    """The tooltip's line about health; none if the health is not known."""
    if health is None:
        return {}
    words = clean(f"{health.state.value} {health.reason}".strip(), 200)
    return {"health": words + (", cordoned" if health.cordoned else "")}
