"""
Which single change of a pod, or of its kubelet's rules, makes it fit: found by making the decision with the change.

- **less of one resource**: the most that one container can ask for of it: devices, whole CPUs, GiB of memory;
- **other rules**: alignment of the pod instead of its containers, or the reverse; the strictest of the other policies.

    8 GPUs, policy single-numa-node, two NUMA nodes with four GPUs each
    ask for 4 instead of 8 nvidia.com/gpu; set topologyManagerPolicy: restricted
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from topoalign.core.model.errors import clean, quoted
from topoalign.core.model.ids import CPU, MEMORY, ContainerName, ResourceName, is_hugepages, is_native
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, Mode, PodRequest, Policy, Scope
from topoalign.core.placement.memory import format_gib
from topoalign.core.profile import profile_of

UNITS = {CPU: 1000, MEMORY: 1 << 30}
"""In what steps less is asked for; devices one by one, hugepages not at all."""
OTHER_SCOPES: tuple[dict[str, str], ...] = tuple({"scope": scope.value} for scope in Scope)
OTHER_POLICIES: tuple[dict[str, str], ...] = tuple({"policy": policy.value} for policy in reversed(Policy))[1:]
OTHER_RULES = (*OTHER_SCOPES, *OTHER_POLICIES)
"""What may differ: the scope, then the policy, the strictest first; nothing is looser by the strictest policy."""
SETTINGS = {"policy": "topologyManagerPolicy", "scope": "topologyManagerScope"}
"""Rule -> the field of the kubelet's configuration that sets it."""


class SmallerRequest(NamedTuple):
    """A pod that asks for less of one resource."""

    resource: ResourceName
    asked: int
    amount: int
    """What to ask for instead; CPUs in millicores."""
    pod: PodRequest
    container: ContainerName | None = None
    """The one that asks for less, if others ask for the resource, too."""

    @property
    def text(self) -> str:
        """For people: `ask for 2 instead of 4 nvidia.com/gpu in container 'train'`."""
        amount = format_amount(self.resource, self.amount)[0]
        (asked, unit) = format_amount(self.resource, self.asked)
        where = f" in container {quoted([self.container])}" if self.container is not None else ""
        return f"ask for {amount} instead of {asked} {unit}{where}"


def smaller_requests(
    pod: PodRequest, admits: Callable[[PodRequest], bool], container: ContainerName | None = None
) -> Iterator[SmallerRequest]:
    """
    For each resource the most that one container can ask for so that the pod is admitted: that `container`, or None: the
    only one that asks for the resource. Resources of which no smaller amount suffices are left out.
    """
    asking: dict[ResourceName, list[ContainerRequest]] = {}
    for each in (*pod.init_containers, *pod.containers):
        for name, amount in each.requests.items():
            if amount and (name in UNITS or not is_native(name)):
                asking.setdefault(name, []).append(each)
    for name, every in asking.items():
        containers = [each for each in every if container in (None, each.name)]
        if len(containers) == 1:
            found = smaller_request(pod, containers[0], name, admits)
            if found is not None:
                yield found._replace(container=containers[0].name if len(every) > 1 else None)


def smaller_request(
    pod: PodRequest, container: ContainerRequest, resource: ResourceName, admits: Callable[[PodRequest], bool]
) -> SmallerRequest | None:
    """The most that this container can ask for of a resource. None: no smaller amount suffices."""
    unit = UNITS.get(resource, 1)
    asked = container.requests[resource]

    def reduced(units: int) -> PodRequest:
        return asking_for(pod, container.name, resource, units * unit)

    found = most_that(lambda units: admits(reduced(units)), (asked - 1) // unit)
    return SmallerRequest(resource, asked, found * unit, reduced(found)) if found else None


def most_that(holds: Callable[[int], bool], most: int) -> int:
    """
    The largest number up to `most` for which it holds, where it holds for all smaller ones down to 1; 0: for none. Up to 16
    are tried one by one, because a smaller set of devices may be harder to align.
    """
    if most <= 16:
        return next((number for number in range(most, 0, -1) if holds(number)), 0)
    if not holds(1):
        return 0
    good = 1
    bad = most + 1
    while 2 * good < bad:  # the answer is small even where somebody asks for billions
        if not holds(2 * good):
            bad = 2 * good
        else:
            good *= 2
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return good


def asking_for(pod: PodRequest, name: ContainerName, resource: ResourceName, amount: int) -> PodRequest:
    """The pod whose container asks for another amount of a resource."""

    def changed(container: ContainerRequest) -> ContainerRequest:
        if container.name != name:
            return container
        equal = container.limits.get(resource) == container.requests[resource]
        limits = {**container.limits, resource: amount} if equal else container.limits
        return msgspec.structs.replace(container, requests={**container.requests, resource: amount}, limits=limits)

    return msgspec.structs.replace(
        pod,
        init_containers=tuple(map(changed, pod.init_containers)),
        containers=tuple(map(changed, pod.containers)),
    )


def sufficient_rules(rules: AdmissionRules, admits: Callable[[dict[str, str]], bool]) -> Iterator[dict[str, str]]:
    """The other scope, and the strictest other policy, by each of which alone the pod is admitted."""
    for alternatives in (OTHER_SCOPES, OTHER_POLICIES):
        others = (each for each in alternatives if any(getattr(rules, key) != value for key, value in each.items()))
        if (found := next(filter(admits, others), None)) is not None:
            yield found


def format_rule(rule: dict[str, str], mode: Mode) -> str:
    """For people: `set topologyManagerScope: pod`; outside a kubelet `use scope pod`."""
    ((key, value),) = rule.items()
    return f"set {SETTINGS[key]}: {value}" if profile_of(mode).starts_kubelet else f"use {key} {value}"


def format_amount(resource: ResourceName, amount: int) -> tuple[str, str]:
    """An amount and its unit, for people."""
    if resource == MEMORY or is_hugepages(resource):
        return format_gib(amount), f"GiB of {resource}"
    return (f"{amount / UNITS[CPU]:g}", "CPUs") if resource == CPU else (str(amount), clean(resource))
