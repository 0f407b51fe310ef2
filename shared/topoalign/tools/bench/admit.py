"""The time of the decision about one pod, hints and placement included, in one process."""

from collections.abc import Iterator

from topoalign.cli.measuring import measured
from topoalign.core.admission.admit import admit
from topoalign.core.model.events import DeviceHealth, DeviceHealthChanged, HealthState, TopologyDiscovered
from topoalign.core.model.ids import CPU, GPU, MEMORY, NIC, ContainerName, NodeName, PodName
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, PodRequest
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState
from topoalign.machines import load_machine

NODE = NodeName("bench")


def cases() -> Iterator[dict[str, object]]:
    """4 GPUs, 32 CPUs, 4 NICs and 64 GiB on an empty DGX A100, without and with the sets that could have been chosen."""
    state = empty_node(load_machine("dgx-a100").topology)
    quantities = {GPU: 4, CPU: 32_000, NIC: 4, MEMORY: 64 << 30}
    container = ContainerRequest(name=ContainerName("train"), requests=quantities, limits=quantities)
    pod = PodRequest(name=PodName("bench"), containers=(container,))
    yield measured("dgx-a100", lambda: admit(state, pod, AdmissionRules()))
    yield measured("dgx-a100-explained", lambda: admit(state, pod, AdmissionRules(), explain=True))


def empty_node(topology: Topology) -> NodeState:
    """A node with all devices healthy and none allocated."""
    healthy = DeviceHealth(state=HealthState.HEALTHY)
    devices = {device: healthy for each in topology.devices.values() for device in each}
    found = TopologyDiscovered(
        node=NODE, epoch=1, revision=1, boot_id="bench", source="described: bench", topology=topology
    )
    health = DeviceHealthChanged(node=NODE, epoch=1, revision=1, devices=devices)
    return NodeState(node=NODE).apply(found).apply(health)
