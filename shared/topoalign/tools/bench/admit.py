"""The time of the decision about one pod, hints and placement included, in one process."""

from collections.abc import Iterator, Mapping

from topoalign.cli.measuring import measured
from topoalign.core.admission.admit import admit
from topoalign.core.model.events import DeviceHealth, HealthState
from topoalign.core.model.ids import CPU, GPU, MEMORY, NIC, ContainerName, NodeName, PodName, ResourceName
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, PodRequest
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState, announced
from topoalign.machines import load_machine

NODE = NodeName("bench")


def cases() -> Iterator[dict[str, object]]:
    """4 GPUs, 32 CPUs, 4 NICs and 64 GiB on an empty DGX A100, without and with the sets that could have been chosen."""
    state = empty_node(load_machine("dgx-a100").topology)
    pod = pod_of({GPU: 4, CPU: 32_000, NIC: 4, MEMORY: 64 << 30})
    yield measured("dgx-a100", lambda: admit(state, pod, AdmissionRules()))
    yield measured("dgx-a100-explained", lambda: admit(state, pod, AdmissionRules(), explain=True))


def pod_of(amounts: Mapping[ResourceName, int], name: str = "bench") -> PodRequest:
    """A pod of one container with these requests, and limits equal to them."""
    container = ContainerRequest(name=ContainerName("main"), requests=dict(amounts), limits=dict(amounts))
    return PodRequest(name=PodName(name), containers=(container,))


def empty_node(topology: Topology) -> NodeState:
    """A node with all devices healthy and none allocated."""
    healthy = DeviceHealth(state=HealthState.HEALTHY)
    devices = {device: healthy for each in topology.devices.values() for device in each}
    return announced(NODE, topology, devices, "described: bench")
