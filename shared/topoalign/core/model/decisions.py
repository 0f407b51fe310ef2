"""
The answers of `admit`, and the questions that it asks while it decides.

An answer contains everything that is needed to act on it and to explain it: the hints of each provider, their merge,
the sets of devices that were considered, and the reason for a refusal.
"""

from collections.abc import Collection, Iterable
from enum import StrEnum

import msgspec

from topoalign.core.model.errors import NoFit, TopoalignError
from topoalign.core.model.events import Allocation, DeviceHealth
from topoalign.core.model.hints import Hints, TopologyHint
from topoalign.core.model.ids import ContainerName, DeviceID, ResourceName


class Considered(msgspec.Struct, frozen=True, kw_only=True):
    """One set of devices that was compared for a resource, with its seam, its score and why it won or lost."""

    resource: ResourceName
    devices: tuple[DeviceID, ...]
    seam: str = ""
    """For GPUs: the minimum cut of the set, for people: `4 NVLinks, 80 GB/s`."""
    score: int
    """The sum of the scores of its links (`topoalign.core.model.topology.queries.connection_score`)."""
    chosen: bool
    why: str
    """Why it won or lost, for people."""
    alignment_cost: str = ""
    """For the chosen GPUs: the stronger seam that would be possible without NUMA alignment, for people. Empty: none."""


class Alignment(msgspec.Struct, frozen=True, kw_only=True):
    """The merge of hints for one container, or for a whole pod in scope `pod`: its input and its result."""

    container: ContainerName | None
    hints: dict[str, dict[ResourceName, Hints]]
    """Provider -> resource -> hints."""
    merged: TopologyHint
    admitted: bool


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """
    How a decision was made: the merges of hints, the sets that were compared, the data that was unknown, and the parts
    of the request that the decision does not cover.
    """

    not_covered: tuple[str, ...] = ()
    """Parts of the request that the decision does not cover, for people: devices of resource claims, exclusive CPUs."""
    alignments: tuple[Alignment, ...] = ()
    considered: tuple[Considered, ...] = ()
    notes: tuple[str, ...] = ()
    """The data that was unknown at the time of the decision, for people. A prediction is only as good as its input."""
    unserved: tuple[ResourceName, ...] = ()
    """Requested resources that no device plugin serves on the node, ascending. A kubelet ignores them."""


class Admission(msgspec.Struct, frozen=True, kw_only=True, tag="Admission"):
    """The answer that a pod fits, with the allocation of each container, in the order of the decisions."""

    allocations: tuple[Allocation, ...]
    """Their ids consist of the names of pod and container; the allocator replaces them when it grants the allocations."""
    explanation: Explanation


class Resolvability(StrEnum):
    """Whether the reason for which a node refuses a pod can go away. Ordered from the most to the least likely."""

    IN_USE = "in-use"
    """If no container held anything, the node would admit the pod."""
    UNHEALTHY = "unhealthy"
    """If, in addition, all devices were healthy and none was cordoned, the node would admit the pod."""
    NOT_KNOWN = "not-known"
    """It is unknown what the node would decide."""
    EXCLUDED = "excluded"
    """Kubernetes excludes the node for the pod. Otherwise it would admit the pod, now or if nothing on it were held."""
    NEVER = "never"
    """The node would refuse the pod even if no container held anything and all devices were healthy."""
    FOREIGN = "foreign"
    """Another system allocates the node's GPUs."""
    MISSING = "missing"
    """The node has no device of a requested resource."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag="Refusal"):
    """The answer that a pod does not fit, or that the decision is not possible, with the reason."""

    reason: str
    """The kubelet's reason: TopologyAffinityError, SMTAlignmentError or UnexpectedAdmissionError."""
    code: str
    """topoalign's reason, more specific than `reason`: CamelCase, stable."""
    finding: str
    remedy: str
    container: ContainerName | None
    """The container that was refused. None: the pod as a whole."""
    provider: str | None
    """The manager that failed to allocate: device, cpu or memory. None: the policy refused, or the request is invalid."""
    explanation: Explanation
    undone: tuple[Allocation, ...] = ()
    """
    In mode `kubelet`: the allocations that the pod's earlier containers had when the pod was refused. If these are
    granted and released, the memory account has the same groups of NUMA nodes as that of the kubelet. Mode `best`
    allocates nothing before the whole pod is decided.
    """
    resolvability: Resolvability | None = None
    """Whether waiting can help: `in-use`, `unhealthy`, `never` or `not-known`. None: not computed."""


Decision = Admission | Refusal


def with_notes(decision: Decision, notes: Iterable[str]) -> Decision:
    """Returns the same decision with these notes appended to its explanation."""
    explanation = decision.explanation
    explanation = msgspec.structs.replace(explanation, notes=(*explanation.notes, *notes))
    return msgspec.structs.replace(decision, explanation=explanation)


def with_unserved(decision: Decision, names: tuple[ResourceName, ...]) -> Decision:
    """Returns the same decision with the names of requested resources that no device plugin serves."""
    explanation = msgspec.structs.replace(decision.explanation, unserved=names)
    return msgspec.structs.replace(decision, explanation=explanation) if names else decision


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `explain`: what is held now, and the decision, if the allocator still has it."""

    allocations: tuple[Allocation, ...]
    decision: Decision | None
    """None: the kubelet decided, or the allocator has restarted since."""
    ailing: dict[DeviceID, DeviceHealth] = {}
    """Held devices that are not usable now -> their health: unhealthy, unknown, or cordoned."""
    notes: tuple[str, ...] = ()
    """How former allocations of this name ended, newest first. Older ones are forgotten."""


class PlacementContext(msgspec.Struct, frozen=True, kw_only=True):
    """All free devices, also those that must not be chosen. For device policies that consider the next container."""

    free: Collection[DeviceID] = ()
    """All usable free devices of the resource, on any NUMA node, in the hardware's order."""
    nics: Collection[DeviceID] = ()
    """Usable free NICs."""
    nics_wanted: int = 0
    """Number of NICs that the container requests."""


NO_CONTEXT = PlacementContext()


class PreferenceQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """Asks which devices of a resource are preferred, like the kubelet's GetPreferredAllocation."""

    resource: ResourceName
    available: Collection[DeviceID]
    """In the hardware's order."""
    must_include: tuple[DeviceID, ...]
    size: int
    container: ContainerName
    near: tuple[DeviceID, ...] = ()
    """Devices of other resources that are already chosen for the container. NICs are chosen near its GPUs."""
    context: PlacementContext = NO_CONTEXT

    def without_context(self) -> "PreferenceQuestion":
        """Returns the question that a kubelet would ask: without the container's devices of other resources."""
        return msgspec.structs.replace(self, near=(), context=PlacementContext(free=self.context.free))


class PreferenceFailed(NoFit):
    """
    Raised when the device plugin is asked for its preference and fails.

    Remedy: Read the log of the node's allocator.
    """

    def __init__(self, resource: ResourceName, error: TopoalignError) -> None:
        super().__init__(f"the device plugin of {resource} gave no preference: {error.finding}", error.remedy)
