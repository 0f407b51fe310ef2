"""
Chooses the devices of a container, once its NUMA affinity is known.

`prefer` answers both the kubelet's GetPreferredAllocation and the question of `admit`.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import islice

from topoalign.core.model.decisions import NO_CONTEXT, PlacementContext
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.requests import Placement
from topoalign.core.model.topology.derived_tables import computed_once
from topoalign.core.model.topology.device_sets import NO_DEVICES, DeviceSet
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.queries import connection_score
from topoalign.core.placement.gpus.bandwidth import (
    NO_NICS,
    Members,
    NicLocality,
    Nics,
    SetScorer,
    gpu_links,
    gpu_scores,
    nic_locality,
)
from topoalign.core.placement.gpus.device_policy import (
    DGX1_PASCAL,
    DGX1_VOLTA,
    DGX2,
    BestEffort,
    DevicePolicy,
    GpuChoice,
    Simple,
    StaticSets,
)
from topoalign.core.placement.gpus.topology import ByTopology

PLACEMENTS: Mapping[str, DevicePolicy] = {
    Placement.TOPOLOGY: ByTopology(),
    Placement.BEST_EFFORT: BestEffort(),
    Placement.SIMPLE: Simple(),
    Placement.STATIC_DGX1_PASCAL: StaticSets(DGX1_PASCAL),
    Placement.STATIC_DGX1_VOLTA: StaticSets(DGX1_VOLTA),
    Placement.STATIC_DGX2: StaticSets(DGX2),
}
"""Device policies for GPUs by name."""


def choose_gpu_set(policy: DevicePolicy, asked: GpuChoice) -> Members:
    """The GPUs that the policy prefers, in ascending order. (): there is no possible set (`has_possible_set`)."""
    return policy.choose(asked) if has_possible_set(asked) else ()


def has_possible_set(asked: GpuChoice) -> bool:
    """
    Whether a set can be chosen. The size is at least 1 and at most the number of available GPUs. All positions exist on
    the machine and are unique. The required GPUs are available and not more than the size.
    """
    available = asked.available
    required = asked.required
    size = asked.size
    known = range(len(asked.scorer.scores))
    sound = len({*available}) == len(available) and len({*required}) == len(required)
    return sound and {*required} <= {*available} <= {*known} and max(1, len(required)) <= size <= len(available)


def prefer(
    topology: Topology,
    resource: ResourceName,
    available: Collection[DeviceID],
    must_include: Sequence[DeviceID],
    size: int,
    placement: str,
    near: Sequence[DeviceID] = (),
    context: PlacementContext = NO_CONTEXT,
) -> tuple[DeviceID, ...]:
    """
    The best `size` devices of a resource, in the hardware's order. The order of the input does not matter.

    GPUs are chosen by the device policy `placement`, NICs by their links to the devices `near`. Shares, MIG instances
    and virtual functions are chosen by how much of their GPU or NIC is held (`prefer_parts`), others in the hardware's
    order.
    `context`: what else is free, for policy `topology`. (): there is no possible set (`has_possible_set`), or the node
    does not have the devices.
    """
    kind = topology.kind_of(resource)
    if kind == "part":
        parts = topology.devices[resource].some(available)
        same = len(parts) == len(available)
        return prefer_parts(topology, resource, parts, must_include, size, near) if same else ()
    listed = topology.devices.get(resource, NO_DEVICES)
    free = frozenset(available)
    if not free <= listed.keys() or len(free) < len(available) or not free.issuperset(must_include):
        return ()
    if kind == "gpu":
        picked = {*prefer_gpus(topology, available, must_include, size, placement, context)}
    else:
        ranked = sorted(listed, key=lambda nic: _nearness(topology, nic, near)) if kind == "nic" else [*listed]
        picked = _first_ranked(ranked, free, must_include, size)
    return tuple(device for device in listed if device in picked)


def prefer_gpus(
    topology: Topology,
    available: Collection[DeviceID],
    must_include: Sequence[DeviceID],
    size: int,
    placement: str,
    context: PlacementContext,
) -> tuple[DeviceID, ...]:
    """`prefer` for whole GPUs of the machine, under whatever resource they are offered. In the hardware's order."""
    chosen = choose_gpu_set(PLACEMENTS[placement], build_gpu_choice(topology, available, must_include, size, context))
    gpus = tuple(topology.gpu_by_id)
    return tuple(gpus[i] for i in chosen)


def _first_ranked(
    ranked: Sequence[DeviceID], free: Collection[DeviceID], must_include: Sequence[DeviceID], size: int
) -> set[DeviceID]:
    if len({*must_include}) < len(must_include) or not max(1, len(must_include)) <= size <= len(free):
        return set()
    required = {*must_include}
    others = (device for device in ranked if device in free and device not in required)
    return {*required, *islice(others, size - len(required))}


def build_gpu_choice(
    topology: Topology,
    available: Collection[DeviceID],
    must_include: Sequence[DeviceID],
    size: int,
    context: PlacementContext,
) -> GpuChoice:
    """The question to a device policy. Raises KeyError for GPUs that the machine does not have."""
    position = positions_by_gpu(topology)
    near = nic_localities(topology)
    return GpuChoice(
        scorer=set_scorer(topology),
        available=[position[device] for device in available],
        required=[position[device] for device in must_include],
        size=size,
        free=frozenset(position[gpu] for gpu in context.free if gpu in position),
        nics=Nics(context.nics_wanted, [near[nic] for nic in context.nics if nic in near])
        if context.nics_wanted
        else NO_NICS,
    )


@computed_once
def positions_by_gpu(topology: Topology) -> Mapping[DeviceID, int]:
    """GPU -> its position on the machine."""
    return {gpu: position for position, gpu in enumerate(topology.gpu_by_id)}


@computed_once
def set_scorer(topology: Topology) -> SetScorer:
    """The scorer of the sets of all GPUs."""
    return SetScorer(gpu_scores(topology), gpu_links(topology))


def seam_of(topology: Topology, gpus: Collection[DeviceID]) -> str:
    """The weakest seam of a set of the machine's GPUs as human-readable text: `4 NVLinks, 80 GB/s`."""
    position = positions_by_gpu(topology)
    return set_scorer(topology).describe(tuple(sorted(position[gpu] for gpu in gpus)))


@computed_once
def nic_localities(topology: Topology) -> Mapping[DeviceID, NicLocality]:
    """NIC -> the GPUs to which it is local, and those near it."""
    return {nic: nic_locality(topology, nic) for nic in topology.nic_by_id}


def _nearness(topology: Topology, device: DeviceID, near: Sequence[DeviceID]) -> tuple[bool, int]:
    """The sort key of NICs, the best first. Equal NICs stay in the hardware's order."""
    nic = topology.nic_by_id.get(device)
    down = nic is not None and bool(nic.ports) and not any(port.state in ("", "ACTIVE") for port in nic.ports)
    return (
        down,  # NICs with a link first,
        -sum(connection_score(topology, device, other) for other in near),  # then the nearest to all of these devices
    )


# Shares, MIG instances and virtual functions are chosen one by one. Each comes from the GPU of which the fewest
# (`distributed`) or the most (`packed`) are held, including those already chosen. Among equal GPUs, the one of which
# this container has the fewest is preferred, then the one nearest to the container's GPUs, then the first in the
# hardware's order. The first two rules are those of NVIDIA's device plugin v0.20.0, which defines no further order.
# A node can offer thousands of shares. So only the number of free shares of each GPU is compared, and the first free
# shares of the chosen GPU are taken.


def prefer_parts(
    topology: Topology,
    resource: ResourceName,
    available: DeviceSet,
    must_include: Sequence[DeviceID],
    size: int,
    near: Sequence[DeviceID] = (),
) -> tuple[DeviceID, ...]:
    """
    The best `size` parts, in the hardware's order. `near`: other devices of the container. (): the size is below 1,
    above the number of available parts, or too small for `must_include`, or one of `must_include` is not available.
    """
    if not max(1, len(must_include)) <= size <= len(available) or not all(map(available.__contains__, must_include)):
        return ()
    chosen = available.devices.some(must_include)
    gpus = _listed_parts(topology)[resource]
    left = {gpu: available & parts - chosen for gpu, parts in gpus.items()}
    free = {gpu: len(parts) for gpu, parts in left.items()}
    held = {gpu: len(parts) - free[gpu] for gpu, parts in gpus.items()}
    sign = -1 if any(offer.packing == "packed" for offer in topology.offers_of[resource]) else 1
    taken: Counter[DeviceID] = Counter(map(topology.parent_of, chosen))
    others = [topology.parent_of(device) for device in near]
    links = {gpu: sum(_link_score_between(topology, gpu, other) for other in (*others, *taken)) for gpu in gpus}
    order = {gpu: index for index, gpu in enumerate(gpus)}
    more: Counter[DeviceID] = Counter()
    for _ in range(size - len(chosen)):
        gpu = min(
            (gpu for gpu, count in free.items() if count),
            key=lambda gpu: (sign * held[gpu], taken[gpu], -links[gpu], order[gpu]),
        )
        if not taken[gpu]:
            links = {other: links[other] + _link_score_between(topology, other, gpu) for other in links}
        free[gpu] -= 1
        held[gpu] += 1
        taken[gpu] += 1
        more[gpu] += 1
    for gpu, amount in more.items():
        chosen |= left[gpu].first(amount)
    return tuple(chosen)


@computed_once
def _listed_parts(topology: Topology) -> Mapping[ResourceName, Mapping[DeviceID, DeviceSet]]:
    """Resource that the node offers -> GPU -> its listed parts, in the hardware's order."""
    found: dict[ResourceName, dict[DeviceID, DeviceSet]] = {}
    for resource in topology.offers_of:
        devices = topology.devices[resource]
        gpus = found.setdefault(resource, {})
        for base, parts in devices.by_base.items():
            gpu = topology.parent_of(base)
            gpus[gpu] = gpus.get(gpu, devices.nothing) | parts
    return found


def _link_score_between(topology: Topology, a: DeviceID, b: DeviceID) -> int:
    return connection_score(topology, a, b) if a != b else 0
