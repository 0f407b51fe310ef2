"""
The devices of a container that are decided together, and the sets that could have been given instead: for `admission`.

Where the smallest scope with enough GPUs leaves a choice, the node's device policy makes it; with `compat` Koordinator does.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import msgspec

from topoalign.core.admission.alternatives import considered
from topoalign.core.demand.pod_demand import ContainerDemand
from topoalign.core.deviceshare.candidates import Candidate, Chooser
from topoalign.core.deviceshare.node_devices import ContainerDevices, joint_devices
from topoalign.core.deviceshare.node_inventory import places_of
from topoalign.core.hints.joint_devices import asked_for, left_to
from topoalign.core.model.decisions import Considered, PlacementContext
from topoalign.core.model.ids import GPU, NIC, DeviceID, ResourceName
from topoalign.core.model.requests import AdmissionRules, Scope
from topoalign.core.model.topology.bitmask import Mask, nodes_of
from topoalign.core.model.topology.device_sets import NO_DEVICES
from topoalign.core.model.topology.model import Topology
from topoalign.core.placement.preference import prefer, prefer_gpus
from topoalign.core.policy import POLICIES
from topoalign.core.policy.merge.kubelet_merge import NO_AFFINITY
from topoalign.core.sharing.choosers import gpus_of
from topoalign.core.state.fold import NodeState

CHOSEN = {
    GPU: "in the smallest part of the machine that has GPUs, and what goes with them, as the annotations ask",
    NIC: "nearest to the container's GPUs, of those that are as the annotations ask",
}
COMPAT = "as Koordinator chooses"


def place_jointly(
    state: NodeState, container: ContainerDemand, rules: AdmissionRules, affinity: Mask | None
) -> ContainerDevices:
    """
    What a container gets on these NUMA nodes (None: on any).

    A policy that admits without alignment has devices of other nodes, too, where those do not do. Raises DevicesDoNotFit
    and TooMuchWork.
    """
    asked = asked_for(state, container, None if follows_koordinator(container) else chooser(state, rules))
    return joint_devices(asked, affinity, spill=POLICIES[rules.policy].admits(NO_AFFINITY))


def follows_koordinator(container: ContainerDemand) -> bool:
    """Whether the container gets Koordinator's answers, odd ones included."""
    return container.joint is not None and container.joint.compat


def chooser(state: NodeState, rules: AdmissionRules) -> Chooser | None:
    """
    The device policy; None where GPUs are taken by index. So they are in scope `pod`: its hints stand on what one container
    leaves to the next, and were found that way.
    """
    return partial(by_policy, state, rules.placement) if rules.scope is Scope.CONTAINER else None


def by_policy(state: NodeState, placement: str, gpus: Sequence[Candidate], count: int) -> list[Candidate]:
    """The GPUs that the device policy chooses of these, those that init containers left first."""
    by_id = {DeviceID(gpu.device.id): gpu for gpu in gpus}
    left = [device for device, gpu in by_id.items() if gpu.device.left]
    if by_id.keys() <= state.hardware.devices.get(GPU, NO_DEVICES).keys():
        beside = PlacementContext(free=state.ownership.free(GPU))
        chosen = prefer(state.hardware, GPU, tuple(by_id), left[:count], count, placement, beside=beside)
    else:  # they are offered in units
        unused = tuple(gpu for gpu, units in state.ownership.units_left.items() if units.unused)
        chosen = prefer_gpus(
            state.hardware, tuple(by_id), left[:count], count, placement, PlacementContext(free=unused)
        )
    return [by_id[device] for device in chosen]


def sets_considered(
    state: NodeState, container: ContainerDemand, affinity: Mask | None, got: ContainerDevices
) -> Iterator[Considered]:
    """The sets that could have been given instead of what it `got` on these NUMA nodes, with reasons of joint allocation."""
    left = left_to(state, container).devices
    for resource, chosen in got.devices.items():
        free = frozenset((*state.ownership.free(resource), *left, *chosen))
        could_have = [device for device in state.hardware.devices[resource] if device in free]
        near = gpus_of(state.hardware, got.devices) if resource == NIC else ()
        for each in considered(state.hardware, resource, could_have, None, chosen, near, ""):
            if each.chosen:
                why = COMPAT if follows_koordinator(container) else CHOSEN[resource]
            else:
                why = reason_against(state.hardware, resource, each.devices, chosen, near, affinity)
            yield msgspec.structs.replace(each, why=why)


def reason_against(
    topology: Topology,
    resource: ResourceName,
    devices: Sequence[DeviceID],
    chosen: Sequence[DeviceID],
    near: Sequence[DeviceID],
    affinity: Mask | None,
) -> str:
    """Why a set was not given, as far as places say."""
    nodes = None if affinity is None else {*nodes_of(affinity)}
    where = topology.devices[resource]
    if nodes is not None and any(nodes.isdisjoint(where[device] or nodes) for device in devices):
        return "not all on the NUMA nodes it is aligned to"
    if near:
        mine = beside(topology, chosen, near)
        other = beside(topology, devices, near)
        return (
            f"beside {other} of the GPUs, not {mine}" if other < mine else "as near; indexes or what was asked decided"
        )
    for what, mine, other in zip(SPREAD, spread(topology, chosen), spread(topology, devices), strict=True):
        if other != mine:
            return (
                f"on {other} {what}, not {mine}" if other > mine else "nearer together, but not as the annotations ask"
            )
    return "as near; NICs beside it, indexes or the device policy decided"


SPREAD = ("NUMA nodes", "root complexes", "switches")


def spread(topology: Topology, devices: Sequence[DeviceID]) -> tuple[int, int, int]:
    """On how many parts of the machine devices are, of those that are known."""
    places = [place for device in devices if (place := places_of(topology).get(device)) is not None]
    return (
        len({each.node for each in places}),
        len({each.pcie for each in places}),
        len({each.switch for each in places}),
    )


def beside(topology: Topology, nics: Sequence[DeviceID], gpus: Sequence[DeviceID]) -> int:
    """How many of the GPUs have one of the NICs below the same switch, or in the same root complex where there is none."""
    places = places_of(topology)
    spots = {places[nic].switch or places[nic].pcie for nic in nics if nic in places} - {""}
    return sum((places[gpu].switch or places[gpu].pcie) in spots for gpu in gpus if gpu in places)
