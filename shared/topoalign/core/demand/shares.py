"""
Reads what a container asks for of GPUs that are offered in units or slots: of how many GPUs, and how much of each.

Units are hundredths of computing time and blocks of memory. From 100 on computing time is that of whole GPUs, and their
memory comes with them. A smaller amount is of one GPU, or in equal parts of several where the annotation
`topoalign.io/gpus` asks for that.

    20 of computing time, 16 blocks                  a fifth of a GPU, and 4 GiB of it
    60 of computing time, 40 blocks, spread over 2   30 and 20 of each of two GPUs
    200 of computing time                            two GPUs, with all of their memory

Slots are read as HAMi reads them. The kubelet allocates only the slots; amounts are in resources that it never sees
(`SlotResources`). Memory in MiB counts before a percentage; without both, it is all memory of a GPU, and 0 counts as
absent. Cores that are not asked for are none.

    nvidia.com/gpu: 1, gpumem: 4000, gpucores: 30    30 cores and 4000 MiB of one GPU
    nvidia.com/gpu: 2, gpumem-percentage: 50         half of the memory of each of two GPUs, without a claim on their cores
    nvidia.com/gpu: 1                                all memory of one GPU: nobody else gets any of it

Two rules are stricter than HAMi's. 100 cores are all that is offered of a GPU, however it is scaled, and nobody else gets
such a GPU. 0 cores are refused, because nothing keeps a container from computing; so are amounts that HAMi would misread or
ignore, such as `gpumem: 16Gi`, which are 17179869184 MiB (`check_amounts`).

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
"""The names of units where the configuration sets none."""
SharesLeft = Mapping[DeviceID, ShareLeft]
"""GPU or MIG instance -> what is left of it."""


class Share(NamedTuple):
    """What one container asks for of shared GPUs, in units or in slots: as much of each of some GPUs."""

    gpus: int
    """Of how many GPUs."""
    cores: int
    """Hundredths of the computing time of each. 100: all that is offered of it, and nobody else has anything of the GPU."""
    memory: int
    """Bytes of each; 0: by `percentage`."""
    resource: ResourceName | None = None
    """Of which it asks for a slot of each GPU. None: it asks for units."""
    percentage: int = 0
    """Memory as hundredths of what is offered of each. 0, or `UNSET`: none."""
    parts: int = 0
    """Above 0 the amounts are not known, and each is one of so many equal parts."""
    rules: GpuRules = ANY_GPU
    """The pod's annotations about the GPUs; units have none."""

    @property
    def whole(self) -> bool:
        """Whether nobody else has anything of these GPUs."""
        return self.cores >= CORES

    def amount_of(self, offered: Amount) -> Amount:
        """What it is of a GPU of which so much is offered: of 81559 MiB 50 per cent are 40779."""
        if self.parts:
            return divide_amount(offered, self.parts)
        memory = self.memory or offered.memory // MIB * self.percentage // ALL_MEMORY * MIB
        return Amount(cores=offered.cores if self.whole else self.cores, memory=memory)


def enough(left: ShareLeft, share: Share, own: Amount | None = None) -> bool:
    """
    Whether a GPU has enough left for a share of it. Where all cores are held, memory alone would take some of them. `own`:
    what the pod holds of it by a slot that its init container leaves, which it takes over.
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
    """Those of which a container could get its part, in the hardware's order."""
    return tuple(gpu for gpu, each in left.items() if may_be_on(topology, share, gpu) and enough(each, share))


@computed_once
def resources_in_units(topology: Topology) -> Mapping[ResourceName, UnitKind]:
    """Resource -> what it is units of, for those of GPUs in units."""
    return {offer.resource: offer.unit for offer in topology.offered if offer.unit is not None}


def unit_of(topology: Topology, resource: ResourceName) -> UnitKind | None:
    """What the resource is units of; None: it is no resource of units."""
    return resources_in_units(topology).get(resource)


def units_asked(topology: Topology, devices: Quantities) -> Amount | None:
    """The units that are asked for on this machine, of all GPUs together; None: none are."""
    in_units = resources_in_units(topology)
    found = [unit_amount(in_units[name], n) for name, n in devices.items() if n and name in in_units]
    return sum_amounts(found) if found else None


def unit_amount(kind: UnitKind, number: int) -> Amount:
    """So many units of a kind: hundredths of computing time, or blocks of memory."""
    is_cores = kind == "cores"
    return Amount(cores=number if is_cores else 0, memory=0 if is_cores else number * MEMORY_BLOCK)


def share_of_units(units: Amount, gpus: int = 1) -> Share:
    """The share that these units are in equal parts of so many GPUs: 60 and 40 blocks over two are 30 and 20 of each."""
    gpus = max(gpus, units.cores // CORES)
    blocks = units.memory // MEMORY_BLOCK
    return Share(gpus=gpus, cores=units.cores // gpus, memory=-(-blocks // gpus) * MEMORY_BLOCK)


def asks_for_both_halves(topology: Topology, devices: Quantities) -> bool:
    """Whether computing time and memory are asked for in units on this machine: a kubelet asks for them one by one."""
    asked = units_asked(topology, devices)
    return asked is not None and asked.cores > 0 and asked.memory > 0


class ShareFields(NamedTuple):
    """The paths of the fields of a request, for error messages."""

    cores: str = "cores"
    memory: str = "memory"
    gpus: str = "gpus"


class UnitResources(NamedTuple):
    """By which names a machine offers GPUs in units, how large they are, and how else its GPUs are asked for."""

    units: tuple[tuple[ResourceName, UnitKind], ...]
    """In the order of the names."""
    most: int
    """Blocks of memory of the largest of its GPUs that are in units."""
    gpus: int
    others: tuple[ResourceName, ...]
    """Resources of GPUs that are whole, MIG instances or shared in another way, `nvidia.com/gpu` always. Ascending."""

    def fields(self, path: str) -> ShareFields:
        """The limits by which the container at this path, such as `spec.containers[0]`, asks for units."""
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
    """By which names units are asked for: those under which they are `offered`, and the usual ones."""
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
    """
    The number of GPUs in the annotation, 1 or more; None if it is absent. Raises InvalidField if it is not such a number.
    """
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
    """Raises InvalidShare for units that cannot be spread over the number of GPUs that the pod asks for."""
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
"""Hundredths of a GPU's."""
UNSET = 101
"""The percentage of a request that has none."""


class HamiRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one container asks for. `count` 0: nothing."""

    count: int = 0
    vendor: str = ""
    memory: int = 0
    """MiB of each GPU. 0: by percentage."""
    percent: int = 0
    """Memory as hundredths of each GPU's. `UNSET`, or 0: none."""
    cores: int = 0
    """Of each GPU."""

    def memory_of(self, total: int) -> int:
        """MiB that it gets of a GPU with `total` MiB."""
        if self.memory > 0 or self.percent == UNSET:
            return self.memory
        return total * self.percent // ALL_MEMORY


def read_hami_request(resource: ResourceName, slots: Slots, amounts: Quantities) -> HamiRequest:
    """What a container asks for of GPUs of which `resource` is a slot; without any nothing, whatever amounts it names."""
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
    """Resource of GPUs in slots -> by what else is asked for them."""
    return {offer.resource: offer.slots for offer in offers_in_slots(topology).values() if offer.slots is not None}


@computed_once
def amount_resources(topology: Topology) -> frozenset[ResourceName]:
    """The resources by which containers say how much of each GPU in slots they ask for; no kubelet sees them."""
    return frozenset(name for slots in resources_in_slots(topology).values() for name in slots.resources)


@computed_once
def gpus_of_numa_nodes(topology: Topology) -> Mapping[ResourceName, Counter[int]]:
    """Resource whose slots are listed to the kubelet with NUMA nodes -> NUMA node -> how many GPUs in slots it has."""
    found = {name: Counter[int]() for name, slots in resources_in_slots(topology).items() if slots.numa_topology}
    for gpu, offer in offers_in_slots(topology).items():
        node = numa_node_of(topology, gpu)
        if offer.resource in found and node is not None:
            found[offer.resource][node] += 1
    return found


def share_in_slots(topology: Topology, devices: Quantities, rules: GpuRules = ANY_GPU) -> Share | None:
    """What is asked for in slots on this machine; None: nothing is."""
    for resource, slots in resources_in_slots(topology).items():
        if devices.get(resource):
            asked = read_hami_request(resource, slots, devices)
            return Share(asked.count, asked.cores, asked.memory * MIB, resource, asked.percent, rules=rules)
    return None


def unknown_share(topology: Topology, resource: ResourceName, gpus: int, rules: GpuRules = ANY_GPU) -> Share:
    """What counts for a container of which it is known only of how many GPUs it asks for slots: an equal part of each."""
    slots = [offer.replicas for offer in offers_in_slots(topology).values() if offer.resource == resource]
    return Share(gpus, cores=0, memory=0, resource=resource, parts=min(slots), rules=rules)


class SlotResources(NamedTuple):
    """By which names a machine offers GPUs in slots, and how large they are."""

    resource: ResourceName
    slots: Slots
    most: int
    """MiB that are offered of the largest of these GPUs."""


USUAL_AMOUNTS = Slots().resources
"""The names of amounts of GPUs in slots where the configuration sets none: HAMi's."""


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
    """Raises InvalidShare for invalid amounts of GPUs that are offered so. `where`: `spec.containers[0]`."""
    slots = offered.slots
    if limits.get(slots.cores) == 0:  # no limiter keeps a container from computing at all
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
    """The bytes that a MIG instance for a share of this GPU needs at least; 0, where the amount is not known."""
    if share.parts:
        return 0
    return left.offered.memory if share.whole else share.amount_of(left.offered).memory


def may_be_on(topology: Topology, share: Share, gpu: DeviceID) -> bool:
    """Whether this GPU, or MIG instance, is offered in the way of the share, and the pod accepts it."""
    offer = offers_in_slots(topology).get(gpu)
    if offer is None or share.resource is None:
        return offer is None and share.resource is None
    whole = gpu_of(topology, gpu)
    exclusion = share.rules.exclusion(whole.id, whole.name, mode_of(offer))
    return offer.resource == share.resource and exclusion is None


def mode_of(offer: Offer) -> str:
    """HAMi's name for what keeps containers on GPUs in slots apart. Empty: nothing does, or HAMi has no name for it."""
    if offer.slots is not None and offer.slots.instances:
        return MIG
    return offer.limited_by if offer.limited_by in MODES else ""


def on_one_node(
    topology: Topology, share: Share, gpus: Collection[DeviceID], own: Collection[DeviceID] = ()
) -> tuple[DeviceID, ...]:
    """
    Those of the GPUs that can be on one NUMA node with as many others of them as a share needs besides its `own`; all of
    them where it need not be on one. Example: of GPUs 0 and 1 on node 0 and GPU 2 on node 1 for two the first two.
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
    """Whether these GPUs are known to be on one NUMA node; one alone is."""
    nodes = {numa_node_of(topology, gpu) for gpu in gpus}
    return len(gpus) < 2 or (len(nodes) == 1 and None not in nodes)


def numa_node_of(topology: Topology, gpu: DeviceID) -> int | None:
    """The NUMA node of a GPU, with which its slots are listed if they are listed with any; None: it is not known."""
    nodes = topology.listed_nodes(gpu_of(topology, gpu).numa_affinity)
    return nodes[0] if nodes else None
