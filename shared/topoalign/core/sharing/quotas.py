"""
What a ResourceQuota's `limits.<resource>` allows a namespace of the memory and computing time of GPUs.

Kubernetes counts `requests.<resource>` of what a pod names, and passes `limits.<resource>` over for extended resources. HAMi
promised it for amounts that are meant for each GPU: they count once for each GPU of the container. Units are sums already
and count as they are. A pod holds what its containers have together, or the most that one of its init containers has
(`largest_moment`):

    init container   2 GPUs, 3000 of nvidia.com/gpumem    6000
    app containers   1 GPU, 4000 and 1 GPU, 1000          5000      the pod holds 6000

This is counted before it is known on which GPUs containers come, and does not change with it: two init containers with 1024
each hold 1024. HAMi counts card by card, so that they hold 2048 on two cards.

Amounts in hundredths of a GPU's memory depend on the GPU and are not counted. Of several quotas the lowest limit counts;
0 allows nothing. Source: HAMi 4707fb02, QuotaManager; sidecars as in Kubernetes' own quotas.
"""

from collections.abc import Iterable, Mapping

from topoalign.core.demand.quantities import device_limits, pod_wide
from topoalign.core.demand.slots import SlotResources
from topoalign.core.model.errors import NoFit, clean
from topoalign.core.model.ids import GPU, ResourceName
from topoalign.core.model.requests import ContainerRequest, PodRequest
from topoalign.core.model.topology.offers import Slots

Amounts = Mapping[ResourceName, int]
PerGpu = Mapping[ResourceName, frozenset[ResourceName]]
"""Amounts that are meant for each GPU -> the resources that say of how many."""

HAMI: PerGpu = dict.fromkeys((Slots().memory, Slots().cores), frozenset({GPU}))
"""What they are called where nobody has renamed them."""


class OverQuota(NoFit):
    """Raised for a pod that asks for more of GPUs than its namespace may still hold."""

    code = "OverQuota"

    def __init__(
        self, namespace: str, resource: ResourceName, asked: int, used: int, limit: int, who: str = "this pod"
    ) -> None:
        """`who`: asks for it."""
        self.namespace, self.resource = namespace, resource
        super().__init__(
            f"namespace {clean(namespace)}: limits.{clean(resource)} of its ResourceQuota is {limit}, "
            f"its pods hold {used}, and {who} asks for {asked}",
            "ask for less, wait until pods of the namespace end, or raise the ResourceQuota",
        )


def amounts_per_gpu(slots: Iterable[SlotResources]) -> PerGpu:
    """Those of HAMi, and what slots that are offered call them."""
    found = dict(HAMI)
    for each in slots:
        for name in (each.slots.memory, each.slots.cores):
            found[name] = found.get(name, frozenset()) | {each.resource}
    return found


def quota_amounts(pod: PodRequest, per_gpu: PerGpu = HAMI) -> dict[ResourceName, int]:
    """What a pod holds of each extended resource, as quotas count it, whether any quota is about that or not."""
    return pod_wide(pod, lambda container: container_amounts(container, per_gpu))


def container_amounts(container: ContainerRequest, per_gpu: PerGpu = HAMI) -> dict[ResourceName, int]:
    """The same of one container. One that does not say of how many GPUs is of one."""
    limits = device_limits(container)

    def gpus(name: ResourceName) -> int:
        said = [limits[each] for each in per_gpu.get(name, ()) if each in limits]
        return sum(said) if said else 1

    return {name: amount * gpus(name) for name, amount in limits.items()}


def lowest_limits(quotas: Iterable[Amounts]) -> dict[ResourceName, int]:
    """What all quotas of a namespace together allow."""
    found: dict[ResourceName, int] = {}
    for quota in quotas:
        for name, limit in quota.items():
            found[name] = min(limit, found.get(name, limit))
    return found


def total(amounts: Iterable[Amounts]) -> dict[ResourceName, int]:
    """What several pods hold together."""
    found: dict[ResourceName, int] = {}
    for each in amounts:
        for name, amount in each.items():
            found[name] = found.get(name, 0) + amount
    return found


def check_quota(namespace: str, asked: Amounts, used: Amounts, limits: Amounts, who: str = "this pod") -> None:
    """Raises OverQuota where `who` asks for more than is left of a limit of the namespace."""
    for name in sorted(asked.keys() & limits.keys()):
        if asked[name] and used.get(name, 0) + asked[name] > limits[name]:
            raise OverQuota(namespace, name, asked[name], used.get(name, 0), limits[name], who)
