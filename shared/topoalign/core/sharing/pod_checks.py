"""
What of a pod cannot be meant, whatever node it comes to: one answer for the webhook, the scheduler's filter and `what-if`.

`check_pod` reads amounts and annotations as every mode does, and looks at what is asked for in units and slots of GPUs. A
node has this judged by what it offers itself (`check_asked`, `check_slots_asked`); for a cluster a pod is refused if each
way in which some node offers these refuses it. The field is named as the pod's manifest has it:

    spec.containers[1].resources.limits[tencent.com/vcuda-core]: 150 units of computing time, of which a GPU has 100

Refused are, in units: amounts of 0, parts of several GPUs where nothing spreads them, computing time without memory, more
memory than a GPU has, units beside GPUs that are asked for in another way, and all annotations of HAMi and Gaia about cards,
which have no effect there; nor have those of Koordinator, where the pod asks for nothing else that they are about
(`joint_checks`). So is the number of GPUs over which units are spread, if it is above what a node has, if amounts do not
divide evenly, and beside whole GPUs, slots, or no units at all. With slots: amounts that no GPU has, 0 cores, amounts
without a number of GPUs, units in the same container, annotations that cannot be meant, those that have no effect, those of
Koordinator, and those that have one where no amount is named: nodes that offer whole GPUs under the same name look at none.
Where HAMi's rules choose the GPUs (`compat`), lists of policies and a policy for nodes can be meant.

Where nobody offers slots, a pod that names amounts as HAMi does is judged by what every GPU in slots would refuse.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Set
from functools import partial
from typing import Literal

from topoalign.core.demand import hami_names as names
from topoalign.core.demand.card_annotations import card_rules, invalid, said_of_cards, uuid_selection, weights_meant
from topoalign.core.demand.field_paths import containers_of, in_manifest
from topoalign.core.demand.gangs import gang_of, path
from topoalign.core.demand.passed_over import check_not_passed_over
from topoalign.core.demand.pod_demand import pod_demand
from topoalign.core.demand.slots import USUAL_SLOTS, SlotResources, check_amounts
from topoalign.core.demand.spread import cards_said, check_cards
from topoalign.core.demand.units import USUAL_NAMES, InvalidShare, Share, UnitResources, check_share, names_of_units
from topoalign.core.demand.validate import validate_pod
from topoalign.core.deviceshare.demand import check_keys, is_joint
from topoalign.core.deviceshare.names import GPU_RESOURCES
from topoalign.core.model.errors import InvalidField, NoFit, quoted
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.requests import CARDS, AdmissionRules, Compat, Mode, PodRequest
from topoalign.core.model.topology.offers import CORES
from topoalign.core.sharing.hami.selection import BINPACK, SPREAD
from topoalign.core.sharing.joint_checks import check_not_joint, check_slots_not_joint, without_effect
from topoalign.core.sharing.refusals import MemoryAboveCard, NotEnoughShareCards, ShareFields

CORE_LIMIT = "tencent.com/vcuda-core-limit"
"""Gaia's: up to how much computing time the containers of a pod may use while nobody else does."""
WITHOUT_EFFECT: Mapping[Literal["units", "slots"], tuple[str, ...]] = {
    "units": (*names.OF_PODS, CORE_LIMIT),
    "slots": (names.VGPU_MODE, names.NODE_POLICY, CORE_LIMIT),
}
"""Annotations that choose cards, nodes or limits elsewhere."""


def check_pod(
    pod: PodRequest,
    offered: Collection[UnitResources] = (),
    slots: Collection[SlotResources] = (),
    compat: Compat = "",
    otherwise: Collection[ResourceName] = (),
    *,
    by_kubelet: bool = False,
) -> None:
    """
    Raises InvalidField for what no node would take, and InvalidShare, MemoryAboveCard and NotEnoughShareCards where none of
    the ways in which units are `offered`, or `slots`, could serve what is asked for in them. `otherwise`: what nodes offer
    in another way than in slots. Where kubelets decide on all nodes (`by_kubelet`) also PassedOverByKubelet.
    """
    try:
        gang_of(pod)
        cards_said(pod.annotations)
        valid = validate_pod(pod)
        if is_joint(pod.annotations):
            for mode in Mode:
                pod_demand(valid, AdmissionRules(mode=mode, compat=compat))
        else:  # then no mode refuses anything else of a valid pod
            check_keys(pod.annotations)
    except InvalidField as error:
        raise in_manifest(error) from error
    if by_kubelet:
        check_not_passed_over(pod)
    units = sorted(offered, key=lambda each: (-each.most, each))
    check_ways(pod, units, slots)
    check_one(partial(check_asked, pod, each) for each in units if asks_for(pod, each))
    if offered or slots or otherwise:  # else it is not known by which names shares are asked for
        check_spread(pod, units)
        check_unlisted_amounts(pod, {*otherwise, *(name for each in slots for name in each.slots.resources)})
    by_amounts = sorted(slots, key=lambda each: (not asks_for_slots(pod, each), -each.most, each.resource))
    check_one(
        partial(check_slots_asked, pod, each, compat) for each in by_amounts if is_for_slots(pod, each, otherwise)
    )


def check_one(checks: Iterable[Callable[[], None]]) -> None:
    """Raises what the first of the checks does if all of them raise NoFit. No checks are all right."""
    refusal: NoFit | None = None
    for check in checks:
        try:
            check()
        except NoFit as error:
            refusal = refusal or error
        else:
            return
    if refusal is not None:
        raise refusal


def check_asked(pod: PodRequest, offered: UnitResources) -> None:
    """
    Raises InvalidShare, MemoryAboveCard and NotEnoughShareCards for what is asked for in units that are offered so. `pod`:
    valid.
    """
    if not asks_for(pod, offered):
        return
    for where, container in containers_of(pod):
        check_container(where, container.limits, offered, cards_said(pod.annotations))
    check_annotations(pod.annotations, "units")
    check_not_joint(pod)


def check_spread(pod: PodRequest, offered: Iterable[UnitResources]) -> None:
    """
    Raises InvalidShare where a pod says over how many GPUs its units are spread, and asks for no units of those that are
    `offered`, nor for any under their usual names. `pod`: valid.
    """
    if CARDS not in pod.annotations:
        return
    units = names_of_units(offered)
    if all(units.isdisjoint(container.limits) for _, container in containers_of(pod)):
        raise InvalidShare(
            f"{path(CARDS)}: spreads units of GPUs, and no container asks for any",
            f"leave it out, or ask for {' and '.join(USUAL_NAMES)}; how many GPUs a container has whole or has slots of, it "
            "says by their number",
        )


def check_ways(pod: PodRequest, units: Iterable[UnitResources], slots: Collection[SlotResources]) -> None:
    """
    Raises InvalidShare for a container that asks for units of GPUs and for slots, or an amount of them, whichever nodes
    offer the one and the other; what nobody offers, under the usual names.
    """
    in_units = names_of_units(units)
    ways = sorted(slots, key=lambda each: each.resource)
    names = (name for each in (USUAL_SLOTS, *ways) for name in (each.resource, *each.slots.resources))
    others = [name for name in names if name not in in_units]
    for where, container in containers_of(pod):
        asked = sorted(name for name in in_units if container.limits.get(name))
        check_one_way(where, container.limits, asked, others)


def check_unlisted_amounts(pod: PodRequest, known: Collection[ResourceName]) -> None:
    """
    Raises InvalidShare for what no node with slots takes, where a pod names amounts as HAMi does and none of these names is
    `known`. It may come without a number of GPUs: by which name it asks for slots is not known either. `pod`: valid.
    """
    if not names_amounts(pod, USUAL_SLOTS) or not {*USUAL_SLOTS.slots.resources}.isdisjoint(known):
        return
    for where, container in containers_of(pod):
        check_amounts(where, {**container.limits, USUAL_SLOTS.resource: 1}, USUAL_SLOTS)
    card_rules(said_of_cards(pod.annotations), as_hami=True)  # which takes all that topoalign's own reading takes
    check_annotations(pod.annotations, "slots", "hami")


def check_slots_asked(pod: PodRequest, offered: SlotResources, compat: Compat = "") -> None:
    """Raises InvalidShare for what is asked for of GPUs that are offered in slots so. `pod`: valid."""
    for where, container in containers_of(pod):
        units = [name for name in USUAL_NAMES if container.limits.get(name)]
        check_one_way(where, container.limits, units, (offered.resource,))
    if names_amounts(pod, offered):
        for where, container in containers_of(pod):
            check_amounts(where, container.limits, offered)
        card_rules(said_of_cards(pod.annotations), as_hami=compat == "hami")
    elif asks_for_slots(pod, offered):
        check_says_nothing(pod.annotations, offered)
    else:
        return
    check_annotations(pod.annotations, "slots", compat)
    check_slots_not_joint(pod, offered)
    check_counts(pod.annotations, offered)


def check_counts(annotations: Mapping[str, str], offered: SlotResources) -> None:
    """Raises InvalidShare for a number of GPUs of a pod with slots, of which it has as many as it asks for slots."""
    if CARDS in annotations:
        raise InvalidShare(
            f"{path(CARDS)}: has no effect on slots of GPUs, which the pod asks for",
            f"leave it out; {offered.resource} says of how many GPUs a container has slots",
        )


def check_says_nothing(annotations: Mapping[str, str], offered: SlotResources) -> None:
    """Raises InvalidShare for annotations that choose among the GPUs, of a pod that asks for slots and for no amount."""
    for key, _ in said_of_cards(annotations):
        raise InvalidShare(
            f"{path(key)}: chooses among GPUs in slots, of which no amount is asked for",
            f"name one, {offered.slots.cores}: {CORES} for whole GPUs, or leave it out",
        )


def is_for_slots(pod: PodRequest, offered: SlotResources, otherwise: Collection[ResourceName]) -> bool:
    """Whether a pod can be for no nodes but those with such slots. `otherwise`: as of `check_pod`."""
    return names_amounts(pod, offered) or (asks_for_slots(pod, offered) and offered.resource not in otherwise)


def asks_for_slots(pod: PodRequest, offered: SlotResources) -> bool:
    """Whether a container asks for slots of this resource."""
    return any(each.limits.get(offered.resource) for _, each in containers_of(pod))


def names_amounts(pod: PodRequest, offered: SlotResources) -> bool:
    """Whether a container names one of the resources of amounts, if only with 0."""
    return any(not each.limits.keys().isdisjoint(offered.slots.resources) for _, each in containers_of(pod))


def asks_for(pod: PodRequest, offered: UnitResources) -> bool:
    """Whether a container names one of these units, if only with 0."""
    units = dict(offered.units)
    return any(not units.keys().isdisjoint(each.limits) for _, each in containers_of(pod))


def check_container(
    where: str, limits: Mapping[ResourceName, int], offered: UnitResources, cards: int | None = None
) -> None:
    """The same for one container, at the path `where`. `cards`: over how many GPUs its units are spread; None: not said."""
    amounts = {"cores": 0, "memory": 0}
    units = {name: unit for name, unit in offered.units if name in limits}
    if not units:
        return
    for name, unit in units.items():
        if not limits[name]:
            raise InvalidShare(f"{where}.resources.limits[{name}]: 0 units", "leave it out, or ask for 1 or more")
        amounts[unit] += limits[name]
    others = (*offered.others, *USUAL_SLOTS.slots.resources, *map(ResourceName, GPU_RESOURCES))
    check_one_way(where, limits, units, [name for name in others if name not in units])
    share, fields = Share(amounts["cores"], amounts["memory"]), offered.fields(where)
    check_share(share, fields)
    if cards is not None:
        share = share._replace(cards=cards)
        check_cards(share, fields)
        if cards > offered.gpus:
            raise NotEnoughShareCards(ShareFields(cards=path(CARDS)), cards, offered.gpus)
    of_each = -(-share.blocks // share.gpus)
    if of_each > offered.most:
        raise MemoryAboveCard(ShareFields(memory=fields.memory), of_each, offered.most, "blocks of memory")


def check_one_way(
    where: str,
    limits: Mapping[ResourceName, int],
    units: Collection[ResourceName],
    others: Iterable[ResourceName],
) -> None:
    """Raises InvalidShare for a container that asks for these units and for GPUs in one of the other ways."""
    for name in others if units else ():
        if limits.get(name):
            raise InvalidShare(
                f"{where}.resources.limits[{name}]: GPUs in two ways, for {' and '.join(units)} are asked for as well",
                "ask for a share of a GPU or for whole devices, each in a container of its own",
            )


def check_annotations(annotations: Mapping[str, str], what: Literal["units", "slots"], compat: Compat = "") -> None:
    """Raises InvalidShare for annotations that have no effect on these, and first for weights that are none."""
    if (weights := annotations.get(names.SCORING_WEIGHTS)) is not None:
        weights_meant(weights)
    for key in WITHOUT_EFFECT[what]:
        if key == names.NODE_POLICY and what == "slots" and compat == "hami":
            check_node_policy(annotations)
        elif key in annotations:
            raise InvalidShare(
                f"{path(key)}: {without_effect(what)}",
                "leave it out; nodeSelector and affinity choose the nodes",
            )


def check_node_policy(annotations: Mapping[str, str]) -> None:
    """Raises InvalidShare for a word by which HAMi ranks no nodes: it reads each other one as `binpack`."""
    policy = annotations.get(names.NODE_POLICY, BINPACK)
    if policy not in (BINPACK, SPREAD):
        raise InvalidShare(
            f"{path(names.NODE_POLICY)}: {quoted([policy])} is no policy",
            f"write {BINPACK} or {SPREAD}, or leave it out",
        )


def check_no_node_policy(pod: PodRequest, slots: Iterable[SlotResources], otherwise: Collection[ResourceName]) -> None:
    """Raises InvalidShare for a policy for nodes of a pod with slots, if it ranks none. `otherwise`: as of `check_pod`."""
    if any(is_for_slots(pod, each, otherwise) for each in slots):
        check_annotations({key: pod.annotations[key] for key in pod.annotations if key == names.NODE_POLICY}, "slots")


def check_gpus_known(
    pod: PodRequest, known: Set[DeviceID], slots: Iterable[SlotResources], otherwise: Collection[ResourceName]
) -> None:
    """Raises InvalidShare for a pod with slots that accepts only GPUs that no node has. `otherwise`: as of `check_pod`."""
    wanted = uuid_selection(pod.annotations).wanted
    if wanted and known.isdisjoint(wanted) and any(is_for_slots(pod, each, otherwise) for each in slots):
        finding, remedy = "no node has such a GPU", "write uuids of GPUs as `topoalign gpu list` shows them"
        raise invalid(names.USE_UUID, f"{quoted(wanted[:3])}: {finding}", f"{remedy}, or wait until the node is there")
