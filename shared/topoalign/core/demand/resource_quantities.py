"""
Computes the requests of a container or of a whole pod to each resource manager.

The managers use different amounts. The device manager uses limits. The CPU manager uses the whole CPUs of containers
that can have exclusive CPUs. The memory manager uses memory and hugepages. For a whole pod, all managers apply the
formula of the effective request (`largest_moment`), because init containers run one after another, but at the same time
as the sidecars that started before them (kubelet v1.36.3). Quotas use this formula, too.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from topoalign.core.model.ids import CPU, MEMORY, ResourceName, is_hugepages, is_native
from topoalign.core.model.requests import ContainerRequest, PodRequest
from topoalign.core.profile import Profile

Quantities = Mapping[ResourceName, int]
Key = TypeVar("Key")
"""The keys of the amounts: resources or GPUs."""


def effective_requests(container: ContainerRequest) -> dict[ResourceName, int]:
    """The requests. If a resource has only a limit, this is also its request, as the API server sets it."""
    return {**container.limits, **container.requests}


def pod_wide(pod: PodRequest, part: Callable[[ContainerRequest], Quantities]) -> dict[ResourceName, int]:
    """The effective request of a pod. `part`: computes the amounts of one container."""
    return largest_moment(
        [(part(each), each.sidecar) for each in pod.init_containers], [part(each) for each in pod.containers]
    )


def largest_moment(init: Iterable[tuple[Mapping[Key, int], bool]], apps: Iterable[Mapping[Key, int]]) -> dict[Key, int]:
    """
    The maximum amounts that a pod needs at any time. `init`: the amounts of each init container, in their order, and
    whether it is a sidecar. `apps`: the amounts of each app container.

    A plain init container runs together with the sidecars before it, and the app containers run together with all
    sidecars. The larger sum is needed: init containers with 4 and 1 GPUs and an app container with 2 GPUs need 4 GPUs.
    """
    sidecars: dict[Key, int] = {}
    starting: dict[Key, int] = {}
    for own, is_sidecar in init:
        needed = _add_quantities(sidecars, own)
        if is_sidecar:
            sidecars = needed
        starting = {name: max(starting.get(name, 0), needed.get(name, 0)) for name in {**starting, **needed}}
    running = sidecars
    for own in apps:
        running = _add_quantities(running, own)
    return {name: max(starting.get(name, 0), running.get(name, 0)) for name in {**starting, **running}}


def _add_quantities(a: Mapping[Key, int], b: Mapping[Key, int]) -> dict[Key, int]:
    return {name: a.get(name, 0) + b.get(name, 0) for name in {**a, **b}}


def device_limits(container: ContainerRequest) -> dict[ResourceName, int]:
    """The number of requested devices of each device plugin resource."""
    return {name: amount for name, amount in container.limits.items() if not is_native(name)}


def may_be_exclusive(pod: PodRequest, profile: Profile) -> bool:
    """Whether containers of the pod can have exclusive CPUs and memory."""
    return pod.gets_exclusive_resources if profile.exclusive_by_qos else not pod.has_pod_level_resources


def exclusive_cpus(pod: PodRequest, container: ContainerRequest, profile: Profile) -> int:
    """Number of exclusive CPUs of the container. 0: it runs in the shared pool."""
    millicores = effective_requests(container).get(CPU, 0)
    if millicores % 1000 or not may_be_exclusive(pod, profile):
        return 0
    firm = profile.exclusive_by_qos or container.limits.get(CPU) == millicores
    return millicores // 1000 if firm else 0


def pod_cpus(pod: PodRequest, profile: Profile) -> int:
    """The maximum number of exclusive CPUs that the containers of a pod have at the same time."""
    return pod_wide(pod, lambda each: {CPU: exclusive_cpus(pod, each, profile)})[CPU]


def memory_part(container: ContainerRequest, profile: Profile) -> dict[ResourceName, int]:
    """Memory and hugepages of one container, in bytes. In mode `best`, only requests that equal their limits."""
    amounts = {
        name: amount for name, amount in effective_requests(container).items() if name == MEMORY or is_hugepages(name)
    }
    if profile.exclusive_by_qos:
        return amounts
    return {name: amount for name, amount in amounts.items() if amount and container.limits.get(name) == amount}


def pod_memory(pod: PodRequest, profile: Profile) -> dict[ResourceName, int]:
    """The memory and hugepages that the memory manager allocates for a whole pod, in bytes."""
    amounts = pod_wide(pod, lambda each: memory_part(each, profile))
    if not profile.drops_memory_of_init_containers:
        return amounts
    # the kubelet drops resources that no app container requests
    wanted = {name for each in pod.containers for name in memory_part(each, profile)}
    return {name: amount for name, amount in amounts.items() if name in wanted}
