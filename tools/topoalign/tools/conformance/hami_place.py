"""
Chooses the GPUs of each container of a pod on one node.

Each container starts with the GPUs as those before it leave them, but each init container with the GPUs as they are
before the pod: they run one after another, and end before the others start. The scores are computed again for each
container, so two containers spread over two GPUs. A node's score counts what is used before the pod, and no links (as
upstream).

Only HAMi uses this sequence. A node of topoalign follows the kubelet, by which a container takes over the devices of its
init containers; both use `gpu_scores` to choose the GPUs of each container.

Source: HAMi 4707fb02, scoreNode.
"""

from collections.abc import Sequence

import msgspec

from topoalign.core.demand.share_annotations import VENDOR, GpuRules
from topoalign.core.demand.shares import HamiRequest
from topoalign.core.model.byte_sizes import MIB
from topoalign.core.model.holdings import Amount
from topoalign.core.model.topology.mig import MigPlacement, find_place
from topoalign.core.sharing.hami.fit import MIG_MODE, HamiShare, Shares, Surroundings, Unfit
from topoalign.core.sharing.hami.gpu_scores import ScoredGpu, choose_gpus_as_hami, hami_gpus_score, score_gpus
from topoalign.core.sharing.hami.registration import PairScores
from topoalign.core.sharing.shared_gpus import SharedGpu
from topoalign.core.state.share_amounts import sum_amounts

INSUFFICIENT = "NodeInsufficientDevice"
"""The reason of a node with fewer GPUs than one container asks for."""
UNKNOWN_VENDOR = "Device type not found"
"""The reason for GPUs of a vendor that is not registered."""


class NodeGpus(msgspec.Struct, frozen=True, kw_only=True):
    """A node's GPUs."""

    cards: tuple[SharedGpu, ...]
    scores: PairScores = {}
    cordoned: frozenset[str] = frozenset()
    """Uuids."""


class PodShares(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod asks for."""

    containers: tuple[tuple[HamiRequest, ...], ...]
    """By container, init containers first; none for one without GPUs."""
    init_containers: int = 0
    rules: GpuRules = GpuRules()


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """A node that can serve the pod."""

    score: float
    containers: tuple[Shares, ...]
    """By container, init containers first; GPUs in the order in which they were taken."""


def place_pod_as_hami(node: NodeGpus, pod: PodShares) -> Placed | Unfit:
    """The GPUs of a pod on one node, or the reason of the first container that does not fit. Raises TooMuchWork."""
    given: list[Shares] = []
    gpus = node.cards
    for number, requests in enumerate(pod.containers):
        found = _serve(node, gpus, requests, pod.rules)
        if isinstance(found, Unfit):
            return found
        shares, left = found
        given.append(shares)
        if number >= pod.init_containers:
            gpus = left
    return Placed(score=hami_gpus_score(node.cards), containers=tuple(given))


def _serve(
    node: NodeGpus, gpus: tuple[SharedGpu, ...], requests: Sequence[HamiRequest], rules: GpuRules
) -> tuple[Shares, tuple[SharedGpu, ...]] | Unfit:
    """The shares of one container, and the GPUs as it leaves them."""
    given: list[HamiShare] = []
    scored = score_gpus(gpus, requests, rules.weights)
    around = Surroundings(rules=rules, cordoned=node.cordoned, scores=node.scores)
    for request in requests:
        if request.count <= 0:
            continue
        if request.vendor != VENDOR:
            return Unfit(UNKNOWN_VENDOR)
        its = [each for each in scored if request.vendor.lower() in each.gpu.model.lower()]
        takes_instances = (rules.mode is None or MIG_MODE in rules.mode) and any(
            each.gpu.mode == MIG_MODE for each in its
        )
        if len(its) < request.count and not takes_instances:  # of those one GPU can serve it more than once
            return Unfit(INSUFFICIENT)
        found = choose_gpus_as_hami(its, request, around)
        if isinstance(found, Unfit):
            return found
        for share in found:
            scored, taken = _take(scored, share)
            given.append(taken)
    return tuple(given), tuple(each.gpu for each in scored)


def _take(gpus: tuple[ScoredGpu, ...], share: HamiShare) -> tuple[tuple[ScoredGpu, ...], HamiShare]:
    """The GPUs with this share held, and the share, which of a GPU in mode `mig` is a whole instance."""
    position = next(i for i, each in enumerate(gpus) if each.gpu.device == share.uuid)
    gpu = gpus[position].gpu
    taken = gpu.taken or frozenset[MigPlacement]()
    instance = find_place(gpu.profiles, taken, share.memory * MIB) if gpu.mode == MIG_MODE else None
    if instance is not None:
        profile, placement = instance
        share = HamiShare(
            uuid=share.uuid,
            memory=-(-profile.memory // MIB),
            cores=profile.cores,
            profile=profile.name,
            placement=placement,
        )
    left = msgspec.structs.replace(
        gpu,
        sharers=gpu.sharers + 1,
        held=sum_amounts((gpu.held, Amount(cores=share.cores, memory=share.memory * MIB))),
        taken=taken if share.placement is None else taken | {share.placement},
    )
    return (*gpus[:position], ScoredGpu(left, gpus[position].score), *gpus[position + 1 :]), share
