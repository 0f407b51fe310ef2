"""
Finds what is invalid in a pod on every node: one answer for the webhook, the scheduler's filter and `what-if`.

`check_pod` reads amounts and annotations as every mode does, and looks at what is asked for in units and slots of GPUs.
A node checks this against its own offers (`check_asked`, `check_slots_asked`). A cluster refuses a pod if every
sharing strategy by which some node offers these refuses it. The field is named as in the pod's manifest:

    spec.containers[1].resources.limits[tencent.com/vcuda-core]: 150 units of computing time, of which a GPU has 100

Refused are, in units: amounts of 0, shares of several GPUs where nothing spreads them, computing time without memory, more
memory than a GPU has, units together with GPUs that are requested in another way, and all annotations of HAMi about
GPUs, which have no effect there; nor have those of Koordinator, where the pod asks for nothing else that they are about
(below). So is the number of GPUs over which units are spread, if it is above what a node has, if amounts do not
divide evenly, and together with whole GPUs, slots, or no units at all. With slots: amounts that no GPU has, 0 cores,
amounts without a number of GPUs, units in the same container, invalid annotations, those of Koordinator,
and those that have an effect where no amount is named: nodes that offer whole GPUs under the same name ignore them.
Where HAMi's rules choose the GPUs (`compat`), lists of policies are valid. A preference without an effect here does
not refuse a pod: `pod_warnings` names it.

Amounts by names of HAMi that nobody offers are judged by what every GPU in slots would refuse.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Set
from functools import partial
from typing import Literal, NamedTuple

from topoalign.core.demand import share_annotations as names
from topoalign.core.demand.field_paths import in_manifest
from topoalign.core.demand.gangs import annotation_path, gang_of
from topoalign.core.demand.pod_demand import ContainerDemand, PodDemand, pod_demand
from topoalign.core.demand.pod_validation import validate_pod
from topoalign.core.demand.share_annotations import (
    InvalidShare,
    annotation_error,
    read_gpu_annotations,
    read_gpu_rules,
    read_weights,
    uuid_selection,
)
from topoalign.core.demand.shares import (
    USUAL_NAMES,
    USUAL_SLOTS,
    SlotResources,
    UnitResources,
    check_amounts,
    check_equal_parts,
    check_units_asked,
    read_gpu_count,
    share_of_units,
    slot_resources,
    unit_amount,
    unit_resource_names,
    unit_resources,
)
from topoalign.core.demand.unserved import check_not_passed_over
from topoalign.core.deviceshare.demand import RESOURCES as JOINT_RESOURCES
from topoalign.core.deviceshare.demand import check_keys, is_joint
from topoalign.core.deviceshare.koordinator_names import ANNOTATIONS, GPU_BYTES, GPU_RESOURCES
from topoalign.core.model.errors import InvalidField, NoFit, quoted
from topoalign.core.model.ids import GPU, NIC, DeviceID, ResourceName
from topoalign.core.model.requests import CARDS, AdmissionRules, Compat, Mode, PodRequest
from topoalign.core.model.topology.device_offers import CORES, MEMORY_BLOCK
from topoalign.core.model.topology.model import Topology
from topoalign.core.sharing.share_refusals import MemoryAboveGpu, NotEnoughShareGpus, ShareFields
from topoalign.core.state.share_amounts import sum_amounts

# Which of Koordinator's annotations about devices are invalid together with shares of GPUs.
#
# They choose whole GPUs and NICs together, and GPUs by Koordinator's names. Units are chosen without them. Slots of
# `nvidia.com/gpu` have the name of whole GPUs, so that a pod with such an annotation would wait for whole ones, which a
# node with slots has none of.


def joint_key(demand: PodDemand) -> str | None:
    """The first of these annotations that the pod has; None: it has none."""
    return next((key for key in ANNOTATIONS if key in demand.annotations), None)


def check_not_joint(demand: PodDemand) -> None:
    """
    Raises InvalidShare for an annotation of Koordinator where no container asks for what these are about: whole GPUs and
    NICs, and GPUs by its own names. `demand`: asks for units.
    """
    key = joint_key(demand)
    if key is None:
        return
    if any(each.asked.get(name) for each in demand.containers for name in JOINT_RESOURCES):
        return  # what that container asks for is decided by them, and their content is checked
    raise InvalidShare(
        f"{annotation_path(key)}: {without_effect('units')}",
        f"leave it out; it is about whole GPUs ({GPU}) and NICs ({NIC}), and no container asks for any",
    )


def check_joint_memory(demand: PodDemand, offered: UnitResources) -> None:
    """
    Raises MemoryAboveGpu for a container that asks by Koordinator's name for more bytes of each GPU than the largest one in
    units has.
    """
    largest = offered.most * MEMORY_BLOCK
    for container in demand.containers:
        gpu = container.joint.gpu if container.joint is not None else None
        memory = 0 if gpu is None else gpu.each.get(GPU_BYTES, 0)
        if memory > largest:
            raise MemoryAboveGpu(ShareFields(memory=f"{container.path}.resources.limits[{GPU_BYTES}]"), memory, largest)


def check_slots_not_joint(demand: PodDemand, offered: SlotResources) -> None:
    """
    Raises InvalidShare for such an annotation of a pod with slots, where whole GPUs have their name. `demand`: asks
    for these slots or for amounts of them.
    """
    key = joint_key(demand)
    if key is not None and offered.resource in JOINT_RESOURCES:
        raise InvalidShare(
            f"{annotation_path(key)}: {without_effect('slots')}",
            f"leave it out, or ask for whole GPUs ({offered.resource}) without amounts, where nodes offer them so",
        )


def without_effect(what: Literal["units", "slots"]) -> str:
    """The finding for an annotation that chooses devices in another way."""
    return f"has no effect on {what} of GPUs{', which go where least is left' if what == 'units' else ''}"


def check_pod(
    pod: PodRequest,
    offered: Collection[UnitResources] = (),
    slots: Collection[SlotResources] = (),
    compat: Compat = "",
    otherwise: Collection[ResourceName] = (),
    *,
    by_kubelet: bool = False,
) -> PodDemand:
    """
    The demand of a pod by the rules of any kubelet.

    Raises InvalidField for what no node would take, and InvalidShare, MemoryAboveGpu and NotEnoughShareGpus where none of
    the ways in which units are `offered`, or `slots`, could serve what is asked for in them. `otherwise`: what nodes offer
    in another way than in slots. Where kubelets decide on all nodes (`by_kubelet`) also PassedOverByKubelet.
    """
    try:
        gang_of(pod)
        read_gpu_count(pod.annotations)
        valid = validate_pod(pod)
        demand = pod_demand(valid, AdmissionRules(mode=Mode.KUBELET, compat=compat))
        if is_joint(pod.annotations):
            pod_demand(valid, AdmissionRules(mode=Mode.BEST, compat=compat))
        else:  # then no mode refuses anything else of a valid pod
            check_keys(pod.annotations)
    except InvalidField as error:
        raise in_manifest(error) from error
    if by_kubelet:
        check_not_passed_over(demand)
    units = sorted(offered, key=lambda each: (-each.most, each))
    is_known = offered or slots or otherwise  # by which names shares are asked for
    if is_known:
        check_ways(demand, units, slots)
        check_unlisted_amounts(demand, {*otherwise, *(name for each in slots for name in each.slots.resources)})
    check_one(partial(check_asked, demand, each) for each in units if asks_for(demand, each))
    if is_known:
        check_spread(demand, units)
    by_amounts = sorted(slots, key=lambda each: (not asks_for_slots(demand, each), -each.most, each.resource))
    check_one(
        partial(check_slots_asked, demand, each, compat) for each in by_amounts if is_for_slots(demand, each, otherwise)
    )
    return demand


class Offers(NamedTuple):
    """By which names some machines offer devices: as of `check_pod`."""

    units: tuple[UnitResources, ...]
    slots: tuple[SlotResources, ...]
    otherwise: frozenset[ResourceName]

    @property
    def names(self) -> frozenset[ResourceName]:
        """All of them, those of amounts included."""
        return self.otherwise.union(*((each.resource, *each.slots.resources) for each in self.slots))


def offers_of_machines(machines: Iterable[Topology]) -> Offers:
    """What these machines offer, all together."""
    units: dict[UnitResources, None] = {}
    slots: dict[SlotResources, None] = {}
    otherwise: set[ResourceName] = set()
    for machine in machines:
        found = unit_resources(machine)
        in_slots = slot_resources(machine)
        units.update({} if found is None else {found: None})
        slots.update(dict.fromkeys(in_slots))
        otherwise.update(machine.offers_of.keys() - {each.resource for each in in_slots})
    return Offers(tuple(units), tuple(slots), frozenset(otherwise))


def check_shares_known(demand: PodDemand, machine: Topology) -> None:
    """
    Raises InvalidShare for what `check_pod` refuses of amounts that this machine does not offer, and of units and slots in
    one container; a decision looks at what the machine offers.
    """
    offers = offers_of_machines((machine,))
    check_ways(demand, offers.units, offers.slots)
    check_unlisted_amounts(demand, offers.names.union(each.resource for each in machine.others))


def check_shares_on(demand: PodDemand, machine: Topology) -> None:
    """Raises InvalidShare, MemoryAboveGpu and NotEnoughShareGpus for what a node with this hardware takes from no pod."""
    units = unit_resources(machine)
    if units is not None:
        check_asked(demand, units)
        check_joint_memory(demand, units)
    check_spread(demand, () if units is None else (units,))
    for slots in slot_resources(machine):
        check_slots_asked(demand, slots, demand.rules.compat)


def check_one(checks: Iterable[Callable[[], None]]) -> None:
    """Raises what the first of the checks raises if all of them raise NoFit. Without checks nothing is raised."""
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


def check_asked(demand: PodDemand, offered: UnitResources) -> None:
    """
    Raises InvalidShare, MemoryAboveGpu and NotEnoughShareGpus for what is asked for in units that are offered so. `pod`:
    valid.
    """
    if not asks_for(demand, offered):
        return
    gpus = read_gpu_count(demand.annotations)
    for container in demand.containers:
        check_container(container, offered, gpus)
    check_no_choice(demand.annotations)
    check_not_joint(demand)


def check_spread(demand: PodDemand, offered: Iterable[UnitResources]) -> None:
    """
    Raises InvalidShare where a pod asks to spread its units over a number of GPUs, and asks for no units of those that are
    `offered`, nor for any under their usual names.
    """
    if CARDS not in demand.annotations:
        return
    units = unit_resource_names(offered)
    if all(units.isdisjoint(container.asked) for container in demand.containers):
        raise InvalidShare(
            f"{annotation_path(CARDS)}: spreads units of GPUs, and no container asks for any",
            f"leave it out, or ask for {' and '.join(USUAL_NAMES)}; the number of whole GPUs or of slots "
            "is already the number of GPUs",
        )


def check_ways(demand: PodDemand, units: Iterable[UnitResources], slots: Collection[SlotResources]) -> None:
    """
    Raises InvalidShare for a container that asks for units of GPUs and for slots, or an amount of them, whichever nodes
    offer the one and the other; what nobody offers, under the usual names.
    """
    in_units = unit_resource_names(units)
    ways = [USUAL_SLOTS, *sorted(slots, key=lambda each: each.resource)]
    for container in demand.containers:
        limits = {name: amount for name, amount in container.asked.items() if name not in in_units}
        others = [name for each in ways for name in names_in_slots(limits, each)]
        check_one_way(container.path, sorted(name for name in in_units if container.asked.get(name)), others)


def asks_for(demand: PodDemand, offered: UnitResources) -> bool:
    """Whether a container names one of these units, if only with 0."""
    units = dict(offered.units)
    return any(not units.keys().isdisjoint(each.asked) for each in demand.containers)


def check_container(container: ContainerDemand, offered: UnitResources, gpus: int | None) -> None:
    """The same for one container. `gpus`: over how many GPUs its units are spread; None: not given."""
    where = container.path
    limits = container.asked
    units = {name: unit for name, unit in offered.units if name in limits}
    if not units:
        return
    for name in units:
        if not limits[name]:
            raise InvalidShare(f"{where}.resources.limits[{name}]: 0 units", "leave it out, or ask for 1 or more")
    others = {name: amount for name, amount in limits.items() if name not in units}
    whole = [name for name in (*offered.others, *map(ResourceName, GPU_RESOURCES)) if others.get(name)]
    check_one_way(where, units, [*whole, *names_in_slots(others, USUAL_SLOTS)])
    asked = sum_amounts(unit_amount(unit, limits[name]) for name, unit in units.items())
    fields = offered.fields(where)
    check_units_asked(asked, fields)
    if gpus is not None:
        check_equal_parts(asked, gpus, fields)
        if gpus > offered.gpus:
            raise NotEnoughShareGpus(ShareFields(cards=annotation_path(CARDS)), gpus, offered.gpus)
    of_each = share_of_units(asked, gpus or 1).memory // MEMORY_BLOCK
    if of_each > offered.most:
        raise MemoryAboveGpu(ShareFields(memory=fields.memory), of_each, offered.most, "{} blocks of memory".format)


# What is invalid in a pod with slots of GPUs, and the checks that units and slots share (`pod_checks`).


NOT_OF_UNITS = tuple(key for key in names.OF_PODS if key != names.NODE_POLICY)
"""Annotations that choose GPUs, which have no effect on units."""


def check_unlisted_amounts(demand: PodDemand, known: Collection[ResourceName]) -> None:
    """
    Raises InvalidShare for what no node with slots takes, where a pod names amounts as HAMi does, by names that are not
    `known`. It may come without a number of GPUs: by which name it asks for slots is not known either.
    """
    unlisted = {*USUAL_SLOTS.slots.resources}.difference(known)
    for container in demand.containers:
        amounts = {name: amount for name, amount in container.asked.items() if name in unlisted}
        if amounts:
            number = container.asked.get(USUAL_SLOTS.resource, 1)
            check_amounts(container.path, {USUAL_SLOTS.resource: number, **amounts}, USUAL_SLOTS)
            read_gpu_rules(
                read_gpu_annotations(demand.annotations), as_hami=True
            )  # takes all that topoalign's own reading takes


def check_slots_asked(demand: PodDemand, offered: SlotResources, compat: Compat = "") -> None:
    """Raises InvalidShare for what is asked for of GPUs that are offered in slots so."""
    for container in demand.containers:
        units = [name for name in USUAL_NAMES if container.asked.get(name)]
        check_one_way(container.path, units, names_in_slots(container.asked, offered))
    if names_amounts(demand, offered):
        for container in demand.containers:
            check_amounts(container.path, container.asked, offered)
        read_gpu_rules(read_gpu_annotations(demand.annotations), as_hami=compat == "hami")
    elif asks_for_slots(demand, offered):
        check_says_nothing(demand.annotations, offered)
    else:
        return
    check_weights_meant(demand.annotations)
    if compat == "hami":
        check_node_policy(demand.annotations)
    check_slots_not_joint(demand, offered)
    check_gpu_count_of_slots(demand.annotations, offered)


def check_gpu_count_of_slots(annotations: Mapping[str, str], offered: SlotResources) -> None:
    """Raises InvalidShare for a number of GPUs of a pod with slots, of which it has as many as it asks for slots."""
    if CARDS in annotations:
        raise InvalidShare(
            f"{annotation_path(CARDS)}: has no effect on slots of GPUs, which the pod asks for",
            f"leave it out; the number of {offered.resource} is already the number of GPUs",
        )


def check_says_nothing(annotations: Mapping[str, str], offered: SlotResources) -> None:
    """Raises InvalidShare for annotations that choose among the GPUs, of a pod that asks for slots and for no amount."""
    for key, _ in read_gpu_annotations(annotations):
        raise InvalidShare(
            f"{annotation_path(key)}: chooses among GPUs in slots, of which no amount is asked for",
            f"name one, {offered.slots.cores}: {CORES} for whole GPUs, or leave it out",
        )


def is_for_slots(demand: PodDemand, offered: SlotResources, otherwise: Collection[ResourceName]) -> bool:
    """Whether only nodes with such slots can run the pod. `otherwise`: as of `check_pod`."""
    return names_amounts(demand, offered) or (asks_for_slots(demand, offered) and offered.resource not in otherwise)


def asks_for_slots(demand: PodDemand, offered: SlotResources) -> bool:
    """Whether a container asks for slots of this resource."""
    return any(each.asked.get(offered.resource) for each in demand.containers)


def names_amounts(demand: PodDemand, offered: SlotResources) -> bool:
    """Whether a container names one of the resources of amounts, if only with 0."""
    return any(not each.asked.keys().isdisjoint(offered.slots.resources) for each in demand.containers)


def names_in_slots(limits: Mapping[ResourceName, int], offered: SlotResources) -> list[ResourceName]:
    """The names by which a container asks for slots that are offered so, or gives an amount of them, even 0."""
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
    """Raises InvalidShare for annotations that choose GPUs, of a pod with units, and first for weights that are none."""
    check_weights_meant(annotations)
    for key in NOT_OF_UNITS:
        if key in annotations:
            raise InvalidShare(
                f"{annotation_path(key)}: {without_effect('units')}",
                "leave it out; nodeSelector and affinity choose the nodes",
            )


def check_weights_meant(annotations: Mapping[str, str]) -> None:
    """Raises InvalidShare for weights that are none."""
    if (weights := annotations.get(names.SCORING_WEIGHTS)) is not None:
        read_weights(weights)


def check_node_policy(annotations: Mapping[str, str]) -> None:
    """Raises InvalidShare for a word by which HAMi ranks no nodes: it reads each other one as `binpack`."""
    policy = annotations.get(names.NODE_POLICY, names.GpuOrder.BINPACK)
    if policy not in names.ORDERS:
        raise InvalidShare(
            f"{annotation_path(names.NODE_POLICY)}: {quoted([policy])} is no policy",
            f"write {' or '.join(names.ORDERS)}, or leave it out",
        )


def check_gpus_known(
    demand: PodDemand, known: Set[DeviceID], slots: Iterable[SlotResources], otherwise: Collection[ResourceName]
) -> None:
    """Raises InvalidShare for a pod with slots that accepts only GPUs that no node has. `otherwise`: as of `check_pod`."""
    wanted = uuid_selection(demand.annotations).wanted
    if wanted and known.isdisjoint(wanted) and any(is_for_slots(demand, each, otherwise) for each in slots):
        finding = "no node has such a GPU"
        remedy = "write uuids of GPUs as `topoalign gpu list` shows them"
        raise annotation_error(
            names.USE_UUID, f"{quoted(wanted[:3])}: {finding}", f"{remedy}, or wait until the node is there"
        )
