"""
What a pod asks for that a decision does not cover, for people.

A decision is about devices of plugins, exclusive CPUs, and memory on NUMA nodes. Devices of resource claims are given by
their drivers (dynamic resource allocation); the kubelet's Topology Manager does not align them (kubelet v1.36.3). A
container that asks for whole CPUs gets exclusive ones from a kubelet only in a Guaranteed pod without pod-level resources.
Otherwise it runs in the shared pool.
"""

from collections.abc import Iterator

from topoalign.core.demand.pod_demand import PodDemand
from topoalign.core.demand.quantities import may_be_exclusive
from topoalign.core.model.errors import quoted
from topoalign.core.model.ids import CPU
from topoalign.core.model.requests import ContainerRequest, PodRequest
from topoalign.core.profile import profile_of

ALIKE = "give each container equal requests and limits of cpu and memory"


def not_covered(demand: PodDemand) -> Iterator[str]:
    """One sentence for each thing."""
    pod = demand.request
    rules = demand.rules
    if pod.claims:
        yield (
            f"the devices of resource claims {quoted(pod.claims)}: their DRA driver gives them, and the kubelet does not "
            "align them with the rest"
        )
    if rules.cpu_manager == "static" and not may_be_exclusive(pod, profile_of(rules.mode)):
        wanting = [each.name for each in (*pod.init_containers, *pod.containers) if asks_for_whole_cpus(each)]
        if wanting:
            yield f"exclusive CPUs for {quoted(wanting)}: {why_shared(pod)}"


def asks_for_whole_cpus(container: ContainerRequest) -> bool:
    """Whether it asks for CPUs as a container that is to have exclusive ones does."""
    cpus = container.requests.get(CPU, 0)
    return cpus > 0 and cpus % 1000 == 0 and container.limits.get(CPU) == cpus


def why_shared(pod: PodRequest) -> str:
    """Why its containers run in the shared pool, and what would give them exclusive CPUs."""
    if pod.has_pod_level_resources:
        return f"with spec.resources they run in the shared pool; to get them, leave that out and {ALIKE}"
    return f"the pod is {pod.qos.value}, so they run in the shared pool; to get them, {ALIKE}"
