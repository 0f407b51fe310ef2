"""
Chooses the GPUs of a container's units or slots, and its amount on each.

`choice` chooses among the GPUs with enough left. With `compat`, gpu-manager's rules choose for units (`gaia.evaluators`) and
HAMi's for slots (`slots_as_hami`). A kubelet counts units and slots per NUMA node, and not per GPU: if its alignment leaves
too few GPUs with enough, the container is refused (`ShareSplit`).

Units of one container are of one GPU, or equal parts of several if the pod asks to spread them:

    left of GPU-0: 100 cores and 320 blocks, of GPU-1: 60 and 200, of GPU-2: 40 and 30
    asked for 20 and 16 blocks: GPU-2; for 20 and 60 blocks: GPU-1; for 100: GPU-0
    asked for 60 and 40 blocks, spread over two: 30 and 20 of each of GPU-1 and GPU-2

Slots of one container are on different GPUs that the pod's annotations accept, near the container's alignment if enough of
these have room. A MIG instance in slots counts as a GPU without links, since instances reach neither one another nor other
GPUs. Example with ten slots per GPU:

    left of GPU-0: 100 cores and 80000 MiB, of GPU-1: 60 and 20000, of GPU-2: 0 and 50000
    asked for 30 cores and 4000 MiB of one: GPU-1; of two: GPU-0 and GPU-1; of three: refused
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
"""The name in refusals of a container's units of both kinds."""


def choose_gpus_for_units(
    topology: Topology, left: SharesLeft, share: Share, among: Iterable[DeviceID], compat: str
) -> tuple[DeviceID, ...]:
    """
    The GPUs, of these, that a container gets its units of; () where none have enough left. `compat`: as in the node's
    rules.
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
        """The healthy units that may be chosen: of GPUs with enough left. Raises ShareSplit where there are none."""
        healthy = self.state.ownership.usable(self.resource)
        gpus = gpus_for_units(self.state, self.container)
        wanted = 1 if self.share.whole else self.share.gpus  # whole ones are counted where they are chosen
        found = healthy & units_on_gpus(self.state, gpus, self.resource)
        if healthy and (not found or len(gpus) < wanted):
            lacking = "no GPU has" if wanted == 1 else f"{len(gpus)} GPUs, and not {wanted}, have"
            raise ShareSplit(SHARE, f"{lacking} enough left of what the container asks for")
        return found

    def prefer(self, choice: DeviceChoice, near: Sequence[DeviceID]) -> tuple[DeviceID, ...]:
        """The units that the container gets; () where no GPU has enough. `near`: GPUs of which it has the other kind."""
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
    """These GPUs, and as many others as the share has more; () where there are not so many."""
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
    Raises ShareSplit where the units of a container are neither equal parts of so many GPUs nor of whole GPUs, with
    memory of each or of none. `amounts`: GPU -> what it has of it; `field`: where it asks for them; `gpus`: over how
    many it is spread, None: that is not known.
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
    """Each GPU with itself, or instead of it its MIG instances that are in slots, with it; in the hardware's order."""
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
    """All `shareable_devices` with what is left of them."""
    return tuple(shared_gpu(topology, base, gpu, left) for base, gpu in shareable_devices(topology))


def shared_gpu(topology: Topology, base: DeviceID, gpu: Gpu, left: SharesLeft) -> SharedGpu:
    """One of them, with nothing left if it is not in `left`. `gpu`: itself, or of which it is an instance."""
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
    """The GPUs, of these, of each of which a container gets its part. Raises ShareDoesNotFit where too few would do."""
    gpus = shared_gpus(topology, left)
    may_be_chosen = [at for at, gpu in enumerate(gpus) if gpu.device in among and gpu.device in left]
    able = positions_with_enough(gpus, share, fields, may_be_chosen)
    if share.rules.hami:
        groups_by_numa_node(gpus, able, share, fields)
        able_gpus = {gpus[at].device for at in able}
        return choose_as_hami(topology, [gpus[at] for at in may_be_chosen], share, able_gpus, fields)
    return tuple(gpu.device for gpu in choose_gpus(gpus, able, share, link_scorer(topology), fields))


class SlotChooser:
    """Chooses the slots of one container. `affinity`: the NUMA nodes to which it is aligned; None: to none."""

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
        """GPU -> what earlier containers of its pod hold of it by the slots that they leave to this one."""

    def room(self) -> DeviceSet:
        """A slot of each GPU that has enough, of those near its affinity if they suffice. Raises ShareDoesNotFit."""
        self.check_room()
        found = slots_for(self._state, self._container, self.resource)
        near = found.devices.some(slot for slot in found if self._is_near(base_of(slot)))
        return near if len(near) >= self._share.gpus - len(self._own) else found

    def check_room(self) -> None:
        """Raises ShareDoesNotFit if too few GPUs of the node have enough, whatever the alignment."""
        missing = self._share.gpus - len(self._own)
        if missing > 0:
            offers = offers_in_slots(self._state.hardware)
            self._choose(missing, [gpu for gpu in self._left if offers[gpu].resource == self.resource], self._own)

    def prefer(self, choice: DeviceChoice, near: Sequence[DeviceID]) -> tuple[DeviceID, ...]:
        """
        The slots that the container gets, near its affinity if that has enough; () where too few GPUs have. Raises
        TooMuchWork where HAMi's rules choose.
        """
        available = choice.available
        must = tuple(dict.fromkeys(map(base_of, choice.must_include)))
        missing = choice.size - len(must)
        among = [gpu for gpu, slots in available.devices.by_base.items() if (slots & available).bits]
        if len(must) < len(choice.must_include) or missing < 1:
            return ()
        tries = [among]
        if self._affinity is not None and not self._share.rules.hami:  # HAMi knows of no affinity
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
        """Raises ShareDoesNotFit if the GPUs of these slots cannot be used, or HAMi's rules find none on the node."""
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
        """Chooses so many of these GPUs in addition to its `own`. Raises ShareDoesNotFit where too few would do."""
        topology = self._state.hardware
        rest = self._share._replace(gpus=missing)
        others = [gpu for gpu in among if gpu not in own]
        near = on_one_node(topology, self._share, others, own) if own else others
        return choose_gpus_for_share(topology, self._left, rest, near, self._fields)

    def amounts(self, slots: Collection[DeviceID]) -> dict[DeviceID, Amount]:
        """What the container asks for by each of these slots, also by those that it takes over (`with_peaks`)."""
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
    """Raises ShareSplit where a kubelet picks at random `amount` of these units or slots, which are of several GPUs."""
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
    """The chooser of the container's slots; None: it asks for none."""
    share = container.share(state.hardware)
    if share is None or share.resource is None:
        return None
    return SlotChooser(state, container, share, share.resource, affinity)


def slots_given(
    state: NodeState, container: ContainerDemand, devices: Mapping[ResourceName, Collection[DeviceID]]
) -> dict[DeviceID, Amount]:
    """What the container would hold by each of the slots among these devices."""
    chooser = slot_chooser_of(state, container)
    return {} if chooser is None else chooser.amounts(devices.get(chooser.resource, ()))


def with_peaks(allocations: Sequence[Allocation]) -> tuple[Allocation, ...]:
    """The allocations of a pod, each slot with its largest amount, because Allocate does not name the container."""
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
    Chooses which units or slots of a resource a container gets; None: it is not offered by amounts, or no amount of it is
    asked for. `compat`: as in the rules of the node. `affinity`: the NUMA nodes that the container is aligned to.
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
    Raises ShareSplit and WholeGpuInUse where the container cannot have these devices together. Init containers of its
    own pod do not count, since they have ended by then.
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
