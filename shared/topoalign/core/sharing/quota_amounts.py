"""
Computes how much memory and computing time of GPUs a namespace can use under `limits.<resource>` in its ResourceQuotas.

For extended resources, Kubernetes enforces `requests.<resource>` and ignores `limits.<resource>`. As in HAMi, an amount
per GPU is multiplied by the container's number of GPUs. Amounts in units are already totals. The usage of a pod is the
larger of the sum over its app containers and the maximum over its init containers (`largest_moment`):

    init container   2 GPUs, 3000 of nvidia.com/gpumem    6000
    app containers   1 GPU, 4000 and 1 GPU, 1000          5000      the pod uses 6000

The usage does not depend on which GPUs the containers get: two init containers with 1024 each use 1024. HAMi counts
each GPU separately, so on two GPUs they use 2048.

A container can request GPU memory without an amount: as a percentage, as whole GPUs, or as slots or units with all
memory of a GPU. Then its usage is computed from the largest GPU of its node (`GpuSizes`). A whole GPU counts as 100
cores. Example, on a node with GPUs of 40960 MiB:

    2 GPUs, 40 of nvidia.com/gpumem-percentage    32768 of nvidia.com/gpumem
    1 GPU                                         40960 of nvidia.com/gpumem and 100 of nvidia.com/gpucores

Before the node is known, only requested amounts count. Time slices have no amount and do not count. If there are
several quotas, the lowest limit applies. A limit of 0 allows nothing. Sidecars count as in Kubernetes' own quotas.

Source: HAMi 4707fb02, QuotaManager.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from topoalign.core.demand.resource_quantities import Quantities, device_limits, pod_wide
from topoalign.core.demand.shares import (
    ALL_MEMORY,
    SlotResources,
    UnitResources,
    read_hami_request,
    slot_resources,
    unit_resources,
)
from topoalign.core.model.byte_sizes import MIB
from topoalign.core.model.errors import NoFit, clean
from topoalign.core.model.ids import GPU, ResourceName
from topoalign.core.model.requests import ContainerRequest, PodRequest
from topoalign.core.model.topology.derived_tables import computed_once
from topoalign.core.model.topology.device_offers import CORES, Slots
from topoalign.core.model.topology.model import Topology

Amounts = Mapping[ResourceName, int]
PerGpu = Mapping[ResourceName, frozenset[ResourceName]]
"""Resource of an amount per GPU -> the resources whose quantity is the number of GPUs."""

HAMI: PerGpu = dict.fromkeys((Slots().memory, Slots().cores), frozenset({GPU}))


class OverQuota(NoFit):
    """Raised if a pod requests more memory or computing time of GPUs than remains in the quota of its namespace."""

    def __init__(
        self, namespace: str, resource: ResourceName, asked: int, used: int, limit: int, who: str = "this pod"
    ) -> None:
        """`who`: the requester, for the message."""
        self.namespace = namespace
        self.resource = resource
        super().__init__(
            f"namespace {clean(namespace)}: limits.{clean(resource)} of its ResourceQuota is {limit}, "
            f"its pods hold {used}, and {who} asks for {asked}",
            "ask for less, wait until pods of the namespace end, or raise the ResourceQuota",
        )


def amounts_per_gpu(slots: Iterable[SlotResources]) -> PerGpu:
    """HAMi's resources of amounts per GPU, and those of the offered slots."""
    found = dict(HAMI)
    for each in slots:
        for name in (each.slots.memory, each.slots.cores):
            found[name] = found.get(name, frozenset()) | {each.resource}
    return found


class GpuSizes(NamedTuple):
    """The sizes of a node's GPUs, for containers that request no amount."""

    gpus: tuple[SlotResources, ...] = ()
    """GPUs and MIG instances that are offered whole or in slots."""
    units: UnitResources | None = None
    """GPUs that are offered in units."""


UNKNOWN_SIZES = GpuSizes()


@computed_once
def gpu_sizes(topology: Topology) -> GpuSizes:
    """The sizes of the GPUs of a node with this hardware. Unknown sizes count as 0."""
    memory = {gpu.id: gpu.memory or 0 for gpu in topology.gpus}
    memory |= {instance.uuid: instance.memory for gpu in topology.gpus for instance in gpu.mig or ()}
    whole: dict[ResourceName, int] = {}
    for offer in topology.offered:
        known = [memory[base] // MIB for base in offer.devices if base in memory]
        if known and not offer.shared:
            whole[offer.resource] = max(whole.get(offer.resource, 0), *known)
    sizes = (SlotResources(resource, Slots(), most) for resource, most in whole.items())
    return GpuSizes((*slot_resources(topology), *sizes), unit_resources(topology))


def quota_amounts(pod: PodRequest, per_gpu: PerGpu = HAMI, sizes: GpuSizes = UNKNOWN_SIZES) -> dict[ResourceName, int]:
    """Extended resource -> the pod's usage that counts for quotas, on a node with GPUs of these sizes."""

    def amounts(container: ContainerRequest) -> dict[ResourceName, int]:
        limits = device_limits(container)
        found = {}
        for name, amount in limits.items():
            gpus = [limits[each] for each in per_gpu.get(name, ()) if each in limits]
            found[name] = amount * (sum(gpus) if gpus else 1)  # without a number of GPUs, for one GPU
        for name, amount in _unnamed_amounts(limits, per_gpu, sizes):
            found[name] = found.get(name, 0) + amount
        return found

    return pod_wide(pod, amounts)


def _unnamed_amounts(limits: Quantities, per_gpu: PerGpu, sizes: GpuSizes) -> Iterator[tuple[ResourceName, int]]:
    """The amounts that a container uses without naming them in its limits."""
    for resource, slots, most in sizes.gpus:
        asked = read_hami_request(resource, slots, limits)
        if not asked.count or resource not in per_gpu.get(slots.memory, ()):
            continue
        if not limits.get(slots.memory):
            yield slots.memory, asked.count * asked.memory_of(most)
            if asked.percent == ALL_MEMORY and slots.cores not in limits:
                yield slots.cores, asked.count * CORES
    if sizes.units is not None:
        named = {unit: name for name, unit in sizes.units.units}
        whole = limits.get(named["cores"], 0) // CORES if "cores" in named else 0
        if whole and "memory" in named and not limits.get(named["memory"]):
            yield named["memory"], whole * sizes.units.most


def lowest_limits(quotas: Iterable[Amounts]) -> dict[ResourceName, int]:
    """The lowest limit of each resource in these quotas."""
    found: dict[ResourceName, int] = {}
    for quota in quotas:
        for name, limit in quota.items():
            found[name] = min(limit, found.get(name, limit))
    return found


def sum_quota_amounts(amounts: Iterable[Amounts]) -> dict[ResourceName, int]:
    """The total usage of several pods."""
    found = Counter[ResourceName]()
    for each in amounts:
        found.update(each)
    return dict(found)


def check_quota(namespace: str, asked: Amounts, used: Amounts, limits: Amounts, who: str = "this pod") -> None:
    """Raises OverQuota if `who` requests more than remains of a limit of the namespace."""
    for name in sorted(asked.keys() & limits.keys()):
        if asked[name] and used.get(name, 0) + asked[name] > limits[name]:
            raise OverQuota(namespace, name, asked[name], used.get(name, 0), limits[name], who)
