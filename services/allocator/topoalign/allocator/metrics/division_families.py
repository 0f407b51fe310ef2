"""
What is given of each GPU, and what is left of it, as families of metrics: under our names, and those of HAMi's scheduler.

They come from the record, and need no measurement. What has no amount, as time slices, has no sample of memory and time;
nor has a GPU in MIG mode one of time. Labels of others: HAMi's scheduler, 0511293c; its ratios are percent, but for
`hami_node_gpu_memory_allocated_ratio`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from topoalign.allocator.metrics.use_families import Family, Sample, part
from topoalign.core.model.ids import DeviceID, NodeName
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.core.state.divisions import Division, Parts
from topoalign.core.usage.given import WHOLE_DEVICE


class Amounts(NamedTuple):
    """Parts of a GPU as amounts; None: they have none."""

    cores: int | None
    """Hundredths of its computing time."""
    memory: int | None
    """Bytes."""
    slots: int | None
    """Slots, time slices or shares by MPS."""


class Row(NamedTuple):
    """One GPU."""

    gpu: Gpu
    containers: int
    """That hold a part of it, or all; not those from which later ones of their pod have taken over all."""
    offered: Amounts
    asked: Amounts
    """What containers were given; what an init container left to later ones counts once."""
    left: Amounts
    """What may be handed out now."""


def rows_of(divided: Mapping[DeviceID, Division], hardware: Topology) -> list[Row]:
    """All GPUs of a node."""
    return [
        Row(
            gpu=gpu,
            containers=holders_of(division),
            offered=amounts(gpu, division, [division.offered]),
            asked=asked_of(gpu, division),
            left=amounts(gpu, division, [division.left]),
        )
        for gpu in hardware.gpus
        if (division := divided.get(gpu.id)) is not None
    ]


def holders_of(division: Division) -> int:
    """
    How many containers hold some of a GPU. An init container from which later ones have taken over all holds nothing. One
    whose units a kubelet gave to another pod counts: both may be running.
    """
    return sum(any(each.alone) or not each.taken_over for each in division.held)


def asked_of(gpu: Gpu, division: Division) -> Amounts:
    """
    What containers were given. Whoever was given all units of computing time was given all memory, and nobody else gets any
    until its record ends: also an init container of which a later one has taken over some. Two containers with half of the
    time each were given their blocks.
    """
    found = amounts(gpu, division, [each.alone for each in division.held])
    if found.memory is None or not any(has_all_time(each.parts) for each in division.held):
        return found
    return found._replace(memory=None if gpu.memory is None else max(found.memory, gpu.memory))


def has_all_time(parts: Parts) -> bool:
    """Whether these are all units of computing time of a GPU. By slots that says nothing of memory."""
    return parts.cores >= WHOLE_DEVICE and not parts.slots


def amounts(gpu: Gpu, division: Division, parts: Iterable[Parts]) -> Amounts:
    """These parts of a GPU together."""
    found = list(parts)
    held = [each.parts for each in division.held]
    sliced = not {"time slices", "MPS"}.isdisjoint(division.ways) or any(each.slices for each in held)
    slotted = sliced or "slots" in division.ways or any(each.slots for each in held)
    slots = sum(each.slots + each.slices for each in found) if slotted else None
    if sliced:
        return Amounts(None, None, slots)
    sizes = [gpu.memory if has_all_time(each) and not slotted else memory_of(gpu, each) for each in found]
    known = [size for size in sizes if size is not None]
    memory = None if len(known) < len(sizes) else sum(known)
    if not slotted and memory is not None and gpu.memory is not None:
        memory = min(memory, gpu.memory)  # whoever has all computing time has all memory, whatever is known of others
    cores = sum(WHOLE_DEVICE if each.whole else each.cores for each in found)
    return Amounts(None if gpu.mig is not None else cores, memory, slots)


def memory_of(gpu: Gpu, parts: Parts) -> int | None:
    """Bytes of one GPU. None: not known."""
    if parts.whole:
        return gpu.memory
    sizes = {each.profile: each.memory for each in gpu.mig or ()}
    instances = [sizes.get(profile) for profile in parts.instances]
    known = [size for size in instances if size is not None]
    return None if len(known) < len(instances) else parts.memory + sum(known)


def own(rows: Iterable[Row]) -> Iterator[Family]:
    """Under our names: `gpu_uuid` is the GPU, with all of its instances."""
    found = list(rows)

    def each(value: Callable[[Row], float | None]) -> list[Sample]:
        """The value of each GPU."""
        return [({"gpu_uuid": row.gpu.id, "mig_uuid": ""}, value(row)) for row in found]

    name = "topoalign_gpu_"
    yield Family(f"{name}containers", "Containers that hold a part of a GPU, or all.", each(lambda r: r.containers))
    yield Family(
        f"{name}memory_asked_bytes", "Memory of a GPU that containers were given.", each(lambda r: r.asked.memory)
    )
    yield Family(f"{name}memory_left_bytes", "Memory of a GPU that may still be given.", each(lambda r: r.left.memory))
    yield Family(
        f"{name}time_asked_ratio",
        "Part of a GPU's time that containers were given.",
        each(lambda r: part(r.asked.cores)),
    )
    yield Family(
        f"{name}time_left_ratio", "Part of a GPU's time that may still be given.", each(lambda r: part(r.left.cores))
    )
    yield Family(
        f"{name}slots_asked",
        "Slots, time slices or MPS shares of a GPU that containers were given.",
        each(lambda r: r.asked.slots),
    )
    yield Family(
        f"{name}slots_left",
        "Slots, time slices or MPS shares of a GPU that may still be given.",
        each(lambda r: r.left.slots),
    )


def hami(rows: Iterable[Row], node: NodeName) -> Iterator[Family]:
    """Under the names of HAMi's scheduler: bytes and percent of what is offered."""
    at = [
        (
            {"node": node, "device_uuid": row.gpu.id, "device_index": str(row.gpu.index), "device_type": row.gpu.name},
            row,
        )
        for row in rows
    ]
    yield Family("hami_gpu_memory_limit_bytes", "GPU memory to give", [(to, row.offered.memory) for to, row in at])
    yield Family(
        "hami_gpu_core_limit_ratio",
        "GPU cores to give, 100",
        [(to, WHOLE_DEVICE if row.offered.cores else None) for to, row in at],
    )
    yield Family(
        "hami_gpu_memory_allocated_bytes",
        "GPU memory that is given",
        [({**to, "device_cores": str(row.offered.cores or 0)}, row.asked.memory) for to, row in at],
    )
    yield Family("hami_gpu_shared_count", "Containers on a GPU", [(to, row.containers) for to, row in at])
    yield Family(
        "hami_gpu_core_allocated_ratio",
        "GPU cores that are given, 0 to 100",
        [(to, core_percent(row)) for to, row in at],
    )
    yield Family(
        "hami_node_gpu_memory_allocated_ratio",
        "GPU memory that is given, 0 to 1",
        [
            ({name: to[name] for name in to if name != "device_type"}, row.asked.memory / row.offered.memory)
            for to, row in at
            if row.asked.memory is not None and row.offered.memory
        ],
    )


def core_percent(row: Row) -> float | None:
    """Cores that are given as percent of those that are offered, rounded up as HAMi does."""
    if row.asked.cores is None or not row.offered.cores:
        return None
    return float(-(-row.asked.cores * WHOLE_DEVICE // row.offered.cores))
