"""
Chooses the GPUs of a container's units or slots, and its amount on each.

`choice` selects among the GPUs with enough free capacity. With `compat`, gpu-manager's rules select the GPUs for units
(`gaia.evaluators`), and HAMi's rules those for slots (`slots_as_hami`). The kubelet counts units and slots per NUMA
node, not per GPU. If too few GPUs on the aligned NUMA nodes have enough, the container is refused (`ShareSplit`).

The units of a container are on one GPU, or in equal parts on several GPUs if the pod requests that:

    free on GPU-0: 100 cores and 320 blocks; on GPU-1: 60 and 200; on GPU-2: 40 and 30
    request of 20 cores and 16 blocks: GPU-2; of 20 cores and 60 blocks: GPU-1; of 100 cores: GPU-0
    request of 60 cores and 40 blocks, spread over two GPUs: 30 and 20 each on GPU-1 and GPU-2

The slots of a container are on different GPUs. The pod's annotations must accept each GPU. The slots are on the NUMA
nodes of the container's affinity if enough GPUs there have enough free capacity. A MIG instance in slots counts as a
GPU without links, because it has no peer-to-peer access to other instances or GPUs. Example with ten slots per GPU:

    free on GPU-0: 100 cores and 80000 MiB; on GPU-1: 60 and 20000; on GPU-2: 0 and 50000
    request of 30 cores and 4000 MiB on one GPU: GPU-1; on two: GPU-0 and GPU-1; on three: refused
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from topoalign.core.demand.pod_demand import ContainerDemand, PodDemand
from topoalign.core.demand.shares import (
    Share,
    ShareFields,
    SharesLeft,
    are_on_one_node,
    enough,
    gpus_of_numa_nodes,
    instance_memory,
    may_be_on,
    mode_of,
    numa_node_of,
    on_one_node,
    resources_in_slots,
    unit_of,
)
from topoalign.core.hints.device_hints import gpus_for_units, slots_for, taken_over, units_on_gpus
from topoalign.core.hints.reuse import held_by_pod, reusable_devices
from topoalign.core.model.allocations import Allocation, amounts_of
from topoalign.core.model.errors import quoted
from topoalign.core.model.holdings import Amount, base_of
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.bitmask import Mask
from topoalign.core.model.topology.derived_tables import computed_once
from topoalign.core.model.topology.device_offers import CORES, MEMORY_BLOCK
from topoalign.core.model.topology.device_sets import DeviceSet
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.core.model.topology.queries import offers_in_slots
from topoalign.core.placement.device_choice import DeviceChoice
from topoalign.core.placement.gpus.bandwidth import SetScorer, gpu_scores
from topoalign.core.placement.preference import set_scorer
from topoalign.core.sharing.choice import FIELDS, choose_gpus, groups_by_numa_node, positions_with_enough
from topoalign.core.sharing.gaia.evaluators import choose_gpus_as_gaia
from topoalign.core.sharing.share_refusals import (
    UNALIGNED,
    WAIT,
    ShareDoesNotFit,
    ShareSplit,
    WholeGpuInUse,
)
from topoalign.core.sharing.shared_gpus import SharedGpu
from topoalign.core.sharing.slots_as_hami import choose_as_hami
from topoalign.core.state.fold import NodeState
from topoalign.core.state.share_amounts import (
    NONE_HELD,
    ShareLeft,
    held_by_slot,
    held_of_gpus,
    larger_amount,
    preventing_allocations,
)

WHOLE_REMEDY = (
    "ask for whole GPUs without memory, all of which comes with them, or let topoalign's scheduler reserve both halves"
)

SHARE = "share"
"""The field that a refusal names if it concerns both kinds of a container's units."""


def choose_gpus_for_units(
    topology: Topology, left: SharesLeft, share: Share, among: Iterable[DeviceID], compat: str
) -> tuple[DeviceID, ...]:
    """
    The GPUs among these on which a container gets units; () if too few have enough. `compat`: as in the node's rules.
    """
    some = frozenset(among)
    if compat == "gaia" and (share.whole or share.gpus == 1):
        asked = Amount(cores=share.cores * share.gpus, memory=share.memory)
        every = tuple(shared_gpu(topology, gpu.id, gpu, left) for gpu in topology.gpus)
        return tuple(gpu.device for gpu in choose_gpus_as_gaia(topology, every, asked, some))
    try:
        return choose_gpus_for_share(topology, left, share, some)
    except ShareDoesNotFit:
        return ()


@dataclass(frozen=True)
class UnitChooser:
    """Chooses the units of one resource of a container. `compat`: as in the rules of the node."""

    state: NodeState
    container: ContainerDemand
    share: Share
    resource: ResourceName
    compat: str

    def room(self) -> DeviceSet:
        """
        The healthy units of GPUs with enough free capacity. Raises ShareSplit if there are healthy units, but too few
        GPUs have enough free capacity.
        """
        healthy = self.state.ownership.usable(self.resource)
        gpus = gpus_for_units(self.state, self.container)
        wanted = 1 if self.share.whole else self.share.gpus  # whole GPUs are counted when they are chosen
        found = healthy & units_on_gpus(self.state, gpus, self.resource)
        if healthy and (not found or len(gpus) < wanted):
            lacking = "no GPU has" if wanted == 1 else f"{len(gpus)} GPUs, and not {wanted}, have"
            raise ShareSplit(SHARE, f"{lacking} enough left of what the container asks for")
        return found

    def prefer(self, choice: DeviceChoice, near: Sequence[DeviceID]) -> tuple[DeviceID, ...]:
        """
        The units that the container gets; () if too few GPUs have enough. `near`: the GPUs on which the container
        already has the other kind of units.
        """
        topology = self.state.hardware
        near = near or taken_over(self.state, self.container)
        gpus = near or tuple(dict.fromkeys(map(topology.parent_of, choice.must_include)))
        by_gpu = choice.available.devices.by_base.items()
        among = [gpu for gpu, units in by_gpu if (units & choice.available).bits]
        gpus = with_missing(topology, self.state.ownership.units_left, self.share, gpus, among, self.compat)
        return units_on(choice.available, choice.must_include, choice.size, gpus)


def with_missing(
    topology: Topology,
    left: SharesLeft,
    share: Share,
    gpus: Sequence[DeviceID],
    among: Iterable[DeviceID],
    compat: str,
) -> tuple[DeviceID, ...]:
    """These GPUs, and the other GPUs that the share still needs; () if too few others are suitable."""
    missing = share.gpus - len(gpus)
    if missing <= 0:
        return tuple(gpus)
    rest = share._replace(gpus=missing)
    others = choose_gpus_for_units(topology, left, rest, (gpu for gpu in among if gpu not in gpus), compat)
    return (*gpus, *others) if others else ()


def gpus_given(topology: Topology, devices: Mapping[ResourceName, Sequence[DeviceID]]) -> tuple[DeviceID, ...]:
    """The GPUs of a container's devices, each once. `devices`: resource -> its devices."""
    given = (each for name, some in devices.items() if topology.kind_of(name) in ("gpu", "unit") for each in some)
    return tuple(dict.fromkeys(map(topology.parent_of, given)))


def units_on(
    available: DeviceSet, must_include: Sequence[DeviceID], size: int, gpus: Collection[DeviceID]
) -> tuple[DeviceID, ...]:
    """The units that must be included, then units spread over these GPUs as equally as possible."""
    devices = available.devices
    must = devices.some(must_include)
    of_gpus = [devices.by_base[gpu] & (available | must) for gpu in gpus if gpu in devices.by_base]
    found = devices.nothing
    missing = size - len(must) + sum(len(units & must) for units in of_gpus)
    for number, units in enumerate(sorted(of_gpus, key=len)):
        own = units & must
        more = (units - must).first(max(0, missing // (len(of_gpus) - number) - len(own)))
        found = found | more
        missing = missing - len(own) - len(more)
    return (*must_include, *found)


def check_gpus(amounts: Mapping[DeviceID, Amount], field: str = SHARE, gpus: int | None = 1) -> None:
    """
    Raises ShareSplit unless the units of a container are equal parts of `gpus` GPUs, or are whole GPUs with memory of
    each or of none. `amounts`: GPU -> amount that the container has of it. `field`: the field that the error names.
    `gpus`: number of GPUs over which the units are spread; None: unknown.
    """
    whole = all(each.cores == CORES for each in amounts.values())
    if not amounts or (whole and len({each.memory > 0 for each in amounts.values()}) == 1):
        return
    if len({*amounts.values()}) == 1 and gpus in (None, len(amounts)):
        return
    found = " and ".join(
        f"{each.cores} units of computing time and {each.memory // MEMORY_BLOCK} blocks of {quoted([gpu])}"
        for gpu, each in sorted(amounts.items())
    )
    asked = "" if gpus in (None, 1) else f", and not equal parts of {gpus}"
    is_large = sum(each.cores for each in amounts.values()) >= CORES
    raise ShareSplit(field, f"the units are of {len(amounts)} GPUs{asked}: {found}", WHOLE_REMEDY if is_large else WAIT)


NOTHING_LEFT = ShareLeft(offered=NONE_HELD, usable=False)


@computed_once
def shareable_devices(topology: Topology) -> tuple[tuple[DeviceID, Gpu], ...]:
    """
    Pairs of a device and its GPU, in the hardware's order. If MIG instances of a GPU are in slots, these instances are
    the devices; otherwise, the GPU itself is the device.
    """
    in_slots = offers_in_slots(topology)
    found = list[tuple[DeviceID, Gpu]]()
    for gpu in topology.gpus:
        instances = [each.uuid for each in gpu.mig or () if each.uuid in in_slots]
        found += [(base, gpu) for base in instances or [gpu.id]]
    return tuple(found)


@computed_once
def link_scorer(topology: Topology) -> SetScorer:
    """The scorer of sets of `shareable_devices`; MIG instances have no links."""
    places = shareable_devices(topology)
    if all(base == gpu.id for base, gpu in places):
        return set_scorer(topology)
    scores = gpu_scores(topology)
    position = {gpu.id: number for number, gpu in enumerate(topology.gpus)}
    rows = [position.get(base) for base, _ in places]
    return SetScorer([[0 if a is None or b is None else scores[a][b] for b in rows] for a in rows])


def shared_gpus(topology: Topology, left: SharesLeft) -> tuple[SharedGpu, ...]:
    """All `shareable_devices` with their free amounts."""
    return tuple(shared_gpu(topology, base, gpu, left) for base, gpu in shareable_devices(topology))


def shared_gpu(topology: Topology, base: DeviceID, gpu: Gpu, left: SharesLeft) -> SharedGpu:
    """
    One of the `shareable_devices`. If `left` does not contain it, nothing of it is free. `gpu`: the device itself, or
    the GPU that contains the instance.
    """
    here = left.get(base, NOTHING_LEFT)
    offer = offers_in_slots(topology).get(base)
    return SharedGpu(
        device=base,
        gpu=gpu.id,
        index=gpu.index,
        minor=gpu.index if gpu.minor is None else gpu.minor,
        numa_node=numa_node_of(topology, gpu.id),
        model=gpu.name,
        mode=mode_of(offer) if offer else "",
        processes=here.sharers,
        **msgspec.structs.asdict(here),
    )


def choose_gpus_for_share(
    topology: Topology, left: SharesLeft, share: Share, among: Collection[DeviceID], fields: ShareFields = FIELDS
) -> tuple[DeviceID, ...]:
    """The GPUs among these on which a container gets its share. Raises ShareDoesNotFit if too few are suitable."""
    gpus = shared_gpus(topology, left)
    may_be_chosen = [at for at, gpu in enumerate(gpus) if gpu.device in among and gpu.device in left]
    able = positions_with_enough(gpus, share, fields, may_be_chosen)
    if share.rules.hami:
        groups_by_numa_node(gpus, able, share, fields)
        able_gpus = {gpus[at].device for at in able}
        return choose_as_hami(topology, [gpus[at] for at in may_be_chosen], share, able_gpus, fields)
    return tuple(gpu.device for gpu in choose_gpus(gpus, able, share, link_scorer(topology), fields))


class SlotChooser:
    """Chooses the slots of a container. `affinity`: the NUMA nodes to which it is aligned; None: it is not aligned."""

    def __init__(
        self,
        state: NodeState,
        container: ContainerDemand,
        share: Share,
        resource: ResourceName,
        affinity: Mask | None = None,
    ) -> None:
        self._state = state
        self._container = container
        self._share = share
        self.resource = resource
        self._affinity = affinity
        self._left = state.ownership.slots_left
        slots = resources_in_slots(state.hardware)[resource]
        self._fields = ShareFields(
            cores=f"limits[{slots.cores}]",
            memory=f"limits[{slots.memory}]",
            gpus=f"limits[{resource}]",
        )
        held = held_by_pod(state, container)
        reusable = reusable_devices(held, resource)
        self._own: Mapping[DeviceID, Amount] = {
            gpu: amount
            for gpu, by_slot in held_by_slot(state.hardware, held).items()
            for slot, amount in by_slot.items()
            if slot in reusable
        }
        """GPU -> amount of the slot that this container reuses from an earlier container of its pod."""

    def room(self) -> DeviceSet:
        """
        One slot of each GPU with enough free capacity; only within the affinity if it suffices. Raises ShareDoesNotFit.
        """
        self.check_room()
        found = slots_for(self._state, self._container, self.resource)
        near = found.devices.some(slot for slot in found if self._is_near(base_of(slot)))
        return near if len(near) >= self._share.gpus - len(self._own) else found

    def check_room(self) -> None:
        """Raises ShareDoesNotFit if too few GPUs of the node have enough free capacity, regardless of the alignment."""
        missing = self._share.gpus - len(self._own)
        if missing > 0:
            offers = offers_in_slots(self._state.hardware)
            self._choose(missing, [gpu for gpu in self._left if offers[gpu].resource == self.resource], self._own)

    def prefer(self, choice: DeviceChoice, near: Sequence[DeviceID]) -> tuple[DeviceID, ...]:
        """
        The slots that the container gets, on the NUMA nodes of its affinity if enough GPUs there are suitable; () if
        too few GPUs are suitable. Raises TooMuchWork, but only if HAMi's rules choose.
        """
        available = choice.available
        must = tuple(dict.fromkeys(map(base_of, choice.must_include)))
        missing = choice.size - len(must)
        among = [gpu for gpu, slots in available.devices.by_base.items() if (slots & available).bits]
        if len(must) < len(choice.must_include) or missing < 1:
            return ()
        tries = [among]
        if self._affinity is not None and not self._share.rules.hami:  # HAMi ignores the affinity
            tries = [[gpu for gpu in among if self._is_near(gpu)], among]
        for gpus in tries:
            try:
                others = self._choose(missing, gpus, must)
            except ShareDoesNotFit:
                continue
            return (*choice.must_include, *(slot_of(available, gpu) for gpu in others))
        return ()

    def _is_near(self, gpu: DeviceID) -> bool:
        node = numa_node_of(self._state.hardware, gpu)
        return self._affinity is None or (node is not None and self._affinity >> node & 1 == 1)

    def check_given(self, slots: Collection[DeviceID]) -> None:
        """Raises ShareDoesNotFit if the GPUs of these slots cannot be used or HAMi's rules find no GPUs on the node."""
        if self._share.rules.hami:
            self.check_room()
        if why := self._objection([base_of(slot) for slot in slots]):
            self.check_room()
            is_aligned = self.resource in gpus_of_numa_nodes(self._state.hardware)
            by = " of slots (sharing.slots.numaTopology)" if is_aligned else ""
            raise ShareSplit(
                self._fields.gpus,
                f"the node has enough left, but not where the kubelet's alignment{by} leads: {why}",
                f"{WAIT}; {UNALIGNED}" if is_aligned else WAIT,
            )

    def _objection(self, gpus: Sequence[DeviceID]) -> str:
        """Why these GPUs cannot be used for the container; empty: they can."""
        hardware = self._state.hardware
        share = self._share
        left = self._left
        if len({*gpus}) < len(gpus):
            return "some slots are of one GPU"
        if unwanted := [gpu for gpu in gpus if gpu in left and not may_be_on(hardware, share, gpu)]:
            return f"{quoted(sorted(unwanted))} is not what the pod's annotations accept"
        if lacking := [gpu for gpu in gpus if gpu not in left or not enough(left[gpu], share, self._own.get(gpu))]:
            return f"of {quoted(sorted(lacking))} not enough is left"
        if share.rules.numa_bind and not are_on_one_node(hardware, gpus):
            return f"{quoted(sorted(gpus))} are not on one NUMA node"
        return ""

    def _choose(self, missing: int, among: Iterable[DeviceID], own: Collection[DeviceID]) -> tuple[DeviceID, ...]:
        """Chooses `missing` of these GPUs in addition to `own`. Raises ShareDoesNotFit if too few are suitable."""
        topology = self._state.hardware
        rest = self._share._replace(gpus=missing)
        others = [gpu for gpu in among if gpu not in own]
        near = on_one_node(topology, self._share, others, own) if own else others
        return choose_gpus_for_share(topology, self._left, rest, near, self._fields)

    def amounts(self, slots: Collection[DeviceID]) -> dict[DeviceID, Amount]:
        """Slot -> amount that the container requests with it, including slots that it reuses (`with_peaks`)."""
        found = {}
        for slot in slots:
            left = self._left.get(base_of(slot))
            if left is not None:
                asked = self._share.amount_of(left.offered)
                if left.profiles:
                    asked = left.instance_for(instance_memory(left, self._share)) or asked
                found[slot] = asked
        return found


def check_takeover(topology: Topology, resource: ResourceName, reusable: Collection[DeviceID], amount: int) -> None:
    """Raises ShareSplit if the reusable units or slots are on several GPUs. The kubelet picks `amount` at random."""
    gpus = {topology.parent_of(base_of(device)) for device in reusable}
    if len(gpus) > 1:
        raise ShareSplit(
            f"limits[{resource}]",
            f"it takes over {amount} of the {len(reusable)} units or slots that init containers left, at random, of "
            f"{len(gpus)} GPUs",
            "let its init containers ask for units of one GPU, or for as much as it asks for itself",
        )


def slot_of(available: DeviceSet, gpu: DeviceID) -> DeviceID:
    """The first of the available slots of a GPU that has one."""
    return (available & available.devices.by_base[gpu]).lowest


def slot_chooser_of(state: NodeState, container: ContainerDemand, affinity: Mask | None = None) -> SlotChooser | None:
    """The chooser of the container's slots; None: it requests no slots."""
    share = container.share(state.hardware)
    if share is None or share.resource is None:
        return None
    return SlotChooser(state, container, share, share.resource, affinity)


def slots_given(
    state: NodeState, container: ContainerDemand, devices: Mapping[ResourceName, Collection[DeviceID]]
) -> dict[DeviceID, Amount]:
    """Slot -> amount that the container would hold with it, for the slots among these devices."""
    chooser = slot_chooser_of(state, container)
    return {} if chooser is None else chooser.amounts(devices.get(chooser.resource, ()))


def with_peaks(allocations: Sequence[Allocation]) -> tuple[Allocation, ...]:
    """A pod's allocations. Each slot has the largest amount of its containers, because Allocate names no container."""
    most: dict[DeviceID, Amount] = {}
    for each in allocations:
        for slot, amount in each.slots.items():
            most[slot] = larger_amount(most.get(slot, amount), amount)
    return tuple(
        msgspec.structs.replace(each, slots={slot: most[slot] for slot in each.slots}) if each.slots else each
        for each in allocations
    )


def chooser_of(
    state: NodeState, container: ContainerDemand, resource: ResourceName, compat: str, affinity: Mask | None
) -> UnitChooser | SlotChooser | None:
    """
    The chooser of a container's units or slots of a resource; None: the resource is not offered in units or slots, or
    not requested. `compat`: as in the node's rules. `affinity`: the NUMA nodes to which the container is aligned.
    """
    hardware = state.hardware
    if unit_of(hardware, resource) is not None:
        share = container.share_in_units(hardware)
        if share is not None:
            return UnitChooser(state, container, share, resource, compat)
    chooser = slot_chooser_of(state, container, affinity) if offers_in_slots(hardware) else None
    return chooser if chooser is not None and chooser.resource == resource else None


def check_shares(
    state: NodeState,
    demand: PodDemand,
    container: ContainerDemand,
    devices: Mapping[ResourceName, Sequence[DeviceID]],
) -> None:
    """
    Raises ShareDoesNotFit, in particular ShareSplit or WholeGpuInUse, if the container cannot have these devices
    together. Init containers of the same pod do not count, because they have ended by then.
    """
    share = container.share_in_units(state.hardware)
    if share is not None:
        amounts = amounts_of(device for ids in devices.values() for device in ids)
        check_gpus(amounts, gpus=1 if share.whole else share.gpus)
        own = {each.id for each in held_by_pod(state, demand) if each.role == "init"}
        live = [each for each in state.allocations.values() if each.id not in own]
        for each in preventing_allocations(live, amounts):
            holder = each.id if each.owner is None else f"{each.owner.namespace}/{each.owner.pod}"
            raise WholeGpuInUse(sorted(each.amounts.keys() & amounts.keys()), holder, SHARE)
        if not any(each.cores for each in amounts.values()):  # memory alone; an init container may have had all cores
            held = held_of_gpus(each for each in live if not amounts.keys().isdisjoint(each.amounts))
            if spent := [gpu for gpu in amounts if gpu in held and held[gpu].amount.cores >= CORES]:
                raise ShareSplit(
                    SHARE, f"all computing time of {quoted(spent)} is held, and memory alone would take some", WAIT
                )
    chooser = slot_chooser_of(state, container) if offers_in_slots(state.hardware) else None
    if chooser is not None:
        chooser.check_given(devices.get(chooser.resource, ()))
