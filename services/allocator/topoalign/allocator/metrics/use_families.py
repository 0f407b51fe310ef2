"""
The use of GPUs as families of metrics: under our names, those of gpu-manager (Gaia), and those of HAMi's monitor.

What is not known has no sample. Utilisation is a ratio, 1 for all of the time, under our names; percent under the others'.
Labels of others: gpu-manager 8cd842ed and HAMi's vGPUmonitor, v2.9.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from topoalign.core.model.allocations import Owner
from topoalign.core.model.library_use import LibraryCount
from topoalign.core.model.topology.mig import MigDevice
from topoalign.core.model.topology.model import Topology
from topoalign.core.usage.attribution import WHOLE_DEVICE, DeviceShares, HolderUse, NodeShares
from topoalign.core.usage.excess import Excess
from topoalign.runtime.series import header, line

MIB = 1 << 20

Labels = tuple[tuple[str, str], ...]
Sample = tuple[Mapping[str, str], float | None]


class Family(NamedTuple):
    """One gauge with its samples. Those with equal labels are added up; where one of them is not known, nor is the sum."""

    name: str
    meaning: str
    samples: Iterable[Sample]


def text(families: Iterable[Family]) -> bytes:
    """The families in the form that Prometheus reads; nothing of those without samples."""
    return b"".join(chunk for family in families for chunk in lines(family))


def lines(family: Family) -> Iterator[bytes]:
    """One family, line by line."""
    sums: dict[Labels, float | None] = {}
    for labels, value in family.samples:
        key = tuple(labels.items())
        before = sums.get(key, 0.0)
        sums[key] = None if before is None or value is None else before + value
    known = [(key, total) for key, total in sums.items() if total is not None]
    if known:
        yield header(family.name, family.meaning)
    for key, total in known:
        yield line(family.name, total, **dict(key))


def own(shares: NodeShares, lasting: Iterable[Excess]) -> Iterator[Family]:
    """Under our names: `gpu_uuid` is the GPU, `mig_uuid` the instance on it, or empty."""

    def each(value: Callable[[HolderUse], float | None]) -> list[Sample]:
        return [({**device_labels(row), **owned}, value(holder)) for row, holder, owned in held(shares)]

    above = {(each.device, each.holder.allocations) for each in lasting}
    rows = [(row, device_labels(row)) for row in shares.devices]
    name = "topoalign_container_gpu_"
    yield Family(f"{name}memory_asked_bytes", "GPU memory that a container was given.", each(lambda h: h.memory))
    yield Family(f"{name}memory_used_bytes", "GPU memory that a container uses.", each(lambda h: h.use.memory))
    yield Family(f"{name}memory_left_bytes", "GPU memory that is given and not used.", each(lambda h: h.memory_left))
    yield Family(
        f"{name}time_asked_ratio",
        "Part of a GPU's time that a container was given.",
        each(lambda h: part(h.cores)),
    )
    yield Family(
        f"{name}time_used_ratio",
        "Part of the last second in which kernels of a container ran.",
        each(lambda h: part(h.use.utilization)),
    )
    yield Family(
        f"{name}memory_exceeded",
        "1 for a container that used more GPU memory than it was given in three measurements in a row.",
        [
            ({**device_labels(row), **owned}, 1.0)
            for row, holder, owned in held(shares)
            if (row.device, holder.allocations) in above
        ],
    )
    yield from own_library(each)
    yield Family("topoalign_gpu_memory_bytes", "Memory of a GPU.", [(labels, row.memory) for row, labels in rows])
    yield Family(
        "topoalign_gpu_memory_used_bytes",
        "Memory of a GPU that is in use, what its driver needs among it.",
        [(labels, row.memory_used) for row, labels in rows],
    )
    yield Family(
        "topoalign_gpu_other_processes",
        "Processes on a GPU that hold nothing of it: in a pod, on the host (in none), or nobody knows where.",
        [({**labels, "where": other.where}, len(other.use.processes)) for row, labels in rows for other in row.others],
    )
    yield Family(
        "topoalign_gpu_other_memory_used_bytes",
        "Memory of a GPU that these processes use.",
        [({**labels, "where": other.where}, other.use.memory) for row, labels in rows for other in row.others],
    )


def own_library(each: Callable[[Callable[[HolderUse], float | None]], list[Sample]]) -> Iterator[Family]:
    """What the libraries that limit containers count, by files that the containers write."""
    name = "topoalign_container_gpu_library_"
    yield Family(
        f"{name}memory_bytes",
        "GPU memory that the library which limits a container counts, as the container says.",
        each(lambda h: None if h.library is None else h.library.memory),
    )
    yield Family(
        f"{name}time_ratio",
        "Part of the last second in which kernels of a container ran, as the library in it says.",
        each(lambda h: None if h.library is None else part(h.library.utilization)),
    )


def gaia(shares: NodeShares, hardware: Topology) -> Iterator[Family]:
    """Under gpu-manager's names: percent, MiB, and cards; each container also in total."""

    def each(label: str, value: Callable[[HolderUse], float | None], *, total: bool = False) -> list[Sample]:
        found: list[Sample] = []
        for row, holder, of in held(shares):
            labels = {
                "pod_name": of["pod"],
                "namespace": of["namespace"],
                "node": shares.node,
                "container_name": of["container"],
            }
            if not total:
                found.append(({**labels, label: f"gpu{hardware.gpu_by_id[row.card].index}"}, value(holder)))
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


def hami(shares: NodeShares, hardware: Topology) -> Iterator[Family]:
    """Under the names of HAMi's monitor: bytes and percent; `vdevice_index` counts a container's devices."""
    yield from hami_hosts(shares, hardware)
    seen: dict[tuple[str, ...], int] = {}
    containers: list[tuple[dict[str, str], DeviceShares, HolderUse]] = []
    for row, holder, owned in held(shares):
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
    instances = {each.uuid: each for gpu in hardware.gpus for each in gpu.mig or ()}
    yield Family(
        "hami_mig_device_info",
        "1 for each MIG instance of a container",
        [
            ({**at, "device_uuid": row.card, **instance_labels(instances[row.device])}, 1)
            for at, row, _ in containers
            if row.device in instances
        ],
    )
    yield from hami_library(shares.time, [(at, h.library) for at, _, h in containers if h.library is not None])


def hami_hosts(shares: NodeShares, hardware: Topology) -> Iterator[Family]:
    """Those of whole GPUs; HAMi has no label `node` at the last."""
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
        if row.device == row.card
        for gpu in [hardware.gpu_by_id[row.card]]
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


def instance_labels(instance: MigDevice) -> dict[str, str]:
    """The labels by which HAMi's monitor tells a MIG instance."""
    return {
        "mig_uuid": instance.uuid,
        "profile": instance.profile,
        "gpu_instance_id": str(instance.gpu_instance),
        "compute_instance_id": str(instance.compute_instance),
    }


def hami_library(now: float, counts: Sequence[tuple[Mapping[str, str], LibraryCount]]) -> Iterator[Family]:
    """What only the files of HAMi-core tell, as HAMi's monitor reads them. `now`: wall seconds."""
    name = "hami_vgpu_memory_"
    yield Family(f"{name}context_bytes", "GPU memory of CUDA contexts", [(at, each.context) for at, each in counts])
    yield Family(f"{name}module_bytes", "GPU memory of programs", [(at, each.modules) for at, each in counts])
    yield Family(f"{name}buffer_bytes", "GPU memory of buffers", [(at, each.buffers) for at, each in counts])
    yield Family(
        "hami_container_last_kernel_elapsed_seconds",
        "Seconds since the newest kernel of a container",
        [(at, None if each.last_kernel is None else max(0, int(now) - each.last_kernel)) for at, each in counts],
    )


def held(shares: NodeShares) -> Iterator[tuple[DeviceShares, HolderUse, dict[str, str]]]:
    """Each container that is known with each device that it holds, and the labels that name it."""
    for row in shares.devices:
        for holder in row.holders:
            if holder.owner is not None:
                yield row, holder, owner_labels(holder.owner)


def owner_labels(owner: Owner) -> dict[str, str]:
    """The labels of a container."""
    return {"namespace": owner.namespace, "pod": owner.pod, "container": owner.container}


def device_labels(row: DeviceShares) -> dict[str, str]:
    """The labels of a GPU or an instance."""
    return {"gpu_uuid": row.card, "mig_uuid": "" if row.device == row.card else row.device}


def part(percent: int | None) -> float | None:
    """Hundredths as a ratio."""
    return None if percent is None else percent / WHOLE_DEVICE


def mib(size: int | None) -> float | None:
    """Bytes in MiB."""
    return None if size is None else size / MIB
