"""What of a pod with slots of GPUs cannot be meant, and what units and slots have in common of that (`pod_checks`)."""

from collections.abc import Collection, Iterable, Mapping, Set

from topoalign.core.demand import hami_names as names
from topoalign.core.demand.field_paths import containers_of
from topoalign.core.demand.gangs import path
from topoalign.core.demand.share_annotations import (
    InvalidShare,
    card_rules,
    invalid,
    said_of_cards,
    uuid_selection,
    weights_meant,
)
from topoalign.core.demand.shares import USUAL_SLOTS, SlotResources, check_amounts
from topoalign.core.demand.units import USUAL_NAMES
from topoalign.core.model.errors import quoted
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.requests import CARDS, Compat, PodRequest
from topoalign.core.model.topology.offers import CORES
from topoalign.core.sharing.hami.selection import BINPACK, SPREAD
from topoalign.core.sharing.joint_checks import check_slots_not_joint, without_effect

NOT_OF_UNITS = tuple(key for key in names.OF_PODS if key != names.NODE_POLICY)
"""Annotations that choose cards, which have no effect on units."""


def check_unlisted_amounts(pod: PodRequest, known: Collection[ResourceName]) -> None:
    """
    Raises InvalidShare for what no node with slots takes, where a pod names amounts as HAMi does, by names that are not
    `known`. It may come without a number of GPUs: by which name it asks for slots is not known either. `pod`: valid.
    """
    unlisted = {*USUAL_SLOTS.slots.resources}.difference(known)
    for where, container in containers_of(pod):
        amounts = {name: amount for name, amount in container.limits.items() if name in unlisted}
        if amounts:
            number = container.limits.get(USUAL_SLOTS.resource, 1)
            check_amounts(where, {USUAL_SLOTS.resource: number, **amounts}, USUAL_SLOTS)
            card_rules(said_of_cards(pod.annotations), as_hami=True)  # takes all that topoalign's own reading takes


def check_slots_asked(pod: PodRequest, offered: SlotResources, compat: Compat = "") -> None:
    """Raises InvalidShare for what is asked for of GPUs that are offered in slots so. `pod`: valid."""
    for where, container in containers_of(pod):
        units = [name for name in USUAL_NAMES if container.limits.get(name)]
        check_one_way(where, units, names_in_slots(container.limits, offered))
    if names_amounts(pod, offered):
        for where, container in containers_of(pod):
            check_amounts(where, container.limits, offered)
        card_rules(said_of_cards(pod.annotations), as_hami=compat == "hami")
    elif asks_for_slots(pod, offered):
        check_says_nothing(pod.annotations, offered)
    else:
        return
    check_weights_meant(pod.annotations)
    if compat == "hami":
        check_node_policy(pod.annotations)
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


def names_in_slots(limits: Mapping[ResourceName, int], offered: SlotResources) -> list[ResourceName]:
    """The names by which a container asks for slots that are offered so, or says an amount of them, if only 0."""
    number = [offered.resource] if limits.get(offered.resource) else []
    return [*number, *(name for name in offered.slots.resources if name in limits)]


def check_one_way(where: str, units: Collection[ResourceName], others: Collection[ResourceName]) -> None:
    """Raises InvalidShare for a container that asks for these units and by the other names for GPUs in another way."""
    if units and others:
        raise InvalidShare(
            f"{where}.resources.limits[{next(iter(others))}]: GPUs in two ways, for {' and '.join(units)} are asked for "
            "as well",
            "ask for a share of a GPU or for whole devices, each in a container of its own",
        )


def check_no_choice(annotations: Mapping[str, str]) -> None:
    """Raises InvalidShare for annotations that choose cards, of a pod with units, and first for weights that are none."""
    check_weights_meant(annotations)
    for key in NOT_OF_UNITS:
        if key in annotations:
            raise InvalidShare(
                f"{path(key)}: {without_effect('units')}", "leave it out; nodeSelector and affinity choose the nodes"
            )


def check_weights_meant(annotations: Mapping[str, str]) -> None:
    """Raises InvalidShare for weights that are none."""
    if (weights := annotations.get(names.SCORING_WEIGHTS)) is not None:
        weights_meant(weights)


def check_node_policy(annotations: Mapping[str, str]) -> None:
    """Raises InvalidShare for a word by which HAMi ranks no nodes: it reads each other one as `binpack`."""
    policy = annotations.get(names.NODE_POLICY, BINPACK)
    if policy not in (BINPACK, SPREAD):
        raise InvalidShare(
            f"{path(names.NODE_POLICY)}: {quoted([policy])} is no policy",
            f"write {BINPACK} or {SPREAD}, or leave it out",
        )


def check_gpus_known(
    pod: PodRequest, known: Set[DeviceID], slots: Iterable[SlotResources], otherwise: Collection[ResourceName]
) -> None:
    """Raises InvalidShare for a pod with slots that accepts only GPUs that no node has. `otherwise`: as of `check_pod`."""
    wanted = uuid_selection(pod.annotations).wanted
    if wanted and known.isdisjoint(wanted) and any(is_for_slots(pod, each, otherwise) for each in slots):
        finding, remedy = "no node has such a GPU", "write uuids of GPUs as `topoalign gpu list` shows them"
        raise invalid(names.USE_UUID, f"{quoted(wanted[:3])}: {finding}", f"{remedy}, or wait until the node is there")
