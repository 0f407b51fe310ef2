"""
Refuses GPUs that would not be visible in a container that requests several GPU resources (`core.demand.device_lists`).

A reservation has a container's devices of all resources, so each Allocate answer lists all its GPUs. Without a
reservation, an answer lists only the GPUs of the requested resource. If the GPUs are passed only in
NVIDIA_VISIBLE_DEVICES (`deviceListStrategy: envvar`), the container would not see its other GPUs, so the next Allocate
call is refused. Example with one GPU and one MIG instance:

    reserved GPU-0, MIG-1-0    Allocate of GPU-0 names GPU-0,MIG-1-0    Allocate of MIG-1-0 names GPU-0,MIG-1-0
    nothing reserved           Allocate of GPU-0 names GPU-0            Allocate of MIG-1-0 is refused

The kubelet writes its checkpoint when a container has all its devices (v1.36.3, allocateContainerResources). Until the
checkpoint has the newest GPU grant, but at most OPEN_SECONDS, the next Allocate call counts as the same container's.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from topoalign.allocator.allocate.claims import AskedContainer, Claim, NodeView
from topoalign.allocator.ports import Poll
from topoalign.core.demand.device_lists import has_gpus, has_nics
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.errors import NoFit, quoted
from topoalign.core.model.holdings import base_of
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.share_amounts import gpus_by_instances

Devices = Mapping[ResourceName, tuple[DeviceID, ...]]
"""Resource -> the devices that one container has or will have."""
Part = tuple[ResourceName, frozenset[DeviceID]]

OPEN_SECONDS = 5.0
"""Maximum time between two Allocate calls for one container. The kubelet needs milliseconds."""


class NotVisible(NoFit):
    """
    Raised for GPUs that the container would not see: an earlier answer lists other GPUs.

    Remedy: Use another `deviceListStrategy`, or one GPU resource in each container.
    """

    def __init__(
        self, resource: ResourceName, devices: Collection[DeviceID], other: ResourceName, named: Collection[DeviceID]
    ) -> None:
        super().__init__(
            f"the container would not see {quoted(sorted(devices))} of {resource}: NVIDIA_VISIBLE_DEVICES names "
            f"{quoted(sorted(named))} in the answer for {other}, and the kubelet passes on only one value of a variable",
            "use deviceListStrategy volume-mounts, cdi-annotations or cdi-cri, bind the pod by topoalign's scheduler "
            "extender, or request GPUs of one resource in each container",
        )


class NewestGpuGrant(NamedTuple):
    """The newest grant of GPUs."""

    id: AllocationID
    resource: ResourceName
    at: float
    """Monotonic seconds."""


class VisibleGpus(Claim):
    """Tracks the GPUs in the answers for a container and refuses GPUs that the container would not see."""

    def __init__(self, view: NodeView, by_variable_alone: Callable[[], bool]) -> None:
        """`by_variable_alone`: whether the current `PluginFlags` pass GPUs only in NVIDIA_VISIBLE_DEVICES."""
        super().__init__(view)
        self._by_variable_alone = by_variable_alone
        self._newest: NewestGpuGrant | None = None

    def applies(self, resource: ResourceName) -> bool:
        """Whether the devices of the resource are GPUs or parts of GPUs."""
        return has_gpus(self.view.state.hardware, resource)

    def granted(self, resource: ResourceName, answers: Sequence[Allocation], poll: Poll | None) -> None:
        """As `Claim.granted`."""
        for answer in answers:
            self._newest = NewestGpuGrant(answer.id, resource, self.view.now)

    def devices_of_container(
        self, resource: ResourceName, allocation: Allocation
    ) -> dict[ResourceName, tuple[DeviceID, ...]]:
        """
        Returns the devices that the container has or will have of all resources of the same kind (GPUs or NICs). They
        are taken from its reservation, or from the allocations of its owner. Empty for vcuda units, because a container
        with units has no other GPUs. Also empty if no other resource has devices.
        """
        state = self.view.state
        reserved = self.view.reserved
        now = self.view.now
        if any(offer.unit is not None for offer in state.hardware.offers_of.get(resource, ())):
            return {}
        own = frozenset(allocation.from_kubelet.get(resource, ()))
        kind = has_gpus if has_gpus(state.hardware, resource) else has_nics
        parts: list[Devices] = []
        for pod in reserved.reservations if own else ():
            is_own = any(own == frozenset(each.devices.get(resource, ())) for each in pod.containers)
            if is_own and reserved.until[pod.pod_uid] > now:
                containers = [of_kind(each.devices, state.hardware, kind) for each in pod.containers]
                parts += with_same_devices(containers, (resource, own))
        if not parts and allocation.owner is not None:
            who = allocation.owner, allocation.pod_uid
            records = [each for each in state.allocations.values() if (each.owner, each.pod_uid) == who]
            parts = [of_kind(each.from_kubelet, state.hardware, kind) for each in records]
        if all(devices.keys() <= {resource} for devices in parts):
            return {}
        instances = {slot: uuid for each in state.allocations.values() for slot, uuid in each.instances.items()}
        by_instances = gpus_by_instances(state.hardware)
        found: dict[ResourceName, tuple[DeviceID, ...]] = {}
        for name, ids in ((name, ids) for devices in parts for name, ids in devices.items()):
            # A slot that becomes a MIG instance has no final ID before the instance is created.
            known = [
                instances.get(each, each) for each in ids if each in instances or base_of(each) not in by_instances
            ]
            found[name] = tuple(dict.fromkeys((*found.get(name, ()), *known)))
        return found

    def conflicts(self, asked: AskedContainer) -> Sequence[Allocation]:
        """Returns the newest grant if its answer omits these GPUs. A poll must show if the container is the same."""
        newest = self._newest
        if newest is None or newest.resource == asked.resource or not self._by_variable_alone():
            return ()
        grant = self.view.state.allocations.get(newest.id)
        if grant is None or grant.pod_uid or self.view.now - newest.at > OPEN_SECONDS:
            return ()
        return () if self._named(newest).issuperset(map(base_of, asked.ids)) else [grant]

    def evict(self, asked: AskedContainer, conflicts: Sequence[Allocation]) -> None:
        """Raises NotVisible if the newest answer for the same container omits these GPUs. Raises once per grant."""
        newest = self._newest
        if not conflicts or newest is None or self._is_entered(newest, asked.known_poll):
            return
        named = self._named(newest)
        self._newest = None
        raise NotVisible(asked.resource, {*map(base_of, asked.ids)}, newest.resource, named)

    def _named(self, newest: NewestGpuGrant) -> frozenset[DeviceID]:
        """Returns the GPUs and MIG instances in the answer to a grant."""
        grant = self.view.state.allocations[newest.id]
        own = (grant.instances.get(each, each) for each in grant.from_kubelet.get(newest.resource, ()))
        others = (each for ids in self.devices_of_container(newest.resource, grant).values() for each in ids)
        return frozenset(map(base_of, (*own, *others)))

    def _is_entered(self, newest: NewestGpuGrant, poll: Poll) -> bool:
        if poll.listing.checkpoint is None:
            return True
        grant = self.view.state.allocations[newest.id]
        if not self.view.liveness.is_written_since(grant, poll.listing):
            return False
        given = grant.from_kubelet.get(newest.resource, ())
        return any(each.resource == newest.resource and each.devices.issuperset(given) for each in poll.listing.parts)


def of_kind(devices: Devices, topology: Topology, kind: Callable[[Topology, ResourceName], bool]) -> Devices:
    """Returns the devices of resources of this kind."""
    return {name: ids for name, ids in devices.items() if kind(topology, name)}


def with_same_devices(containers: Iterable[Devices], part: Part) -> list[Devices]:
    """Returns the containers with exactly these devices, and those that share a device set with one already found."""
    found: list[Devices] = []
    known = {part}
    rest = [*containers]
    while more := [each for each in rest if not known.isdisjoint(resource_sets(each))]:
        found += more
        known.update(*map(resource_sets, more))
        rest = [each for each in rest if each not in more]
    return found


def resource_sets(devices: Devices) -> set[Part]:
    """Returns the pairs of a resource and its set of devices."""
    return {(name, frozenset(ids)) for name, ids in devices.items()}
