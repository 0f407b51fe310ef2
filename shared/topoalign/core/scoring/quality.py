"""
Computes the score `quality`: how fast a collective runs on the GPUs that a pod would get on a node, and how they
fragment the node.

Nodes are compared by one key, element by element, which begins like that of device policy `topology`:

1. the weakest seam of the GPUs that each container would get, in GB/s; of several containers the weakest one. The strongest
   node wins. A single GPU has no seam;
2. NICs, where the pod asks for some: how many can be local to these GPUs, then how many near;
3. NUMA nodes: the number that the GPUs are on, divided by the fewest that so many GPUs need. The lowest wins;
4. packing, by amounts of GPUs. With `binpack`: the links that are cut between these GPUs and GPUs that stay unused, then
   what stays free of GPUs that are shared, then what stays free of the node, the least each. With `spread`: what stays free
   of the node, the most.

    8 GPUs in two groups of four with NVLinks inside, 1 GPU is asked for; binpack
    a: one GPU is held; another of its group cuts the links to two GPUs     second
    b: none is held; each GPU cuts the links to three                       third
    c: all but one are held; it cuts none                                   first

Element 4 fills GPUs and nodes as well as fragmentation gradient descent does (docs/decisions/0021), and knows no workload.
Which GPUs a pod would get is in `taken_gpus`; which CPUs and memory are free there is not considered. For MIG instances and
functions nodes differ in the packing only.

Which machine it is, what is free by position, and what is asked for decide the key; so keys are cached by these for
all machines of one model. A node with too few of a device has none.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from topoalign.core.demand.pod_demand import PodDemand
from topoalign.core.demand.shares import Share, share_in_slots, share_in_units
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.topology.bitmask import node_mask, nodes_of
from topoalign.core.model.topology.derived_tables import computed_once
from topoalign.core.model.topology.model import Topology
from topoalign.core.placement.gpus.nics import Nics, count_nics
from topoalign.core.placement.preference import nic_localities, set_scorer
from topoalign.core.policy import POLICIES
from topoalign.core.profile import profile_of
from topoalign.core.scoring.taken_gpus import (
    GpuLeft,
    SharedGpus,
    WholeGpus,
    gpu_left,
    position_by_gpu,
)
from topoalign.core.sharing.choosers import link_scorer, shareable_devices
from topoalign.core.state.fold import NodeState

MOST_KEPT = 16_384
"""Keys that are cached for machines of one model."""


class NodePacking(StrEnum):
    """Which nodes come first where the devices are equally good."""

    BINPACK = "binpack"
    """Those of which the most is held."""
    SPREAD = "spread"
    """Those of which the most is free."""


class DeviceNeed(NamedTuple):
    """The properties of a pod and of the rules of a node's kubelet that the score depends on."""

    gpus: tuple[tuple[ResourceName, int], ...]
    """How many whole GPUs each container asks for."""
    shares: tuple[Share, ...]
    """What each container asks for of GPUs in slots or in units."""
    nics: tuple[tuple[ResourceName, int], ...]
    """How many NICs the pod asks for."""
    parts: tuple[tuple[ResourceName, int], ...]
    """How many of other devices that are offered here."""
    aligned: bool
    """Whether NUMA nodes count."""
    by_gpus: bool
    """Whether equally few NUMA nodes are compared by their GPUs."""
    placement: str
    """The node's device policy."""


class FreeDevices(NamedTuple):
    """What is free on a node."""

    masks: Mapping[ResourceName, int]
    """Resource -> the whole GPUs or NICs, as bits by their positions on the machine; of parts how many."""
    slots: tuple[GpuLeft, ...]
    """What is left of each GPU or MIG instance in slots, in the order of `shareable_devices`. Empty: there is none."""
    units: tuple[GpuLeft, ...]
    """What is left of each GPU in units, by position. Empty: there is none."""


class NodeKey(NamedTuple):
    """What sorts nodes for a pod: the best has the lowest key."""

    seam: float
    """GB/s across the weakest seam, negative; 0 where no container gets several GPUs."""
    nics: tuple[int, int]
    """NICs that can be local, and near, to the GPUs, negative."""
    numa: float
    """NUMA nodes that the GPUs are on, divided by the fewest that so many GPUs can be on."""
    packing: tuple[float, ...]
    """Links that are cut, what stays free of shared GPUs and of the node; or what stays free of the node, negative."""


def device_need(topology: Topology, demand: PodDemand) -> DeviceNeed:
    """
    The need of a pod on a kind of machine. GPUs of plain init containers count only where no other container asks for some,
    because the others take them over.
    """
    kinds = {name: topology.kind_of(name) for name in demand.devices}
    lasting = [each for each in demand.containers if each.role != "init"]
    gpus = []
    for name in (name for name, kind in kinds.items() if kind == "gpu"):
        sizes = [each.devices[name] for each in lasting if each.devices.get(name)]
        gpus += [(name, size) for size in sizes or [demand.devices[name]] if size]
    shares: list[Share] = []
    if not {"unit", "slot"}.isdisjoint(kinds.values()):
        # without the annotations, which the node's decision has looked at and which other nodes may not be able to read
        asked = (
            share_in_slots(topology, each.devices) or share_in_units(topology, each.devices, each.cards)
            for each in lasting
        )
        shares = [share for share in asked if share is not None]
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
    """What is free on a node of each resource that is offered there."""
    topology = state.hardware
    owned = state.ownership
    positions = position_by_gpu(topology)
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
    """
    The key of a node of this topology: the one that was announced, whose shape others share. None: a device is short. A few
    µs if such a node was evaluated before; otherwise 0.1 ms with eight GPUs, and up to 3 ms with sixteen.
    """
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
    """The elements of the key together; None where a device is short."""
    short = any(nodes.bit_count() < amount for nodes, amount in _free_and_requested(free, need.nics))
    if short or any(count < amount for count, amount in _free_and_requested(free, need.parts)):
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
    left = whole.left + sum(gpus.left for gpus in shared)
    left += sum(nodes.bit_count() - amount for nodes, amount in _free_and_requested(free, need.nics))
    left += sum(count - amount for count, amount in _free_and_requested(free, need.parts))
    cut = whole.cut + sum(gpus.cut for gpus in shared)
    rest = sum(gpus.rest for gpus in shared)
    return NodeKey(
        seam=-round(min(seams), 1) if seams else 0.0,
        nics=_count_local_nics(shape, need, free, [gpu for members in whole.taken for gpu in members]),
        numa=whole.numa,
        packing=(-round(left, 4),) if packing is NodePacking.SPREAD else (cut, round(rest, 4), round(left, 4)),
    )


def _free_and_requested(free: FreeDevices, asked: Sequence[tuple[ResourceName, int]]) -> Iterator[tuple[int, int]]:
    return ((free.masks.get(name, 0), amount) for name, amount in asked)


def _count_local_nics(shape: Topology, need: DeviceNeed, free: FreeDevices, gpus: Sequence[int]) -> tuple[int, int]:
    """How many of the NICs that the pod asks for can be local, and near, to these GPUs; negative."""
    localities = [*nic_localities(shape).values()]
    local = near = 0
    for nics, amount in _free_and_requested(free, need.nics) if gpus else ():
        counts = count_nics(Nics(amount, [localities[nic] for nic in nodes_of(nics)]), gpus)
        local = local - counts[0]
        near = near - counts[1]
    return local, near
