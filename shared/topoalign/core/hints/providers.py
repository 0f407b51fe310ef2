"""
The hint providers together: what the device, CPU and memory managers of a node say to one container or pod.

In mode `kubelet` they say what the kubelet v1.36.3 says, oddities included. In mode `best`, for decisions that topoalign
makes itself, they differ in these points; docs/modes.md has an example of each:

1. Only NUMA nodes that have CPUs are offered for CPUs and, if they have memory too, for memory: never a GPU's own memory.
2. A hint is preferred if nothing narrower fits now. To the kubelet it is preferred only if nothing narrower would fit
   an empty machine.
3. What fits nowhere is said to fit nowhere: memory, whose key the kubelet leaves out, which counts as no opinion, so that
   the pod dies after it was admitted; and too few devices of which no NUMA node is known.
4. CPUs and memory are exclusive to any container whose request is firm (equal to its limit, CPUs whole), whatever the QoS
   class of its pod, and for nobody else. For a pod as a whole, what only init containers and sidecars ask for counts, too.
5. A resource of which nothing is asked is not asked for: a limit of 0 neither narrows the choice nor fails.
6. Devices of a pod with Koordinator's annotations are looked for together (`joint_devices`).
7. Sockets have no say (align-by-socket), because the merge judges by width alone.
"""

from collections.abc import Mapping

from topoalign.core.hints.cpu import CpuProvider
from topoalign.core.hints.devices import DeviceProvider
from topoalign.core.hints.joint_devices import check_annotations
from topoalign.core.hints.memory import MemoryProvider
from topoalign.core.hints.preconditions import check_rules
from topoalign.core.hints.provider import HintProvider
from topoalign.core.model.errors import InvalidField, clean
from topoalign.core.model.events import DeviceHealth, DeviceHealthChanged, HealthState, TopologyDiscovered
from topoalign.core.model.hints import HintAnswer, HintQuestion, Hints
from topoalign.core.model.holdings import base_of
from topoalign.core.model.ids import ContainerName, ResourceName
from topoalign.core.model.requests import AdmissionRules, PodRequest
from topoalign.core.state.fold import NodeState

PROVIDERS: Mapping[str, HintProvider] = {
    each.name: each
    for each in (
        DeviceProvider(),
        CpuProvider(),
        MemoryProvider(),
    )
}
"""By name, in the order in which the kubelet asks them."""

HEALTHY = DeviceHealth(state=HealthState.HEALTHY)
UNUSABLE = DeviceHealth(state=HealthState.UNHEALTHY, reason="not offered by the asker")


def question(state: NodeState, pod: PodRequest, container: ContainerName | None, rules: AdmissionRules) -> HintQuestion:
    """Asks about a container, or with None about the pod as a whole, with all that the answer depends on."""
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
        container=container,
        rules=rules,
    )


def answer(question: HintQuestion, topology: TopologyDiscovered) -> HintAnswer:
    """
    The hints for a question, from the node's topology and from nothing else that is known here.

    Raises InvalidField for a question that cannot be meant, TooMuchWork as `hints_for` does.
    """
    check_rules(question.rules)
    check_annotations(question.pod, question.rules)
    listed = (device for devices in topology.topology.devices.values() for device in devices)
    health = {base_of(device): HEALTHY for device in listed} | dict.fromkeys(question.unusable, UNUSABLE)
    state = NodeState(
        node=question.node,
        topology=topology,
        health=DeviceHealthChanged(node=question.node, epoch=0, revision=0, devices=health),
        allocations={held.id: held for held in question.allocations},
        memory=question.memory,
    )
    try:
        return HintAnswer(providers=hints_for(state, question.pod, question.container, question.rules))
    except ValueError as error:
        raise InvalidField("question", clean(str(error), 200), "list CPUs as 0-3,8 and NUMA nodes from 0 on") from error


def hints_for(
    state: NodeState, pod: PodRequest, container: ContainerName | None, rules: AdmissionRules
) -> dict[str, dict[ResourceName, Hints]]:
    """
    What each provider says, in the order in which the kubelet asks them.

    Raises TooMuchWork where the narrowest hints are not found within the limit on work, and InvalidField if the pod has
    no such container.
    """
    if container is not None and container not in {c.name for c in (*pod.init_containers, *pod.containers)}:
        raise InvalidField("container", f"the pod has no container {container!r}", "name one of the pod's containers")
    return {name: dict(provider.hints(state, pod, container, rules)) for name, provider in PROVIDERS.items()}
