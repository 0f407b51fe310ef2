"""
Computes what a container or a whole pod asks of each resource manager.

Each manager uses other amounts: the device manager uses limits, the CPU manager the whole CPUs of containers that may
have exclusive CPUs, the memory manager memory and hugepages. For a whole pod each applies the same formula
(`largest_moment`), because init containers run one after another, but together with the sidecars started before them
(kubelet v1.36.3; effective request). Quotas count by it, too.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from topoalign.core.model.ids import CPU, MEMORY, ResourceName, is_hugepages, is_native
from topoalign.core.model.requests import ContainerRequest, PodRequest
from topoalign.core.profile import Profile

Quantities = Mapping[ResourceName, int]
Key = TypeVar("Key")
"""What amounts are of: resources, or GPUs."""


def effective_requests(container: ContainerRequest) -> dict[ResourceName, int]:
    """The requests; a resource with a limit alone is requested up to it, as the API server fills it in."""
    return {**container.limits, **container.requests}


def pod_wide(pod: PodRequest, part: Callable[[ContainerRequest], Quantities]) -> dict[ResourceName, int]:
    """The effective request of a pod, where `part` gives what each container contributes."""
    return largest_moment(
        [(part(each), each.sidecar) for each in pod.init_containers], [part(each) for each in pod.containers]
    )


def largest_moment(init: Iterable[tuple[Mapping[Key, int], bool]], apps: Iterable[Mapping[Key, int]]) -> dict[Key, int]:
    """
    The most that a pod needs of each thing at any moment. `init`: what each of its init containers needs, in their order,
    and whether it is a sidecar; `apps`: what each of its app containers needs.

    A plain init container needs its own amount in addition to those of the sidecars before it; the app containers run
    together with all sidecars. The larger of the two is needed: init containers of 4 and 1 GPUs and an app of 2 need 4.
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
    """What device plugins are asked for, in devices."""
    return {name: amount for name, amount in container.limits.items() if not is_native(name)}


def may_be_exclusive(pod: PodRequest, profile: Profile) -> bool:
    """Whether containers of the pod may have CPUs and memory of their own."""
    return pod.gets_exclusive_resources if profile.exclusive_by_qos else not pod.has_pod_level_resources


def exclusive_cpus(pod: PodRequest, container: ContainerRequest, profile: Profile) -> int:
    """How many CPUs the container gets to itself; 0: it runs in the shared pool."""
    millicores = effective_requests(container).get(CPU, 0)
    if millicores % 1000 or not may_be_exclusive(pod, profile):
        return 0
    firm = profile.exclusive_by_qos or container.limits.get(CPU) == millicores
    return millicores // 1000 if firm else 0


def pod_cpus(pod: PodRequest, profile: Profile) -> int:
    """How many CPUs the containers of a pod have to themselves at a time."""
    return pod_wide(pod, lambda each: {CPU: exclusive_cpus(pod, each, profile)})[CPU]


def memory_part(container: ContainerRequest, profile: Profile) -> dict[ResourceName, int]:
    """Memory and hugepages of one container, in bytes; in mode `best` only what is asked for firmly."""
    amounts = {
        name: amount for name, amount in effective_requests(container).items() if name == MEMORY or is_hugepages(name)
    }
    if profile.exclusive_by_qos:
        return amounts
    return {name: amount for name, amount in amounts.items() if amount and container.limits.get(name) == amount}


def pod_memory(pod: PodRequest, profile: Profile) -> dict[ResourceName, int]:
    """What the memory manager is to place for a whole pod, in bytes."""
    amounts = pod_wide(pod, lambda each: memory_part(each, profile))
    if not profile.drops_memory_of_init_containers:
        return amounts
    # the kubelet drops the names that no app container has
    wanted = {name for each in pod.containers for name in memory_part(each, profile)}
    return {name: amount for name, amount in amounts.items() if name in wanted}
