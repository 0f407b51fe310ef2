"""
Where a pod goes on one node: the cards of each of its containers.

Each container starts with the cards as those before it leave them, but each init container with the cards as they are
before the pod: they run one after another, and end before the others start. Of each container's cards the scores are
taken anew, so that two containers spread over two cards. A node's score is of what is used before the pod, and does
not look at links (upstream: neither).

This sequence is HAMi's alone, and only the published cases (suites `hami/place` and `hami/mig_place`) take it. A node of
topoalign follows the kubelet, by which a container takes over the devices of its init containers; what both have in common
is `choice`, by which each container gets its cards.

Source: HAMi 4707fb02, scoreNode.
"""

from collections.abc import Sequence

import msgspec

from topoalign.core.demand.share_annotations import VENDOR
from topoalign.core.demand.shares import HamiRequest
from topoalign.core.model.topology.mig import find_place
from topoalign.core.sharing.hami.fit import MIG_MODE, Shares, Surroundings, Unfit
from topoalign.core.sharing.hami.gpu_scores import ScoredGpu, choose_gpus_as_hami, hami_gpus_score, score_cards
from topoalign.core.sharing.hami.hami_amounts import MIB, HamiGpuUsage, HamiShare, with_share
from topoalign.core.sharing.hami.registration import PairScores
from topoalign.core.sharing.hami.selection import PodRules

INSUFFICIENT = "NodeInsufficientDevice"
"""The reason of a node with fewer cards than one container asks for."""
UNKNOWN_VENDOR = "Device type not found"
"""The reason for cards of a vendor that nobody has registered."""


class NodeGpus(msgspec.Struct, frozen=True, kw_only=True):
    """A node's cards."""

    cards: tuple[HamiGpuUsage, ...]
    scores: PairScores = {}
    """What the links between them are worth."""
    cordoned: frozenset[str] = frozenset()
    """Uuids."""


class PodShares(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod asks for."""

    containers: tuple[tuple[HamiRequest, ...], ...]
    """By container, init containers first; none for one without cards."""
    init_containers: int = 0
    rules: PodRules = PodRules()


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """A node that can serve the pod."""

    score: float
    containers: tuple[Shares, ...]
    """By container, init containers first; cards in the order in which they were taken."""


def place_pod_as_hami(node: NodeGpus, pod: PodShares) -> Placed | Unfit:
    """The cards of a pod on one node, or the reason of the first container that does not fit. Raises TooMuchWork."""
    given: list[Shares] = []
    cards = node.cards
    for number, requests in enumerate(pod.containers):
        found = _serve(node, cards, requests, pod.rules)
        if isinstance(found, Unfit):
            return found
        shares, left = found
        given.append(shares)
        if number >= pod.init_containers:
            cards = left
    return Placed(score=hami_gpus_score(node.cards), containers=tuple(given))


def _serve(
    node: NodeGpus, cards: tuple[HamiGpuUsage, ...], requests: Sequence[HamiRequest], rules: PodRules
) -> tuple[Shares, tuple[HamiGpuUsage, ...]] | Unfit:
    """The shares of one container, and the cards as it leaves them."""
    given: list[HamiShare] = []
    scored = score_cards(cards, requests, rules.weights)
    around = Surroundings(rules=rules, cordoned=node.cordoned, scores=node.scores)
    for request in requests:
        if request.count <= 0:
            continue
        if request.vendor != VENDOR:
            return Unfit(UNKNOWN_VENDOR)
        its = [each for each in scored if request.vendor.lower() in each.card.type.lower()]
        if len(its) < request.count and not _takes_instances(its, rules):
            return Unfit(INSUFFICIENT)
        found = choose_gpus_as_hami(its, request, around)
        if isinstance(found, Unfit):
            return found
        for share in found:
            scored, taken = _take(scored, share)
            given.append(taken)
    return tuple(given), tuple(each.card for each in scored)


def _takes_instances(scored: Sequence[ScoredGpu], rules: PodRules) -> bool:
    """Whether one card can serve a container more than once."""
    return rules.takes_mode(MIG_MODE) and any(each.card.mode == MIG_MODE for each in scored)


def _take(cards: tuple[ScoredGpu, ...], share: HamiShare) -> tuple[tuple[ScoredGpu, ...], HamiShare]:
    """The cards with this share held, and the share, which of a card in mode `mig` is a whole instance."""
    position = next(i for i, each in enumerate(cards) if each.card.uuid == share.uuid)
    card = cards[position].card
    instance = find_place(card.profiles, card.instances, share.memory * MIB) if card.mode == MIG_MODE else None
    if instance is not None:
        profile, placement = instance
        share = HamiShare(
            uuid=share.uuid,
            memory=-(-profile.memory // MIB),
            cores=profile.cores,
            profile=profile.name,
            placement=placement,
        )
    left = ScoredGpu(with_share(card, share), cards[position].score)
    return (*cards[:position], left, *cards[position + 1 :]), share
