"""
Gets the hints for one container or pod from the device, CPU and memory managers of a node.

In mode `kubelet`, the managers return the hints of kubelet v1.36.3, including its known bugs. In mode `best`, for
decisions that topoalign makes itself, they differ in these points (docs/modes.md has an example of each):

1. Only NUMA nodes that have CPUs are offered for CPUs and, if they also have memory, for memory. GPU memory is never
   offered.
2. A hint is preferred if nothing narrower fits now. For the kubelet, it is preferred only if nothing narrower would fit
   on an empty machine.
3. If memory fits nowhere, the hints are an empty list. The kubelet omits the key, which counts as no preference, so the
   pod fails after admission. The same applies to too few devices without a known NUMA node.
4. CPUs and memory are exclusive to each container whose request equals its limit (whole CPUs), regardless of the QoS
   class of its pod, and to no other container. For a whole pod, resources that only init containers or sidecars request
   count, too.
5. A limit of 0 counts as no request. It neither narrows the choice nor fails.
6. Devices of a pod with Koordinator's annotations are allocated together (`joint_hints`).
7. align-by-socket has no effect, because the merge compares hints only by their number of nodes.
"""

from collections.abc import Mapping

from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.hints.cpu import CpuProvider
from topoalign.core.hints.device_hints import DeviceProvider
from topoalign.core.hints.memory_hints import MemoryProvider
from topoalign.core.hints.provider import HintProvider, HintRequest
from topoalign.core.model.errors import InvalidField, clean
from topoalign.core.model.events import HEALTHY, DeviceHealth, DeviceHealthChanged, HealthState, TopologyDiscovered
from topoalign.core.model.hints import HintAnswer, HintQuestion
from topoalign.core.model.holdings import base_of
from topoalign.core.model.requests import PodRequest
from topoalign.core.state.fold import NodeState

PROVIDERS: Mapping[str, HintProvider] = {
    each.name: each
    for each in (
        DeviceProvider(),
        CpuProvider(),
        MemoryProvider(),
    )
}
"""By name, in the order in which the kubelet calls them."""

UNUSABLE = DeviceHealth(state=HealthState.UNHEALTHY, reason="not offered by the asker")


def to_hint_question(asked: HintRequest, pod: PodRequest) -> HintQuestion:
    """Converts a request for a container of a pod to a question for another process, with all that the answer needs."""
    state = asked.state
    discovered = state.topology
    return HintQuestion(
        node=state.node,
        topology=(discovered.epoch, discovered.revision) if discovered is not None else (0, 0),
        allocations=tuple(state.allocations.values()),
        memory=dict(state.memory),
        unusable=tuple(
            device
            for devices in state.hardware.devices.values()
            for device in devices
            if not state.health_of(device).usable
        ),
        pod=pod,
        container=asked.demand.container,
        rules=asked.rules,
    )


def request_of_question(question: HintQuestion, topology: TopologyDiscovered) -> HintRequest:
    """Converts a question from another process to a request on this topology. Raises InvalidField."""
    listed = (device for devices in topology.topology.devices.values() for device in devices)
    health = {base_of(device): HEALTHY for device in listed} | dict.fromkeys(question.unusable, UNUSABLE)
    state = NodeState(
        node=question.node,
        topology=topology,
        health=DeviceHealthChanged(node=question.node, epoch=0, revision=0, devices=health),
        allocations={held.id: held for held in question.allocations},
        memory=question.memory,
    )
    return HintRequest(state, read_pod(question.pod, question.rules).of(question.container), question.rules)


def answer_hint_request(asked: HintRequest) -> HintAnswer:
    """Gets each provider's hints. Raises TooMuchWork, and InvalidField for invalid CPUs or NUMA nodes in the state."""
    try:
        return HintAnswer(providers={name: dict(provider.hints(asked)) for name, provider in PROVIDERS.items()})
    except ValueError as error:
        raise InvalidField("question", clean(str(error), 200), "list CPUs as 0-3,8 and NUMA nodes from 0 on") from error
