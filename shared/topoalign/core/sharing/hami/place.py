"""
Where a pod goes: the cards of each of its containers on one node, and the node among those that have enough.

Each container starts with the cards as those before it leave them, but each init container with the cards as they are
before the pod: they run one after another, and end before the others start. Of each container's cards the scores are
taken anew, so that two containers spread over two cards. A node's score is of what is used before the pod, and does
not look at links (upstream: neither).

Source: HAMi 4707fb02, scoreNode.
"""

from collections.abc import Mapping, Sequence

import msgspec

from topoalign.core.demand.hami_names import NODE_POLICY
from topoalign.core.model.ids import NodeName
from topoalign.core.model.topology.mig import find_place
from topoalign.core.sharing.hami.fit import Shares, Surroundings, Unfit, fit
from topoalign.core.sharing.hami.mig import MIG_MODE
from topoalign.core.sharing.hami.order import ScoredCard, walk
from topoalign.core.sharing.hami.quota import NamespaceQuota
from topoalign.core.sharing.hami.registration import PairScores
from topoalign.core.sharing.hami.requests import CardRequest
from topoalign.core.sharing.hami.scores import device_score, node_score
from topoalign.core.sharing.hami.selection import BINPACK, SPREAD, PodRules
from topoalign.core.sharing.hami.usage import MIB, CardShare, CardUsage, with_share

INSUFFICIENT = "NodeInsufficientDevice"
"""The reason of a node with fewer cards than one container asks for."""


class NodeCards(msgspec.Struct, frozen=True, kw_only=True):
    """A node's cards."""

    cards: tuple[CardUsage, ...]
    scores: PairScores = {}
    """What the links between them are worth."""
    cordoned: frozenset[str] = frozenset()
    """Uuids."""


class PodShares(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod asks for."""

    containers: tuple[tuple[CardRequest, ...], ...]
    """By container, init containers first; none for one without cards."""
    init_containers: int = 0
    rules: PodRules = PodRules()
    quota: NamespaceQuota | None = None
    """Of its namespace. None: there is none."""


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """A node that can serve the pod."""

    score: float
    containers: tuple[Shares, ...]
    """By container, init containers first; cards in the order in which they were taken."""


def place(node: NodeCards, pod: PodShares) -> Placed | Unfit:
    """The cards of a pod on one node, or the reason of the first container that does not fit. Raises TooMuchWork."""
    given: list[Shares] = []
    cards = node.cards
    for number, requests in enumerate(pod.containers):
        found = _serve(node, cards, requests, pod, tuple(given))
        if isinstance(found, Unfit):
            return found
        shares, left = found
        given.append(shares)
        if number >= pod.init_containers:
            cards = left
    return Placed(score=node_score(node.cards), containers=tuple(given))


def choose_node(scores: Mapping[NodeName, float], policy: str = BINPACK) -> NodeName | None:
    """The node of the highest score, with `spread` of the lowest; of equal ones the first by name. None without nodes."""
    return min(scores, key=lambda name: (-node_rank(scores[name], policy), name), default=None)


def node_rank(score: float, policy: str = BINPACK) -> float:
    """What nodes of such scores are ranked by, the best one highest: the score, with `spread` the other way round."""
    return -score if policy == SPREAD else score


def node_policy(annotations: Mapping[str, str], policy: str = BINPACK) -> str:
    """How the node is chosen for a pod with these annotations."""
    return annotations.get(NODE_POLICY, policy)


def _serve(
    node: NodeCards,
    cards: tuple[CardUsage, ...],
    requests: Sequence[CardRequest],
    pod: PodShares,
    earlier: tuple[Shares, ...],
) -> tuple[Shares, tuple[CardUsage, ...]] | Unfit:
    """The shares of one container, and the cards as it leaves them."""
    given: list[CardShare] = []
    scores = [device_score(card, requests, pod.rules.weights) for card in cards]
    for request in requests:
        if request.count <= 0:
            continue
        scored = [ScoredCard(card, score) for card, score in zip(cards, scores, strict=True) if _is_for(request, card)]
        if len(scored) < request.count and not _takes_instances(scored, pod.rules):
            return Unfit(INSUFFICIENT)
        around = Surroundings(
            rules=pod.rules,
            cordoned=node.cordoned,
            scores=node.scores,
            quota=pod.quota,
            init_containers=pod.init_containers,
            earlier=earlier,
        )
        found = fit(walk(scored, pod.rules.policy, pod.rules.numa_bind), request, around)
        if isinstance(found, Unfit):
            return found
        for share in found:
            cards, taken = _take(cards, share)
            given.append(taken)
    return tuple(given), cards


def _is_for(request: CardRequest, card: CardUsage) -> bool:
    return request.vendor.lower() in card.type.lower()


def _takes_instances(scored: Sequence[ScoredCard], rules: PodRules) -> bool:
    """Whether one card can serve a container more than once."""
    return rules.takes_mode(MIG_MODE) and any(each.card.mode == MIG_MODE for each in scored)


def _take(cards: tuple[CardUsage, ...], share: CardShare) -> tuple[tuple[CardUsage, ...], CardShare]:
    """The cards with this share held, and the share, which of a card in mode `mig` is a whole instance."""
    position = next(i for i, card in enumerate(cards) if card.uuid == share.uuid)
    card = cards[position]
    instance = find_place(card.profiles, card.instances, share.memory * MIB) if card.mode == MIG_MODE else None
    if instance is not None:
        profile, placement = instance
        share = CardShare(
            uuid=share.uuid,
            memory=-(-profile.memory // MIB),
            cores=profile.cores,
            profile=profile.name,
            placement=placement,
        )
    return (*cards[:position], with_share(card, share), *cards[position + 1 :]), share
