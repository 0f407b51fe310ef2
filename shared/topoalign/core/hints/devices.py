"""
Where devices of one resource can be had (kubelet v1.36.3, device manager hints).

Subsets are taken of the NUMA nodes that bear a device of the resource, healthy or not. A device that is near several nodes
is there for each of them and counts once; a device of which no node is known counts nowhere, nor does a node that the
machine lacks.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Set

from topoalign.core.deviceshare.node_devices import RESOURCES
from topoalign.core.hints.joint_devices import decided_jointly, joint_hints
from topoalign.core.hints.provider import Largest
from topoalign.core.hints.requested import device_request
from topoalign.core.hints.reuse import allocations_of, held_before, reusable_devices
from topoalign.core.hints.rules import Supply, hints_from
from topoalign.core.model.hints import HintQuestion, Hints, Need, ProviderHints
from topoalign.core.model.ids import ContainerName, DeviceID, ResourceName
from topoalign.core.model.requests import AdmissionRules, Mode, PodRequest
from topoalign.core.model.topology.bitmask import Mask, mask_of
from topoalign.core.model.topology.model import Topology
from topoalign.core.profile import profile_of
from topoalign.core.state.fold import NodeState

Devices = Mapping[DeviceID, tuple[int, ...] | None]
"""All devices of a resource -> the NUMA nodes each is listed with; None without topology, () with one that is empty."""


def device_hints(
    devices: Devices,
    available: Collection[DeviceID],
    reusable: Collection[DeviceID],
    requested: int,
    machine: tuple[int, ...],
    mode: Mode,
    held: Collection[DeviceID] = (),
) -> Hints:
    """
    The hints for `requested` devices of one resource.

    `available` are healthy and free, `reusable` were left by init containers of the pod, `held` are what this container
    has already; `machine` are the ids of the machine's NUMA nodes, ascending. Without topology the kubelet has no opinion,
    whether there are enough or not; mode `best` has none only if there are enough.
    """
    enough = len({*available, *reusable}) >= requested
    if not any(devices.values()) and (profile_of(mode).silent_on_unplaced_devices or enough):
        return None
    if held:
        return possible(devices, held, (), requested, machine, mode) if len(held) == requested else ()
    if not enough:
        return ()
    return possible(devices, available, reusable, requested, machine, mode)


def possible(
    devices: Devices,
    available: Collection[DeviceID],
    reusable: Collection[DeviceID],
    requested: int,
    machine: tuple[int, ...],
    mode: Mode,
) -> Hints:
    """The subsets that have enough devices, and all reusable ones that have a topology."""
    nodes = mask_of(bearing_nodes(devices, machine))
    nodes_of = {device: real_nodes(near) & nodes for device, near in devices.items() if near is not None}
    counted = Counter(nodes_of[device] for device in (*available, *reusable) if device in nodes_of)
    obligatory = {nodes_of[device] for device in reusable if device in nodes_of}
    now = (Need(requested, somewhere(counted)), *(Need(1, somewhere({near: 1})) for near in sorted(obligatory)))
    empty = (Need(requested, somewhere(Counter(nodes_of.values()))),)
    return hints_from(Supply(nodes, now), Supply(nodes, empty), mode, len(machine))


def somewhere(counted: Mapping[Mask, int]) -> dict[Mask, int]:
    """Without what is near no node at all: it meets no need."""
    return {near: amount for near, amount in counted.items() if near}


def real_nodes(near: Iterable[int]) -> Mask:
    """A plugin may list a device with node -1, which is none."""
    return mask_of(node for node in near if node >= 0)


def bearing_nodes(devices: Devices, machine: tuple[int, ...]) -> tuple[int, ...]:
    """The machine's NUMA nodes that bear a device of the resource; all of them where none is known to."""
    bearing = {node for near in devices.values() for node in near or ()}
    return tuple(node for node in machine if node in bearing) or machine


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
            state.ownership.free(name),
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


class DeviceProvider:
    """The device manager."""

    name = "device"
    narrows = False

    def hints(
        self, state: NodeState, pod: PodRequest, container: ContainerName | None, rules: AdmissionRules
    ) -> ProviderHints:
        return device_answer(state, pod, container, rules)

    def resources(self, question: HintQuestion, topology: Topology) -> Set[ResourceName]:
        return {name for name, _ in asked_devices(topology, question.pod, question.container, question.rules)}

    def may_be_silent(self, question: HintQuestion) -> bool:
        return False

    def may_have_no_opinion(self, resource: ResourceName, question: HintQuestion, topology: Topology) -> bool:
        """Only on devices of which no NUMA node is known, or that are decided jointly."""
        together = resource in RESOURCES and decided_jointly(question.pod, question.rules)
        return together or not any(topology.devices[resource].values())

    def largest_rule(self, resource: ResourceName, question: HintQuestion, topology: Topology) -> Largest:
        """One need, and one more for each NUMA node where the pod left some; as many places as there are devices."""
        left = len(topology.nodes) if held_before(question) else 0
        return Largest(1 + left, max(1, len(topology.devices.get(resource, ()))), 0)
