"""
What is asked of a node, and under which rules it decides.

Quantities are whole numbers in one unit each: `cpu` in millicores, `memory` and `hugepages-*` in bytes, every other
resource as a count of devices. Requests come from outside, so `checked` looks at every field before anything is decided.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from functools import cached_property
from typing import Literal

import msgspec

from topoalign.core.errors import InvalidField, clean
from topoalign.core.ids import CPU, MEMORY, ContainerName, Namespace, NodeName, PodName, ResourceName, is_hugepages

LARGEST_QUANTITY = 2**63 - 1
"""Kubernetes quantities are 64-bit; anything above is a mistake or an attack."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
"""Wider than Kubernetes' own names, for pods that no API server has seen; without what could be mistaken for a path."""

ANNOTATION = re.compile(r"([A-Za-z0-9][A-Za-z0-9.-]{0,252}/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")

MOST_CONTAINERS = 100
"""Init containers included: far above the pods that are run, and a decision looks at each beside all before it."""
MOST_RESOURCES = 64
MOST_ANNOTATIONS = 1_000
MOST_ANNOTATED = 256 * 1024
"""Characters of all annotations together, as many as the API server takes bytes."""


class Mode(StrEnum):
    """How a decision is meant."""

    KUBELET = "kubelet"
    """Exactly as the kubelet decides, including what is odd there: for predictions."""
    BEST = "best"
    """Ours, for admissions that topoalign decides itself: judged by what is free now, and never by CPU-less nodes."""


class Qos(StrEnum):
    GUARANTEED = "Guaranteed"
    BURSTABLE = "Burstable"
    BEST_EFFORT = "BestEffort"


class ContainerRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What one container asks for."""

    name: ContainerName
    requests: dict[ResourceName, int] = {}
    limits: dict[ResourceName, int] = {}
    sidecar: bool = False
    """An init container with restart policy Always: it runs on beside the app containers."""


class PodRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, dict=True):
    """What one pod asks for."""

    namespace: Namespace = Namespace("default")
    name: PodName
    annotations: dict[str, str] = {}
    """Looked at are those by which its devices are decided together (docs/joint-allocation.md)."""
    init_containers: tuple[ContainerRequest, ...] = ()
    containers: tuple[ContainerRequest, ...]

    @cached_property
    def qos(self) -> Qos:
        """The QoS class as Kubernetes derives it from the CPU and memory of all containers."""
        containers = (*self.init_containers, *self.containers)
        asked = [c for c in containers if any(c.requests.get(r) or c.limits.get(r) for r in (CPU, MEMORY))]
        if not asked:
            return Qos.BEST_EFFORT
        whole = all(
            c.limits.get(r, 0) > 0 and c.requests.get(r, c.limits.get(r)) == c.limits.get(r)
            for c in containers
            for r in (CPU, MEMORY)
        )
        return Qos.GUARANTEED if whole else Qos.BURSTABLE


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
    """Device policies: ours, and those of go-gpuallocator by their names."""

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


class AdmissionRules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How a node decides. Field names follow the kubelet's configuration where it has the same setting."""

    policy: Policy = Policy.BEST_EFFORT
    """Topology policy. The default admits every pod that fits: a first run refuses nobody."""
    scope: Scope = Scope.CONTAINER
    mode: Mode = Mode.BEST
    placement: Placement = Placement.TOPOLOGY
    """Device policy: which GPUs, once the NUMA affinity is known."""
    compat: Literal["", "koordinator"] = ""
    """Whose answers pods with Koordinator's annotations get: ours, or Koordinator's with all that is odd there."""
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


def overridden(rules: AdmissionRules, changes: Mapping[str, str | int | bool]) -> AdmissionRules:
    """The rules with these changes, by field name. Raises InvalidField that names the rule."""
    try:
        return msgspec.convert({**msgspec.to_builtins(rules), **changes}, AdmissionRules, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidField("rules", clean(str(error), 200), "see `topoalign allocate --help` for the rules") from error


class AllocateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """
    Asks the allocator of a node to admit a pod (`allocate`) or to say whether it would (`what-if`).

    Asking again for a pod that already holds what it asks for gets the same answer, so it is safe to repeat.
    """

    node: NodeName
    pod: PodRequest
    rules: dict[str, str | int | bool] = {}
    """Rules that differ from the node's own, by the field names of `AdmissionRules`."""


class ReleaseRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Gives back allocations: one by its id, or all of a pod named `namespace/name`."""

    node: NodeName
    target: str


class ExplainRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Asks how a decision came about: of an allocation by its id, or the latest about a pod named `namespace/name`."""

    node: NodeName
    target: str


class SnapshotRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Asks the allocator to announce all its live allocations anew; answered with the snapshot's (epoch, seq)."""

    node: NodeName


class AnnounceRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Asks discovery to announce topology and health anew; answered with the (epoch, revision) of each."""

    node: NodeName


class AliveRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Asks discovery whether it lives; answered with the (epoch, revision) of the newest topology and health."""

    node: NodeName


def checked(pod: PodRequest) -> PodRequest:
    """
    The same request, if it can be meant, with requests filled in from limits as the API server does.

    Raises InvalidField that names the field by its path.
    """
    if not pod.containers:
        raise InvalidField("pod.containers", "empty", "a pod has at least one container")
    groups = (("pod.initContainers", pod.init_containers), ("pod.containers", pod.containers))
    check_name("pod.namespace", pod.namespace)
    check_name("pod.name", pod.name)
    check_annotations(pod.annotations)
    if len(pod.init_containers) + len(pod.containers) > MOST_CONTAINERS:
        raise InvalidField(
            "pod.containers", f"more than {MOST_CONTAINERS} containers, init containers included", "split the pod"
        )
    seen: set[str] = set()
    for path, containers in groups:
        for position, container in enumerate(containers):
            where = f"{path}[{position}]"
            check_name(f"{where}.name", container.name)
            if container.name in seen:
                raise InvalidField(
                    f"{where}.name", f"{container.name!r} stands twice", "give each container its own name"
                )
            seen.add(container.name)
            if container.sidecar and path == "pod.containers":
                raise InvalidField(f"{where}.sidecar", "set on an app container", "move it to initContainers")
            check_quantities(f"{where}.requests", container.requests)
            check_quantities(f"{where}.limits", container.limits)
            check_limits(where, container)
    return msgspec.structs.replace(
        pod,
        init_containers=tuple(map(with_requests, pod.init_containers)),
        containers=tuple(map(with_requests, pod.containers)),
    )


def with_requests(container: ContainerRequest) -> ContainerRequest:
    return msgspec.structs.replace(container, requests={**container.limits, **container.requests})


def check_name(path: str, name: str) -> None:
    if not NAME.fullmatch(name):
        raise InvalidField(
            path,
            f"{clean(name, 60)!r} is not a name",
            "use 1 to 253 letters, digits, `-`, `_` and `.`, a letter or digit first",
        )


def check_annotations(annotations: Mapping[str, str]) -> None:
    """Sizes and keys; what they say is looked at where it counts."""
    size = sum(len(key) + len(value) for key, value in annotations.items())
    if len(annotations) > MOST_ANNOTATIONS or size > MOST_ANNOTATED:
        most = f"at most {MOST_ANNOTATIONS} with {MOST_ANNOTATED} characters"
        raise InvalidField("pod.annotations", f"{len(annotations)} with {size} characters", f"give {most}")
    for key in annotations:
        if not ANNOTATION.fullmatch(key):
            where = f"pod.annotations[{clean(key, 80)}]"
            raise InvalidField(where, "not a key of annotations", "use keys such as example.com/purpose")


def check_quantities(path: str, quantities: Mapping[ResourceName, int]) -> None:
    if len(quantities) > MOST_RESOURCES:
        raise InvalidField(path, f"{len(quantities)} resources", f"ask for at most {MOST_RESOURCES}")
    for resource, amount in quantities.items():
        where = f"{path}[{clean(resource, 80)}]"
        if not resource or len(resource) > 317 or resource != clean(resource, 317):
            raise InvalidField(where, "not a resource name", "use names such as cpu, memory or nvidia.com/gpu")
        if not 0 <= amount <= LARGEST_QUANTITY:
            raise InvalidField(
                where,
                f"{clean(str(amount), 30)} is outside 0 to 2^63-1",
                "ask for a whole number that a machine can have",
            )


def check_limits(path: str, container: ContainerRequest) -> None:
    """Kubernetes' own rules: a request stays below its limit, and devices and hugepages have both or only a limit."""
    for resource, amount in container.requests.items():
        limit = container.limits.get(resource)
        if limit is not None and amount > limit:
            raise InvalidField(
                f"{path}.requests[{resource}]",
                f"{amount} is above the limit {limit}",
                "raise the limit or lower the request",
            )
        if resource not in (CPU, MEMORY) and limit != amount:
            kind = "hugepages" if is_hugepages(resource) else "a device"
            finding = "has no limit" if limit is None else f"differs from its limit {limit}"
            raise InvalidField(f"{path}.requests[{resource}]", finding, f"{kind} needs equal ones")
