"""
On which GPUs a container gets its slots, and what it holds of each.

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

import msgspec

from topoalign.core.demand.card_rules import Selection
from topoalign.core.demand.hami_names import NO_USE_TYPE, NO_USE_UUID, USE_TYPE, USE_UUID, VGPU_MODE
from topoalign.core.demand.pod_demand import ContainerDemand
from topoalign.core.demand.share_annotations import Said, lists_said
from topoalign.core.demand.shares import (
    SlotShare,
    SlotsOfGpus,
    are_on_one_node,
    gpus_of_numa_nodes,
    gpus_with_slots,
    has_slot_for,
    instance_memory,
    may_be_on,
    numa_node_of,
    on_one_node,
    resources_in_slots,
    slots_asked,
)
from topoalign.core.hints.devices import slots_for
from topoalign.core.hints.reuse import held_by_pod, reusable_devices
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.errors import InvalidField, quoted
from topoalign.core.model.holdings import Amount, base_of
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.bitmask import Mask
from topoalign.core.model.topology.by_amounts import offers_in_slots
from topoalign.core.model.topology.cpuset import format_cpuset
from topoalign.core.model.topology.device_sets import DeviceSet
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.offers import CORES
from topoalign.core.placement.devices import Choice
from topoalign.core.sharing.cards import ShareRequest
from topoalign.core.sharing.choice import choose
from topoalign.core.sharing.fitting import accepted_cards
from topoalign.core.sharing.refusals import (
    UNALIGNED,
    WAIT,
    NoneByHami,
    NotEnoughShareCards,
    ShareDoesNotFit,
    ShareFields,
    ShareSplit,
    SlotsBeyondNumaNode,
)
from topoalign.core.sharing.slot_cards import scorer_of, slot_candidates
from topoalign.core.sharing.slots_as_hami import choose_as_hami
from topoalign.core.state.fold import NodeState
from topoalign.core.state.share_amounts import held_by_slot, larger


def fields_of(topology: Topology, resource: ResourceName, said: Said) -> ShareFields:
    """
    The limits of a container by which it asks for slots of this resource and for its amounts, and the annotations of its pod
    that list GPUs. `said`: what that says about cards.
    """
    slots = resources_in_slots(topology)[resource]
    return ShareFields(
        cores=f"limits[{slots.cores}]",
        memory=f"limits[{slots.memory}]",
        cards=f"limits[{resource}]",
        types=lists_said(said, USE_TYPE, NO_USE_TYPE),
        uuids=lists_said(said, USE_UUID, NO_USE_UUID),
        modes=lists_said(said, VGPU_MODE),
    )


def choose_gpus_for_slots(
    topology: Topology, left: SlotsOfGpus, share: SlotShare, among: Iterable[DeviceID], fields: ShareFields
) -> tuple[DeviceID, ...]:
    """The GPUs, of these, of each of which a container gets a slot. Raises ShareDoesNotFit where too few would do."""
    gpus = {gpu for gpu in among if gpu in left}
    every = slot_candidates(topology, left)
    cards = [card for card in every if card.device in gpus]
    whole = [msgspec.structs.replace(card, device=topology.card_of(card.device)) for card in cards]
    accepted = [cards[at].device for at in accepted_cards(whole, share.rules, fields)]
    enough = [gpu for gpu in accepted if has_slot_for(left[gpu], share)]
    if share.rules.hami and len(on_one_node(topology, share, enough)) >= share.gpus:
        return choose_as_hami(topology, cards, left, share, enough, fields)
    wanted = enough if len(enough) >= share.gpus else accepted
    # the least of them, where GPUs of different sizes are asked for by a percentage: each of `enough` has its own; and a
    # byte of GPUs so small that it is none
    asked = [share.amount_of(left[gpu].offered) for gpu in wanted]
    request = ShareRequest(
        cores=CORES if share.whole else min(CORES - 1, *(each.cores for each in asked)),
        memory=max(1, min(each.memory for each in asked)),
        percentage=0 if share.memory else share.percentage,
        cards=share.gpus,
    )
    rules = msgspec.structs.replace(share.rules, uuids=Selection(wanted=tuple(wanted)))
    chosen = choose(every, request, scorer_of(topology), rules, fields)
    if len(enough) < share.gpus:
        raise NotEnoughShareCards(fields, share.gpus, len(enough))
    return tuple(card.device for card in chosen)


class SlotChooser:
    """Chooses the slots of one container."""

    def __init__(
        self, state: NodeState, container: ContainerDemand, share: SlotShare, affinity: Mask | None = None
    ) -> None:
        """`affinity`: the NUMA nodes to which the container is aligned; None: to none."""
        self._state = state
        self._container = container
        self._share = share
        self.resource = share.resource
        self._affinity = affinity
        self._left = state.ownership.slots_left
        self._fields = fields_of(state.hardware, share.resource, container.about_cards)
        held = held_by_pod(state, container)
        self._own = own_amounts(state.hardware, held, reusable_devices(held, share.resource))

    def room(self) -> DeviceSet:
        """
        A slot of each GPU that has enough, of those near its affinity if they suffice. Raises ShareDoesNotFit where all are
        too few.
        """
        self.check_room()
        found = slots_for(self._state, self._container, self._share.resource)
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

    def prefer(self, choice: Choice, near: Sequence[DeviceID]) -> tuple[DeviceID, ...]:
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
        """Why these GPUs together would not do; empty: they would."""
        hardware, share, left = self._state.hardware, self._share, self._left
        if len({*gpus}) < len(gpus):
            able = {*gpus_with_slots(left, share, hardware), *self._own}
            return f"some are of one GPU: {several_of_one_gpu(hardware, self.resource, gpus, able)[0]}"
        if unwanted := [gpu for gpu in gpus if gpu in left and not may_be_on(hardware, share, gpu)]:
            return f"{quoted(sorted(unwanted))} is not what the pod's annotations accept"
        if lacking := [
            gpu for gpu in gpus if gpu not in left or not has_slot_for(left[gpu], share, self._own.get(gpu))
        ]:
            return f"of {quoted(sorted(lacking))} not enough is left"
        if share.rules.numa_bind and not are_on_one_node(hardware, gpus):
            return f"{quoted(sorted(gpus))} are not on one NUMA node"
        return ""

    def _choose(self, missing: int, among: Iterable[DeviceID], own: Collection[DeviceID]) -> tuple[DeviceID, ...]:
        """So many GPUs of these beside its `own`. Raises ShareDoesNotFit where too few would do."""
        topology, rest = self._state.hardware, self._share._replace(gpus=missing)
        others = [gpu for gpu in among if gpu not in own]
        near = on_one_node(topology, self._share, others, own) if own else others
        return choose_gpus_for_slots(topology, self._left, rest, near, self._fields)

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
    share = slots_asked(state.hardware, container.devices, container.about_cards, as_hami=container.as_hami)
    return None if share is None else SlotChooser(state, container, share, affinity)


def slots_given(
    state: NodeState, container: ContainerDemand, devices: Mapping[ResourceName, Collection[DeviceID]]
) -> dict[DeviceID, Amount]:
    """What the container holds by each of the slots among these devices, which it would get in this state."""
    chooser = slot_chooser_of(state, container)
    return {} if chooser is None else chooser.amounts(devices.get(chooser.resource, ()))


def with_peaks(allocations: Sequence[Allocation]) -> tuple[Allocation, ...]:
    """
    What the containers of a pod hold, each slot with the most that any of them holds by it: a kubelet that asks for a slot
    says not for which of them.
    """
    most: dict[DeviceID, Amount] = {}
    for each in allocations:
        for slot, amount in each.slots.items():
            most[slot] = larger(most.get(slot, amount), amount)
    return tuple(
        msgspec.structs.replace(each, slots={slot: most[slot] for slot in each.slots}) if each.slots else each
        for each in allocations
    )
