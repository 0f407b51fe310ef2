"""
The suite `kubelet/admission`: sequences of pods admitted, started and removed, and of devices that become unhealthy.

Each step goes through the decision and the fold of facts that the services use. After each, the answer and the
remaining state of the node must be the kubelet's; a case ends at its first step that differs.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from topoalign.core.admission.admit import answer_to, drive, iterate_decision_for_request
from topoalign.core.admission.pipeline import Question, Reply
from topoalign.core.cpu_assignment import read_reserved_cpus
from topoalign.core.hints.cpu import shared_cpus
from topoalign.core.hints.memory_hints import memory_nodes
from topoalign.core.model.decisions import Admission, Decision, PreferenceQuestion, Refusal
from topoalign.core.model.errors import Undecodable, quoted
from topoalign.core.model.events import (
    Allocation,
    DeviceHealth,
    DeviceHealthChanged,
    HealthState,
    MemoryUse,
)
from topoalign.core.model.ids import ContainerName, DeviceID, PodName, ResourceName
from topoalign.core.model.requests import AdmissionRules, PodRequest
from topoalign.core.model.topology.bitmask import nodes_of
from topoalign.core.model.topology.cpuset import format_cpuset
from topoalign.core.state.fold import initial_state
from topoalign.tools.conformance.case_files import results
from topoalign.tools.conformance.kubelet_errors import kind_of, kind_of_refusal
from topoalign.tools.conformance.kubelet_memory import Block
from topoalign.tools.conformance.kubelet_memory import written as blocks_written
from topoalign.tools.conformance.kubelet_merge import Hint, written
from topoalign.tools.conformance.kubelet_node import NODE, Config, Machine, Plugin
from topoalign.tools.conformance.kubelet_pods import Pod, as_the_kubelet_reads
from topoalign.tools.conformance.suite import CaseResult, Outcome

DEFAULT_GATES = ("1.34", "1.35", "1.36")
"""How the id of a case ends: versions of the kubelet with pod-level resources, and default feature gates."""


class Given(msgspec.Struct, frozen=True):
    """What one container got."""

    hint: Hint
    cpus: str | None
    devices: dict[ResourceName, list[DeviceID]]
    memory: list[Block] | None


class Rejected(msgspec.Struct, frozen=True):
    """A refusal: reason, kind of its message, container and manager."""

    reason: str
    code: str | None
    container: ContainerName | None
    provider: str | None


class NodeMemory(msgspec.Struct, frozen=True):
    """Memory of a NUMA node after a step: free bytes by resource, its group, and its number of assignments."""

    free: dict[ResourceName, int]
    cells: list[int]
    assignments: int


class After(msgspec.Struct, frozen=True):
    """What is left of the node."""

    shared_cpus: str
    free_devices: dict[ResourceName, list[DeviceID]]
    memory: dict[int, NodeMemory] | None = None


class Expected(msgspec.Struct, frozen=True):
    """The expected answer of a step, and the state after it."""

    state_after: After
    admitted: bool | None = None
    containers: dict[ContainerName, Given] = {}
    reason: str = ""
    message: str = ""
    container: ContainerName | None = None
    provider: str | None = None

    @property
    def answer(self) -> dict[ContainerName, Given] | Rejected:
        """The expected containers, or the refusal with the kind of its message."""
        if self.admitted is not False:
            return self.containers
        return Rejected(self.reason, kind_of(self.message), self.container, self.provider)


class Step(msgspec.Struct, frozen=True, tag_field="op"):
    """A step of a sequence."""

    expect: Expected


class Admit(Step, frozen=True, tag="admit"):
    """Admit a pod."""

    pod: Pod


class Remove(Step, frozen=True, tag="remove"):
    """Remove a pod."""

    pod_name: PodName


class Start(Step, frozen=True, tag="start"):
    """Start the containers of a pod."""

    pod_name: PodName


class Devices(Step, frozen=True, tag="devices"):
    """Change which devices of a resource are unhealthy."""

    resource: ResourceName
    unhealthy: list[DeviceID]


class InForce(msgspec.Struct, frozen=True):
    """Values that the kubelet derives at its start."""

    reserved_cpus: str


class AdmissionCase(msgspec.Struct, frozen=True):
    """A case: a machine, a kubelet's configuration, and steps."""

    id: str
    machine: Machine
    config: Config
    expect: InForce
    steps: list[Admit | Remove | Start | Devices]


def admissions(path: Path) -> Iterator[CaseResult]:
    """The results of a file of `kubelet/admission`."""
    return results(path, AdmissionCase, outcome)


def pod_level_resources(path: Path) -> Iterator[CaseResult]:
    """The results of the cases of `kubelet_versions/pod_level_resources` with default feature gates."""
    return (each for each in results(path, AdmissionCase, outcome) if each.id.rpartition("@")[2] in DEFAULT_GATES)


def outcome(case: AdmissionCase) -> Outcome:
    """The first difference of a case, or its equal last step."""
    sequence = Sequence(case.machine, case.config.rules(case.machine))
    wanted: object = case.expect.reserved_cpus
    got: object = format_cpuset(read_reserved_cpus(sequence.state.hardware, sequence.rules))
    for number, step in enumerate(case.steps):
        if wanted != got:
            break
        wanted = (f"step {number}", step.expect.answer, step.expect.state_after)
        got = (f"step {number}", sequence.done(step), sequence.after())
    return wanted, got


class Sequence:
    """One case under way: the node, and what its plugins last listed."""

    def __init__(self, machine: Machine, rules: AdmissionRules) -> None:
        self.plugins: dict[ResourceName, Plugin] = machine.devices
        self.rules = rules
        self.healthy = {
            device: each.healthy for plugin in self.plugins.values() for device, each in plugin.devices.items()
        }
        self.state = initial_state(NODE, machine.read, {}, "described: case")
        self.judge()

    def judge(self) -> None:
        """Apply the health of the devices to the state."""
        health = {
            device: DeviceHealth(state=HealthState.HEALTHY if good else HealthState.UNHEALTHY)
            for device, good in self.healthy.items()
        }
        changed = DeviceHealthChanged(node=NODE, epoch=1, revision=1, devices=health)
        self.state = msgspec.structs.replace(self.state, health=changed)

    def done(self, step: Admit | Remove | Start | Devices) -> dict[ContainerName, Given] | Rejected:  # noqa: C901  # one branch a step
        """What the containers of a pod got, or why they got nothing; nothing where no pod was admitted."""
        match step:
            case Admit():
                decision = self.decide(as_the_kubelet_reads(step.pod.read))
                if isinstance(decision, Refusal):
                    for allocation in decision.undone:
                        self.state = self.state.holding(allocation)
                    for allocation in decision.undone:
                        self.state = self.state.without(allocation.id)
                    return Rejected(decision.reason, kind_of_refusal(decision), decision.container, decision.provider)
                for allocation in decision.allocations:
                    self.state = self.state.holding(allocation)
                return told(decision)
            case Remove():
                for held in self.held_by(step.pod_name):
                    self.state = self.state.without(held.id)
            case Start():
                for held in self.held_by(step.pod_name):
                    if held.role == "init":  # it has ended: the kubelet frees its memory, and keeps CPUs and devices
                        self.state = self.state.without(held.id)
                        self.state = self.state.holding(msgspec.structs.replace(held, memory=()))
            case Devices():
                if step.resource not in self.plugins:
                    raise Undecodable("a step `devices`", f"no plugin has {quoted([step.resource])}")
                self.healthy |= {d: d not in step.unhealthy for d in self.plugins[step.resource].devices}
                self.judge()
        return {}

    def decide(self, pod: PodRequest) -> Decision:
        """The decision about a pod; the plugin of the case answers preference questions."""
        return drive(iterate_decision_for_request(self.state, pod, self.rules), self.answer)

    def answer(self, asked: Question) -> Reply:
        """Hints as this process knows them; preferences as the case's plugins have them."""
        if isinstance(asked, PreferenceQuestion):
            return self.plugins[asked.resource].preferred(asked)
        return answer_to(asked, self.state, self.rules)

    def held_by(self, pod: PodName) -> list[Allocation]:
        """The live allocations of a pod."""
        return [held for held in self.state.allocations.values() if held.owner and held.owner.pod == pod]

    def after(self) -> After:
        """The remaining state of the node in the fields of a case."""
        state = self.state
        memory = {
            number: NodeMemory(
                free=dict(node.free),
                cells=list(nodes_of(node.group)),
                assignments=state.memory.get(number, MemoryUse()).assignments,
            )
            for number, node in memory_nodes(state, self.rules).items()
        }
        return After(
            shared_cpus=format_cpuset(shared_cpus(state, self.rules)),
            free_devices={name: sorted(state.ownership.free(name)) for name in self.plugins},
            memory=memory if self.rules.memory_manager == "Static" else None,
        )


def told(decision: Admission) -> dict[ContainerName, Given]:
    """What each container got, as case files tell it."""
    hints = {each.container: written(each.merged) for each in decision.explanation.alignments}
    return {
        each.owner.container: Given(
            hint=hints[each.owner.container if each.owner.container in hints else None],
            cpus=each.cpus or None,
            devices={name: sorted(devices) for name, devices in each.devices.items()},
            memory=blocks_written(each.memory) or None,
        )
        for each in decision.allocations
        if each.owner is not None
    }
