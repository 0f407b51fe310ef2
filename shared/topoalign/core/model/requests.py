"""
The request of a pod, and the rules under which a node decides about it.

Quantities are whole numbers in one unit each: `cpu` in millicores, `memory` and `hugepages-*` in bytes, every other
resource as a count of devices. Requests come from outside: `core.demand.pod_validation` checks every field before
anything is decided.
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
"""Kubernetes quantities are 64-bit; anything above is a mistake or an attack."""

MOST_CONTAINERS = 100
"""Init containers included: far above the pods that are run, and a decision compares each with all before it."""


GANG = "topoalign.io/gang"
GANG_SIZE = "topoalign.io/gang-size"
"""Annotations of pods that start together or not at all: the name of their gang, and how many pods it has."""
GPU_COUNT = "topoalign.io/gpus"
"""The annotation with the number of GPUs over which the units of a container are spread (`core.demand.shares`)."""


class Mode(StrEnum):
    """Whether a decision predicts the kubelet's or is topoalign's own."""

    KUBELET = "kubelet"
    """Exactly as the kubelet decides, its known faults included: for predictions."""
    BEST = "best"
    """Ours, for admissions that topoalign decides itself: judged by what is free now, and never by CPU-less nodes."""


class Qos(StrEnum):
    """QoS classes of pods, by Kubernetes' names."""

    GUARANTEED = "Guaranteed"
    BURSTABLE = "Burstable"
    BEST_EFFORT = "BestEffort"


class ContainerRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One container with the resources that it asks for, in the units of this module."""

    name: ContainerName
    requests: dict[ResourceName, int] = {}
    limits: dict[ResourceName, int] = {}
    sidecar: bool = False
    """An init container with restart policy Always: it runs on together with the app containers."""


class PodLevelResources(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Pod-level resources (`spec.resources`): CPUs, memory and hugepages, in the units of this module."""

    requests: dict[ResourceName, int] = {}
    limits: dict[ResourceName, int] = {}


class PodRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, dict=True):
    """One pod with the resources that its containers ask for."""

    namespace: Namespace = Namespace("default")
    name: PodName
    annotations: dict[str, str] = {}
    """Looked at are those by which its devices are decided together (docs/joint-allocation.md)."""
    init_containers: tuple[ContainerRequest, ...] = ()
    containers: tuple[ContainerRequest, ...]
    resources: PodLevelResources = PodLevelResources()
    """With any, the CPU and memory managers of a kubelet leave the pod alone."""
    claims: tuple[str, ...] = ()
    """Names of its resource claims (dynamic resource allocation). No decision covers their devices."""

    @property
    def has_pod_level_resources(self) -> bool:
        """Whether there are any (IsPodLevelResourcesSet of Kubernetes v1.36)."""
        return bool(self.resources.requests or self.resources.limits)

    @cached_property
    def qos(self) -> Qos:
        """The QoS class, by pod-level CPU and memory or those of all containers (ComputePodQOS, Kubernetes v1.36)."""
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
        """Whether a kubelet v1.34 to v1.36 (default feature gates) gives containers of the pod CPUs of their own."""
        return self.qos is Qos.GUARANTEED and not self.has_pod_level_resources


class Policy(StrEnum):
    """Topology policies by the kubelet's names."""

    NONE = "none"
    BEST_EFFORT = "best-effort"
    RESTRICTED = "restricted"
    SINGLE_NUMA_NODE = "single-numa-node"


class Scope(StrEnum):
    """What is aligned as one: each container, or the whole pod."""

    CONTAINER = "container"
    POD = "pod"


class Placement(StrEnum):
    """Device policies: topoalign's own, and those of go-gpuallocator by their names."""

    TOPOLOGY = "topology"
    """The best connected GPUs that leave the best ones for the next container."""
    BEST_EFFORT = "best-effort"
    SIMPLE = "simple"
    STATIC_DGX1_PASCAL = "static-dgx1-pascal"
    STATIC_DGX1_VOLTA = "static-dgx1-volta"
    STATIC_DGX2 = "static-dgx2"


class CpuOption(StrEnum):
    """Options of the CPU manager's static policy, by the kubelet's names."""

    FULL_PCPUS_ONLY = "full-pcpus-only"
    """Whole cores only: a request that is not a multiple of the threads per core is refused."""
    DISTRIBUTE_ACROSS_NUMA = "distribute-cpus-across-numa"
    """Evenly over the NUMA nodes where one is not enough, instead of filling one after the other."""
    ALIGN_BY_SOCKET = "align-by-socket"
    """A hint that stays on as few sockets as possible is preferred, too."""
    DISTRIBUTE_ACROSS_CORES = "distribute-cpus-across-cores"
    """Single CPUs over all cores, instead of whole cores."""
    STRICT_RESERVATION = "strict-cpu-reservation"
    """The shared pool does without the reserved CPUs."""
    PREFER_UNCORE = "prefer-align-cpus-by-uncorecache"
    """CPUs of one last-level cache where they fit."""


Compat = Literal["", "koordinator", "gaia", "hami"]
"""Whose answers pods get: topoalign's own, or those of another scheduler, with its known faults."""


class AdmissionRules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The rules by which a node admits pods. Field names follow the kubelet's configuration where it has them."""

    policy: Policy = Policy.BEST_EFFORT
    """Topology policy. The default admits every pod that fits: a first run refuses nobody."""
    scope: Scope = Scope.CONTAINER
    mode: Mode = Mode.BEST
    placement: Placement = Placement.TOPOLOGY
    """Device policy: which GPUs, once the NUMA affinity is known."""
    compat: Compat = ""
    """Whose answers pods get, with their known faults: topoalign's (empty), `koordinator`'s, `gaia`'s or `hami`'s."""
    prefer_closest_numa_nodes: bool = False
    max_allowable_numa_nodes: int = 8
    """In mode `kubelet`, more NUMA nodes than this are refused, as the kubelet refuses to start. Mode `best` ignores it."""
    cpu_manager: Literal["static", "none"] = "static"
    reserved_cpus: str = ""
    """CPUs kept for the system, as a list `0-3,8`."""
    reserved_cpu_count: int = 0
    """How many CPUs the CPU manager keeps for the system by its own choice, where `reserved_cpus` names none."""
    cpu_options: frozenset[CpuOption] = frozenset()
    memory_manager: Literal["Static", "None"] = "Static"
    reserved_memory: dict[int, dict[ResourceName, int]] = {}
    """NUMA node id -> resource -> bytes kept for the system."""


RuleChanges = Mapping[str, str | int | bool]
"""Rules that are to differ from those of a node, by the field names of `AdmissionRules`."""
NO_CHANGES: RuleChanges = MappingProxyType({})


def override_rules(rules: AdmissionRules, changes: RuleChanges) -> AdmissionRules:
    """Returns the rules with these changes, by field name. Raises InvalidField, which names the wrong rule."""
    try:
        return msgspec.convert({**msgspec.to_builtins(rules), **changes}, AdmissionRules, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidField("rules", clean(str(error), 200), "see `topoalign allocate --help` for the rules") from error


class NodeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to a service of one node."""

    node: NodeName


class ClockRequest(NodeRequest, frozen=True, kw_only=True):
    """Asks the allocator of a node for its clock, to give the next request a deadline."""


class ClockReading(msgspec.Struct, frozen=True, kw_only=True):
    """The clock of an allocator's process at the moment when it answered."""

    clock: str
    """Names it; a process that starts anew has another one."""
    now: float
    """Seconds since some moment."""


class Deadline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time after which a request is refused: DeadlinePassed. A caller that waits 10 s names `now + 10`."""

    clock: str
    """`ClockReading.clock`."""
    at: float
    """Seconds on that clock."""


class AllocateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """
    Asks the allocator of a node to admit a pod (`allocate`) or to decide whether it would (`what-if`). It is safe to repeat,
    also after a restart: a pod whose containers already hold as many of each device, CPU and byte gets the same answer.
    """

    node: NodeName
    pod: PodRequest
    rules: RuleChanges = {}
    """Rules that differ from the node's own, by the field names of `AdmissionRules`."""
    deadline: Deadline | None = None
    """None: it is never late. `what-if` has no effect and looks at none."""


class ConfirmRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """
    Asks the allocator of a node what its kubelet will give a pod that is about to be bound there, while this is reserved
    for other pods. Answered with a decision, as `what-if`; nothing is recorded.
    """

    node: NodeName
    pod: PodRequest
    reserved: tuple[Reservation, ...] = ()
    """Reservations of the node for other pods, as the asker knows them; what the node has given of them counts once."""
    terminated: tuple[str, ...] = ()
    """UIDs of pods that are terminated or deleted in the API and still hold something in the newest facts."""


class ReleaseRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Gives back allocations: one by its id, or all of a pod named `namespace/name`."""

    node: NodeName
    target: str
    deadline: Deadline | None = None
    """As of AllocateRequest: what comes late could give back what the pod was given since."""


class ExplainRequest(NodeRequest, frozen=True, kw_only=True):
    """Asks how a decision came about: of an allocation by its id, or the latest about a pod `namespace/name`."""

    target: str


class SnapshotRequest(NodeRequest, frozen=True, kw_only=True):
    """Asks the allocator to announce all its live allocations anew; answered with the snapshot's (epoch, seq)."""


class AnnounceRequest(NodeRequest, frozen=True, kw_only=True):
    """Asks for topology and health, or usage, anew in a new epoch; answered with the (epoch, revision) of each."""


class AliveRequest(NodeRequest, frozen=True, kw_only=True):
    """Asks a service whether it is alive; answered with (epoch, revision) of each reading, or a `WriterPosition`."""


class PublishedRequest(NodeRequest, frozen=True, kw_only=True):
    """Asks discovery what it announced last; answered with a `Published` for `topology` and one for `health`."""


class UseRequest(NodeRequest, frozen=True, kw_only=True):
    """Asks discovery what the GPUs are used for now; answered with a `Measurement`."""


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """Identifies the reading that its writer announced last."""

    epoch: int
    revision: int
    digest: str
    """`wire.body_digest` of the message: it distinguishes two readings with the same number."""


class WriterPosition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The newest facts that an allocator confirms: one that differs did not come from the node's own services."""

    epoch: int = 0
    """Of its journal; 0: not known."""
    seq: int = 0
    digest: str = ""
    """`NodeState.digest` after the fact of this epoch and seq."""
    readings: dict[str, tuple[int, int]] = {}
    """`topology`, `health`, `usage` -> (epoch, revision), of the first two as discovery confirmed last."""
