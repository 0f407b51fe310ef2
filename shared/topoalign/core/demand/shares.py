"""
Reads a container's request for GPUs that are offered in units or slots: the number of GPUs, and the amount of each.

Units are hundredths of computing time and blocks of memory. A request for 100 units of computing time or more is for
whole GPUs, including their memory. A smaller request is for a part of one GPU. With the annotation `topoalign.io/gpus`,
it is for equal parts of several GPUs.

    20 of computing time, 16 blocks                  a fifth of the computing time of a GPU, and 4 GiB of its memory
    60 of computing time, 40 blocks, spread over 2   30 and 20 on each of two GPUs
    200 of computing time                            two GPUs, with all of their memory

Slots are read as HAMi reads them. The kubelet allocates only the slots. The amounts are in resources that are not
listed to the kubelet (`SlotResources`). Memory in MiB takes precedence over a percentage. A memory amount of 0 counts
as absent. If both are absent, the container gets all memory of a GPU. The default for cores is 0.

    nvidia.com/gpu: 1, gpumem: 4000, gpucores: 30    30 cores and 4000 MiB of one GPU
    nvidia.com/gpu: 2, gpumem-percentage: 50         half of the memory of each of two GPUs, no reserved cores
    nvidia.com/gpu: 1                                all memory of one GPU: no other container gets any of it

Two rules are stricter than those of HAMi. A request for 100 cores gets all offered cores of a GPU, regardless of the
scaling, and excludes other containers from the GPU. Requests for 0 cores are refused, because no limiter can keep a
container from using computing time. Amounts that HAMi would misread or ignore are also refused, such as `gpumem: 16Gi`,
which means 17179869184 MiB (`check_amounts`).

Source: HAMi 4707fb02, GenerateResourceRequests.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec

from topoalign.core.demand.gangs import annotation_path
from topoalign.core.demand.resource_quantities import Quantities
from topoalign.core.demand.share_annotations import (
    ANY_GPU,
    MIG,
    MODES,
    VENDOR,
    GpuRules,
    InvalidShare,
)
from topoalign.core.model.byte_sizes import MIB
from topoalign.core.model.errors import InvalidField, quoted
from topoalign.core.model.holdings import Amount, UnitKind
from topoalign.core.model.ids import GPU, DeviceID, ResourceName
from topoalign.core.model.requests import GPU_COUNT
from topoalign.core.model.topology.derived_tables import computed_once
from topoalign.core.model.topology.device_offers import CORES, MEMORY_BLOCK, Offer, Slots
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.queries import gpu_of, offers_in_slots
from topoalign.core.state.share_amounts import ShareLeft, divide_amount, offered_in_slots, sum_amounts

USUAL_NAMES = (ResourceName("tencent.com/vcuda-core"), ResourceName("tencent.com/vcuda-memory"))
"""The default resource names of units."""
SharesLeft = Mapping[DeviceID, ShareLeft]
"""GPU or MIG instance -> its free capacity."""


class Share(NamedTuple):
    """A container's request for shared GPUs, in units or in slots: the same amount of each GPU."""

    gpus: int
    """Number of GPUs."""
    cores: int
    """Hundredths of each GPU's computing time. 100: all offered computing time, and other containers are excluded."""
    memory: int
    """Bytes of each GPU; 0: `percentage` applies."""
    resource: ResourceName | None = None
    """The resource of the slots, of which it requests one on each GPU. None: it requests units."""
    percentage: int = 0
    """Memory as a percentage of the offered memory of each GPU. 0, or `UNSET`: none."""
    parts: int = 0
    """Above 0: the amounts are unknown. The share then counts as one of this number of equal parts of each GPU."""
    rules: GpuRules = ANY_GPU
    """The pod's annotations about the GPUs; units have none."""

    @property
    def whole(self) -> bool:
        """Whether the share excludes other containers from its GPUs."""
        return self.cores >= CORES

    def amount_of(self, offered: Amount) -> Amount:
        """The amount on a GPU of which `offered` is offered. Example: 50 % of 81559 MiB is 40779 MiB."""
        if self.parts:
            return divide_amount(offered, self.parts)
        memory = self.memory or offered.memory // MIB * self.percentage // ALL_MEMORY * MIB
        return Amount(cores=offered.cores if self.whole else self.cores, memory=memory)


def enough(left: ShareLeft, share: Share, own: Amount | None = None) -> bool:
    """
    Whether a GPU has enough left for the share. A share with only memory needs one free core, because it uses computing
    time. `own`: the amount of the pod's slot on this GPU that the container reuses from an init container.
    """
    if not left.usable or (own is None and left.all_slots and left.slots < 1):
        return False
    if left.sharers - (own is not None) and (share.whole or share.rules.mutex):
        return False
    if left.profiles:
        memory = instance_memory(left, share)
        return own.memory >= memory if own is not None else left.instance_for(memory) is not None
    asked = share.amount_of(left.offered)
    free = left.left if own is None else sum_amounts((left.left, own))
    return free.cores >= max(1, asked.cores) and free.memory >= asked.memory


def gpus_with_enough(topology: Topology, left: SharesLeft, share: Share) -> tuple[DeviceID, ...]:
    """The GPUs on which a container could get the share, in the hardware's order."""
    return tuple(gpu for gpu, each in left.items() if may_be_on(topology, share, gpu) and enough(each, share))


@computed_once
def resources_in_units(topology: Topology) -> Mapping[ResourceName, UnitKind]:
    """Resource -> kind of its units, for resources of GPUs in units."""
    return {offer.resource: offer.unit for offer in topology.offered if offer.unit is not None}


def unit_of(topology: Topology, resource: ResourceName) -> UnitKind | None:
    """The kind of units of a resource; None: it is not a resource of units."""
    return resources_in_units(topology).get(resource)


def units_asked(topology: Topology, devices: Quantities) -> Amount | None:
    """The total number of units that are requested on this machine; None: no units are requested."""
    in_units = resources_in_units(topology)
    found = [unit_amount(in_units[name], n) for name, n in devices.items() if n and name in in_units]
    return sum_amounts(found) if found else None


def unit_amount(kind: UnitKind, number: int) -> Amount:
    """The amount of `number` units of a kind: hundredths of computing time, or blocks of memory."""
    is_cores = kind == "cores"
    return Amount(cores=number if is_cores else 0, memory=0 if is_cores else number * MEMORY_BLOCK)


def share_of_units(units: Amount, gpus: int = 1) -> Share:
    """These units as a share in equal parts of GPUs: 60 cores and 40 blocks on two GPUs are 30 and 20 on each."""
    gpus = max(gpus, units.cores // CORES)
    blocks = units.memory // MEMORY_BLOCK
    return Share(gpus=gpus, cores=units.cores // gpus, memory=-(-blocks // gpus) * MEMORY_BLOCK)


def asks_for_both_halves(topology: Topology, devices: Quantities) -> bool:
    """Whether computing time and memory are requested in the machine's units. The kubelet allocates them separately."""
    asked = units_asked(topology, devices)
    return asked is not None and asked.cores > 0 and asked.memory > 0


class ShareFields(NamedTuple):
    """The paths of the fields of a request, for error messages."""

    cores: str = "cores"
    memory: str = "memory"
    gpus: str = "gpus"


class UnitResources(NamedTuple):
    """The resource names of a machine's units, the size of its GPUs in units, and the other resources of its GPUs."""

    units: tuple[tuple[ResourceName, UnitKind], ...]
    """In the order of the names."""
    most: int
    """Memory blocks of the largest GPU in units."""
    gpus: int
    others: tuple[ResourceName, ...]
    """
    Resources of whole GPUs, of MIG instances, and of GPUs that are shared in another way, in ascending order. Includes
    `nvidia.com/gpu` even if the machine does not offer it.
    """

    def fields(self, path: str) -> ShareFields:
        """The paths of the limits by which the container at `path`, such as `spec.containers[0]`, requests units."""
        return ShareFields(**{unit: f"{path}.resources.limits[{resource}]" for resource, unit in self.units})


@computed_once
def unit_resources(topology: Topology) -> UnitResources | None:
    """What the machine offers in units; None: nothing."""
    in_units = resources_in_units(topology)
    if not in_units:
        return None
    others = {
        offer.resource
        for offer in topology.offered
        if offer.unit is None and any(topology.parent_of(base) in topology.gpu_by_id for base in offer.devices)
    }
    most = max((offer.replicas for offer in topology.offered if offer.unit == "memory"), default=0)
    gpus = {gpu for offer in topology.offered if offer.unit is not None for gpu in offer.devices}
    ways = tuple(sorted({*others, GPU} - in_units.keys()))
    return UnitResources(tuple(sorted(in_units.items())), most, len(gpus), ways)


def unit_resource_names(offered: Iterable[UnitResources]) -> set[ResourceName]:
    """The resource names of units: those in `offered`, and the defaults."""
    return {*USUAL_NAMES, *(name for each in offered for name, _ in each.units)}


def check_units_asked(units: Amount, fields: ShareFields) -> None:
    """Raises InvalidShare for invalid amounts."""
    cores = units.cores
    if cores > CORES and cores % CORES:
        raise InvalidShare(
            f"{fields.cores}: {cores} units of computing time, of which a GPU has {CORES}",
            f"ask for at most {CORES}, or for a multiple of {CORES} to get whole GPUs",
        )
    if 0 < units.memory // MEMORY_BLOCK < cores // CORES:
        raise InvalidShare(
            f"{fields.memory}: {units.memory // MEMORY_BLOCK} blocks of memory of {cores // CORES} whole GPUs",
            "ask for none, as all memory of whole GPUs comes with them, or for a block of each at least",
        )
    if 0 < cores < CORES and not units.memory:
        raise InvalidShare(
            f"{fields.memory}: no memory of the GPU is asked for with {cores} units of its computing time",
            "write how many blocks of memory are needed, or ask for the whole GPU",
        )


NUMBER = re.compile(r"[1-9][0-9]{0,2}")


def read_gpu_count(annotations: Mapping[str, str]) -> int | None:
    """The number of GPUs in the annotation, 1 to 999; None if it is absent. Raises InvalidField for any other value."""
    text = annotations.get(GPU_COUNT)
    if text is None:
        return None
    if not NUMBER.fullmatch(text):
        raise InvalidField(
            annotation_path(GPU_COUNT),
            f"{quoted([text])} is not a number of GPUs",
            "write over how many GPUs the units of each container are spread, 1 to 999",
        )
    return int(text)


def check_equal_parts(units: Amount, gpus: int, fields: ShareFields) -> None:
    """Raises InvalidShare for units that cannot be spread over the number of GPUs that the pod requests."""
    if units.cores >= CORES:
        raise InvalidShare(
            f"{annotation_path(GPU_COUNT)} is given with {fields.cores}: {units.cores}, which already means whole GPUs",
            "leave it out, or ask for less than 100 of computing time, which is spread",
        )
    for field, amount in ((fields.cores, units.cores), (fields.memory, units.memory // MEMORY_BLOCK)):
        if amount % gpus:
            raise InvalidShare(
                f"{field}: {amount} units do not divide into {gpus} equal parts, as {annotation_path(GPU_COUNT)} asks",
                f"ask for a multiple of {gpus}, or for another number of GPUs",
            )


ALL_MEMORY = 100
"""All memory of a GPU, in percent."""
UNSET = 101
"""The percentage of a request that has none."""


class HamiRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The request of one container as HAMi reads it. `count` 0: it requests no GPU."""

    count: int = 0
    vendor: str = ""
    memory: int = 0
    """MiB of each GPU. 0: `percent` applies."""
    percent: int = 0
    """Memory as a percentage of the memory of each GPU. `UNSET`, or 0: none."""
    cores: int = 0
    """Hundredths of the computing time of each GPU."""

    def memory_of(self, total: int) -> int:
        """MiB that it gets of a GPU with `total` MiB."""
        if self.memory > 0 or self.percent == UNSET:
            return self.memory
        return total * self.percent // ALL_MEMORY


def read_hami_request(resource: ResourceName, slots: Slots, amounts: Quantities) -> HamiRequest:
    """A container's request for slots of `resource`. It is empty without slots, even if the container names amounts."""
    if resource not in amounts:
        return HamiRequest()
    memory = amounts.get(slots.memory, 0)
    percent = min(max(0, amounts.get(slots.percentage, 0)), ALL_MEMORY)
    percent = percent or (UNSET if memory else ALL_MEMORY)  # 0 counts as absent
    return HamiRequest(
        count=amounts[resource], vendor=VENDOR, memory=memory, percent=percent, cores=amounts.get(slots.cores, 0)
    )


LOWEST_PRIORITY = 1


@computed_once
def resources_in_slots(topology: Topology) -> Mapping[ResourceName, Slots]:
    """Resource of GPUs in slots -> settings of its slots, with the resource names of the amounts."""
    return {offer.resource: offer.slots for offer in offers_in_slots(topology).values() if offer.slots is not None}


@computed_once
def amount_resources(topology: Topology) -> frozenset[ResourceName]:
    """The resources by which containers request amounts of each GPU in slots. They are not listed to the kubelet."""
    return frozenset(name for slots in resources_in_slots(topology).values() for name in slots.resources)


@computed_once
def gpus_of_numa_nodes(topology: Topology) -> Mapping[ResourceName, Counter[int]]:
    """Resource -> NUMA node -> number of its GPUs in slots, for resources whose slots are listed with NUMA nodes."""
    found = {name: Counter[int]() for name, slots in resources_in_slots(topology).items() if slots.numa_topology}
    for gpu, offer in offers_in_slots(topology).items():
        node = numa_node_of(topology, gpu)
        if offer.resource in found and node is not None:
            found[offer.resource][node] += 1
    return found


def share_in_slots(topology: Topology, devices: Quantities, rules: GpuRules = ANY_GPU) -> Share | None:
    """The share that is requested in slots on this machine; None: no slots are requested."""
    for resource, slots in resources_in_slots(topology).items():
        if devices.get(resource):
            asked = read_hami_request(resource, slots, devices)
            return Share(asked.count, asked.cores, asked.memory * MIB, resource, asked.percent, rules=rules)
    return None


def unknown_share(topology: Topology, resource: ResourceName, gpus: int, rules: GpuRules = ANY_GPU) -> Share:
    """The share of a container whose number of slots is known, but not its amounts: an equal part of each GPU."""
    slots = [offer.replicas for offer in offers_in_slots(topology).values() if offer.resource == resource]
    return Share(gpus, cores=0, memory=0, resource=resource, parts=min(slots), rules=rules)


class SlotResources(NamedTuple):
    """The resource names under which a machine offers GPUs in slots, and the size of these GPUs."""

    resource: ResourceName
    slots: Slots
    most: int
    """Offered memory of the largest of these GPUs, in MiB."""


USUAL_AMOUNTS = Slots().resources
"""The default resource names of amounts of GPUs in slots: those of HAMi."""


@computed_once
def slot_resources(topology: Topology) -> tuple[SlotResources, ...]:
    """What the machine offers in slots, by resource."""
    found = []
    for resource, slots in resources_in_slots(topology).items():
        gpus = [gpu for gpu, offer in offers_in_slots(topology).items() if offer.resource == resource]
        most = max(offered_in_slots(topology)[gpu].memory for gpu in gpus) // MIB
        found.append(SlotResources(resource, slots, most))
    return tuple(found)


def check_amounts(where: str, limits: Quantities, offered: SlotResources) -> None:
    """Raises InvalidShare for amounts that are invalid with this offer. `where`: path of the container."""
    slots = offered.slots
    if limits.get(slots.cores) == 0:  # no limiter can reduce computing time to 0
        raise InvalidShare(
            f"{where}.resources.limits[{slots.cores}]: 0 cores",
            f"leave it out where an amount of memory is given ({slots.memory}): the container then has no "
            "limit of its own, and shares computing time",
        )
    most = (
        (slots.percentage, ALL_MEMORY, "all of a GPU's memory", "write a number from 1 to 100"),
        (slots.cores, CORES, "all of a GPU's computing time", f"write {CORES} for a whole GPU, or less"),
        (
            slots.memory,
            offered.most,
            "what the largest GPU has",
            "write a number of MiB, 16384 and not 16Gi, and no more than a GPU has",
        ),
        (slots.priority, LOWEST_PRIORITY, "the lowest priority", "write 0 for high or 1 for low"),
    )
    for name, limit, meaning, remedy in most:
        field = f"{where}.resources.limits[{name}]"
        if name in limits and not limits.get(offered.resource):
            raise InvalidShare(
                f"{field}: {limits[name]} of no GPU, as {offered.resource} is missing",
                f"say of how many GPUs it is: {offered.resource}: 1",
            )
        if limits.get(name, 0) > limit:
            raise InvalidShare(f"{field}: {limits[name]} is above {limit}, which is {meaning}", remedy)


def instance_memory(left: ShareLeft, share: Share) -> int:
    """The minimum size, in bytes, of a MIG instance for the share on this GPU; 0: the amount is unknown."""
    if share.parts:
        return 0
    return left.offered.memory if share.whole else share.amount_of(left.offered).memory


def may_be_on(topology: Topology, share: Share, gpu: DeviceID) -> bool:
    """Whether this GPU or MIG instance is offered in units or slots as the share requires, and the pod accepts it."""
    offer = offers_in_slots(topology).get(gpu)
    if offer is None or share.resource is None:
        return offer is None and share.resource is None
    whole = gpu_of(topology, gpu)
    exclusion = share.rules.exclusion(whole.id, whole.name, mode_of(offer))
    return offer.resource == share.resource and exclusion is None


def mode_of(offer: Offer) -> str:
    """HAMi's name for the isolation of containers on GPUs in slots. Empty: no isolation, or one without a HAMi name."""
    if offer.slots is not None and offer.slots.instances:
        return MIG
    return offer.limited_by if offer.limited_by in MODES else ""


def on_one_node(
    topology: Topology, share: Share, gpus: Collection[DeviceID], own: Collection[DeviceID] = ()
) -> tuple[DeviceID, ...]:
    """
    The GPUs among these that can be on one NUMA node with the rest of the share: the node has enough GPUs, including
    `own`, and no `own` GPU is on another node. All of them if the share can be on several nodes. Example: GPUs 0 and 1
    are on node 0, and GPU 2 is on node 1. For a share of two GPUs, the result is GPUs 0 and 1.
    """
    if not share.rules.numa_bind or share.gpus < 2:  # one GPU is on one node
        return tuple(gpus)
    nodes = {gpu: numa_node_of(topology, gpu) for gpu in (*gpus, *own)}
    there = Counter(nodes.values())
    own_nodes = {nodes[gpu] for gpu in own}
    return tuple(
        gpu for gpu in gpus if nodes[gpu] is not None and there[nodes[gpu]] >= share.gpus and own_nodes <= {nodes[gpu]}
    )


def are_on_one_node(topology: Topology, gpus: Collection[DeviceID]) -> bool:
    """Whether these GPUs are known to be on one NUMA node. True for a single GPU."""
    nodes = {numa_node_of(topology, gpu) for gpu in gpus}
    return len(gpus) < 2 or (len(nodes) == 1 and None not in nodes)


def numa_node_of(topology: Topology, gpu: DeviceID) -> int | None:
    """The NUMA node of a GPU; None: unknown. If its slots are listed with a NUMA node, it is this one."""
    nodes = topology.listed_nodes(gpu_of(topology, gpu).numa_affinity)
    return nodes[0] if nodes else None
