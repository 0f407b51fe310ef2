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
6. Devices of a pod with Koordinator's annotations are looked for together (`jointly`).
7. Sockets have no say (align-by-socket), because the merge judges by width alone.
"""

from topoalign.core.cpu_assignment.reserved import reserved_cpus
from topoalign.core.deviceshare.node_devices import RESOURCES
from topoalign.core.hints.cpu import cpu_hints
from topoalign.core.hints.devices import device_hints
from topoalign.core.hints.joint_devices import check_annotations, decided_jointly, joint_hints
from topoalign.core.hints.memory import held_hints, memory_hints, memory_nodes, places
from topoalign.core.hints.preconditions import check_rules
from topoalign.core.hints.requested import cpu_request, device_request, manages_memory, memory_request
from topoalign.core.hints.reuse import allocations_of, reusable_cpus, reusable_devices, reusable_memory
from topoalign.core.model.errors import InvalidField, clean
from topoalign.core.model.events import DeviceHealth, DeviceHealthChanged, HealthState, TopologyDiscovered
from topoalign.core.model.hints import HintAnswer, HintQuestion, Hints, ProviderHints
from topoalign.core.model.ids import CPU, ContainerName, ResourceName
from topoalign.core.model.requests import AdmissionRules, CpuOption, PodRequest
from topoalign.core.model.topology.cpuset import parse_cpuset
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.offers import base_of
from topoalign.core.profile import profile_of
from topoalign.core.state.fold import NodeState

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
    return {
        "device": dict(device_answer(state, pod, container, rules)),
        "cpu": dict(cpu_answer(state, pod, container, rules)),
        "memory": dict(memory_answer(state, pod, container, rules) or {}),
    }


def device_answer(
    state: NodeState, pod: PodRequest, container: ContainerName | None, rules: AdmissionRules
) -> ProviderHints:
    """Per resource that this node has devices of, or that is decided jointly; nothing else is anybody's business."""
    held = allocations_of(state, pod)
    own = allocations_of(state, pod, container)
    asked = asked_devices(state.hardware, pod, container, rules)
    together = {name for name, _ in asked if name in RESOURCES} if decided_jointly(pod, rules) else set()
    joint = joint_hints(state, pod, container, rules) if together else None
    return {
        name: joint
        if name in together
        else device_hints(
            state.hardware.devices[name],
            state.free(name),
            reusable_devices(held, name),
            amount,
            state.hardware.node_ids,
            rules.mode,
            held=[device for each in own for device in each.devices.get(name, ())],
        )
        for name, amount in asked
    }


def asked_devices(
    topology: Topology, pod: PodRequest, container: ContainerName | None, rules: AdmissionRules
) -> list[tuple[ResourceName, int]]:
    """The device resources on which there is an answer, and how many of each are asked for."""
    known = topology.devices.keys() | (RESOURCES if decided_jointly(pod, rules) else frozenset())
    return [
        (name, amount)
        for name, amount in sorted(device_request(pod, container).items())
        if name in known and (amount or profile_of(rules.mode).asks_for_zero_devices)
    ]


def cpu_answer(
    state: NodeState, pod: PodRequest, container: ContainerName | None, rules: AdmissionRules
) -> ProviderHints:
    """Nothing unless CPUs are to be given exclusively."""
    requested = cpu_request(pod, container, rules.mode) if rules.cpu_manager == "static" else 0
    if not requested:
        return {}
    cpus = state.hardware.cpu_topology
    own = allocations_of(state, pod, container)
    hints = cpu_hints(
        cpus,
        available_cpus(state, rules),
        reusable_cpus(allocations_of(state, pod)) & cpus.node_of.keys(),
        requested,
        rules.mode,
        held=cpus.node_of.keys() & frozenset().union(*(parse_cpuset(each.cpus) for each in own)),
        by_socket=CpuOption.ALIGN_BY_SOCKET in rules.cpu_options,
        machine=len(state.hardware.nodes),
    )
    return {CPU: hints}


def available_cpus(state: NodeState, rules: AdmissionRules) -> frozenset[int]:
    """
    CPUs that may be given exclusively now: those in the shared pool which are not kept for the system.

    Raises NotEnoughCpus or TooMuchWork where the CPUs to keep cannot be chosen.
    """
    return shared_cpus(state, rules) - reserved_cpus(state.hardware, rules)


def shared_cpus(state: NodeState, rules: AdmissionRules) -> frozenset[int]:
    """
    The shared pool: CPUs that no container has to itself.

    Those kept for the system are among them unless strict-cpu-reservation takes them out. Raises as `available_cpus`.
    """
    online = frozenset(state.hardware.cpu_topology.node_of)
    strict = CpuOption.STRICT_RESERVATION in rules.cpu_options
    return online - state.cpus_in_use - (reserved_cpus(state.hardware, rules) if strict else frozenset())


def memory_answer(
    state: NodeState, pod: PodRequest, container: ContainerName | None, rules: AdmissionRules
) -> ProviderHints | None:
    """The same hints for each resource of the request. None: the memory manager does not look at this pod."""
    if rules.memory_manager == "None" or not manages_memory(pod, rules.mode):
        return None
    request = memory_request(pod, container, rules.mode)
    held = allocations_of(state, pod)
    blocks = next((each.memory for each in allocations_of(state, pod, container) if each.memory), None)
    if blocks is not None:
        return held_hints(blocks, request)
    if not request:
        return {}
    hints = memory_hints(
        memory_nodes(state, rules),
        places(state.hardware, rules.mode),
        request,
        reusable_memory(held),
        rules.mode,
    )
    if not hints and profile_of(rules.mode).silent_on_unmet_memory:
        return {}
    return dict.fromkeys(request, hints)
