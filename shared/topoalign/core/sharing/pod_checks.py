"""
Finds what makes a pod invalid on every node. The webhook, the scheduler's filter and `what-if` use the same checks.

`check_pod` checks amounts and annotations by the rules of all modes. `check_shares` compares the requested units and
slots of GPUs with those that a node or a cluster offers. A pod is invalid in a cluster if it is invalid under each
sharing configuration by which some node offers them. An error names the field by its path in the pod's manifest:

    spec.containers[1].resources.limits[tencent.com/vcuda-core]: 150 units of computing time, of which a GPU has 100

A container requests GPUs either in units or in another way, not both. For units, these are invalid:

- an amount of 0, or computing time without memory;
- more than 100 units of computing time, if they are not a multiple of 100;
- more memory than a GPU has;
- HAMi's annotations about GPUs, which have no effect on units;
- the annotation `topoalign.io/gpus`: if a node has fewer GPUs, if the amounts do not divide evenly, if the units are
  whole GPUs, or if no container requests units.

For slots, these are invalid: amounts that no GPU has, 0 cores, amounts without a number of GPUs, invalid annotations,
and Koordinator's annotations. If HAMi's rules choose the GPUs (`compat`), a list of policies is valid.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Set
from functools import partial
from typing import NamedTuple

from topoalign.core.demand.field_paths import in_manifest
from topoalign.core.demand.gangs import annotation_path, gang_of
from topoalign.core.demand.pod_demand import ContainerDemand, PodDemand, pod_demand
from topoalign.core.demand.pod_validation import validate_pod
from topoalign.core.demand.share_annotations import (
    CHOOSING,
    USE_UUID,
    InvalidShare,
    annotation_error,
    check_gpu_annotations,
    uuid_selection,
)
from topoalign.core.demand.shares import (
    USUAL_AMOUNTS,
    USUAL_NAMES,
    ShareFields,
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
from topoalign.core.model.ids import GPU, DeviceID, ResourceName
from topoalign.core.model.requests import GPU_COUNT, AdmissionRules, Compat, Mode, PodRequest
from topoalign.core.model.topology.derived_tables import computed_once
from topoalign.core.model.topology.device_offers import MEMORY_BLOCK
from topoalign.core.model.topology.model import Topology
from topoalign.core.sharing.share_refusals import MemoryAboveGpu, NotEnoughShareGpus
from topoalign.core.state.share_amounts import sum_amounts


class Offers(NamedTuple):
    """The resource names under which a group of machines offers devices."""

    units: Collection[UnitResources] = ()
    slots: Collection[SlotResources] = ()
    otherwise: Collection[ResourceName] = frozenset()
    """Resources that at least one of these machines offers other than in slots."""

    @property
    def names(self) -> frozenset[ResourceName]:
        """All resource names, including the names of amounts."""
        return frozenset(self.otherwise).union(*((each.resource, *each.slots.resources) for each in self.slots))


NO_OFFERS = Offers()


def offers_of_machines(machines: Iterable[Topology]) -> Offers:
    """The offers of all these machines."""
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


@computed_once
def _offers_of(machine: Topology) -> Offers:
    return offers_of_machines((machine,))


def check_pod(
    pod: PodRequest, offers: Offers = NO_OFFERS, compat: Compat = "", *, by_kubelet: bool = False
) -> PodDemand:
    """
    The demand of a pod in mode `kubelet` with this `compat`, and otherwise default rules.

    Raises InvalidField for a pod that no node would accept, and the errors of `check_shares`. If the kubelet decides on
    all nodes (`by_kubelet`), it also raises the error of `check_not_passed_over`.
    """
    try:
        gang_of(pod)
        read_gpu_count(pod.annotations)
        valid = validate_pod(pod)
        demand = pod_demand(valid, AdmissionRules(mode=Mode.KUBELET, compat=compat))
        if is_joint(pod.annotations):
            pod_demand(valid, AdmissionRules(mode=Mode.BEST, compat=compat))
        else:  # in this case, no other part of a valid pod is refused in any mode
            check_keys(pod.annotations)
    except InvalidField as error:
        raise in_manifest(error) from error
    if by_kubelet:
        check_not_passed_over(demand)
    check_shares(demand, offers)
    return demand


def check_shares_on(demand: PodDemand, machine: Topology) -> None:
    """Raises the errors of `check_shares` for a demand that a node with this hardware can never serve."""
    offers = _offers_of(machine)
    check_shares(demand, offers)
    for units in offers.units:
        largest = units.most * MEMORY_BLOCK
        for container in demand.containers:
            # bytes of each GPU, requested by Koordinator's resource name
            gpu = container.joint.gpu if container.joint is not None else None
            memory = 0 if gpu is None else gpu.each.get(GPU_BYTES, 0)
            if memory > largest:
                field = f"{container.path}.resources.limits[{GPU_BYTES}]"
                raise MemoryAboveGpu(ShareFields(memory=field), memory, largest)


def check_shares(demand: PodDemand, offers: Offers) -> None:
    """
    Raises InvalidShare, MemoryAboveGpu or NotEnoughShareGpus if no offer of units can serve the units that the pod
    requests, or no offer of slots its slots.
    """
    if any(offers):  # without offers, the resource names of shares are not known
        _check_one_way(demand, offers)
        _check_spread(demand, offers)
    units = sorted(offers.units, key=lambda each: (-each.most, each))
    _check_any(partial(_check_units, demand, each) for each in units if _asks_for_units(demand, each))
    _check_any(partial(_check_slots, demand, each) for each in _slots_asked(demand, offers))


def _check_any(checks: Iterable[Callable[[], None]]) -> None:
    """Raises the error of the first check if every check raises NoFit. Without checks, it raises nothing."""
    refusals = list[NoFit]()
    for check in checks:
        try:
            check()
        except NoFit as refusal:
            refusals.append(refusal)
        else:
            return
    if refusals:
        raise refusals[0]


def _check_one_way(demand: PodDemand, offers: Offers) -> None:
    """
    Raises InvalidShare for a container that requests units and also requests GPUs in another way. The default resource
    names count even if no machine offers them.
    """
    units = unit_resource_names(offers.units)
    for container in demand.containers:
        in_units = sorted(name for name in units if container.asked.get(name))
        others = _names_of_gpus(offers) if in_units else ()
        if otherwise := next((name for name in others if name not in units and container.asked.get(name)), None):
            raise InvalidShare(
                f"{container.path}.resources.limits[{otherwise}]: GPUs in two ways, for {' and '.join(in_units)} are asked "
                "for as well",
                "ask for a share of a GPU or for whole devices, each in a container of its own",
            )


def _names_of_gpus(offers: Offers) -> Iterator[ResourceName]:
    """The resources by which containers request GPUs other than in units."""
    yield from (GPU, *USUAL_AMOUNTS)
    for slots in sorted(offers.slots, key=lambda each: each.resource):
        yield from (slots.resource, *slots.slots.resources)
    for units in offers.units:
        yield from units.others
    yield from map(ResourceName, GPU_RESOURCES)


def _check_spread(demand: PodDemand, offers: Offers) -> None:
    """Raises InvalidShare for a pod that has the annotation `topoalign.io/gpus` and does not request units."""
    units = unit_resource_names(offers.units)
    if GPU_COUNT in demand.annotations and all(units.isdisjoint(each.asked) for each in demand.containers):
        raise annotation_error(
            GPU_COUNT,
            "spreads units of GPUs, and no container asks for any",
            f"leave it out, or ask for {' and '.join(USUAL_NAMES)}; the number of whole GPUs or of slots "
            "is already the number of GPUs",
        )


def _asks_for_units(demand: PodDemand, offered: UnitResources) -> bool:
    """Whether a container names one of these unit resources, even with amount 0."""
    units = dict(offered.units)
    return any(not units.keys().isdisjoint(each.asked) for each in demand.containers)


def _check_units(demand: PodDemand, offered: UnitResources) -> None:
    gpus = read_gpu_count(demand.annotations)
    for container in demand.containers:
        _check_units_of_container(container, offered, gpus)
    if key := next((key for key in CHOOSING if key in demand.annotations), None):
        raise annotation_error(
            key,
            "has no effect on units of GPUs, which go where least is left",
            "leave it out; nodeSelector and affinity choose the nodes",
        )


def _check_units_of_container(container: ContainerDemand, offered: UnitResources, gpus: int | None) -> None:
    """Checks the units of one container. `gpus`: number of GPUs over which they are spread; None: not given."""
    where = container.path
    limits = container.asked
    units = {name: unit for name, unit in offered.units if name in limits}
    if not units:
        return
    for name in units:
        if not limits[name]:
            raise InvalidShare(f"{where}.resources.limits[{name}]: 0 units", "leave it out, or ask for 1 or more")
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


def _slots_asked(demand: PodDemand, offers: Offers) -> list[SlotResources]:
    """
    The offers of slots that could serve the pod. An offer counts if the pod names one of its amounts, or if the pod
    requests its resource and no node offers this resource in another way. Offers whose resource is requested come
    first, then those with the largest GPUs. Empty: nodes without slots can also run the pod.
    """
    asked = {name for each in demand.containers for name, amount in each.asked.items() if amount}
    named = {name for each in demand.containers for name in each.asked}
    found = [
        each
        for each in offers.slots
        if not named.isdisjoint(each.slots.resources) or each.resource in asked.difference(offers.otherwise)
    ]
    return sorted(found, key=lambda each: (each.resource not in asked, -each.most, each.resource))


def _check_slots(demand: PodDemand, offered: SlotResources) -> None:
    annotations = demand.annotations
    for container in demand.containers:
        check_amounts(container.path, container.asked, offered)
    check_gpu_annotations(annotations, as_hami=demand.rules.compat == "hami")
    joint = next((key for key in ANNOTATIONS if key in annotations), None)
    if joint is not None and offered.resource in JOINT_RESOURCES:
        # slots of `nvidia.com/gpu` and whole GPUs have the same resource name; such a pod would wait for whole GPUs
        raise annotation_error(
            joint,
            "has no effect on slots of GPUs",
            f"leave it out, or ask for whole GPUs ({offered.resource}) without amounts, where nodes offer them so",
        )


def check_gpus_known(demand: PodDemand, known: Set[DeviceID], offers: Offers) -> None:
    """Raises InvalidShare for a pod that requests slots and accepts only GPUs that no node has."""
    wanted = uuid_selection(demand.annotations).wanted
    if wanted and known.isdisjoint(wanted) and _slots_asked(demand, offers):
        raise annotation_error(
            USE_UUID,
            f"{quoted(wanted[:3])}: no node has such a GPU",
            "write uuids of GPUs as `topoalign gpu list` shows them, or wait until the node is there",
        )
