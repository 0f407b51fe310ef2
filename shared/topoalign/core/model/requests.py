"""
The request of a pod, and the rules by which a node decides about it.

Quantities are whole numbers in one unit each: `cpu` in millicores, `memory` and `hugepages-*` in bytes, every other
resource in devices. Requests come from outside: `core.demand.pod_validation` checks every field before any decision.
"""

from collections.abc import Mapping
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType
from typing import Literal

import msgspec

from topoalign.core.model.errors import InvalidField, clean
from topoalign.core.model.ids import CPU, MEMORY, ContainerName, Namespace, NodeName, PodName, ResourceName
from topoalign.core.model.reservations import Reservation

LARGEST_QUANTITY = 2**63 - 1
"""Kubernetes quantities are 64-bit integers."""

MOST_CONTAINERS = 100
"""
Maximum number of containers of a pod, including init containers. Limits the work of a decision, which compares each
container with all earlier ones.
"""


GANG = "topoalign.io/gang"
GANG_SIZE = "topoalign.io/gang-size"
"""Annotations of pods that start together or not at all: the name of their gang, and the number of its pods."""
GPU_COUNT = "topoalign.io/gpus"
"""The annotation with the number of GPUs over which the units of a container are spread (`core.demand.shares`)."""


class Mode(StrEnum):
    """Whether a decision predicts that of a kubelet or is topoalign's own."""

    KUBELET = "kubelet"
    """Exactly as the kubelet decides, with its known faults: for predictions."""
    BEST = "best"
    """For admissions that topoalign decides itself: only devices that are free now, and no NUMA nodes without CPUs."""


class Qos(StrEnum):
    """QoS classes of pods, with the names that Kubernetes uses."""

    GUARANTEED = "Guaranteed"
    BURSTABLE = "Burstable"
    BEST_EFFORT = "BestEffort"


class ContainerRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One container with its requested resources, in the units of this module."""

    name: ContainerName
    requests: dict[ResourceName, int] = {}
    limits: dict[ResourceName, int] = {}
    sidecar: bool = False
    """An init container with restart policy Always, which keeps running with the app containers."""


class PodLevelResources(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Pod-level resources (`spec.resources`): CPUs, memory and hugepages, in the units of this module."""

    requests: dict[ResourceName, int] = {}
    limits: dict[ResourceName, int] = {}


class PodGroupReference(msgspec.Struct, frozen=True, kw_only=True):
    """A field of a pod that names a PodGroup."""

    field: str
    """Path of the field, such as `spec.schedulingGroup.podGroupName`."""
    api_group: str
    """API group of the PodGroup, such as `scheduling.k8s.io`."""
    name: str
    """Name of the PodGroup in the namespace of the pod."""


class PodRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, dict=True):
    """One pod with the requested resources of its containers."""

    namespace: Namespace = Namespace("default")
    name: PodName
    annotations: dict[str, str] = {}
    """Annotations that affect decisions, for example those in docs/joint-allocation.md. Others are ignored."""
    init_containers: tuple[ContainerRequest, ...] = ()
    containers: tuple[ContainerRequest, ...]
    resources: PodLevelResources = PodLevelResources()
    """If there are any, the kubelet's CPU and memory managers allocate nothing exclusively to the pod."""
    claims: tuple[str, ...] = ()
    """Names of its resource claims (dynamic resource allocation). No decision covers their devices."""
    pod_groups: tuple[PodGroupReference, ...] = ()
    """The PodGroups that it names (`core.demand.gangs`)."""

    @property
    def names_a_gang(self) -> bool:
        """Whether the pod is in a gang, or would be if its annotations were valid."""
        return bool(self.pod_groups) or GANG in self.annotations

    @property
    def has_pod_level_resources(self) -> bool:
        """Whether `resources` has a request or a limit (IsPodLevelResourcesSet of Kubernetes v1.36)."""
        return bool(self.resources.requests or self.resources.limits)

    @cached_property
    def qos(self) -> Qos:
        """
        The QoS class by the pod-level CPU and memory or, if the pod has no pod-level resources, by those of all
        containers (ComputePodQOS, Kubernetes v1.36).
        """
        whole: tuple[ContainerRequest | PodLevelResources, ...] = (*self.init_containers, *self.containers)
        parts = (self.resources,) if self.has_pod_level_resources else whole
        if not any(part.requests.get(r) or part.limits.get(r) for part in parts for r in (CPU, MEMORY)):
            return Qos.BEST_EFFORT
        firm = all(
            part.limits.get(r, 0) > 0 and part.requests.get(r, part.limits.get(r)) == part.limits.get(r)
            for part in parts
            for r in (CPU, MEMORY)
        )
        return Qos.GUARANTEED if firm else Qos.BURSTABLE

    @property
    def gets_exclusive_resources(self) -> bool:
        """Whether the pod's containers can get exclusive CPUs from a kubelet v1.34 to v1.36 (default feature gates)."""
        return self.qos is Qos.GUARANTEED and not self.has_pod_level_resources


class Policy(StrEnum):
    """Topology policies, with the names that the kubelet uses."""

    NONE = "none"
    BEST_EFFORT = "best-effort"
    RESTRICTED = "restricted"
    SINGLE_NUMA_NODE = "single-numa-node"


class Scope(StrEnum):
    """What is aligned as one unit: each container, or the whole pod."""

    CONTAINER = "container"
    POD = "pod"


class Placement(StrEnum):
    """Device policies: topoalign's own, and those of go-gpuallocator under the same names."""

    TOPOLOGY = "topology"
    """The best connected GPUs. Of equal sets, the one after which the best set remains for the next container."""
    BEST_EFFORT = "best-effort"
    SIMPLE = "simple"
    STATIC_DGX1_PASCAL = "static-dgx1-pascal"
    STATIC_DGX1_VOLTA = "static-dgx1-volta"
    STATIC_DGX2 = "static-dgx2"


class CpuOption(StrEnum):
    """Options of the CPU manager's static policy, with the names that the kubelet uses."""

    FULL_PCPUS_ONLY = "full-pcpus-only"
    """Allocates only whole cores, and refuses a request that is not a multiple of the threads per core."""
    DISTRIBUTE_ACROSS_NUMA = "distribute-cpus-across-numa"
    """If one NUMA node is not enough, takes CPUs evenly from several instead of filling one node after another."""
    ALIGN_BY_SOCKET = "align-by-socket"
    """Hints that need no more sockets than necessary are also preferred."""
    DISTRIBUTE_ACROSS_CORES = "distribute-cpus-across-cores"
    """Takes single CPUs of different cores, instead of whole cores."""
    STRICT_RESERVATION = "strict-cpu-reservation"
    """The shared pool does not contain the reserved CPUs."""
    PREFER_UNCORE = "prefer-align-cpus-by-uncorecache"
    """Takes CPUs of one last-level cache if it has enough."""


Compat = Literal["", "koordinator", "gaia", "hami"]
"""The system whose rules apply, including its known faults. Empty: topoalign's own rules."""


class AdmissionRules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The rules by which a node admits pods. Fields of the kubelet's configuration have the same names here."""

    policy: Policy = Policy.BEST_EFFORT
    """Topology policy. The default admits every pod that fits."""
    scope: Scope = Scope.CONTAINER
    mode: Mode = Mode.BEST
    placement: Placement = Placement.TOPOLOGY
    """Device policy, which chooses the GPUs after the NUMA affinity is known."""
    compat: Compat = ""
    """The system whose rules apply, including its known faults. Empty: topoalign's own rules."""
    prefer_closest_numa_nodes: bool = False
    max_allowable_numa_nodes: int = 8
    """Mode `kubelet` refuses machines with more NUMA nodes: their kubelets do not start. Mode `best` has no limit."""
    cpu_manager: Literal["static", "none"] = "static"
    reserved_cpus: str = ""
    """CPUs that are reserved for the system, as a list `0-3,8`."""
    reserved_cpu_count: int = 0
    """Number of CPUs that the CPU manager chooses and reserves for the system if `reserved_cpus` is empty."""
    cpu_options: frozenset[CpuOption] = frozenset()
    memory_manager: Literal["Static", "None"] = "Static"
    reserved_memory: dict[int, dict[ResourceName, int]] = {}
    """NUMA node id -> resource -> bytes that are reserved for the system."""


RuleChanges = Mapping[str, str | int | bool]
"""Rules that differ from those of the node: field of `AdmissionRules` -> value."""
NO_CHANGES: RuleChanges = MappingProxyType({})


def override_rules(rules: AdmissionRules, changes: RuleChanges) -> AdmissionRules:
    """Returns the rules with these changes, by field name. Raises InvalidField, which names the wrong rule."""
    try:
        return msgspec.convert({**msgspec.to_builtins(rules), **changes}, AdmissionRules, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidField("rules", clean(str(error), 200), "see `topoalign allocate --help` for the rules") from error


class NodeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request that contains only the name of the node: for a reading, a position, or a new publication."""

    node: NodeName


class ClockReading(msgspec.Struct, frozen=True, kw_only=True):
    """The clock of an allocator's process, read when it answered."""

    clock: str
    """Identifies the clock. A restarted process has another one."""
    now: float
    """Seconds since an arbitrary point in time."""


class Deadline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time after which a request is refused (DeadlinePassed). A caller that waits 10 s sets `now + 10`."""

    clock: str
    """`ClockReading.clock`."""
    at: float
    """Seconds on that clock."""


class AllocateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """
    Asks a node's allocator to admit a pod (`allocate`), or whether it would admit it (`what-if`). The request can be
    repeated safely, also after a restart: if the pod already holds the requested amounts, the answer is the same.
    """

    node: NodeName
    pod: PodRequest
    rules: RuleChanges = {}
    """Rules that differ from the node's own: field of `AdmissionRules` -> value."""
    deadline: Deadline | None = None
    """None: there is none. `what-if` ignores it."""


class ConfirmRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """
    Asks the allocator of a node what its kubelet will allocate to a pod that is about to be bound there, if the pods in
    `reserved` also run there. The answer is a decision, as for `what-if`; nothing is recorded.
    """

    node: NodeName
    pod: PodRequest
    reserved: tuple[Reservation, ...] = ()
    """
    Reservations of the node for other pods, according to the caller. Reserved devices that the node has already
    allocated count only once.
    """
    terminated: tuple[str, ...] = ()
    """UIDs of pods that the API server reports as terminated or deleted and that hold something in the newest facts."""


class ReleaseRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Releases an allocation by its id, or all allocations of a pod `namespace/name`."""

    node: NodeName
    target: str
    deadline: Deadline | None = None
    """As in AllocateRequest. A late request could release newer allocations of the pod."""


class ExplainRequest(NodeRequest, frozen=True, kw_only=True):
    """Asks how the decision about an allocation (by id) or the latest one about a pod (`namespace/name`) was made."""

    target: str


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """Identifies the newest reading that its writer has published."""

    epoch: int
    revision: int
    digest: str
    """`wire.body_digest` of the message: it distinguishes two readings with the same number."""


class WriterPosition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The newest facts that an allocator confirms. A different fact was not published by the node's own services."""

    epoch: int = 0
    """Epoch of its journal; 0: unknown."""
    seq: int = 0
    digest: str = ""
    """`NodeState.digest` after the fact of this epoch and seq."""
    readings: dict[str, tuple[int, int]] = {}
    """`topology`, `health`, `usage` -> (epoch, revision). The first two are as last confirmed by discovery."""
