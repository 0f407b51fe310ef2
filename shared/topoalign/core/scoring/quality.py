"""
Computes the score `quality`: how fast a collective runs on the GPUs that a pod gets, and how they fragment the node.

Nodes are compared by one key, element by element, which begins like that of device policy `topology`:

1. the weakest seam of the GPUs that each container would get, in GB/s. For several containers, the weakest of them. The
   highest wins. A single GPU has no seam;
2. NICs, if the pod requests some: the number that can be local to these GPUs, then the number that can be near. The
   highest wins;
3. NUMA nodes: the number of NUMA nodes of the GPUs, divided by the minimum for this number of GPUs. The lowest wins;
4. packing, with free capacity counted in GPUs. With `binpack`: the links cut between these GPUs and GPUs that stay
   unused, then the free capacity of the shared GPUs, then the free capacity of the node. The lowest wins. With
   `spread`: the free capacity of the node. The highest wins.

    8 GPUs in two groups of four with NVLinks inside; 1 GPU is requested; binpack
    a: one GPU is held; another of its group cuts the links to two GPUs     second
    b: none is held; each GPU cuts the links to three                       third
    c: all but one are held; it cuts none                                   first

Element 4 fills GPUs and nodes as well as fragmentation gradient descent (docs/decisions/0021), but needs no workload
model. Free CPUs and memory are not considered. For MIG instances and virtual functions, nodes differ only in element 4.

The key depends only on the machine model, the free devices by position, and the request. So keys are cached by these
for all machines of one model. A node with too few free devices has no key.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import combinations
from math import comb
from typing import NamedTuple

from topoalign.core.demand.pod_demand import PodDemand
from topoalign.core.demand.share_annotations import ANY_GPU
from topoalign.core.demand.shares import Share
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.topology.bitmask import node_mask, nodes_of
from topoalign.core.model.topology.derived_tables import computed_once
from topoalign.core.model.topology.model import Topology
from topoalign.core.numa_sets.subsets import fewest_with
from topoalign.core.placement.gpus.bandwidth import Members, Nics, SetScorer, count_nics
from topoalign.core.placement.gpus.device_policy import GpuChoice
from topoalign.core.placement.gpus.topology import SetOrder, by_topology
from topoalign.core.placement.preference import PLACEMENTS, choose_gpu_set, nic_localities, positions_by_gpu, set_scorer
from topoalign.core.policy import POLICIES
from topoalign.core.profile import profile_of
from topoalign.core.sharing.choosers import link_scorer, shareable_devices
from topoalign.core.state.fold import NodeState
from topoalign.core.state.share_amounts import ShareLeft

# Which GPUs a pod would get on a node.
#
# Whole GPUs are those that the node's device policy prefers. If the node aligns, they are on the smallest set of NUMA
# nodes with enough GPUs. Of equally small sets, they are on the lowest one or, in mode `best`, on the one whose GPUs
# come first by policy `topology`. A share is on the GPU that has the least free, but enough. Shares of several GPUs are
# on those that come first by policy `topology`. Containers take GPUs one after another.


MOST_SETS = 1_000
"""Maximum number of sets of NUMA nodes to search. If there are more, the nodes with the most GPUs are used."""
MOST_ALIGNED = 64
"""Maximum number of sets of NUMA nodes that are compared by their GPUs."""


class TakenGpus:
    """The GPUs of a node that containers take one after another."""

    def __init__(self, scorer: SetScorer, unused: Iterable[int]) -> None:
        self.scorer = scorer
        self.order = SetOrder(scorer, unused)
        self.taken: list[Members] = []

    @property
    def members(self) -> set[int]:
        """All taken GPUs."""
        return {gpu for members in self.taken for gpu in members}

    @property
    def seams(self) -> list[float]:
        """GB/s of the weakest seam of each container with several GPUs."""
        several = (members for members in self.taken if len(members) > 1)
        return [self.scorer.seam(members).bandwidth(self.scorer.links.model) for members in several]

    @property
    def cut(self) -> int:
        """Sum of the scores of the links between taken GPUs that were unused and GPUs that stay unused."""
        return self.order.cut(tuple(sorted(self.members)))


class WholeGpus(TakenGpus):
    """Takes whole GPUs from a node, one container after another."""

    def __init__(
        self, shape: Topology, free: Mapping[ResourceName, Members], placement: str, *, aligned: bool, by_gpus: bool
    ) -> None:
        """
        `free`: resource -> the free GPUs; `placement`: the device policy; `aligned`: whether NUMA nodes count;
        `by_gpus`: whether equally small sets of NUMA nodes are compared by their GPUs.
        """
        super().__init__(set_scorer(shape), {gpu for some in free.values() for gpu in some})
        self.shape = shape
        self.policy = PLACEMENTS[placement]
        self.aligned = aligned
        self.by_gpus = by_gpus
        self.free = dict(free)
        self.numa = 1.0
        """The highest ratio of the number of NUMA nodes of a container's GPUs to the minimum for so many GPUs."""

    def take(self, name: ResourceName, size: int) -> bool:
        """Takes GPUs for a container. False: too few are free."""
        free = self.free[name]
        node_of = _gpu_numa_nodes(self.shape).get(name, {})
        offered = _aligned_free_sets(node_of, free, size, several=self.by_gpus) if self.aligned else [free]
        questions = (GpuChoice(self.scorer, available, (), size, frozenset(free)) for available in offered)
        sets = [members for question in questions if (members := choose_gpu_set(self.policy, question))]
        if not sets:
            return False
        order = SetOrder(self.scorer, free)
        members = sets[0] if len(sets) == 1 else min(sets, key=lambda each: order.rank(each)[:-1])
        self.taken.append(members)
        width = len({node_of[place] for place in members if place in node_of})
        if least := fewest_with(Counter(node_of.values()).values(), len(members)):
            self.numa = max(self.numa, width / least)
        self.free[name] = tuple(gpu for gpu in free if gpu not in members)
        return True

    @property
    def left(self) -> int:
        """Number of GPUs that stay free."""
        return sum(map(len, self.free.values()))


class GpuLeft(NamedTuple):
    """The free capacity of a shared GPU. Memory is in bytes."""

    cores: int
    memory: int
    all_cores: int
    all_memory: int
    """The offered memory. 0: it is unknown, and only cores count."""
    slots: int
    """Maximum number of further containers on the GPU."""
    unused: bool

    @property
    def part(self) -> float:
        """The free fraction of the GPU: that of the cores or that of the memory, whichever is lower."""
        cores = self.cores / self.all_cores if self.all_cores else 0.0
        return min(cores, self.memory / self.all_memory) if self.all_memory else cores

    def has(self, asked: Amount, *, whole: bool) -> bool:
        """Whether one more container can get this amount. `whole`: no other container can use the GPU."""
        some = self.slots > 0 and self.cores >= max(1, asked.cores) and self.memory >= asked.memory
        return some and (self.unused or not whole)

    def less(self, asked: Amount) -> "GpuLeft":
        """The free capacity after a container has got this amount."""
        return self._replace(
            cores=self.cores - asked.cores, memory=self.memory - asked.memory, slots=self.slots - 1, unused=False
        )


NOTHING_LEFT = GpuLeft(0, 0, 0, 0, 0, False)


def gpu_left(gpu: ShareLeft | None) -> GpuLeft:
    """The free capacity of a GPU in units or slots."""
    if gpu is None or not gpu.usable:
        return NOTHING_LEFT
    left = gpu.left
    offered = gpu.offered
    places = gpu.slots if gpu.all_slots else left.cores
    return GpuLeft(left.cores, left.memory, offered.cores, offered.memory, places, gpu.unused)


class SharedGpus(TakenGpus):
    """Takes shares of GPUs in slots, or of GPUs in units, from a node, one container after another."""

    def __init__(self, scorer: SetScorer, gpus: Sequence[GpuLeft]) -> None:
        super().__init__(scorer, [at for at, gpu in enumerate(gpus) if gpu.unused])
        self.gpus = list(gpus)

    def take(self, share: Share) -> bool:
        """Takes a share for a container. False: too few GPUs have enough."""
        amounts = [share.amount_of(Amount(cores=gpu.all_cores, memory=gpu.all_memory)) for gpu in self.gpus]
        if share.whole:  # for a GPU of unknown size, only cores count
            pairs = zip(self.gpus, amounts, strict=True)
            amounts = [each if gpu.all_memory else Amount(cores=each.cores, memory=0) for gpu, each in pairs]
        pairs = zip(self.gpus, amounts, strict=True)
        enough = [at for at, (gpu, amount) in enumerate(pairs) if gpu.has(amount, whole=share.whole)]
        if len(enough) < share.gpus:
            return False
        if share.gpus == 1:  # the GPU with the least free
            least = min(self.gpus[at][:2] for at in enough)
            enough = [at for at in enough if self.gpus[at][:2] == least]
        unused = [at for at, gpu in enumerate(self.gpus) if gpu.unused]
        members = by_topology(self.scorer, enough, (), share.gpus, unused)
        for at in members:
            self.gpus[at] = self.gpus[at].less(amounts[at])
        self.taken.append(members)
        return True

    @property
    def left(self) -> float:
        """The free capacity, in GPUs."""
        return sum(gpu.part for gpu in self.gpus)


@computed_once
def _gpu_numa_nodes(topology: Topology) -> Mapping[ResourceName, Mapping[int, int]]:
    """Resource -> position of a GPU -> the NUMA node that it is listed with, if known."""
    places = positions_by_gpu(topology)
    return {
        name: {places[gpu]: nodes[0] for gpu, nodes in topology.devices[name].items() if nodes}
        for name in topology.offers_of
        if topology.kind_of(name) == "gpu"
    }


def _aligned_free_sets(node_of: Mapping[int, int], free: Members, size: int, *, several: bool) -> list[Sequence[int]]:
    """
    The free GPUs of the smallest set of NUMA nodes with enough GPUs. Of equally small sets, the lowest one. `several`:
    those of each such set, the lowest first.
    """
    counts = Counter(node_of[place] for place in free if place in node_of)
    least = fewest_with(counts.values(), size)
    if least is None:
        return [free]
    sets = combinations(sorted(counts), least) if comb(len(counts), least) <= MOST_SETS else ()
    enough = [nodes for nodes in sets if sum(counts[node] for node in nodes) >= size]
    if not enough:
        enough = [tuple(node for node, _ in counts.most_common(least))]
    chosen = sorted(enough, key=node_mask)[: MOST_ALIGNED if several else 1]
    return [[place for place in free if node_of.get(place) in nodes] for nodes in chosen]


MOST_KEPT = 16_384
"""Maximum number of cached keys for machines of one model."""


class NodePacking(StrEnum):
    """Which nodes come first if the devices are equally good."""

    BINPACK = "binpack"
    """Those with the most held capacity."""
    SPREAD = "spread"
    """Those with the most free capacity."""


class DeviceNeed(NamedTuple):
    """The properties of a pod and of the rules of a node's kubelet that the score depends on."""

    gpus: tuple[tuple[ResourceName, int], ...]
    """Resource and number of whole GPUs, for each request of a container."""
    shares: tuple[Share, ...]
    """The shares of GPUs in slots or in units that the containers request."""
    nics: tuple[tuple[ResourceName, int], ...]
    """Resource and number of the NICs that the pod requests."""
    parts: tuple[tuple[ResourceName, int], ...]
    """Resource and number of other devices that topoalign offers, such as MIG instances."""
    aligned: bool
    """Whether NUMA nodes count."""
    by_gpus: bool
    """Whether equally small sets of NUMA nodes are compared by their GPUs."""
    placement: str


class FreeDevices(NamedTuple):
    """The free devices of a node."""

    masks: Mapping[ResourceName, int]
    """Resource -> the whole GPUs or NICs, as bits by their positions on the machine. For parts, their number."""
    slots: tuple[GpuLeft, ...]
    """Each GPU or MIG instance in slots, in the order of `shareable_devices`. Empty: there is none."""
    units: tuple[GpuLeft, ...]
    """Each GPU in units, by position. Empty: there is none."""


class NodeKey(NamedTuple):
    """The sort key of a node for a pod: the best node has the lowest."""

    seam: float
    """GB/s of the weakest seam, negative; 0 if no container gets several GPUs."""
    nics: tuple[int, int]
    """Numbers of NICs that can be local and near to the GPUs, negative."""
    numa: float
    """Number of NUMA nodes of the GPUs, divided by the minimum for this number of GPUs."""
    packing: tuple[float, ...]
    """
    With `binpack`: cut links, then the free capacity of the shared GPUs and of the node. With `spread`: the free
    capacity of the node, negative.
    """


def device_need(topology: Topology, demand: PodDemand) -> DeviceNeed:
    """The need of a pod on a kind of machine."""
    kinds = {name: topology.kind_of(name) for name in demand.devices}
    # the other containers reuse the GPUs of plain init containers
    lasting = [each for each in demand.containers if each.role != "init"]
    gpus = []
    for name in (name for name, kind in kinds.items() if kind == "gpu"):
        sizes = [each.devices[name] for each in lasting if each.devices.get(name)]
        gpus += [(name, size) for size in sizes or [demand.devices[name]] if size]
    shares: list[Share] = []
    if not {"unit", "slot"}.isdisjoint(kinds.values()):
        asked = (each.share(topology) for each in lasting)
        # without the annotations: the key does not depend on them, and pods that differ in them share the cached keys
        shares = [share._replace(rules=ANY_GPU) for share in asked if share is not None]
    return DeviceNeed(
        gpus=tuple(gpus),
        shares=tuple(shares),
        nics=tuple((name, demand.devices[name]) for name, kind in kinds.items() if kind == "nic"),
        parts=tuple((name, demand.devices[name]) for name, kind in kinds.items() if kind == "part"),
        aligned=POLICIES[demand.rules.policy].asks,
        by_gpus=profile_of(demand.rules.mode).compares_gpus_of_nodes,
        placement=demand.rules.placement,
    )


def free_devices(state: NodeState) -> FreeDevices:
    """The free devices of each resource that the node offers."""
    topology = state.hardware
    owned = state.ownership
    positions = {**positions_by_gpu(topology), **{nic: place for place, nic in enumerate(topology.nic_by_id)}}
    kinds = {name: topology.kind_of(name) for name in topology.offers_of}
    masks = {
        name: len(owned.free(name)) if kind == "part" else node_mask(map(positions.__getitem__, owned.free(name)))
        for name, kind in kinds.items()
        if kind in ("gpu", "nic", "part")
    }
    slots = (
        map(owned.slots_left.get, (base for base, _ in shareable_devices(topology))) if "slot" in kinds.values() else ()
    )
    units = map(owned.units_left.get, topology.gpu_by_id) if "unit" in kinds.values() else ()
    return FreeDevices(masks, tuple(map(gpu_left, slots)), tuple(map(gpu_left, units)))


def node_key(topology: Topology, need: DeviceNeed, free: FreeDevices, packing: NodePacking) -> NodeKey | None:
    """The key of a node. `topology`: as announced; equal machines share its shape. None: too few devices are free."""
    shape = topology.shape
    known = keys_of(shape)
    names = (name for some in (need.gpus, need.nics, need.parts) for name, _ in some)
    shared = (free.slots, free.units) if need.shares else ()
    question = need, tuple(free.masks.get(name, 0) for name in names), shared, packing
    if question not in known:
        if len(known) >= MOST_KEPT:
            known.clear()
        known[question] = compute_key(shape, need, free, packing)
    return known[question]


Question = tuple[DeviceNeed, tuple[int, ...], tuple[tuple[GpuLeft, ...], ...], NodePacking]


@computed_once
def keys_of(topology: Topology) -> dict[Question, NodeKey | None]:
    """The cached keys for machines of one shape."""
    return {}


def compute_key(shape: Topology, need: DeviceNeed, free: FreeDevices, packing: NodePacking) -> NodeKey | None:
    """Computes the key. None: too few devices are free."""
    nics = [(free.masks.get(name, 0), amount) for name, amount in need.nics]
    parts = [(free.masks.get(name, 0), amount) for name, amount in need.parts]
    spare = [there.bit_count() - amount for there, amount in nics] + [count - amount for count, amount in parts]
    if any(each < 0 for each in spare):
        return None
    gpus = {name: nodes_of(free.masks.get(name, 0)) for name, _ in need.gpus}
    whole = WholeGpus(shape, gpus, need.placement, aligned=need.aligned, by_gpus=need.by_gpus)
    in_slots = SharedGpus(link_scorer(shape), free.slots)
    in_units = SharedGpus(set_scorer(shape), free.units)
    shares = [(in_slots if share.resource else in_units, share) for share in need.shares]
    if not all(whole.take(name, size) for name, size in need.gpus) or not all(
        gpus.take(share) for gpus, share in shares
    ):
        return None
    shared = [gpus for gpus in (in_slots, in_units) if gpus.taken]
    seams = [*whole.seams, *(seam for gpus in shared for seam in gpus.seams)]
    left = whole.left + sum(gpus.left for gpus in shared) + sum(spare)
    cut = whole.cut + sum(gpus.cut for gpus in shared)
    local = near = 0
    for there, amount in nics if whole.taken else ():
        localities = [*nic_localities(shape).values()]
        wanted = Nics(amount, [localities[nic] for nic in nodes_of(there)])
        counts = count_nics(wanted, [*whole.members])
        local = local + counts[0]
        near = near + counts[1]
    rest = sum(gpus.gpus[at].part for gpus in shared for at in gpus.members)  # the free capacity of the taken GPUs
    return NodeKey(
        seam=-round(min(seams), 1) if seams else 0.0,
        nics=(-local, -near),
        numa=whole.numa,
        packing=(-round(left, 4),) if packing is NodePacking.SPREAD else (cut, round(rest, 4), round(left, 4)),
    )
