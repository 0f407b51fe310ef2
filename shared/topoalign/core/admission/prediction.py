"""
Predicts the decision of a node's kubelet about a pod, only from the facts that the node has published.

    state: the fold of TopologyDiscovered, DeviceHealthChanged, Allocation… and UsageObserved
       |  prediction_basis: the kubelet's rules; devices, CPUs and memory as the kubelet will have them; notes
       v
    decide(basis.state, the pod's demand by basis.rules)

The node's allocator uses `predict`. Any subscriber that folds the same events can use it, too, and gets the same
answer. The notes report data that could not be read on the node. The last report of PodResources replaces such data if
possible. Data are never guessed. docs/predictions.md describes what is read, and what each note means.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from topoalign.core.admission.admit import decide_demand
from topoalign.core.admission.feasibility import machine_key, order_free_digest
from topoalign.core.admission.kubelet_devices import (
    as_others,
    describe_unaccounted_grants,
    explain_unavailable_resources,
    find_unrecorded_devices,
    with_others,
    without_dropped,
    without_ended,
)
from topoalign.core.admission.resolvability import explain_decision
from topoalign.core.demand.pod_demand import pod_demand
from topoalign.core.demand.pod_validation import validate_pod
from topoalign.core.demand.unserved import unserved_names
from topoalign.core.hints.memory_hints import memory_node
from topoalign.core.model.decisions import Decision, with_notes, with_unserved
from topoalign.core.model.errors import Unavailable, clean
from topoalign.core.model.events import Allocation, MemoryBlock, MemoryUse, Owner
from topoalign.core.model.ids import AllocationID, ContainerName, DeviceID, Namespace, NodeName, PodName, ResourceName
from topoalign.core.model.kubelet import CheckpointEntry, KubeletObserved, KubeletRules
from topoalign.core.model.requests import NO_CHANGES, AdmissionRules, Mode, PodRequest, RuleChanges, override_rules
from topoalign.core.model.reservations import Reservation
from topoalign.core.model.topology.derived_tables import computed_once
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState
from topoalign.core.state.node_reservations import with_reserved

PREDICTED = "v1.36."
"""Prefix of the kubelet versions whose decisions are predicted."""

INSTEAD = "what PodResources showed last counts instead"


class KubeletUnknown(Unavailable):
    """
    Raised when the rules of a node's kubelet are unknown, so that no decision can be predicted.

    Remedy: Check that the node's allocator runs with `TOPOALIGN_KUBELET_DIR`.
    """

    def __init__(self, node: NodeName, finding: str) -> None:
        super().__init__(
            f"what the kubelet of node {clean(node)!r} decides by is not known: {finding}",
            "see that the node's allocator is of this version and serves a kubelet, or ask it for a what-if",
        )


class PredictionBasis(msgspec.Struct, frozen=True, kw_only=True):
    """The input of all predictions for a node's kubelet, independent of the pod, and how reliable it is."""

    state: NodeState
    """The state of the node as its kubelet will have it at the next admission."""
    rules: AdmissionRules
    """The rules of the kubelet."""
    notes: tuple[str, ...]
    """Known or possible differences from the kubelet's state, and other facts that affect decisions. Human-readable."""
    doubts: tuple[str, ...]
    """Why allocations might be missing from the record. In a decision, they come after the notes on the pod."""
    registered: frozenset[ResourceName] | None
    """Resources that plugins registered with the kubelet. None: unknown."""
    devices_unknown: str
    """Why the devices that other plugins list are unknown. Empty: they are known."""


def predict(
    state: NodeState,
    pod: PodRequest,
    now: float,
    changes: RuleChanges = NO_CHANGES,
    *,
    explain: bool = False,
    reserved: Sequence[Reservation] = (),
) -> Decision:
    """
    The decision that the node's kubelet would make about this pod at Unix time `now`. `changes`: rules that differ from
    those of the kubelet, by field name. `explain`: explain the decision as `explain_decision` does. `reserved`:
    reservations for other pods, which count as held.

    Raises KubeletUnknown if the node has not published the rules of its kubelet, if these are not supported, or if
    neither the files of its kubelet nor PodResources could be read. Raises InvalidField for an invalid pod, for invalid
    rules, and for a resource that is registered with the kubelet but has no known devices.
    """
    pod = validate_pod(pod)
    basis = prediction_basis(state, now)
    rules = override_rules(basis.rules, changes)
    demand = pod_demand(pod, rules)
    hardware = basis.state.hardware
    passed_over = explain_unavailable_resources(demand, hardware, basis.registered, basis.devices_unknown)
    held = with_reserved(basis.state, state, reserved)
    held = as_others(held, demand)
    decision = explain_decision(held, demand) if explain else decide_demand(held, demand)
    if kubelet_of(state).devices is not None:  # otherwise, another plugin can serve any name
        decision = with_unserved(decision, unserved_names(demand, hardware, basis.registered or ()))
    return with_notes(decision, (*basis.notes, *passed_over, *basis.doubts))


def prediction_basis(state: NodeState, now: float) -> PredictionBasis:
    """The input of `predict` at Unix time `now`. Raises KubeletUnknown in the same cases as `predict`."""
    kubelet = kubelet_of(state)
    rules = admission_rules(kubelet.rules, state.node)
    over = frozenset[DeviceID]().union(
        *(state.allocations[each].device_ids for each in kubelet.ended if each in state.allocations)
    )
    state, lagging = without_ended(with_others(state, kubelet.devices), kubelet.ended)
    entries, memory, missing = _held_by_kubelet(state, kubelet, rules)
    state = without_dropped(state, kubelet.dropped)
    notes = [*missing, *kubelet.notes, *describe_unaccounted_grants(state, kubelet)]
    if kubelet.memory_doubt:
        notes.append(kubelet.memory_doubt)
    if kubelet.started is not None and 0 <= now - kubelet.started < kubelet.settle_seconds:
        notes.append(describe_starting_kubelet(now - kubelet.started))
    if kubelet.version and not kubelet.version.startswith(PREDICTED):
        version = clean(kubelet.version)
        notes.append(f"the kubelet is {version}: what is predicted is what {PREDICTED}x would decide")
    notes = [clean(note, 400) for note in notes]
    others = [  # resources of containers that the record does not have
        Allocation(
            id=AllocationID(f"{each.pod_uid}/{each.container}"),
            owner=Owner(namespace=Namespace(""), pod=PodName(each.pod_uid), container=each.container),
            devices=dict(find_unrecorded_devices(state, each, over)),
            cpus=each.cpus,
            memory=each.memory,
        )
        for each in entries
    ]
    merged = {**state.allocations, **{each.id: each for each in others}}
    doubts = (describe_unconfirmed_record(kubelet.record_doubt),) if kubelet.record_doubt else ()
    return PredictionBasis(
        state=msgspec.structs.replace(state, allocations=merged, memory=memory or state.memory),
        rules=rules,
        notes=(*notes, *lagging),
        doubts=doubts,
        registered=None if kubelet.registered is None else frozenset(kubelet.registered),
        devices_unknown=kubelet.devices_unknown or kubelet.unknown if kubelet.devices is None else "",
    )


def kubelet_of(state: NodeState) -> KubeletObserved:
    """The data that the node published about its kubelet. Raises KubeletUnknown if missing data cannot be replaced."""
    usage = state.usage
    if usage is None or usage.kubelet is None:
        raise KubeletUnknown(state.node, "the node has not published it")
    why = usage.kubelet.unknown
    if not why:
        return usage.kubelet
    if not usage.containers_known:
        raise KubeletUnknown(state.node, f"{why}, and PodResources has not answered yet")
    return msgspec.structs.replace(usage.kubelet, cpus_unknown=why, memory_unknown=why, checkpoint_unknown=why)


def admission_rules(rules: KubeletRules, node: NodeName) -> AdmissionRules:
    """The kubelet's rules as AdmissionRules. Raises KubeletUnknown for a policy or an option that is not supported."""
    known = msgspec.to_builtins(rules)
    try:
        return msgspec.convert(
            {**{name: value for name, value in known.items() if name != "unknown"}, "mode": Mode.KUBELET.value},
            AdmissionRules,
        )
    except msgspec.ValidationError as error:
        raise KubeletUnknown(node, clean(str(error), 200)) from error


def to_kubelet_rules(rules: AdmissionRules, unknown: str = "") -> KubeletRules:
    """Converts the rules to the message that is published on the bus; `unknown` as in `KubeletRules`."""
    same = {name: getattr(rules, name) for name in KubeletRules.__struct_fields__ if name != "unknown"}
    return KubeletRules(**{**same, "cpu_options": tuple(sorted(rules.cpu_options))}, unknown=unknown)


def _held_by_kubelet(
    state: NodeState, kubelet: KubeletObserved, rules: AdmissionRules
) -> tuple[list[CheckpointEntry], Mapping[int, MemoryUse], list[str]]:
    """
    The resources of each container according to the checkpoints or, if they could not be read, to PodResources. NUMA
    node -> its used memory. Notes on data that could not be read.
    """
    usage = state.usage
    shown = usage.containers if usage is not None and usage.containers_known else None
    entries = list(kubelet.entries)
    memory = kubelet.memory
    instead = f"; {INSTEAD}" if shown is not None else ""
    missing = [kubelet.stale, kubelet.rules.unknown]
    missing += [f"{each}{instead}" if each else "" for each in (kubelet.cpus_unknown, kubelet.memory_unknown)]
    missing += [kubelet.checkpoint_unknown if not kubelet.unknown else "", kubelet.pods_unknown]
    if kubelet.memory_unknown and shown is not None:
        blocks = iter(
            spread_memory_blocks([b for each in shown for b in each.memory], state.hardware, rules.reserved_memory)
        )
        shown = tuple(msgspec.structs.replace(each, memory=tuple(next(blocks) for _ in each.memory)) for each in shown)
        alone = NodeState(node=state.node)
        for each in shown:
            alone = alone.holding(Allocation(id=AllocationID(""), memory=each.memory))
        memory = dict(alone.memory)
    # the last report of PodResources, which has no UIDs, replaces the parts of a checkpoint that could not be read
    reported = [
        CheckpointEntry(
            pod_uid=f"{used.owner.namespace}/{used.owner.pod}",
            container=used.owner.container,
            cpus=used.cpus if kubelet.cpus_unknown else "",
            memory=used.memory if kubelet.memory_unknown else (),
            devices=used.devices if kubelet.checkpoint_unknown else {},
        )
        for used in shown or ()
    ]
    entries += [each for each in reported if each.cpus or each.memory or each.devices]
    found: dict[tuple[str, ContainerName], CheckpointEntry] = {}  # entries of a container do not overlap
    for entry in entries:
        had = found.get((entry.pod_uid, entry.container), entry)
        found[entry.pod_uid, entry.container] = msgspec.structs.replace(
            had,
            cpus=had.cpus or entry.cpus,
            memory=had.memory or entry.memory,
            devices=had.devices or entry.devices,
            mounted=had.mounted or entry.mounted,
        )
    return [found[container] for container in sorted(found)], memory, [each for each in dict.fromkeys(missing) if each]


def spread_memory_blocks(
    blocks: Iterable[MemoryBlock], hardware: Topology, kept: Mapping[int, Mapping[ResourceName, int]] = {}
) -> Iterator[MemoryBlock]:
    """
    The same blocks, with the memory that each takes from the NUMA nodes of its group. PodResources does not report this
    distribution. The kubelet fills the nodes in ascending order, as far as memory is free (v1.36.3, memorymanager
    static policy). `kept`: NUMA node -> its memory that is reserved for the system; a missing node has none.
    """
    left = {
        (node.id, name): size
        for node in hardware.nodes
        for name, size in memory_node(node, kept.get(node.id, {}), MemoryUse()).allocatable.items()
    }
    for block in blocks:
        wanted = block.size
        taken = []
        for node in block.nodes:
            part = min(wanted, left.get((node, block.resource), wanted))
            left[node, block.resource] = left.get((node, block.resource), part) - part
            wanted -= part
            taken.append(part)
        if taken:
            taken[-1] += wanted
        yield msgspec.structs.replace(block, taken=tuple(taken))


def describe_starting_kubelet(age: float) -> str:
    """
    The note on a kubelet that started `age` seconds ago. It keeps resources of deleted pods until it has all its pods.
    """
    return (
        f"the kubelet started {age:.0f} s ago: until it has received all its pods it drops nothing of pods that are gone, "
        "and may refuse what is predicted to fit"
    )


def describe_unconfirmed_record(doubt: str) -> str:
    """The note in predictions while the allocator's record is unconfirmed for this reason."""
    return f"the journal was damaged ({doubt}): something may be held that is not in the record"


# Groups nodes into kinds. A pod has the same needs on all nodes of one kind.


@dataclass(frozen=True, eq=False)
class NodeKind:
    """The common properties of nodes that differ only in the ids of their devices and in their free resources."""

    topology: Topology
    """The topology of one of these nodes, including devices of other plugins."""
    rules: AdmissionRules
    """The rules of the kubelet."""
    registered: frozenset[ResourceName] | None
    """As in `PredictionBasis`."""


def kind_key(basis: PredictionBasis) -> object:
    """A key that is equal for nodes of the same kind."""
    hardware = basis.state.hardware
    machine = key_of_shape(hardware.shape) if hardware.shape is not hardware else machine_key(hardware)
    return machine, order_free_digest((basis.rules,)), basis.registered


key_of_shape = computed_once(machine_key)
"""`machine_key` of a hardware shape that many nodes share, computed once."""
