"""
Finds what is invalid in a pod on every node: one answer for the webhook, the scheduler's filter and `what-if`.

`check_pod` reads amounts and annotations as every mode does, and looks at what is asked for in units and slots of GPUs.
A node checks this against its own offers (`check_shares_on`). A cluster refuses a pod if every
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
from typing import NamedTuple

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
from topoalign.core.model.requests import GPU_COUNT, AdmissionRules, Compat, Mode, PodRequest
from topoalign.core.model.topology.device_offers import CORES, MEMORY_BLOCK
from topoalign.core.model.topology.model import Topology
from topoalign.core.sharing.share_refusals import MemoryAboveGpu, NotEnoughShareGpus, ShareFields
from topoalign.core.state.share_amounts import sum_amounts

NOT_OF_UNITS = tuple(key for key in names.OF_PODS if key != names.NODE_POLICY)
"""Annotations that choose GPUs, which have no effect on units."""
NO_EFFECT_ON_UNITS = "has no effect on units of GPUs, which go where least is left"


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
        _check_ways(demand, units, slots)
        _check_unlisted_amounts(demand, {*otherwise, *(name for each in slots for name in each.slots.resources)})
    _check_any(partial(_check_units, demand, each) for each in units if _asks_for_units(demand, each))
    if is_known:
        check_spread(demand, units)
    by_amounts = sorted(slots, key=lambda each: (not _asks_for_slots(demand, each), -each.most, each.resource))
    _check_any(
        partial(_check_slots, demand, each, compat) for each in by_amounts if _is_for_slots(demand, each, otherwise)
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
    Raises InvalidShare for what `check_pod` refuses of amounts that this machine does not offer, and for units with
    slots.
    """
    offers = offers_of_machines((machine,))
    _check_ways(demand, offers.units, offers.slots)
    _check_unlisted_amounts(demand, offers.names.union(each.resource for each in machine.others))


def check_shares_on(demand: PodDemand, machine: Topology) -> None:
    """Raises InvalidShare, MemoryAboveGpu and NotEnoughShareGpus for what a node with this hardware takes from no pod."""
    units = unit_resources(machine)
    if units is not None:
        _check_units(demand, units)
        largest = units.most * MEMORY_BLOCK
        for container in demand.containers:
            # bytes of each GPU, by Koordinator's name
            gpu = container.joint.gpu if container.joint is not None else None
            memory = 0 if gpu is None else gpu.each.get(GPU_BYTES, 0)
            if memory > largest:
                field = f"{container.path}.resources.limits[{GPU_BYTES}]"
                raise MemoryAboveGpu(ShareFields(memory=field), memory, largest)
    check_spread(demand, () if units is None else (units,))
    for slots in slot_resources(machine):
        _check_slots(demand, slots, demand.rules.compat)


def _check_any(checks: Iterable[Callable[[], None]]) -> None:
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


def _joint_key(demand: PodDemand) -> str | None:
    """The first of Koordinator's annotations about devices that the pod has."""
    return next((key for key in ANNOTATIONS if key in demand.annotations), None)


def _check_units(demand: PodDemand, offered: UnitResources) -> None:
    """Checks what a valid pod asks for in units that are offered so."""
    if not _asks_for_units(demand, offered):
        return
    annotations = demand.annotations
    gpus = read_gpu_count(annotations)
    for container in demand.containers:
        _check_units_of_container(container, offered, gpus)
    _check_weights(annotations)
    for key in NOT_OF_UNITS:
        if key in annotations:
            raise annotation_error(key, NO_EFFECT_ON_UNITS, "leave it out; nodeSelector and affinity choose the nodes")
    joint = _joint_key(demand)
    # Koordinator's annotations decide about whole GPUs and NICs, and GPUs by its own names, if a container asks for some
    if joint is not None and not any(each.asked.get(name) for each in demand.containers for name in JOINT_RESOURCES):
        raise annotation_error(
            joint,
            NO_EFFECT_ON_UNITS,
            f"leave it out; it is about whole GPUs ({GPU}) and NICs ({NIC}), and no container asks for any",
        )


def check_spread(demand: PodDemand, offered: Iterable[UnitResources]) -> None:
    """Raises InvalidShare for units to be spread over GPUs, of a pod without units that are `offered` or of usual names."""
    if GPU_COUNT not in demand.annotations:
        return
    units = unit_resource_names(offered)
    if all(units.isdisjoint(container.asked) for container in demand.containers):
        raise annotation_error(
            GPU_COUNT,
            "spreads units of GPUs, and no container asks for any",
            f"leave it out, or ask for {' and '.join(USUAL_NAMES)}; the number of whole GPUs or of slots "
            "is already the number of GPUs",
        )


def _check_ways(demand: PodDemand, units: Iterable[UnitResources], slots: Collection[SlotResources]) -> None:
    """Refuses a container that asks for units and for slots, whichever nodes offer them; the usual names count as well."""
    in_units = unit_resource_names(units)
    ways = [USUAL_SLOTS, *sorted(slots, key=lambda each: each.resource)]
    for container in demand.containers:
        limits = {name: amount for name, amount in container.asked.items() if name not in in_units}
        others = [name for each in ways for name in _names_in_slots(limits, each)]
        _check_one_way(container.path, sorted(name for name in in_units if container.asked.get(name)), others)


def _asks_for_units(demand: PodDemand, offered: UnitResources) -> bool:
    """Whether a container names one of these units, if only with 0."""
    units = dict(offered.units)
    return any(not units.keys().isdisjoint(each.asked) for each in demand.containers)


def _check_units_of_container(container: ContainerDemand, offered: UnitResources, gpus: int | None) -> None:
    """`gpus`: over how many GPUs its units are spread; None: not given."""
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
    _check_one_way(where, units, [*whole, *_names_in_slots(others, USUAL_SLOTS)])
    asked = sum_amounts(unit_amount(unit, limits[name]) for name, unit in units.items())
    fields = offered.fields(where)
    check_units_asked(asked, fields)
    if gpus is not None:
        check_equal_parts(asked, gpus, fields)
        if gpus > offered.gpus:
            raise NotEnoughShareGpus(ShareFields(gpus=annotation_path(GPU_COUNT)), gpus, offered.gpus)
    of_each = share_of_units(asked, gpus or 1).memory // MEMORY_BLOCK
    if of_each > offered.most:
        raise MemoryAboveGpu(ShareFields(memory=fields.memory), of_each, offered.most, "{} blocks of memory".format)


def _check_unlisted_amounts(demand: PodDemand, known: Collection[ResourceName]) -> None:
    """Refuses amounts named as HAMi does, by names that are not `known`, that no node with slots takes."""
    unlisted = {*USUAL_SLOTS.slots.resources}.difference(known)
    for container in demand.containers:
        amounts = {name: amount for name, amount in container.asked.items() if name in unlisted}
        if amounts:
            # by which name it asks for slots is not known either: it may come without a number of GPUs
            number = container.asked.get(USUAL_SLOTS.resource, 1)
            check_amounts(container.path, {USUAL_SLOTS.resource: number, **amounts}, USUAL_SLOTS)
            # HAMi's reading takes all that topoalign's own reading takes
            read_gpu_rules(read_gpu_annotations(demand.annotations), as_hami=True)


def _check_slots(demand: PodDemand, offered: SlotResources, compat: Compat) -> None:
    """Checks what a pod asks for of GPUs that are offered in slots so."""
    annotations = demand.annotations
    for container in demand.containers:
        units = [name for name in USUAL_NAMES if container.asked.get(name)]
        _check_one_way(container.path, units, _names_in_slots(container.asked, offered))
    if _names_amounts(demand, offered):
        for container in demand.containers:
            check_amounts(container.path, container.asked, offered)
        read_gpu_rules(read_gpu_annotations(annotations), as_hami=compat == "hami")
    elif _asks_for_slots(demand, offered):
        for key, _ in read_gpu_annotations(annotations):
            raise annotation_error(
                key,
                "chooses among GPUs in slots, of which no amount is asked for",
                f"name one, {offered.slots.cores}: {CORES} for whole GPUs, or leave it out",
            )
    else:
        return
    _check_weights(annotations)
    policy = annotations.get(names.NODE_POLICY)
    if (
        compat == "hami" and policy is not None and policy not in names.ORDERS
    ):  # HAMi reads each other word as `binpack`
        raise annotation_error(
            names.NODE_POLICY,
            f"{quoted([policy])} is no policy",
            f"write {' or '.join(names.ORDERS)}, or leave it out",
        )
    joint = _joint_key(demand)
    if joint is not None and offered.resource in JOINT_RESOURCES:
        # slots of `nvidia.com/gpu` have the name of whole GPUs, for which such a pod would wait
        raise annotation_error(
            joint,
            "has no effect on slots of GPUs",
            f"leave it out, or ask for whole GPUs ({offered.resource}) without amounts, where nodes offer them so",
        )
    if GPU_COUNT in annotations:
        raise annotation_error(
            GPU_COUNT,
            "has no effect on slots of GPUs, which the pod asks for",
            f"leave it out; the number of {offered.resource} is already the number of GPUs",
        )


def _is_for_slots(demand: PodDemand, offered: SlotResources, otherwise: Collection[ResourceName]) -> bool:
    """Whether only nodes with such slots can run the pod. `otherwise`: as of `check_pod`."""
    return _names_amounts(demand, offered) or (_asks_for_slots(demand, offered) and offered.resource not in otherwise)


def _asks_for_slots(demand: PodDemand, offered: SlotResources) -> bool:
    return any(each.asked.get(offered.resource) for each in demand.containers)


def _names_amounts(demand: PodDemand, offered: SlotResources) -> bool:
    """Whether a container names one of the resources of amounts, if only with 0."""
    return any(not each.asked.keys().isdisjoint(offered.slots.resources) for each in demand.containers)


def _names_in_slots(limits: Mapping[ResourceName, int], offered: SlotResources) -> list[ResourceName]:
    """The names by which a container asks for slots that are offered so, or gives an amount of them, even 0."""
    number = [offered.resource] if limits.get(offered.resource) else []
    return [*number, *(name for name in offered.slots.resources if name in limits)]


def _check_one_way(where: str, units: Collection[ResourceName], others: Collection[ResourceName]) -> None:
    """Refuses a container that asks for these units and by the other names for GPUs in another way."""
    if units and others:
        raise InvalidShare(
            f"{where}.resources.limits[{next(iter(others))}]: GPUs in two ways, for {' and '.join(units)} are asked for "
            "as well",
            "ask for a share of a GPU or for whole devices, each in a container of its own",
        )


def _check_weights(annotations: Mapping[str, str]) -> None:
    if (weights := annotations.get(names.SCORING_WEIGHTS)) is not None:
        read_weights(weights)


def check_gpus_known(
    demand: PodDemand, known: Set[DeviceID], slots: Iterable[SlotResources], otherwise: Collection[ResourceName]
) -> None:
    """Raises InvalidShare for a pod with slots that accepts only GPUs that no node has. `otherwise`: as of `check_pod`."""
    wanted = uuid_selection(demand.annotations).wanted
    if wanted and known.isdisjoint(wanted) and any(_is_for_slots(demand, each, otherwise) for each in slots):
        raise annotation_error(
            names.USE_UUID,
            f"{quoted(wanted[:3])}: no node has such a GPU",
            "write uuids of GPUs as `topoalign gpu list` shows them, or wait until the node is there",
        )
