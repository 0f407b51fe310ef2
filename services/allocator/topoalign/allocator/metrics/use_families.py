"""
The use of GPUs as metric families: under topoalign's names, and under those of gpu-manager (Gaia) and of HAMi.

Unknown values have no sample. Utilisation is a ratio (1: all of the time) under topoalign's names, and percent under
the others. Sources of the other names and labels: gpu-manager 8cd842ed and HAMi's vGPUmonitor, v2.9.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from topoalign.core.model.byte_sizes import MIB
from topoalign.core.model.ids import DeviceID, NodeName
from topoalign.core.model.processes import LibraryCount
from topoalign.core.model.topology.device_offers import CORES
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.core.state.gpu_partitioning import GpuPartitioning, Parts
from topoalign.core.usage.attribution import DeviceShares, Excess, HolderUse, NodeShares
from topoalign.runtime.metrics import format_header, format_sample

Labels = tuple[tuple[str, str], ...]
Sample = tuple[Mapping[str, str], float | None]


class Family(NamedTuple):
    """One gauge with its samples. Samples with equal labels are summed; if one of them is unknown, so is the sum."""

    name: str
    meaning: str
    samples: Iterable[Sample]


def render_families(families: Iterable[Family]) -> bytes:
    """The families in Prometheus' text format, without families that have no sample."""
    return b"".join(chunk for family in families for chunk in lines(family))


def lines(family: Family) -> Iterator[bytes]:
    """The lines of one family."""
    sums: dict[Labels, float | None] = {}
    for labels, value in family.samples:
        key = tuple(labels.items())
        before = sums.get(key, 0.0)
        sums[key] = None if before is None or value is None else before + value
    known = [(key, total) for key, total in sums.items() if total is not None]
    if known:
        yield format_header(family.name, family.meaning)
    for key, total in known:
        yield format_sample(family.name, total, **dict(key))


def measured_family(measured: bool) -> Family:
    """Whether the use of the GPUs could be measured."""
    meaning = "1 if the use of this node's GPUs could be measured for this page."
    return Family("topoalign_gpu_use_measured", meaning, [({}, measured)])


def own_use_families(shares: NodeShares, lasting: Iterable[Excess]) -> Iterator[Family]:
    """The families under topoalign's names: `gpu_uuid` is the GPU, `mig_uuid` the MIG instance on it, or empty."""
    of_holders: dict[str, tuple[str, Callable[[HolderUse], float | None]]] = {
        "memory_asked_bytes": ("GPU memory that a container was given.", lambda h: h.memory),
        "memory_used_bytes": ("GPU memory that a container uses.", lambda h: h.use.memory),
        "memory_left_bytes": ("GPU memory that is given and not used.", lambda h: h.memory_left),
        "time_asked_ratio": ("Part of a GPU's time that a container was given.", lambda h: part(h.cores)),
        "time_used_ratio": (
            "Part of the last second in which kernels of a container ran.",
            lambda h: part(h.use.utilization),
        ),
        "library_memory_bytes": (
            "GPU memory that the library which limits a container counts, as the container reports it.",
            lambda h: None if h.library is None else h.library.memory,
        ),
        "library_time_ratio": (
            "Part of the last second in which kernels of a container ran, as the library in it reports it.",
            lambda h: None if h.library is None else part(h.library.utilization),
        ),
    }
    holders = [({**device_labels(row), **owned}, row, holder) for row, holder, owned in known_holders(shares)]
    for name, (meaning, value) in of_holders.items():
        samples = [(labels, value(holder)) for labels, _, holder in holders]
        yield Family(f"topoalign_container_gpu_{name}", meaning, samples)
    above = {(each.device, each.holder.allocations) for each in lasting}
    yield Family(
        "topoalign_container_gpu_memory_exceeded",
        "1 for a container that used more GPU memory than it was given in three measurements in a row.",
        [(labels, 1.0) for labels, row, holder in holders if (row.device, holder.allocations) in above],
    )
    rows = [(row, device_labels(row)) for row in shares.devices]
    yield Family("topoalign_gpu_memory_bytes", "Memory of a GPU.", [(labels, row.memory) for row, labels in rows])
    yield Family(
        "topoalign_gpu_memory_used_bytes",
        "Memory of a GPU that is in use, including what its driver needs.",
        [(labels, row.memory_used) for row, labels in rows],
    )
    others = [({**labels, "where": other.where}, other.use) for row, labels in rows for other in row.others]
    yield Family(
        "topoalign_gpu_other_processes",
        "Processes on a GPU of which they hold nothing; where: in a pod, on the host, or unknown.",
        [(labels, len(use.processes)) for labels, use in others],
    )
    yield Family(
        "topoalign_gpu_other_memory_used_bytes",
        "Memory of a GPU that processes use which hold nothing of it.",
        [(labels, use.memory) for labels, use in others],
    )


def gaia(shares: NodeShares, hardware: Topology) -> Iterator[Family]:
    """The families under gpu-manager's names, in percent, MiB and GPUs, for each container per GPU and in total."""

    def each(label: str, value: Callable[[HolderUse], float | None], *, total: bool = False) -> list[Sample]:
        found: list[Sample] = []
        for row, holder, of in known_holders(shares):
            labels = {
                "pod_name": of["pod"],
                "namespace": of["namespace"],
                "node": shares.node,
                "container_name": of["container"],
            }
            if not total:
                found.append(({**labels, label: f"gpu{hardware.gpu_by_id[row.gpu].index}"}, value(holder)))
            found.append(({**labels, label: "total"}, value(holder)))
        return found

    yield Family("container_gpu_utilization", "gpu utilization", each("gpu", lambda h: h.use.utilization))
    yield Family(
        "container_gpu_memory_total", "gpu memory usage in MiB", each("gpu_memory", lambda h: mib(h.use.memory))
    )
    yield Family(
        "container_request_gpu_utilization",
        "request of gpu utilization",
        each("req_of_gpu", lambda h: part(h.cores), total=True),
    )
    yield Family(
        "container_request_gpu_memory",
        "request of gpu memory in MiB",
        each("req_of_gpu_memory", lambda h: mib(h.memory), total=True),
    )


def hami_use_families(shares: NodeShares, hardware: Topology) -> Iterator[Family]:
    """The families under HAMi's monitor's names, in bytes and percent; `vdevice_index`: per container, from 0."""
    yield from hami_hosts(shares, hardware)
    seen: dict[tuple[str, ...], int] = {}
    containers: list[tuple[dict[str, str], DeviceShares, HolderUse]] = []
    for row, holder, owned in known_holders(shares):
        key = tuple(owned.values())
        index = seen[key] = seen.get(key, -1) + 1
        containers.append(({**owned, "vdevice_index": str(index), "device_uuid": row.device}, row, holder))
    memory: list[Sample] = [(labels, holder.use.memory) for labels, _, holder in containers]
    yield Family("hami_vgpu_memory_used_bytes", "GPU memory used by a container", memory)
    yield Family(
        "hami_vgpu_memory_limit_bytes", "GPU memory given to a container", [(at, h.memory) for at, _, h in containers]
    )
    yield Family("hami_container_device_memory_bytes", "GPU memory used by a container", memory)
    yield Family(
        "hami_container_device_utilization_ratio",
        "GPU utilization of a container, 0 to 100",
        [(at, h.use.utilization) for at, _, h in containers],
    )
    instance_labels = {
        instance.uuid: {
            "device_uuid": gpu.id,
            "mig_uuid": instance.uuid,
            "profile": instance.profile,
            "gpu_instance_id": str(instance.gpu_instance),
            "compute_instance_id": str(instance.compute_instance),
        }
        for gpu in hardware.gpus
        for instance in gpu.mig or ()
    }
    yield Family(
        "hami_mig_device_info",
        "1 for each MIG instance of a container",
        [({**at, **instance_labels[row.device]}, 1) for at, row, _ in containers if row.device in instance_labels],
    )
    yield from hami_library(shares.time, [(at, h.library) for at, _, h in containers if h.library is not None])


def hami_hosts(shares: NodeShares, hardware: Topology) -> Iterator[Family]:
    """The families of whole GPUs. As in HAMi, the last one has no label `node`."""
    hosts: list[tuple[dict[str, str], DeviceShares]] = [
        (
            {
                "node": shares.node,
                "device_index": str(gpu.index),
                "device_uuid": row.device,
                "device_type": f"NVIDIA-{gpu.name}",
            },
            row,
        )
        for row in shares.devices
        if row.device == row.gpu
        for gpu in [hardware.gpu_by_id[row.gpu]]
    ]
    yield Family("hami_host_gpu_memory_used_bytes", "GPU memory in use", [(at, row.memory_used) for at, row in hosts])
    yield Family(
        "hami_host_gpu_utilization_ratio", "GPU utilization, 0 to 100", [(at, row.utilization) for at, row in hosts]
    )
    yield Family(
        "hami_host_gpu_memory_controller_utilization_ratio",
        "Utilization of a GPU's memory, 0 to 100",
        [({name: at[name] for name in at if name != "node"}, row.memory_utilization) for at, row in hosts],
    )


def hami_library(now: float, counts: Sequence[tuple[Mapping[str, str], LibraryCount]]) -> Iterator[Family]:
    """The families from the files of HAMi-core, as HAMi's monitor reads them. `now`: Unix time in seconds."""
    name = "hami_vgpu_memory_"
    yield Family(f"{name}context_bytes", "GPU memory of CUDA contexts", [(at, each.context) for at, each in counts])
    yield Family(f"{name}module_bytes", "GPU memory of programs", [(at, each.modules) for at, each in counts])
    yield Family(f"{name}buffer_bytes", "GPU memory of buffers", [(at, each.buffers) for at, each in counts])
    yield Family(
        "hami_container_last_kernel_elapsed_seconds",
        "Seconds since the newest kernel of a container",
        [(at, None if each.last_kernel is None else max(0, int(now) - each.last_kernel)) for at, each in counts],
    )


def known_holders(shares: NodeShares) -> Iterator[tuple[DeviceShares, HolderUse, dict[str, str]]]:
    """Yields each device with each known container that holds it, and the labels of the container's name."""
    for row in shares.devices:
        for holder in row.holders:
            if (owner := holder.owner) is not None:
                yield row, holder, {"namespace": owner.namespace, "pod": owner.pod, "container": owner.container}


def device_labels(row: DeviceShares) -> dict[str, str]:
    """The labels of a GPU or an instance."""
    return {"gpu_uuid": row.gpu, "mig_uuid": "" if row.device == row.gpu else row.device}


def part(percent: int | None) -> float | None:
    """Converts percent to a ratio."""
    return None if percent is None else percent / CORES


def mib(size: int | None) -> float | None:
    """Converts bytes to MiB."""
    return None if size is None else size / MIB


# The allocated and free amounts of each GPU come from the record, without a measurement. A GPU shared by time slicing
# or MPS has no samples of memory and time, and a GPU in MIG mode has no samples of time. Source of the other names and
# labels: HAMi's scheduler, 0511293c; its ratios are percent, except `hami_node_gpu_memory_allocated_ratio`.


class Amounts(NamedTuple):
    """The amounts of parts of a GPU; None: unknown, or the parts do not have this amount."""

    cores: int | None
    """Hundredths of its computing time."""
    memory: int | None
    """Bytes."""
    slots: int | None
    """Number of slots, time slices or MPS shares."""


class GpuUsage(NamedTuple):
    """The offered, allocated and free amounts of one GPU."""

    gpu: Gpu
    containers: int
    """Number of containers that hold the GPU or a part of it, except those whose parts are all reused by later ones."""
    offered: Amounts
    asked: Amounts
    """The allocated amounts. Parts of an init container that later containers reuse count once."""
    left: Amounts
    """The free amounts."""


def gpu_usages(divided: Mapping[DeviceID, GpuPartitioning], hardware: Topology) -> list[GpuUsage]:
    """All GPUs of a node."""
    return [
        GpuUsage(
            gpu=gpu,
            containers=sum(any(each.alone) for each in division.held),
            offered=sum_parts(gpu, division, [division.offered]),
            asked=sum_granted(gpu, division),
            left=sum_parts(gpu, division, [division.left]),
        )
        for gpu in hardware.gpus
        if (division := divided.get(gpu.id)) is not None
    ]


def sum_granted(gpu: Gpu, division: GpuPartitioning) -> Amounts:
    """
    The allocated amounts of a GPU. A container with all units of computing time has all memory until its allocation
    ends, even if it is an init container and a later container reuses some of its units. Two containers with half of
    the time each have only their own units of memory.
    """
    found = sum_parts(gpu, division, [each.alone for each in division.held])
    if found.memory is None or not any(has_all_time(each.parts) for each in division.held):
        return found
    return found._replace(memory=None if gpu.memory is None else max(found.memory, gpu.memory))


def has_all_time(parts: Parts) -> bool:
    """Whether these are all units of a GPU's computing time. False for slots, whose memory is a separate amount."""
    return parts.cores >= CORES and not parts.slots


def sum_parts(gpu: Gpu, division: GpuPartitioning, parts: Iterable[Parts]) -> Amounts:
    """The sum of these parts of a GPU."""
    found = list(parts)
    held = [each.parts for each in division.held]
    sliced = not {"time slices", "MPS"}.isdisjoint(division.ways) or any(each.slices for each in held)
    slotted = sliced or "slots" in division.ways or any(each.slots for each in held)
    slots = sum(each.slots + each.slices for each in found) if slotted else None
    if sliced:
        return Amounts(None, None, slots)
    sizes = [gpu.memory if has_all_time(each) and not slotted else memory_of_parts(gpu, each) for each in found]
    known = [size for size in sizes if size is not None]
    memory = None if len(known) < len(sizes) else sum(known)
    if not slotted and memory is not None and gpu.memory is not None:
        memory = min(memory, gpu.memory)  # a container with all computing time has all memory
    cores = sum(CORES if each.whole else each.cores for each in found)
    return Amounts(None if gpu.mig is not None else cores, memory, slots)


def memory_of_parts(gpu: Gpu, parts: Parts) -> int | None:
    """The memory of these parts of a GPU, in bytes. None: unknown."""
    if parts.whole:
        return gpu.memory
    sizes = {each.profile: each.memory for each in gpu.mig or ()}
    instances = [sizes.get(profile) for profile in parts.instances]
    known = [size for size in instances if size is not None]
    return None if len(known) < len(instances) else parts.memory + sum(known)


def own_partition_families(rows: Sequence[GpuUsage]) -> Iterator[Family]:
    """The families under topoalign's names: `gpu_uuid` is the GPU, including its MIG instances."""
    values: dict[str, tuple[str, Callable[[GpuUsage], float | None]]] = {
        "containers": ("Containers that hold a part of a GPU, or all.", lambda r: r.containers),
        "memory_asked_bytes": ("Memory of a GPU that containers were given.", lambda r: r.asked.memory),
        "memory_left_bytes": ("Memory of a GPU that may still be given.", lambda r: r.left.memory),
        "time_asked_ratio": ("Part of a GPU's time that containers were given.", lambda r: part(r.asked.cores)),
        "time_left_ratio": ("Part of a GPU's time that may still be given.", lambda r: part(r.left.cores)),
        "slots_asked": (
            "Slots, time slices or MPS shares of a GPU that containers were given.",
            lambda r: r.asked.slots,
        ),
        "slots_left": ("Slots, time slices or MPS shares of a GPU that may still be given.", lambda r: r.left.slots),
    }
    for name, (meaning, value) in values.items():
        samples = [({"gpu_uuid": row.gpu.id, "mig_uuid": ""}, value(row)) for row in rows]
        yield Family(f"topoalign_gpu_{name}", meaning, samples)


def hami_partition_families(rows: Iterable[GpuUsage], node: NodeName) -> Iterator[Family]:
    """The families under the names of HAMi's scheduler, in bytes and in percent of the offered amounts."""
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
        [(to, CORES if row.offered.cores else None) for to, row in at],
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


def core_percent(row: GpuUsage) -> float | None:
    """Allocated cores as percent of the offered ones, rounded up as in HAMi."""
    if row.asked.cores is None or not row.offered.cores:
        return None
    return float(-(-row.asked.cores * CORES // row.offered.cores))
