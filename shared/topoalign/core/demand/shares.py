"""
What a container asks for of GPUs that are offered in slots: so many GPUs, and an amount of cores and memory of each of them.

The kubelet is asked for the slots alone. The amounts are in resources that it never sees (`Slots`), by HAMi's rules
(`card_requests`): memory in MiB counts before a percentage; with neither it is all of a GPU's, and 0 of either is as if it
were left out; cores that are not asked for are none. Two rules are stricter. 100 cores are all that is offered of a GPU,
however it is scaled, and such a GPU is nobody else's. 0 cores are refused, because nothing keeps a container from computing.
What HAMi would read as something else, or as no request at all, is refused, too (`check_amounts`).

    nvidia.com/gpu: 1, gpumem: 4000, gpucores: 30     30 cores and 4000 MiB of one GPU
    nvidia.com/gpu: 2, gpumem-percentage: 50          half of the memory of each of two GPUs, without a claim on their cores
    nvidia.com/gpu: 1                                 all memory of one GPU: nobody else gets any of it
    nvidia.com/gpu: 1, gpumem: 16Gi                   refused: these are 17179869184 MiB

Which GPUs would do, and which of them come first, the pod's annotations say (`card_annotations`).

Source: HAMi 4707fb02, GenerateResourceRequests (spec hami.md 2.2).
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from topoalign.core.demand.card_requests import ALL_MEMORY, card_request
from topoalign.core.demand.card_rules import ANY_CARD, CardRules
from topoalign.core.demand.hami_names import MIG, MODES
from topoalign.core.demand.quantities import Quantities
from topoalign.core.demand.share_annotations import InvalidShare, Said, card_rules
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import GPU, DeviceID, ResourceName
from topoalign.core.model.topology.by_amounts import gpu_of, offers_in_slots
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.offers import CORES, Offer, Slots
from topoalign.core.model.topology.views import made_once
from topoalign.core.state.share_amounts import MIB, SlotsLeft, offered_in_slots, part_of

LOWEST_PRIORITY = 1
SlotsOfGpus = Mapping[DeviceID, SlotsLeft]
"""GPU -> what is left of it."""


class SlotShare(NamedTuple):
    """What one container asks for in slots: an amount of each of some GPUs."""

    resource: ResourceName
    """Of which it asks for slots."""
    gpus: int
    """How many GPUs, of each of which it has one slot."""
    cores: int
    """Hundredths of the computing time of each. 100: all that is offered of it, and nobody else has anything of the GPU."""
    memory: int
    """MiB of each; 0: by `percentage`."""
    percentage: int
    """Memory as hundredths of what is offered of each. 0, or `card_requests.UNSET`: none."""
    parts: int = 0
    """Above 0 the amounts are not known, and each is one of so many equal parts."""
    rules: CardRules = ANY_CARD
    """What the pod says about the GPUs."""

    @property
    def whole(self) -> bool:
        """Whether nobody else has anything of these GPUs."""
        return self.cores >= CORES

    def amount_of(self, offered: Amount) -> Amount:
        """What it is of a GPU of which so much is offered: of 81559 MiB 50 per cent are 40779."""
        if self.parts:
            return part_of(offered, self.parts)
        memory = self.memory or offered.memory // MIB * self.percentage // ALL_MEMORY
        return Amount(cores=offered.cores if self.whole else self.cores, memory=memory * MIB)


@made_once
def resources_in_slots(topology: Topology) -> Mapping[ResourceName, Slots]:
    """Resource of GPUs in slots -> by what else is asked for them."""
    return {offer.resource: offer.slots for offer in offers_in_slots(topology).values() if offer.slots is not None}


@made_once
def amount_resources(topology: Topology) -> frozenset[ResourceName]:
    """The resources by which containers say how much of each GPU in slots they ask for; no kubelet sees them."""
    return frozenset(name for slots in resources_in_slots(topology).values() for name in slots.resources)


@made_once
def gpus_of_numa_nodes(topology: Topology) -> Mapping[ResourceName, Counter[int]]:
    """Resource whose slots are listed to the kubelet with NUMA nodes -> NUMA node -> how many GPUs in slots it has."""
    found = {name: Counter[int]() for name, slots in resources_in_slots(topology).items() if slots.numa_topology}
    for gpu, offer in offers_in_slots(topology).items():
        node = numa_node_of(topology, gpu)
        if offer.resource in found and node is not None:
            found[offer.resource][node] += 1
    return found


def slots_asked(topology: Topology, devices: Quantities, said: Said = (), *, as_hami: bool = False) -> SlotShare | None:
    """
    What is asked for in slots on this machine; None: nothing is. `as_hami`: HAMi's rules choose the GPUs. Raises
    InvalidShare for annotations that cannot be meant.
    """
    for resource, slots in resources_in_slots(topology).items():
        if devices.get(resource):
            asked = card_request(resource, slots, devices)
            rules = card_rules(said, as_hami=as_hami)
            return SlotShare(resource, asked.count, asked.cores, asked.memory, asked.percent, rules=rules)
    return None


def unknown_share(topology: Topology, resource: ResourceName, gpus: int) -> SlotShare:
    """What counts for a container of which it is known only of how many GPUs it asks for slots: an equal part of each."""
    slots = [offer.replicas for offer in offers_in_slots(topology).values() if offer.resource == resource]
    return SlotShare(resource, gpus, cores=0, memory=0, percentage=0, parts=min(slots))


def share_of_amount(share: SlotShare, amount: Amount) -> SlotShare:
    """Slots of as many GPUs as of a share, with so much of each."""
    return share._replace(cores=amount.cores, memory=amount.memory // MIB, percentage=0, parts=0)


class SlotResources(NamedTuple):
    """By which names a machine offers GPUs in slots, and how large they are."""

    resource: ResourceName
    """Of the slots."""
    slots: Slots
    most: int
    """MiB that are offered of the largest of these GPUs."""


BEYOND_ALL_GPUS = 1 << 22
"""MiB: 4 TiB. No GPU has as much; whoever writes `16Gi` or `64Mi` asks for more."""
USUAL_SLOTS = SlotResources(GPU, Slots(), BEYOND_ALL_GPUS)
"""How GPUs in slots are asked for where no node offers any: by the names of HAMi."""


@made_once
def slot_resources(topology: Topology) -> tuple[SlotResources, ...]:
    """What the machine offers in slots, by resource."""
    found = []
    for resource, slots in resources_in_slots(topology).items():
        gpus = [gpu for gpu, offer in offers_in_slots(topology).items() if offer.resource == resource]
        most = max(offered_in_slots(topology)[gpu].memory for gpu in gpus) // MIB
        found.append(SlotResources(resource, slots, most))
    return tuple(found)


def check_amounts(where: str, limits: Quantities, offered: SlotResources) -> None:
    """
    Raises InvalidShare for amounts that cannot be meant of GPUs that are offered so, by the container at the path `where`:
    `spec.containers[0]`.
    """
    slots = offered.slots
    if limits.get(slots.cores) == 0:  # no limiter keeps a container from computing at all
        raise InvalidShare(
            f"{where}.resources.limits[{slots.cores}]: 0 cores",
            f"leave it out beside an amount of memory ({slots.memory}): the container then has no limit of its own, and "
            "shares computing time",
        )
    most = (
        (slots.percentage, ALL_MEMORY, "all of a GPU's memory", "write a number from 1 to 100"),
        (slots.cores, CORES, "all of a GPU's computing time", f"write {CORES} for a whole GPU, or less"),
        (
            slots.memory,
            offered.most,
            "what the largest GPU has" if offered.most != BEYOND_ALL_GPUS else "more than any GPU has",
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


def has_slot_for(left: SlotsLeft, share: SlotShare, own: Amount | None = None) -> bool:
    """
    Whether a GPU has enough left for a share of it. Where all cores are held, memory alone would take some of them. `own`:
    what the pod holds of it by a slot that its init container leaves, which it needs no second one for.
    """
    if not left.usable or (own is None and left.slots < 1):
        return False
    asked, free = share.amount_of(left.offered), left.left
    others = left.sharers - (own is not None)
    if others and (share.whole or share.rules.mutex):
        return False
    if left.profiles:
        memory = instance_memory(left, share)
        return own.memory >= memory if own is not None else left.instance_for(memory) is not None
    if own is not None:
        free = Amount(cores=free.cores + own.cores, memory=free.memory + own.memory)
    if share.whole:
        return asked.memory <= left.offered.memory
    return free.cores >= max(1, asked.cores) and free.memory >= asked.memory


def instance_memory(left: SlotsLeft, share: SlotShare) -> int:
    """
    The bytes that a MIG instance for a share of this GPU needs at least: all, for 100 cores; none, where it is not known how
    much is asked for.
    """
    if share.parts:
        return 0
    return left.offered.memory if share.whole else share.amount_of(left.offered).memory


def gpus_with_slots(left: SlotsOfGpus, share: SlotShare, topology: Topology) -> tuple[DeviceID, ...]:
    """Those of which a container could get its part, in the hardware's order."""
    return tuple(gpu for gpu, each in left.items() if may_be_on(topology, share, gpu) and has_slot_for(each, share))


def may_be_on(topology: Topology, share: SlotShare, gpu: DeviceID) -> bool:
    """
    Whether this GPU in slots is offered under the share's resource, and the pod accepts it; of a MIG instance the GPU that
    it is a part of.
    """
    offer = offers_in_slots(topology)[gpu]
    card = gpu_of(topology, gpu)
    rules = share.rules
    return offer.resource == share.resource and rules.takes_mode(mode_of(offer)) and rules.accepts(card.id, card.name)


def mode_of(offer: Offer) -> str:
    """HAMi's name for what keeps containers on GPUs in slots apart. Empty: nothing does, or HAMi has no name for it."""
    if offer.slots is not None and offer.slots.instances:
        return MIG
    return offer.limited_by if offer.limited_by in MODES else ""


def on_one_node(
    topology: Topology, share: SlotShare, gpus: Collection[DeviceID], own: Collection[DeviceID] = ()
) -> tuple[DeviceID, ...]:
    """
    Those of the GPUs that can be on one NUMA node with as many others of them as a share needs beside its `own`; all of them
    where it need not be on one. Example: of GPUs 0 and 1 on node 0 and GPU 2 on node 1 for two the first two.
    """
    if not share.rules.numa_bind or share.gpus < 2:  # one GPU is on one node
        return tuple(gpus)
    nodes = {gpu: numa_node_of(topology, gpu) for gpu in (*gpus, *own)}
    there, own_nodes = Counter(nodes.values()), {nodes[gpu] for gpu in own}
    return tuple(
        gpu for gpu in gpus if nodes[gpu] is not None and there[nodes[gpu]] >= share.gpus and own_nodes <= {nodes[gpu]}
    )


def are_on_one_node(topology: Topology, gpus: Collection[DeviceID]) -> bool:
    """Whether these GPUs are known to be on one NUMA node; one alone is."""
    nodes = {numa_node_of(topology, gpu) for gpu in gpus}
    return len(gpus) < 2 or (len(nodes) == 1 and None not in nodes)  # as above


def numa_node_of(topology: Topology, gpu: DeviceID) -> int | None:
    """The NUMA node of a GPU, with which its slots are listed if they are listed with any; None: it is not known."""
    nodes = topology.listed_nodes(gpu_of(topology, gpu).numa_affinity)
    return nodes[0] if nodes else None
