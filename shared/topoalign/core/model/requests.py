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
"""Kubernetes quantities have 64 bits."""

MOST_CONTAINERS = 100
"""Init containers included. Limits the work of a decision, which compares each container with all before it."""


GANG = "topoalign.io/gang"
GANG_SIZE = "topoalign.io/gang-size"
"""Annotations of pods that start together or not at all: the name of their gang, and how many pods it has."""
GPU_COUNT = "topoalign.io/gpus"
"""The annotation with the number of GPUs over which the units of a container are spread (`core.demand.shares`)."""


class Mode(StrEnum):
    """Whether a decision predicts that of a kubelet or is topoalign's own."""

    KUBELET = "kubelet"
    """Exactly as the kubelet decides, with its known faults: for predictions."""
    BEST = "best"
    """For admissions that topoalign decides itself: by the devices that are free now, without CPU-less NUMA nodes."""


class Qos(StrEnum):
    """QoS classes of pods, by Kubernetes' names."""

    GUARANTEED = "Guaranteed"
    BURSTABLE = "Burstable"
    BEST_EFFORT = "BestEffort"


class ContainerRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One container with its requested resources, in the units of this module."""

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
    """One pod with the requested resources of its containers."""

    namespace: Namespace = Namespace("default")
    name: PodName
    annotations: dict[str, str] = {}
    """Annotations that decide about devices, for example docs/joint-allocation.md. Others are ignored."""
    init_containers: tuple[ContainerRequest, ...] = ()
    containers: tuple[ContainerRequest, ...]
    resources: PodLevelResources = PodLevelResources()
    """If there are any, the kubelet's CPU and memory managers allocate nothing exclusively to the pod."""
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
    """The best connected GPUs; among equal sets, the one that leaves the best set for the next container."""
    BEST_EFFORT = "best-effort"
    SIMPLE = "simple"
    STATIC_DGX1_PASCAL = "static-dgx1-pascal"
    STATIC_DGX1_VOLTA = "static-dgx1-volta"
    STATIC_DGX2 = "static-dgx2"


class CpuOption(StrEnum):
    """Options of the CPU manager's static policy, by the kubelet's names."""

    FULL_PCPUS_ONLY = "full-pcpus-only"
    """Only whole cores: a request that is not a multiple of the threads per core is refused."""
    DISTRIBUTE_ACROSS_NUMA = "distribute-cpus-across-numa"
    """Evenly over the NUMA nodes where one is not enough, instead of filling one after the other."""
    ALIGN_BY_SOCKET = "align-by-socket"
    """A hint that stays on as few sockets as possible is preferred, too."""
    DISTRIBUTE_ACROSS_CORES = "distribute-cpus-across-cores"
    """Single CPUs over all cores, instead of whole cores."""
    STRICT_RESERVATION = "strict-cpu-reservation"
    """The shared pool does not contain the reserved CPUs."""
    PREFER_UNCORE = "prefer-align-cpus-by-uncorecache"
    """CPUs of one last-level cache, if they fit."""


Compat = Literal["", "koordinator", "gaia", "hami"]
"""Decide as topoalign (empty), or as another system, with its known faults."""


class AdmissionRules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The rules by which a node admits pods. Fields that the kubelet's configuration has, too, have its names."""

    policy: Policy = Policy.BEST_EFFORT
    """Topology policy. The default admits every pod that fits."""
    scope: Scope = Scope.CONTAINER
    mode: Mode = Mode.BEST
    placement: Placement = Placement.TOPOLOGY
    """Device policy: chooses the GPUs once the NUMA affinity is known."""
    compat: Compat = ""
    """Decide as topoalign (empty), or as `koordinator`, `gaia` or `hami`, with their known faults."""
    prefer_closest_numa_nodes: bool = False
    max_allowable_numa_nodes: int = 8
    """In mode `kubelet`, a machine with more NUMA nodes is refused: its kubelet does not start. Mode `best` ignores it."""
    cpu_manager: Literal["static", "none"] = "static"
    reserved_cpus: str = ""
    """CPUs kept for the system, as a list `0-3,8`."""
    reserved_cpu_count: int = 0
    """Number of CPUs that the CPU manager chooses and keeps for the system if `reserved_cpus` is empty."""
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
    """A request that needs no more than the name of the node: for a reading, a position, or a new publication."""

    node: NodeName


class ClockReading(msgspec.Struct, frozen=True, kw_only=True):
    """The clock of an allocator's process, read when it answered."""

    clock: str
    """Identifies the clock. A restarted process has another one."""
    now: float
    """Seconds since some moment."""


class Deadline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time after which a request is refused (DeadlinePassed). A caller that waits 10 s sets `now + 10`."""

    clock: str
    """`ClockReading.clock`."""
    at: float
    """Seconds on that clock."""


class AllocateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """
    Asks the allocator of a node to admit a pod (`allocate`) or to decide whether it would (`what-if`). It is safe to repeat,
    also after a restart: if the pod's containers already hold the requested amounts, the answer is the same.
    """

    node: NodeName
    pod: PodRequest
    rules: RuleChanges = {}
    """Rules that differ from the node's own: field of `AdmissionRules` -> value."""
    deadline: Deadline | None = None
    """None: there is none. `what-if` ignores it."""


class ConfirmRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """
    Asks the allocator of a node what its kubelet will allocate to a pod that is about to be bound there, beside `reserved`
    pods. The answer is a decision, as for `what-if`; nothing is recorded.
    """

    node: NodeName
    pod: PodRequest
    reserved: tuple[Reservation, ...] = ()
    """Reservations of the node for other pods, by the caller's data. Devices that the node has allocated count once."""
    terminated: tuple[str, ...] = ()
    """UIDs of pods that the API server reports as terminated or deleted, and that hold something by the newest facts."""


class ReleaseRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Releases an allocation by its id, or all allocations of a pod `namespace/name`."""

    node: NodeName
    target: str
    deadline: Deadline | None = None
    """As in AllocateRequest. A late request could release newer allocations of the pod."""


class ExplainRequest(NodeRequest, frozen=True, kw_only=True):
    """Asks how a decision was made: about an allocation by its id, or the latest about a pod `namespace/name`."""

    target: str


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """Identifies the reading that its writer published last."""

    epoch: int
    revision: int
    digest: str
    """`wire.body_digest` of the message: it distinguishes two readings with the same number."""


class WriterPosition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The newest facts that an allocator confirms. A different fact was not published by the node's own services."""

    epoch: int = 0
    """Epoch of its journal; 0: not known."""
    seq: int = 0
    digest: str = ""
    """`NodeState.digest` after the fact of this epoch and seq."""
    readings: dict[str, tuple[int, int]] = {}
    """`topology`, `health`, `usage` -> (epoch, revision); the first two as discovery confirmed them last."""
