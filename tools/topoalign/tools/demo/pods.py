"""
The pods of the demo, from the wanted one down to what a small machine can take.

The pod that is refused is a matter of alignment, not of number, wherever the machine allows: it asks for GPUs of one NUMA
node and for more CPUs than any NUMA node has. All of it is free, and there is no set of NUMA nodes that suits both.
"""

from collections.abc import Iterator

from topoalign.core.model.byte_sizes import GIB
from topoalign.core.model.decisions import Admission, Decision, Refusal
from topoalign.core.model.ids import CPU, GPU, MEMORY, NIC, ContainerName, PodName, ResourceName
from topoalign.core.model.requests import ContainerRequest, PodRequest
from topoalign.core.model.topology.model import Topology

MAIN = ContainerName("main")


WANTED = {PodName("train"): "4 GPUs", PodName("serve"): "2 GPUs, 1 NIC, 8 CPUs, 8 GiB"}
REFUSED_BECAUSE = {
    PodName("scattered"): "all of it is free, but not side by side",
    PodName("greedy"): "more than is free",
}


def first_pods(topology: Topology) -> Iterator[PodRequest]:
    """Candidates for the pod `train`, largest first: half of the GPUs at most, so that some are left for the others."""
    for gpus in (4, 2, 1):
        if gpus == 1 or 2 * gpus <= len(topology.gpus):
            yield pod("train", gpus=gpus)


def second_pods(topology: Topology) -> Iterator[PodRequest]:
    """Candidates for the pod `serve`, largest first: GPUs, CPUs with memory, and a NIC where the machine has one."""
    for gpus, cpus, nics in ((2, 8, 1), (2, 8, 0), (1, 8, 1), (1, 8, 0), (1, 2, 0), (0, 8, 1), (0, 8, 0), (0, 2, 0)):
        if nics <= len(topology.nics):
            yield pod("serve", gpus=gpus, cpus=cpus, nics=nics)


def third_pods(topology: Topology, free: int) -> Iterator[PodRequest]:
    """Candidates for the pod that is refused, see above. `free`: how many GPUs nobody holds."""
    largest = max((len(cpus) for cpus in topology.cpus_by_node.values()), default=0)
    for gpus in (2, 1):
        if gpus <= free:
            yield pod("scattered", gpus=gpus, cpus=largest + largest // 2)
    yield pod("greedy", gpus=len(topology.gpus))


def aligned(decision: Decision) -> bool:
    """Whether the pod was admitted."""
    return isinstance(decision, Admission)


def misaligned(decision: Decision) -> bool:
    """Whether the pod was refused because no NUMA affinity suits it (TopologyAffinityError)."""
    return isinstance(decision, Refusal) and decision.reason == "TopologyAffinityError"


def pod(name: str, *, gpus: int = 0, cpus: int = 0, nics: int = 0) -> PodRequest:
    """A pod of one container with these amounts; with `cpus` it is Guaranteed, and has one GiB of memory for each CPU."""
    amounts = {GPU: gpus, NIC: nics, CPU: cpus * 1000, MEMORY: cpus * GIB}
    resources: dict[ResourceName, int] = {name: amount for name, amount in amounts.items() if amount}
    container = ContainerRequest(name=MAIN, requests=resources, limits=resources)
    return PodRequest(name=PodName(name), containers=(container,))


def worded(pod: PodRequest) -> str:
    """The amounts that a pod asks for, in words: `2 GPUs, 1 NIC, 8 CPUs, 8 GiB`."""
    asked = pod.containers[0].limits
    parts = [
        counted(asked.get(GPU, 0), "GPU"),
        counted(asked.get(NIC, 0), "NIC"),
        counted(asked.get(CPU, 0) // 1000, "CPU"),
    ]
    parts += [f"{asked[MEMORY] // GIB} GiB"] if MEMORY in asked else []
    return ", ".join(part for part in parts if part)


def counted(amount: int, noun: str) -> str:
    """An amount with its noun, singular or plural; empty for 0."""
    return f"{amount} {noun}{'' if amount == 1 else 's'}" if amount else ""
