"""
Which devices a container gets, once its NUMA affinity is known.

`prefer` is the answer to the kubelet's GetPreferredAllocation and to `admit`'s own question alike.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from topoalign.core.model.decisions import NO_CONTEXT, PlacementContext
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.requests import Placement
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.queries import pair_score
from topoalign.core.model.topology.views import made_once
from topoalign.core.placement.gpus.best_effort import best_effort
from topoalign.core.placement.gpus.scores import Scores, gpu_scores
from topoalign.core.placement.gpus.simple import simple
from topoalign.core.placement.gpus.static_dgx import DGX1_PASCAL, DGX1_VOLTA, DGX2, StaticSets
from topoalign.core.placement.gpus.topology import Nics, SetScorer, by_topology
from topoalign.core.placement.parts import prefer_parts

Choose = Callable[[Scores, Sequence[int], Collection[int], int], tuple[int, ...]]

PLACEMENTS: Mapping[str, Choose] = {
    Placement.TOPOLOGY: lambda scores, *asked: by_topology(SetScorer(scores), *asked),
    Placement.BEST_EFFORT: best_effort,
    Placement.SIMPLE: simple,
    Placement.STATIC_DGX1_PASCAL: StaticSets(DGX1_PASCAL),
    Placement.STATIC_DGX1_VOLTA: StaticSets(DGX1_VOLTA),
    Placement.STATIC_DGX2: StaticSets(DGX2),
}
"""Device policies for GPUs by name: (scores, available, required, size) to positions, ascending; () for none."""


def choose(
    policy: Choose, scores: Scores, available: Sequence[int], required: Sequence[int], size: int
) -> tuple[int, ...]:
    """
    The set of `size` positions that the policy prefers, ascending.

    () where there is no preference to give: size below 1 or above what is available, positions repeated or not in the
    table, required ones that are not available or more than `size`.
    """
    known = range(len(scores))
    sound = len({*available}) == len(available) and len({*required}) == len(required)
    if not sound or not {*required} <= {*available} <= {*known} or not max(1, len(required)) <= size <= len(available):
        return ()
    return policy(scores, available, required, size)


def prefer(
    topology: Topology,
    resource: ResourceName,
    available: Sequence[DeviceID],
    must_include: Sequence[DeviceID],
    size: int,
    placement: str,
    near: Sequence[DeviceID] = (),
    beside: PlacementContext = NO_CONTEXT,
) -> tuple[DeviceID, ...]:
    """
    The `size` devices of a resource that are best, in the hardware's order; the order of the input has no say.

    GPUs by the device policy named `placement`; NICs by `nearness` to the devices `near`; shares, MIG instances and virtual
    functions by how much of their cards is held (`prefer_parts`); others in the hardware's order.
    `beside` is what else is free, for policy `topology`. () where there is no preference to give (`choose`), and for devices
    that the node does not have.
    """
    listed, free = tuple(topology.devices.get(resource, ())), frozenset(available)
    if not free <= {*listed} or len(free) < len(available) or not {*must_include} <= free:
        return ()
    ranked = listed
    kind = topology.kind_of(resource)
    if kind == "part":
        return prefer_parts(topology, resource, available, must_include, size, near)
    if kind == "gpu":
        ranked = tuple(topology.gpu_by_id)
        policy, scores = PLACEMENTS[placement], gpu_scores(topology)
        if placement == Placement.TOPOLOGY:
            policy = partial(outlooked, topology, beside)
    else:
        if kind == "nic":
            ranked = tuple(sorted(listed, key=lambda nic: nearness(topology, nic, near)))
        policy, scores = simple, [[0] * len(listed)] * len(listed)
    position = {device: i for i, device in enumerate(ranked)}
    chosen = choose(policy, scores, [position[d] for d in available], [position[d] for d in must_include], size)
    picked = {ranked[i] for i in chosen}
    return tuple(device for device in listed if device in picked)


def outlooked(
    topology: Topology,
    beside: PlacementContext,
    _: Scores,
    available: Sequence[int],
    required: Collection[int],
    size: int,
) -> tuple[int, ...]:
    """Policy `topology` with all that it can look at."""
    return by_topology(outlook(topology), available, required, size, *looked_at(topology, beside))


def looked_at(topology: Topology, beside: PlacementContext) -> tuple[frozenset[int], Nics]:
    """What policy `topology` looks at besides: the positions of the free GPUs, and the NICs."""
    gpus = tuple(topology.gpu_by_id)
    nearness = [[pair_score(topology, nic, gpu) for gpu in gpus] for nic in beside.nics] if beside.nics_wanted else []
    positions = {gpu: position for position, gpu in enumerate(gpus)}
    return frozenset(positions[gpu] for gpu in beside.free if gpu in positions), Nics(beside.nics_wanted, nearness)


@made_once
def outlook(topology: Topology) -> SetScorer:
    """The scorer of the sets of all GPUs."""
    return SetScorer(gpu_scores(topology))


def nearness(topology: Topology, device: DeviceID, near: Sequence[DeviceID]) -> tuple[bool, int]:
    """Sorts NICs, the best first; equals stay in the hardware's order."""
    nic = topology.nic_by_id.get(device)
    down = nic is not None and bool(nic.ports) and not any(port.state in ("", "ACTIVE") for port in nic.ports)
    return (
        down,  # one that has a link,
        -sum(pair_score(topology, device, other) for other in near),  # then the nearest to all of these devices
    )
