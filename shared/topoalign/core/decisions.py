"""
What `admit` answers, and what it may ask on the way.

An answer says everything that is needed to act on it and to explain it: the hints each provider gave, what the merge made
of them, the sets of devices that were considered, and the reason where it is a refusal.
"""

import msgspec

from topoalign.core.errors import NoFit
from topoalign.core.events import Allocation
from topoalign.core.hints.model import Hints, TopologyHint
from topoalign.core.ids import ContainerName, DeviceID, ResourceName


class Considered(msgspec.Struct, frozen=True, kw_only=True):
    """A set of devices that could have been chosen."""

    resource: ResourceName
    devices: tuple[DeviceID, ...]
    score: int
    """The sum of the scores of its links (`topoalign.core.topology.queries.pair_score`)."""
    chosen: bool
    why: str
    """Why it won or lost, for people."""


class Alignment(msgspec.Struct, frozen=True, kw_only=True):
    """How one merge came about: for a container, or for a whole pod in scope `pod`."""

    container: ContainerName | None
    hints: dict[str, dict[ResourceName, Hints]]
    """Provider -> resource -> hints, as they were given."""
    merged: TopologyHint
    admitted: bool


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """How a decision came about."""

    alignments: tuple[Alignment, ...] = ()
    considered: tuple[Considered, ...] = ()


class Admission(msgspec.Struct, frozen=True, kw_only=True, tag="Admission"):
    """The pod fits: this is what each of its containers gets, in the order in which they were decided."""

    allocations: tuple[Allocation, ...]
    """Their ids are made of the pod's name and the container's; the allocator gives them lasting ones."""
    explanation: Explanation


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag="Refusal"):
    """The pod does not fit, or cannot be decided."""

    reason: str
    """The kubelet's word for it: TopologyAffinityError, SMTAlignmentError or UnexpectedAdmissionError."""
    code: str
    """Ours, narrower than `reason`: CamelCase, stable."""
    finding: str
    remedy: str
    container: ContainerName | None
    """Where it failed. None: the pod as a whole."""
    provider: str | None
    """Who failed to allocate: device, cpu or memory. None: the policy refused."""
    explanation: Explanation


Decision = Admission | Refusal


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `explain`: what is held now, and the decision as it was made while the allocator still remembers it."""

    allocations: tuple[Allocation, ...]
    decision: Decision | None
    """None: it was made by the kubelet, or before the allocator last started."""


class PreferenceQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """Which devices are preferred? The kubelet asks this as GetPreferredAllocation."""

    resource: ResourceName
    available: tuple[DeviceID, ...]
    must_include: tuple[DeviceID, ...]
    size: int
    container: ContainerName
    near: tuple[DeviceID, ...] = ()
    """Devices of other resources already decided for the container: NICs are chosen near its GPUs."""


class Refused(NoFit):
    """A refusal, for callers that want it as an error."""

    code = "Refused"

    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal
        super().__init__(refusal.finding, refusal.remedy)
