"""
Whether units of a GPU can be given beside what others have of it: of a GPU of which one container has all computing time
nobody else has anything.

The record knows what was given; whose it is, it learns from PodResources when the pod runs, and of init containers never.
The checkpoint has that as soon as a container has all that it asks for. So a container is judged by all that either says it
has: its computing time may be in several records, where later containers of its pod or of others have taken some over.

For which pod the kubelet asks, it does not say. It is likely one whose units it gives again, for only containers of one pod
take over from one another; one for which just these units are reserved; or the one of the newest grant, if that lacks these.
What such a pod has does not count; should it be another one, its container does not start (`share_starts`).
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set

from topoalign.allocator.allocate.units import Shares
from topoalign.allocator.ports import Listing, Poll
from topoalign.allocator.reconciliation.liveness import Liveness, places, still_displaced
from topoalign.core.demand.units import unit_of
from topoalign.core.model.allocations import Allocation, amounts_of
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.model.topology.offers import CORES
from topoalign.core.sharing.refusals import WholeGpuInUse
from topoalign.core.state.fold import NodeState
from topoalign.core.state.unit_amounts import Holder, excluded, holder_of, unshareable


class ShareExclusion:
    """Judges at Allocate who keeps units of GPUs from being given."""

    def __init__(self, state: Callable[[], NodeState], liveness: Liveness, shares: Shares) -> None:
        """`state`: of the node now; while calls are judged, with what those before were given."""
        self._state, self._liveness, self._shares = state, liveness, shares

    def beside(self, resource: ResourceName, units: Collection[DeviceID]) -> list[Allocation]:
        """
        The records of these GPUs, where somebody may have one of them whole, or would: the kubelet has to tell then whose
        they are.
        """
        state = self._state()
        asked = amounts_of(units) if unit_of(state.hardware, resource) is not None else {}
        if not asked:
            return []
        near = [each for each in state.allocations.values() if not asked.keys().isdisjoint(each.amounts)]
        for gpu, amount in asked.items():
            held = [each.amounts[gpu].cores for each in near if gpu in each.amounts]
            if held and (amount.cores >= CORES or sum(held) >= CORES):
                return near
        return []

    def making_room(
        self,
        resource: ResourceName,
        units: Collection[DeviceID],
        beside: Sequence[Allocation],
        way: Mapping[AllocationID, Allocation],
        poll: Poll | None,
    ) -> dict[AllocationID, Allocation]:
        """
        Those of the records `beside` that make way, by id: the units could not be given beside them, and their containers
        have ended, also because one of them is among those of which the kubelet gives away devices (`way`). Raises
        WholeGpuInUse where somebody else has one of the GPUs whole, or has something of one that is asked for whole.
        """
        if not beside:
            return {}
        assert poll is not None, "a record is known to the poll"
        listing, liveness, asked = poll.listing, self._liveness, amounts_of(units)
        over = {(each.owner, each.pod_uid) for each in way.values() if each.owner}
        counted, ended = list[Allocation](), list[Allocation]()
        for record in beside:
            runs_on = liveness.is_displaced(record, listing)
            gone = [record] if liveness.has_ended(record, listing, poll.at) else []
            if record.id in way:
                counted += [record] if runs_on else []
                continue
            is_over = (record.owner, record.pod_uid) in over and not runs_on
            is_dropped = liveness.dropped(gone, (), (), poll.at) or (gone and self._is_nobodys(record, listing))
            (ended if is_over or is_dropped else counted).append(record)
        owners = self._shares.asking(resource, units, poll)
        for holder, held in units_held(counted, beside, listing, liveness).items():
            gpus = excluded(asked, amounts_of(held))
            if gpus and holder.pod not in owners.pods and holder.container not in owners.records:
                raise WholeGpuInUse(gpus, " ".join(filter(None, holder)))
        return {each.id: each for each in unshareable(ended, asked)}

    def _is_nobodys(self, record: Allocation, listing: Listing) -> bool:
        """
        Whether a checkpoint that was written since a grant has nothing of it: a kubelet writes down what a container has
        before it asks for the next one. It writes at other moments as well, maybe just before it notes a grant; that one may
        be the first half of the container for which it asks now, and is the newest then: a container has units of two kinds,
        and is asked for each once.
        """
        return (
            record.id != self._shares.newest
            and listing.checkpoint is not None
            and listing.checkpoint.isdisjoint(places(record))
            and self._liveness.is_written_since(record, listing)
        )


def units_held(
    records: Iterable[Allocation], every: Iterable[Allocation], listing: Listing, liveness: Liveness
) -> Mapping[Holder, Set[DeviceID]]:
    """
    Container -> what it has by these records. What no owner is known of has that of the checkpoint's entry, unless this is
    older: the kubelet writes what it drops later than it gives it anew. `every`: these and those of containers that have
    ended; what such a one displaced may run on.
    """
    found = defaultdict[Holder, set[DeviceID]](set)
    told = [each for each in records if each.owner is not None or liveness.is_written_since(each, listing)]
    units = frozenset[DeviceID]().union(*(each.device_ids for each in told))
    for part in listing.parts:
        if some := units.intersection(part.devices):
            found[Holder(part.pod_uid, part.container)] |= some
    entered = frozenset[DeviceID]().union(*found.values())
    names = {each.id for each in told}
    for each in records:
        if each.owner is not None:
            found[holder_of(each.owner, each.pod_uid)] |= each.device_ids
        elif each.id not in names or entered.isdisjoint(each.device_ids):
            found[Holder("", each.id)] |= each.device_ids
    for each in every:
        for former in still_displaced(each.displaced, listing):
            found[holder_of(former.owner, former.pod_uid)].update(*former.devices.values())
    return found
