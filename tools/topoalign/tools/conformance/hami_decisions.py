"""The suites `hami/…` about which cards a pod gets: scores, order, fit, topology, MIG, quota and the node."""

from collections.abc import Mapping, Sequence

from msgspec import UNSET

from topoalign.core.demand.resource_quantities import largest_moment
from topoalign.core.demand.share_annotations import read_as_hami
from topoalign.core.model.errors import Undecodable
from topoalign.core.model.ids import NodeName, ResourceName
from topoalign.core.model.topology.device_offers import Slots
from topoalign.core.model.topology.mig import MigPlacement, free_mig_placement
from topoalign.core.scoring.scorers import hami_order, node_policy
from topoalign.core.sharing.hami.fit import Shares, Surroundings, Unfit, fit
from topoalign.core.sharing.hami.gpu_links import GpuLink, link_score
from topoalign.core.sharing.hami.gpu_scores import ScoredGpu, hami_gpu_score, hami_gpus_score, order_of_trial, sort_key
from topoalign.core.sharing.quota_amounts import OverQuota, check_quota, lowest_limits, sum_quota_amounts
from topoalign.kubelet.files.manifest import read_quota_limits
from topoalign.tools.conformance.gpuallocator import PCIE
from topoalign.tools.conformance.hami_cases import Case, Share, close_to, suite
from topoalign.tools.conformance.hami_decision_cases import (
    Allocation,
    Answer,
    FitInput,
    Gpu,
    LinkExpected,
    LinkInput,
    MigExpected,
    MigInput,
    NodeFits,
    NodeInput,
    OrderExpected,
    OrderInput,
    PlaceExpected,
    PlaceInput,
    Placing,
    QuotaExpected,
    QuotaInput,
    Score,
    ScoreInput,
    UuidScores,
)
from topoalign.tools.conformance.hami_place import NodeGpus, Placed, PodShares, place_pod_as_hami
from topoalign.tools.conformance.suite import Suite

PCIE_PREFIX = "P2PLink"
NAMES = Slots()
"""What quotas call memory and cores where nobody has renamed them."""


def device_order(case: OrderInput, _: OrderExpected) -> OrderExpected:
    """Which of two cards is tried last."""
    a, b = (sort_key(ScoredGpu(each.read, each.score), case.policy, case.numa_bind) for each in (case.a, case.b))
    return OrderExpected(a < b)


def scores(case: ScoreInput, expect: Score) -> Score:
    """How full a card or a node is."""
    if case.devices is not None:
        return Score(close_to(expect.score, hami_gpus_score([each.read for each in case.devices])))
    return Score(
        close_to(expect.score, hami_gpu_score(case.device.read, [r.read for r in case.requests], case.weights))
    )


def container_fit(case: FitInput, expect: Answer) -> Answer:
    """The cards of one container."""
    if case.devices:
        scored = [ScoredGpu(each.read, each.score) for each in case.devices]
        cards = order_of_trial(scored, case.gpu_policy, case.group_by_numa)
    else:
        cards = tuple(each.read for each in reversed(case.devices_in_order))
    rules = read_as_hami(case.annotations, case.gpu_policy)
    return answer(fit(cards, case.request.read, Surroundings(rules=rules, scores=case.pair_scores)), expect)


def answer(found: Shares | Unfit, expect: Answer) -> Answer:
    """What came out, in the form in which it is expected; cards of a set in the expected order."""
    uuids = [] if isinstance(found, Unfit) else [str(each.uuid) for each in found]
    listed = expect.devices_set
    same = listed is not UNSET and sorted(listed) == sorted(uuids)
    return Answer(
        fits=not isinstance(found, Unfit),
        devices=UNSET if expect.devices is UNSET else uuids,
        devices_set=listed if listed is UNSET or same else uuids,
        reason=UNSET if expect.reason is UNSET else found.reason if isinstance(found, Unfit) else "",
    )


def gpu_pair_score(case: LinkInput, _: LinkExpected) -> LinkExpected:
    """The scores of the links between all cards."""

    def score(one: Gpu, other: Gpu) -> int:
        there = one.links.get(other.index, [])
        back = other.links.get(one.index, [])
        # a pair of which one card shows more links, as with a broken NVLink, is worth nothing
        return sum(link_score(link_of(each)) for each in there) if len(there) == len(back) else 0

    return LinkExpected([UuidScores(a.uuid, {b.uuid: score(a, b) for b in case.gpus if b is not a}) for a in case.gpus])


def link_of(link: Mapping[str, int | str]) -> GpuLink:
    """One link of a case: `{"nvlinks": 2}`, or `{"pcie": "SameCPU"}`. Raises Undecodable."""
    match list(link.items()):
        case [("nvlinks", int(nvlinks))]:
            return nvlinks
        case [(_, str(name))] if (known := PCIE_PREFIX + name.removeprefix(PCIE_PREFIX)) in PCIE:
            return PCIE[known]
    raise Undecodable("a link", "neither a number of nvlinks nor a path over PCIe")


def mig_place(case: MigInput, expect: MigExpected) -> MigExpected:
    """The instances for several profiles of one card, or for one container."""
    if case.request is None:
        return MigExpected(placements=instances(case))
    pod = PodShares(containers=((case.request.read,),), rules=read_as_hami(case.annotations))
    found = place_pod_as_hami(NodeGpus(cards=tuple(each.read for each in case.devices)), pod)
    shares = () if isinstance(found, Unfit) else found.containers[0]
    made = [Allocation(str(each.uuid), each.profile, each.placement, each.memory, each.cores) for each in shares]
    return MigExpected(
        fits=not isinstance(found, Unfit),
        reason=UNSET if expect.reason is UNSET else found.reason if isinstance(found, Unfit) else "",
        allocations=UNSET if expect.allocations is UNSET else made,
    )


def instances(case: MigInput) -> list[Placing]:
    """Where instances of the profiles of a case go, one after another."""
    profiles = {each.name: each.read for each in case.profiles}
    taken: list[MigPlacement] = []
    found = []
    for name in case.requests:
        placement = free_mig_placement(profiles[name], taken)
        if placement is not None:
            taken.append(placement)
            found.append(Placing(name, placement.start, placement.size))
    return found


def quota_fit(case: QuotaInput, _: QuotaExpected) -> QuotaExpected:
    """
    What a pod uses with one more card, and whether its namespace may: counted as services count, but card by card.

    Of several shares that one init container has of a card the largest counts upstream, as if each were a container's own.
    """
    containers = [*case.allocated_by_container, [*case.picked_for_current_container, case.candidate]]
    init = containers[: case.init_containers]
    apps = containers[case.init_containers :]
    by_card = largest_moment(
        [(of_card(share), False) for each in init for share in each],
        [of_card(share) for each in apps for share in each],
    )
    used = sum_quota_amounts({resource: amount} for (_, resource), amount in by_card.items())
    quotas = [case.quota] if case.quota is not None and case.quota.namespace == case.namespace else []
    try:
        check_quota(case.namespace, used, {}, lowest_limits(read_quota_limits(each.hard) for each in quotas))
    except OverQuota:
        return QuotaExpected(used[NAMES.memory], within_quota=False)
    return QuotaExpected(used[NAMES.memory], within_quota=True)


def of_card(share: Share) -> dict[tuple[str, ResourceName], int]:
    """What a container has of a card, by the card and what quotas call it."""
    return {(share.uuid, NAMES.memory): share.mem_mb, (share.uuid, NAMES.cores): share.cores}


def nodes(case: PlaceInput, expect: PlaceExpected) -> PlaceExpected:
    """The cards of a pod on each node, and the node; one of those that may be chosen passes."""
    found = {name: placed(node, case) for name, node in case.nodes.items()}
    fitting = {name: each for name, each in found.items() if isinstance(each, Placed)}
    policy = node_policy(case.annotations, case.node_policy)
    chosen = min(fitting, key=lambda name: (hami_order(policy, fitting[name].score), name), default=None)
    allowed = expect.chosen_node_any_of
    return PlaceExpected(
        fits={name: node_fits(name, each, expect) for name, each in fitting.items()},
        failed={name: each.reason for name, each in found.items() if isinstance(each, Unfit)},
        chosen_node_any_of=allowed if chosen in allowed else [chosen] if chosen is not None else [],
    )


def placed(node: NodeInput, case: PlaceInput) -> Placed | Unfit:
    """The cards of a pod on one node."""
    pod = PodShares(
        containers=tuple(tuple(request.read for request in each) for each in case.containers),
        init_containers=case.init_containers,
        rules=read_as_hami(case.annotations, node.gpu_policy),
    )
    return place_pod_as_hami(NodeGpus(cards=tuple(each.read for each in node.devices), scores=node.pair_scores), pod)


def node_fits(name: NodeName, found: Placed, expect: PlaceExpected) -> NodeFits:
    """A node that can serve the pod, as cases have it."""
    expected = expect.fits.get(name)
    containers: Sequence[Shares] = found.containers
    return NodeFits(
        node_score=found.score if expected is None else close_to(expected.node_score, found.score),
        devices=[[str(share.uuid) for share in shares] for shares in containers],
        mem_mb=[[share.memory for share in shares] for shares in containers],
        cores=[[share.cores for share in shares] for shares in containers],
    )


SUITES: dict[str, Suite] = {
    "hami/device_order": suite(Case[OrderInput, OrderExpected], device_order),
    "hami/device_score": suite(Case[ScoreInput, Score], scores),
    "hami/fit": suite(Case[FitInput, Answer], container_fit),
    "hami/gpu_pair_score": suite(Case[LinkInput, LinkExpected], gpu_pair_score),
    "hami/mig_place": suite(Case[MigInput, MigExpected], mig_place),
    "hami/node_score": suite(Case[ScoreInput, Score], scores),
    "hami/numa_bind": suite(Case[FitInput, Answer], container_fit),
    "hami/place": suite(Case[PlaceInput, PlaceExpected], nodes),
    "hami/quota_fit": suite(Case[QuotaInput, QuotaExpected], quota_fit),
    "hami/topology_pick": suite(Case[FitInput, Answer], container_fit),
}
