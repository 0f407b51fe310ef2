"""
Chooses the GPUs on which a container gets its slots, and what it holds of each.

Slots of one container are of different GPUs, and each of them has enough left for the amounts that the container asks for.
A MIG instance in slots counts as a GPU without links: instances reach neither one another nor other GPUs, so where they are
equal the lowest ones are taken. Which GPUs is decided by `choice`, among those that the pod's annotations accept: near the
container's alignment if enough of them would do. A kubelet for which slots have NUMA nodes counts slots, and knows neither
GPUs nor annotations: where its alignment leaves too few GPUs that would do, the container is refused (`ShareSplit`). Where
HAMi's rules choose, `slots_as_hami` does it. Example with ten slots a GPU:

    left of GPU-0: 100 cores and 80000 MiB, of GPU-1: 60 and 20000, of GPU-2: 0 and 50000
    asked for 30 cores and 4000 MiB of one: GPU-1; of two: GPU-0 and GPU-1; of three: refused
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from topoalign.core.demand.pod_demand import ContainerDemand, PodDemand
from topoalign.core.demand.share_annotations import (
    NO_USE_TYPE,
    NO_USE_UUID,
    USE_TYPE,
    USE_UUID,
    VGPU_MODE,
    Published,
    Selection,
    list_annotation_paths,
)
from topoalign.core.demand.shares import (
    Share,
    SharesLeft,
    are_on_one_node,
    enough,
    gpus_of_numa_nodes,
    gpus_with_enough,
    instance_memory,
    may_be_on,
    mode_of,
    numa_node_of,
    on_one_node,
    resources_in_slots,
    share_in_units,
    unit_of,
)
from topoalign.core.hints.device_hints import gpus_for_units, slots_for, taken_over, units_on_gpus
from topoalign.core.hints.reuse import held_by_pod, reusable_devices
from topoalign.core.model.allocations import Allocation, amounts_of
from topoalign.core.model.errors import InvalidField, quoted
from topoalign.core.model.holdings import Amount, base_of
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.bitmask import Mask
from topoalign.core.model.topology.by_amounts import offers_in_slots
from topoalign.core.model.topology.cpuset import format_cpuset
from topoalign.core.model.topology.derived_tables import computed_once
from topoalign.core.model.topology.device_offers import CORES, MEMORY_BLOCK
from topoalign.core.model.topology.device_sets import DeviceSet
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.core.placement.device_choice import DeviceChoice
from topoalign.core.placement.gpus.seam import SetScorer, gpu_scores
from topoalign.core.placement.preference import set_scorer
from topoalign.core.sharing.choice import FIELDS, accepted_gpus, choose_gpus
from topoalign.core.sharing.gaia.evaluators import choose_gpus_as_gaia
from topoalign.core.sharing.share_refusals import (
    UNALIGNED,
    WAIT,
    NoneByHami,
    NotEnoughShareGpus,
    ShareDoesNotFit,
    ShareFields,
    ShareSplit,
    SlotsBeyondNumaNode,
    WholeGpuInUse,
)
from topoalign.core.sharing.shared_gpus import SharedGpu
from topoalign.core.sharing.slots_as_hami import choose_as_hami
from topoalign.core.state.fold import NodeState
from topoalign.core.state.share_amounts import (
    NONE_HELD,
    NOTHING,
    ShareLeft,
    held_by_slot,
    held_of_gpus,
    larger_amount,
    preventing_allocations,
)

# Chooses the GPUs on which a container gets its units of computing time and of memory.
#
# Which GPU is decided by `choice`, or with `compat: gaia` by gpu-manager's rules (`gaia.evaluators`). A kubelet counts
# units per NUMA node, and not per GPU: where its alignment leaves no GPU with enough, the container is refused
# (`ShareSplit`). Example:
#
#     left of GPU-0: 100 and 320 blocks, of GPU-1: 60 and 200, of GPU-2: 40 and 30
#     asked for 20 and 16 blocks: GPU-2; for 20 and 60 blocks: GPU-1; for 100: GPU-0
#     asked for 60 and 40 blocks, spread over two: 30 and 20 of each of GPU-1 and GPU-2


WHOLE_REMEDY = (
    "ask for whole GPUs without memory, all of which comes with them, or let topoalign's scheduler reserve both halves"
)

SHARE = "share"
"""The name in refusals of a container's units of both kinds."""


def choose_gpus_for_units(
    topology: Topology, left: SharesLeft, share: Share, among: Iterable[DeviceID], compat: str
) -> tuple[DeviceID, ...]:
    """
    The GPUs, of these, that a container gets its units of; () where none have enough left. `compat`: as in the rules of the
    node; gpu-manager has no shares of several GPUs.
    """
    some = frozenset(among)
    try:
        if compat == "gaia" and (share.whole or share.gpus == 1):
            asked = Amount(cores=share.cores * share.gpus, memory=share.memory)
            every = tuple(shared_gpu(topology, gpu.id, gpu, left) for gpu in topology.gpus)
            return tuple(gpu.device for gpu in choose_gpus_as_gaia(topology, every, asked, some))
        return choose_gpus_for_share(topology, left, share, some)
    except (InvalidField, ShareDoesNotFit):
        return ()


class UnitChooser:
    """Chooses the units of one resource of a container."""

    def __init__(
        self, state: NodeState, container: ContainerDemand, share: Share, resource: ResourceName, compat: str
    ) -> None:
        """`compat`: as in the rules of the node."""
        self._state = state
        self._container = container
        self._share = share
        self._resource = resource
        self._compat = compat

    def room(self) -> DeviceSet:
        """
        The healthy units of the resource that are of GPUs with room for what the container asks for. Raises ShareSplit where
        there are none.
        """
        healthy = self._state.ownership.usable(self._resource)
        gpus = gpus_for_units(self._state, self._container)
        cards = 1 if self._share.whole else self._share.gpus  # whole ones are counted where they are chosen
        found = healthy & units_on_gpus(self._state, gpus, self._resource)
        if healthy and (not found or len(gpus) < cards):
            lacking = "no GPU has" if cards == 1 else f"{len(gpus)} GPUs, and not {cards}, have"
            raise ShareSplit(SHARE, f"{lacking} enough left of what the container asks for")
        return found

    def check_takeover(self, reusable: Collection[DeviceID], amount: int) -> None:
        """
        Raises ShareSplit where a kubelet picks `amount` of the units that init containers left, which are more, and may pick
        them of other GPUs than those of one share: it picks them at random.
        """
        by_gpu = Counter(map(self._state.hardware.card_of, reusable))
        if len(by_gpu) <= 1:
            return
        unused = len(reusable) - amount
        if self._share.whole and len(by_gpu) == self._share.gpus and unused < min(by_gpu.values()):
            return  # memory of each of its GPUs, whichever blocks these are
        raise ShareSplit(
            SHARE,
            f"it takes over {amount} of the {len(reusable)} units that init containers left, at random, of "
            f"{len(by_gpu)} GPUs",
            "let its init containers ask for units of one GPU, or for as much as it asks for itself",
        )

    def prefer(self, choice: DeviceChoice, near: Sequence[DeviceID]) -> tuple[DeviceID, ...]:
        """
        The units that the container gets, of those that may be chosen; () where no GPU has enough. `near`: GPUs of which it
        has units already, of the other kind. Units that it takes over from an init container count as well.
        """
        topology = self._state.hardware
        near = near or taken_over(self._state, self._container)
        gpus = near or tuple(dict.fromkeys(map(topology.card_of, choice.must_include)))
        by_gpu = choice.available.devices.by_base.items()
        among = [gpu for gpu, units in by_gpu if (units & choice.available).bits]
        gpus = with_missing(topology, self._state.ownership.units_left, self._share, gpus, among, self._compat)
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
    """The GPUs of which a container has something, each once. `devices`: resource -> what it has been given of it."""
    given = (each for name, some in devices.items() if topology.kind_of(name) in ("gpu", "unit") for each in some)
    return tuple(dict.fromkeys(map(topology.card_of, given)))


def units_on(
    available: DeviceSet, must_include: Sequence[DeviceID], size: int, gpus: Collection[DeviceID]
) -> tuple[DeviceID, ...]:
    """
    So many of the available units of these GPUs, those that must be included first, and with them equally many of each as
    far as can be. Fewer where they have not enough.
    """
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


def check_units(
    state: NodeState, demand: PodDemand, devices: Mapping[ResourceName, Sequence[DeviceID]], share: Share
) -> None:
    """
    Raises ShareSplit where the units that a container would get are not of as many GPUs as its share, and WholeGpuInUse
    where somebody else has one whole, or has units of one that it would have whole, and ShareSplit for memory alone of one
    of which all computing time is held: an init container may have had it whole. Init containers of its own pod have ended
    by then. `devices`: resource -> what it would get.
    """
    amounts = amounts_of(device for ids in devices.values() for device in ids)
    check_gpus(amounts, gpus=1 if share.whole else share.gpus)
    own = {each.id for each in held_by_pod(state, demand) if each.role == "init"}
    live = [each for each in state.allocations.values() if each.id not in own]
    for each in preventing_allocations(live, amounts):
        raise WholeGpuInUse(sorted(each.amounts.keys() & amounts.keys()), allocation_title(each), SHARE)
    if not any(each.cores for each in amounts.values()):
        held = held_of_gpus(each for each in live if not amounts.keys().isdisjoint(each.amounts))
        if spent := [gpu for gpu in amounts if held.get(gpu, NOTHING).amount.cores >= CORES]:
            raise ShareSplit(
                SHARE, f"all computing time of {quoted(spent)} is held, and memory alone would take some", WAIT
            )


def allocation_title(allocation: Allocation) -> str:
    """The pod of an allocation, or the allocation's id."""
    owner = allocation.owner
    return allocation.id if owner is None else f"{owner.namespace}/{owner.pod}"


def check_gpus(amounts: Mapping[DeviceID, Amount], field: str = SHARE, gpus: int | None = 1) -> None:
    """
    Raises ShareSplit where the units that a container has are not equal parts of so many GPUs, or not of whole ones and
    memory of each or none of them: both halves show to the container which GPUs it has. `amounts`: GPU -> what it has of it;
    `field`: where it asks for them; `gpus`: over how many it is spread, None: it is not known.
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


# The GPUs of a machine as GPUs that are shared, for whoever chooses the slots of a container: what each offers and
# what of it is held, and what sets of them are worth. In the place of a GPU are its MIG instances, if those are in
# slots.


NOTHING_LEFT = ShareLeft(offered=NONE_HELD, usable=False)


@computed_once
def shareable_devices(topology: Topology) -> tuple[tuple[DeviceID, Gpu], ...]:
    """All GPUs in the hardware's order, each with itself, or in its place its MIG instances that are in slots, with it."""
    in_slots = offers_in_slots(topology)
    found = list[tuple[DeviceID, Gpu]]()
    for gpu in topology.gpus:
        instances = [each.uuid for each in gpu.mig or () if each.uuid in in_slots]
        found += [(base, gpu) for base in instances or [gpu.id]]
    return tuple(found)


@computed_once
def link_scorer(topology: Topology) -> SetScorer:
    """The scorer of sets of these; MIG instances have no links."""
    places = shareable_devices(topology)
    if all(base == gpu.id for base, gpu in places):
        return set_scorer(topology)
    scores = gpu_scores(topology)
    position = {gpu.id: number for number, gpu in enumerate(topology.gpus)}
    rows = [position.get(base) for base, _ in places]
    return SetScorer([[0 if a is None or b is None else scores[a][b] for b in rows] for a in rows])


def shared_gpus(topology: Topology, left: SharesLeft) -> tuple[SharedGpu, ...]:
    """All GPUs and instances of `shareable_devices`, of which so much is left."""
    return tuple(shared_gpu(topology, base, gpu, left) for base, gpu in shareable_devices(topology))


def shared_gpu(topology: Topology, base: DeviceID, gpu: Gpu, left: SharesLeft) -> SharedGpu:
    """One of them; nothing is left of one that `left` does not have. `gpu`: itself, or of which it is an instance."""
    here = left.get(base, NOTHING_LEFT)
    offer = offers_in_slots(topology).get(base)
    if here.profiles:  # whether an instance fits is known already: what is left decides the order alone
        held = Amount(cores=0, memory=here.offered.memory - here.left.memory)
        here = msgspec.structs.replace(here, held=held, profiles=())
    return SharedGpu(
        device=base,
        index=gpu.index,
        minor=gpu.index if gpu.minor is None else gpu.minor,
        numa_node=numa_node_of(topology, gpu.id),
        model=gpu.name,
        mode=mode_of(offer) if offer else "",
        processes=here.sharers,
        **msgspec.structs.asdict(here),
    )


def share_fields(topology: Topology, resource: ResourceName, published: Published) -> ShareFields:
    """
    The limits of a container by which it asks for slots of this resource and for its amounts, and the annotations of its pod
    that list GPUs. `published`: those of its annotations that are about GPUs.
    """
    slots = resources_in_slots(topology)[resource]
    return ShareFields(
        cores=f"limits[{slots.cores}]",
        memory=f"limits[{slots.memory}]",
        cards=f"limits[{resource}]",
        types=list_annotation_paths(published, USE_TYPE, NO_USE_TYPE),
        uuids=list_annotation_paths(published, USE_UUID, NO_USE_UUID),
        modes=list_annotation_paths(published, VGPU_MODE),
    )


def choose_gpus_for_share(
    topology: Topology, left: SharesLeft, share: Share, among: Collection[DeviceID], fields: ShareFields = FIELDS
) -> tuple[DeviceID, ...]:
    """The GPUs, of these, of each of which a container gets its part. Raises ShareDoesNotFit where too few would do."""
    every = shared_gpus(topology, left)
    cards = [card for card in every if card.device in among and card.device in left]
    whole = [msgspec.structs.replace(card, device=topology.card_of(card.device)) for card in cards]
    accepted = [cards[at].device for at in accepted_gpus(whole, share.rules, fields)]
    able = [gpu for gpu in accepted if enough(left[gpu], share)]
    if share.rules.hami and len(on_one_node(topology, share, able)) >= share.gpus:
        return choose_as_hami(topology, cards, left, share, able, fields)
    wanted = able if len(able) >= share.gpus else accepted
    # the least of them, where GPUs of different sizes are asked for by a percentage: each of `able` has its own
    asked = [share.amount_of(left[gpu].offered) for gpu in wanted]
    least = share._replace(
        cores=CORES if share.whole else min(CORES - 1, *(each.cores for each in asked)),
        memory=min(each.memory for each in asked),
        percentage=0 if share.memory else share.percentage,
        parts=0,
        rules=msgspec.structs.replace(share.rules, uuids=Selection(wanted=tuple(wanted))),
    )
    chosen = choose_gpus(every, least, link_scorer(topology), fields)
    if len(able) < share.gpus:
        raise NotEnoughShareGpus(fields, share.gpus, len(able))
    return tuple(card.device for card in chosen)


class SlotChooser:
    """Chooses the slots of one container."""

    def __init__(
        self,
        state: NodeState,
        container: ContainerDemand,
        share: Share,
        resource: ResourceName,
        affinity: Mask | None = None,
    ) -> None:
        """`affinity`: the NUMA nodes to which the container is aligned; None: to none."""
        self._state = state
        self._container = container
        self._share = share
        self.resource = resource
        self._affinity = affinity
        self._left = state.ownership.slots_left
        self._fields = share_fields(state.hardware, resource, container.gpu_annotations)
        held = held_by_pod(state, container)
        self._own = own_amounts(state.hardware, held, reusable_devices(held, resource))

    def room(self) -> DeviceSet:
        """
        A slot of each GPU that has enough, of those near its affinity if they suffice. Raises ShareDoesNotFit where all are
        too few.
        """
        self.check_room()
        found = slots_for(self._state, self._container, self.resource)
        near = found.devices.some(slot for slot in found if self._is_near(base_of(slot)))
        return near if len(near) >= self._share.gpus - len(self._own) else found

    def check_room(self) -> None:
        """Raises ShareDoesNotFit where too few GPUs of the node have enough, however they are aligned."""
        missing = self._share.gpus - len(self._own)
        if missing > 0:
            offers = offers_in_slots(self._state.hardware)
            self._choose(missing, [gpu for gpu in self._left if offers[gpu].resource == self.resource], self._own)

    def check_takeover(self, reusable: Collection[DeviceID], amount: int) -> None:
        """
        Raises ShareSplit: a kubelet picks at random which `amount` of the slots it takes over that init containers left, and
        they are of different GPUs.
        """
        raise ShareSplit(
            self._fields.cards,
            f"it takes over {amount} of the {len(reusable)} slots that init containers left, at random, of different GPUs",
            "let its init containers ask for no more GPUs than it asks for itself",
        )

    def prefer(self, choice: DeviceChoice, near: Sequence[DeviceID]) -> tuple[DeviceID, ...]:
        """
        The slots that the container gets, of those that may be chosen: of GPUs near its affinity if these have enough; ()
        where too few GPUs have. Raises NoneByHami, and TooMuchWork where HAMi's rules choose.
        """
        available = choice.available
        must = tuple(dict.fromkeys(map(base_of, choice.must_include)))
        missing = choice.size - len(must)
        among = [gpu for gpu, slots in available.devices.by_base.items() if (slots & available).bits]
        if len(must) < len(choice.must_include) or missing < 1:
            return ()
        for gpus in self._nearest_first(among):
            try:
                others = self._choose(missing, gpus, must)
            except NoneByHami:
                raise
            except (InvalidField, ShareDoesNotFit):
                continue
            return (*choice.must_include, *(slot_of(available, gpu) for gpu in others))
        return ()

    def _nearest_first(self, gpus: Sequence[DeviceID]) -> Iterator[Sequence[DeviceID]]:
        """Those of the GPUs near the affinity, then all; HAMi, whose rules may choose, knows of no affinity."""
        if self._affinity is not None and not self._share.rules.hami:
            yield [gpu for gpu in gpus if self._is_near(gpu)]
        yield gpus

    def _is_near(self, gpu: DeviceID) -> bool:
        """Whether a GPU is near the affinity; all are where there is none."""
        node = numa_node_of(self._state.hardware, gpu)
        return self._affinity is None or (node is not None and self._affinity >> node & 1 == 1)

    def check_given(self, slots: Collection[DeviceID]) -> None:
        """
        Raises ShareDoesNotFit where these slots are not of different GPUs that would do for the container, or HAMi, whose
        rules are to choose, would find none on the whole node.
        """
        if self._share.rules.hami:
            self.check_room()
        if why := self._objection([base_of(slot) for slot in slots]):
            self.check_room()
            self._check_numa_nodes({*map(base_of, slots)})
            raise ShareSplit(
                self._fields.cards,
                f"the node has enough left, but not where the kubelet's alignment leads: {why}",
                WAIT if self.resource not in gpus_of_numa_nodes(self._state.hardware) else f"{WAIT}; {UNALIGNED}",
            )

    def _check_numa_nodes(self, given: Collection[DeviceID]) -> None:
        """
        Raises SlotsBeyondNumaNode and ShareSplit where slots are listed with NUMA nodes, and the NUMA nodes of these GPUs
        have fewer GPUs than are asked for.
        """
        hardware = self._state.hardware
        asked = self._share.gpus
        on_nodes = gpus_of_numa_nodes(hardware).get(self.resource, Counter())
        nodes = {node for gpu in given if (node := numa_node_of(hardware, gpu)) is not None}
        there = sum(on_nodes[node] for node in nodes)
        most = max(on_nodes.values(), default=0)
        if not there or there >= asked:
            return
        if asked > most:
            raise SlotsBeyondNumaNode(self._fields, asked, most)
        raise ShareSplit(
            self._fields.cards,
            f"{asked} GPUs are asked for, and the kubelet aligns slots to NUMA nodes {format_cpuset(nodes)} with {there}",
            f"ask for fewer GPUs; {UNALIGNED}",
        )

    def _objection(self, gpus: Sequence[DeviceID]) -> str:
        """Why these GPUs cannot be used together; empty: they can."""
        hardware = self._state.hardware
        share = self._share
        left = self._left
        if len({*gpus}) < len(gpus):
            able = {*gpus_with_enough(hardware, left, share), *self._own}
            return f"some are of one GPU: {several_of_one_gpu(hardware, self.resource, gpus, able)[0]}"
        if unwanted := [gpu for gpu in gpus if gpu in left and not may_be_on(hardware, share, gpu)]:
            return f"{quoted(sorted(unwanted))} is not what the pod's annotations accept"
        if lacking := [gpu for gpu in gpus if gpu not in left or not enough(left[gpu], share, self._own.get(gpu))]:
            return f"of {quoted(sorted(lacking))} not enough is left"
        if share.rules.numa_bind and not are_on_one_node(hardware, gpus):
            return f"{quoted(sorted(gpus))} are not on one NUMA node"
        return ""

    def _choose(self, missing: int, among: Iterable[DeviceID], own: Collection[DeviceID]) -> tuple[DeviceID, ...]:
        """Chooses `count` of these GPUs in addition to its `own`. Raises ShareDoesNotFit where too few would do."""
        topology = self._state.hardware
        rest = self._share._replace(gpus=missing)
        others = [gpu for gpu in among if gpu not in own]
        near = on_one_node(topology, self._share, others, own) if own else others
        return choose_gpus_for_share(topology, self._left, rest, near, self._fields)

    def amounts(self, slots: Collection[DeviceID]) -> dict[DeviceID, Amount]:
        """What the container asks for by each of these slots, also by those that it takes over (`with_peaks`)."""
        found = {}
        for slot in slots:
            if (gpu := base_of(slot)) not in self._left:
                continue
            left = self._left[gpu]
            asked = self._share.amount_of(left.offered)
            if left.profiles:
                asked = left.instance_for(instance_memory(left, self._share)) or asked
            found[slot] = asked
        return found


def several_of_one_gpu(
    topology: Topology, resource: ResourceName, gpus: Sequence[DeviceID], able: Collection[DeviceID]
) -> tuple[str, str]:
    """
    Why a kubelet gives a container slots of these GPUs, of which some are the same, and what to do about it. `able`: the
    GPUs with enough left.
    """
    asked = len(gpus)
    nodes = {numa_node_of(topology, gpu) for gpu in gpus}
    near = [gpu for gpu in able if numa_node_of(topology, gpu) in nodes]
    if len(able) < asked:
        cause = f"{asked} GPUs are asked for, and {len(able)} of the node have enough left"
        return cause, "ask for fewer GPUs, or wait until pods on this node end"
    if len(near) < asked and resource in gpus_of_numa_nodes(topology):
        where = f"NUMA node{'' if len(nodes) == 1 else 's'} {format_cpuset(node for node in nodes if node is not None)}"
        return (
            f"the kubelet takes the slots of {where}, where {len(near)} GPUs have enough left, and {asked} are asked for",
            f"ask for at most {len(near)} GPUs, or list slots without NUMA nodes (sharing.slots.numaTopology: false)",
        )
    return (
        f"{len(able)} GPUs have enough left, and the kubelet has chosen slots without the plugin's preference",
        "delete the pod, and let a controller create it again",
    )


def slot_of(available: DeviceSet, gpu: DeviceID) -> DeviceID:
    """The first of the available slots of a GPU that has one."""
    return (available & available.devices.by_base[gpu]).lowest


def own_amounts(
    topology: Topology, held: Iterable[Allocation], reusable: Collection[DeviceID]
) -> Mapping[DeviceID, Amount]:
    """GPU -> what earlier containers of a pod hold of it by the slots that they leave to the next one."""
    return {
        gpu: amount
        for gpu, slots in held_by_slot(topology, held).items()
        for slot, amount in slots.items()
        if slot in reusable
    }


def slot_chooser_of(state: NodeState, container: ContainerDemand, affinity: Mask | None = None) -> SlotChooser | None:
    """Chooses the container's slots, near this affinity if it can; None: it asks for none."""
    share = container.share(state.hardware)
    if share is None or share.resource is None:
        return None
    return SlotChooser(state, container, share, share.resource, affinity)


def slots_given(
    state: NodeState, container: ContainerDemand, devices: Mapping[ResourceName, Collection[DeviceID]]
) -> dict[DeviceID, Amount]:
    """What the container holds by each of the slots among these devices, which it would get in this state."""
    chooser = slot_chooser_of(state, container)
    return {} if chooser is None else chooser.amounts(devices.get(chooser.resource, ()))


def with_peaks(allocations: Sequence[Allocation]) -> tuple[Allocation, ...]:
    """
    What the containers of a pod hold, each slot with the most that any of them holds by it: a kubelet that asks for a slot
    does not report for which of them.
    """
    most: dict[DeviceID, Amount] = {}
    for each in allocations:
        for slot, amount in each.slots.items():
            most[slot] = larger_amount(most.get(slot, amount), amount)
    return tuple(
        msgspec.structs.replace(each, slots={slot: most[slot] for slot in each.slots}) if each.slots else each
        for each in allocations
    )


# Chooses for a decision about a pod among GPUs that are offered by amounts: in units, or in slots.


class Chooser(Protocol):
    """Chooses which units or slots of one resource a container gets."""

    def room(self) -> DeviceSet:
        """Those that may be chosen: of GPUs with enough left. Raises ShareDoesNotFit where there are too few."""

    def check_takeover(self, reusable: Collection[DeviceID], amount: int) -> None:
        """
        Raises ShareSplit where a kubelet picks at random `amount` of these, which init containers left, and may pick wrong.
        """

    def prefer(self, choice: DeviceChoice, near: Sequence[DeviceID]) -> tuple[DeviceID, ...]:
        """
        What the container gets, of those that may be chosen; () where no GPUs have enough. `near`: the GPUs that it has.
        """


def chooser_of(
    state: NodeState, container: ContainerDemand, resource: ResourceName, compat: str, affinity: Mask | None
) -> Chooser | None:
    """
    Chooses for this container; None: the resource is not offered by amounts, or no amount of it is asked for. `compat`: as
    in the rules of the node. `affinity`: the NUMA nodes that the container is aligned to.
    """
    hardware = state.hardware
    share = (
        share_in_units(hardware, container.devices, container.cards)
        if unit_of(hardware, resource) is not None
        else None
    )
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
    """Raises ShareSplit and WholeGpuInUse where the container cannot have these devices together; accepts all others."""
    share = share_in_units(state.hardware, container.devices, container.cards)
    if share is not None:
        check_units(state, demand, devices, share)
    chooser = slot_chooser_of(state, container) if offers_in_slots(state.hardware) else None
    if chooser is not None:
        chooser.check_given(devices.get(chooser.resource, ()))
