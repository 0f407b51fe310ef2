"""
What of a pod cannot be meant, whatever node it comes to: one answer for the webhook, the scheduler's filter and `what-if`.

`check_pod` reads amounts and annotations as every mode does, and looks at what is asked for in units and slots of GPUs. A
node has this judged by what it offers itself (`check_asked`, `check_slots_asked`); for a cluster a pod is refused if each
way in which some node offers these refuses it. The field is named as the pod's manifest has it:

    spec.containers[1].resources.limits[tencent.com/vcuda-core]: 150 units of computing time, of which a GPU has 100

Refused are, in units: amounts of 0, parts of several GPUs where nothing spreads them, computing time without memory, more
memory than a GPU has, units beside GPUs that are asked for in another way, and all annotations of HAMi about cards, which
have no effect there; nor have those of Koordinator, where the pod asks for nothing else that they are about
(`joint_checks`). So is the number of GPUs over which units are spread, if it is above what a node has, if amounts do not
divide evenly, and beside whole GPUs, slots, or no units at all. With slots: amounts that no GPU has, 0 cores, amounts
without a number of GPUs, units in the same container, annotations that cannot be meant, those of Koordinator, and those that
have an effect where no amount is named: nodes that offer whole GPUs under the same name look at none.
Where HAMi's rules choose the GPUs (`compat`), lists of policies can be meant. What is a wish alone, and has no effect here,
is no reason to refuse a pod: `pod_warnings` names it.

Amounts by names of HAMi that nobody offers are judged by what every GPU in slots would refuse.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import NamedTuple

from topoalign.core.demand.field_paths import containers_of, in_manifest
from topoalign.core.demand.gangs import gang_of, path
from topoalign.core.demand.passed_over import check_not_passed_over
from topoalign.core.demand.pod_demand import pod_demand
from topoalign.core.demand.share_annotations import InvalidShare
from topoalign.core.demand.shares import USUAL_SLOTS, SlotResources, slot_resources
from topoalign.core.demand.spread import cards_said, check_cards
from topoalign.core.demand.units import USUAL_NAMES, Share, UnitResources, check_share, names_of_units, unit_resources
from topoalign.core.demand.validate import validate_pod
from topoalign.core.deviceshare.demand import check_keys, is_joint
from topoalign.core.deviceshare.names import GPU_RESOURCES
from topoalign.core.model.errors import InvalidField, NoFit
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.requests import CARDS, AdmissionRules, Compat, Mode, PodRequest
from topoalign.core.model.topology.model import Topology
from topoalign.core.sharing.joint_checks import check_not_joint
from topoalign.core.sharing.refusals import MemoryAboveCard, NotEnoughShareCards, ShareFields
from topoalign.core.sharing.slot_checks import (
    asks_for_slots,
    check_no_choice,
    check_one_way,
    check_slots_asked,
    check_unlisted_amounts,
    is_for_slots,
    names_in_slots,
)


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
    is_known = offered or slots or otherwise  # by which names shares are asked for
    if is_known:
        check_ways(pod, units, slots)
        check_unlisted_amounts(pod, {*otherwise, *(name for each in slots for name in each.slots.resources)})
    check_one(partial(check_asked, pod, each) for each in units if asks_for(pod, each))
    if is_known:
        check_spread(pod, units)
    by_amounts = sorted(slots, key=lambda each: (not asks_for_slots(pod, each), -each.most, each.resource))
    check_one(
        partial(check_slots_asked, pod, each, compat) for each in by_amounts if is_for_slots(pod, each, otherwise)
    )


class Offers(NamedTuple):
    """By which names some machines offer devices: as of `check_pod`."""

    units: tuple[UnitResources, ...]
    slots: tuple[SlotResources, ...]
    otherwise: frozenset[ResourceName]

    @property
    def names(self) -> frozenset[ResourceName]:
        """All of them, those of amounts included."""
        return self.otherwise.union(*((each.resource, *each.slots.resources) for each in self.slots))


def offers_of(machines: Iterable[Topology]) -> Offers:
    """What these machines offer, all together."""
    units: dict[UnitResources, None] = {}
    slots: dict[SlotResources, None] = {}
    otherwise: set[ResourceName] = set()
    for machine in machines:
        found, in_slots = unit_resources(machine), slot_resources(machine)
        units.update({} if found is None else {found: None})
        slots.update(dict.fromkeys(in_slots))
        otherwise.update(machine.offers_of.keys() - {each.resource for each in in_slots})
    return Offers(tuple(units), tuple(slots), frozenset(otherwise))


def check_shares_known(pod: PodRequest, machine: Topology) -> None:
    """
    Raises InvalidShare for what `check_pod` refuses of amounts that this machine does not offer, and of units and slots in
    one container; a decision looks at what the machine offers. `pod`: valid.
    """
    offers = offers_of((machine,))
    check_ways(pod, offers.units, offers.slots)
    check_unlisted_amounts(pod, offers.names.union(each.resource for each in machine.others))


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
    check_no_choice(pod.annotations)
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
    ways = [USUAL_SLOTS, *sorted(slots, key=lambda each: each.resource)]
    for where, container in containers_of(pod):
        limits = {name: amount for name, amount in container.limits.items() if name not in in_units}
        others = [name for each in ways for name in names_in_slots(limits, each)]
        check_one_way(where, sorted(name for name in in_units if container.limits.get(name)), others)


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
    beside = {name: amount for name, amount in limits.items() if name not in units}
    whole = [name for name in (*offered.others, *map(ResourceName, GPU_RESOURCES)) if beside.get(name)]
    check_one_way(where, units, [*whole, *names_in_slots(beside, USUAL_SLOTS)])
    share, fields = Share(amounts["cores"], amounts["memory"]), offered.fields(where)
    check_share(share, fields)
    if cards is not None:
        share = share._replace(cards=cards)
        check_cards(share, fields)
        if cards > offered.gpus:
            raise NotEnoughShareCards(ShareFields(cards=path(CARDS)), cards, offered.gpus)
    of_each = -(-share.blocks // share.gpus)
    if of_each > offered.most:
        raise MemoryAboveCard(ShareFields(memory=fields.memory), of_each, offered.most, "{} blocks of memory".format)
