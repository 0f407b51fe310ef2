"""
The answers of `admit`, and the questions that it asks on the way.

An answer contains everything that is needed to act on it and to explain it: the hints each provider gave, what the
merge made of them, the sets of devices that were considered, and the reason where it is a refusal.
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
    """Of GPUs the connection across the weakest split of the set, for people: `4 NVLinks, 80 GB/s`."""
    score: int
    """The sum of the scores of its links (`topoalign.core.model.topology.queries.connection_score`)."""
    chosen: bool
    why: str
    """Why it won or lost, for people."""
    alignment_cost: str = ""
    """Of the chosen GPUs the stronger seam that the alignment to NUMA nodes cost, for people. Empty: it cost none."""


class Alignment(msgspec.Struct, frozen=True, kw_only=True):
    """The merge of hints for one container, or for a whole pod in scope `pod`: its input and its result."""

    container: ContainerName | None
    hints: dict[str, dict[ResourceName, Hints]]
    """Provider -> resource -> hints, as they were given."""
    merged: TopologyHint
    admitted: bool
    note: str = ""
    """What is not exact about it, for people: a search that ended at its limit on work."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What a decision does not cover, and how it came about: the merges of hints, the sets compared, what was not known."""

    not_covered: tuple[str, ...] = ()
    """What the pod asks for and the decision does not cover, for people: devices of resource claims, exclusive CPUs."""
    alignments: tuple[Alignment, ...] = ()
    considered: tuple[Considered, ...] = ()
    notes: tuple[str, ...] = ()
    """What was not known when it was decided, for people: a prediction is only as good as its input."""
    unserved: tuple[ResourceName, ...] = ()
    """Names by which the pod asks for devices that nobody serves on the node, ascending. A kubelet passes over them."""


class Admission(msgspec.Struct, frozen=True, kw_only=True, tag="Admission"):
    """The answer that a pod fits, with what each of its containers gets, in the order in which they were decided."""

    allocations: tuple[Allocation, ...]
    """Their ids are made of the pod's name and the container's; the allocator gives them lasting ones."""
    explanation: Explanation


class Resolvability(StrEnum):
    """Whether what keeps a pod off a node can pass, and what it is, the most likely to pass first."""

    IN_USE = "in-use"
    """It would admit the pod if nobody had anything."""
    UNHEALTHY = "unhealthy"
    """It would if, besides, all of its devices were healthy and none was cordoned."""
    NOT_KNOWN = "not-known"
    """What it would decide is not known."""
    EXCLUDED = "excluded"
    """Kubernetes keeps the pod off it; else it would admit the pod, now or if nobody had anything."""
    NEVER = "never"
    """It would refuse the pod even if nobody had anything and all of its devices were healthy."""
    FOREIGN = "foreign"
    """Others give out its GPUs."""
    MISSING = "missing"
    """It has no device of a resource that is asked for."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag="Refusal"):
    """The answer that a pod does not fit, or that it cannot be decided, with the reason."""

    reason: str
    """The kubelet's reason: TopologyAffinityError, SMTAlignmentError or UnexpectedAdmissionError."""
    code: str
    """Ours, narrower than `reason`: CamelCase, stable."""
    finding: str
    remedy: str
    container: ContainerName | None
    """Where it failed. None: the pod as a whole."""
    provider: str | None
    """Who failed to allocate: device, cpu or memory. None: the policy refused, or the request is invalid."""
    explanation: Explanation
    undone: tuple[Allocation, ...] = ()
    """
    In mode `kubelet` what earlier containers of the pod had been given when it was refused. Granting and releasing these
    folds to what the kubelet then knows of groups of NUMA nodes. Mode `best` gives nothing before all is decided.
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
    """Returns the same decision with the names of devices that nobody serves."""
    explanation = msgspec.structs.replace(decision.explanation, unserved=names)
    return msgspec.structs.replace(decision, explanation=explanation) if names else decision


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `explain`: what is held now, and the decision, as long as the allocator keeps it."""

    allocations: tuple[Allocation, ...]
    decision: Decision | None
    """None: it was made by the kubelet, or before the allocator last started."""
    ailing: dict[DeviceID, DeviceHealth] = {}
    """Held devices that would not be handed out now, with their health: unhealthy, of unknown health, or cordoned."""
    notes: tuple[str, ...] = ()
    """Why nothing is held, and how former allocations of this name ended, newest first, as far as that is remembered."""


class PlacementContext(msgspec.Struct, frozen=True, kw_only=True):
    """What is free besides the devices that may be chosen, for a device policy that considers the next container."""

    free: Collection[DeviceID] = ()
    """All devices of the resource that may be handed out now, on whatever NUMA nodes, in the hardware's order."""
    nics: Collection[DeviceID] = ()
    """NICs that may be handed out now."""
    nics_wanted: int = 0
    """How many of them the container asks for."""


NO_CONTEXT = PlacementContext()


class PreferenceQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """The question which devices of a resource are preferred; the kubelet asks it as GetPreferredAllocation."""

    resource: ResourceName
    available: Collection[DeviceID]
    """In the hardware's order."""
    must_include: tuple[DeviceID, ...]
    size: int
    container: ContainerName
    near: tuple[DeviceID, ...] = ()
    """Devices of other resources already decided for the container: NICs are chosen near its GPUs."""
    context: PlacementContext = NO_CONTEXT

    def without_context(self) -> "PreferenceQuestion":
        """Returns the question as a kubelet asks it: about one resource, without what else the container has."""
        return msgspec.structs.replace(self, near=(), context=PlacementContext(free=self.context.free))


class PreferenceFailed(NoFit):
    """
    Raised when the device plugin is asked for its preference and fails.

    Remedy: Read the log of the node's allocator.
    """

    def __init__(self, resource: ResourceName, error: TopoalignError) -> None:
        super().__init__(f"the device plugin of {resource} gave no preference: {error.finding}", error.remedy)
