"""The cases of the suites `hami/…` about which cards a pod gets, as the files have them."""

import msgspec
from msgspec import UNSET, UnsetType

from topoalign.core.demand.share_annotations import GpuOrder, Weights
from topoalign.core.model.ids import NodeName
from topoalign.core.model.topology.mig import MigPlacement
from topoalign.tools.conformance.hami_cases import Card, Profile, Request, Share


class OrderInput(msgspec.Struct, frozen=True):
    """Two cards with their scores, and the policy."""

    a: Card
    b: Card
    policy: str
    numa_bind: bool


class OrderExpected(msgspec.Struct, frozen=True):
    """Which of them comes first in upstream's list, and is tried last."""

    a_before_b: bool


class ScoreInput(msgspec.Struct, frozen=True):
    """A card with the requests of a container, or the cards of a node."""

    device: Card = Card()
    requests: list[Request] = []
    weights: Weights = Weights()
    devices: list[Card] | None = None


class Score(msgspec.Struct, frozen=True):
    """How full it is."""

    score: float


class FitInput(msgspec.Struct, frozen=True):
    """
    The cards of a node for one container: as upstream's list, which is walked from the end, or with their scores.

    `group_by_numa`: whether the order keeps cards of one NUMA node together.
    """

    request: Request
    annotations: dict[str, str] = {}
    devices_in_order: list[Card] = []
    pair_scores: dict[str, dict[str, int]] = {}
    devices: list[Card] = []
    gpu_policy: str = GpuOrder.SPREAD
    group_by_numa: bool = False


class Allocation(msgspec.Struct, frozen=True):
    """An instance that a container gets."""

    uuid: str
    profile: str
    placement: MigPlacement | None
    mem_mb: int
    cores: int


class Answer(msgspec.Struct, frozen=True):
    """Which cards a container gets; only what the case tells counts."""

    fits: bool | UnsetType = UNSET
    devices: list[str] | UnsetType = UNSET
    devices_set: list[str] | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    allocations: list[Allocation] | UnsetType = UNSET


class Gpu(msgspec.Struct, frozen=True):
    """
    A card with its links, by the index of the other card: a number of `nvlinks`, or under any other key upstream's name of a
    path over PCIe.
    """

    uuid: str
    index: int
    links: dict[int, list[dict[str, int | str]]] = {}


class LinkInput(msgspec.Struct, frozen=True):
    """The cards of a node."""

    gpus: list[Gpu]


class UuidScores(msgspec.Struct, frozen=True):
    """The scores of one card's links, by uuid."""

    uuid: str
    score: dict[str, int]


class LinkExpected(msgspec.Struct, frozen=True):
    """The scores of all cards."""

    scores: list[UuidScores]


class MigInput(msgspec.Struct, frozen=True):
    """Profiles of a card that are asked for one after another, or a container's request for cards in mode `mig`."""

    profiles: list[Profile] = []
    requests: list[str] = []
    annotations: dict[str, str] = {}
    devices: list[Card] = []
    request: Request | None = None


class Placing(msgspec.Struct, frozen=True):
    """Where an instance goes."""

    profile: str
    start: int
    size: int


class MigExpected(Answer, frozen=True):
    """Where all of them go, or what the container gets."""

    placements: list[Placing] | UnsetType = UNSET


class Quota(msgspec.Struct, frozen=True):
    """The ResourceQuota of a namespace."""

    namespace: str
    hard: dict[str, int | str]


class QuotaInput(msgspec.Struct, frozen=True):
    """A card that a container is to get, and what it and the pod's containers before it get."""

    namespace: str
    candidate: Share
    allocated_by_container: list[list[Share]]
    picked_for_current_container: list[Share]
    init_containers: int = 0
    quota: Quota | None = None


class QuotaExpected(msgspec.Struct, frozen=True):
    """What the pod then uses, and whether its namespace may."""

    effective_mem_mb: int
    within_quota: bool


class NodeInput(msgspec.Struct, frozen=True):
    """A node's cards, and the policy of its cluster."""

    devices: list[Card]
    gpu_policy: str = GpuOrder.SPREAD
    pair_scores: dict[str, dict[str, int]] = {}


class PlaceInput(msgspec.Struct, frozen=True):
    """A pod and the nodes."""

    nodes: dict[NodeName, NodeInput]
    containers: list[list[Request]]
    node_policy: str
    annotations: dict[str, str] = {}
    init_containers: int = 0


class NodeFits(msgspec.Struct, frozen=True):
    """A node that can serve the pod; lists by container."""

    node_score: float
    devices: list[list[str]]
    mem_mb: list[list[int]]
    cores: list[list[int]]


class PlaceExpected(msgspec.Struct, frozen=True):
    """The nodes that can serve the pod, why others cannot, and which may be chosen."""

    fits: dict[NodeName, NodeFits]
    failed: dict[NodeName, str]
    chosen_node_any_of: list[NodeName]
