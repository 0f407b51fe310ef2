"""
Whether a container may start with its units of GPUs.

Allocate does not say for whom. When a container starts, the kubelet's checkpoint has what each container was given, so it is
known then whether the halves of its share are of one GPU, or equal parts of the same ones, and with whom it shares these.
One that has halves on different GPUs, that has a whole GPU of which somebody else has units, or units of a GPU that somebody
else has whole, does not start. So no container runs with the share of another.

Entries of the checkpoint count until their pods are gone. An init container leaves its units to the app containers of its
pod: where one of two containers is not shown by PodResources, as init containers are not, they do not count against each
other. Containers that run on although the kubelet has lost what they have are in the record alone, and count as well.

What a unit is of is told by its id, so the configuration may have changed since.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from topoalign.allocator.allocate.slot_starts import STARTED_AGAIN, record_refused_start, reserved_owner
from topoalign.allocator.allocate.units import units_held
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.ports import Listing, Part, Poll
from topoalign.allocator.reconciliation.liveness import Liveness
from topoalign.core.demand.shares import Share, UnitFields, check_share
from topoalign.core.model.allocations import Owner, amounts_of
from topoalign.core.model.errors import NoFit, Unavailable
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import ContainerName, DeviceID, ResourceName
from topoalign.core.model.topology.offers import MEMORY_BLOCK
from topoalign.core.sharing.choosers import check_gpus
from topoalign.core.sharing.refusals import WholeGpuInUse
from topoalign.core.state.reservations import NodeReservations
from topoalign.core.state.share_amounts import Holder, excluded

Amounts = Mapping[DeviceID, Amount]
"""GPU -> how much of it a container has."""
MOST_TOLD = 1_000
"""Refusals that are remembered: each is recorded once, however often the kubelet tries to start the container."""


class ShareStarts:
    """Judges containers with units of GPUs that are about to start."""

    def __init__(self, ledger: Ledger, liveness: Liveness, reserved: Callable[[], NodeReservations]) -> None:
        """`reserved`: what is reserved on the node now."""
        self._ledger = ledger
        self._liveness = liveness
        self._reserved = reserved
        self._told: dict[tuple[Holder, str], None] = {}

    def check(self, resource: ResourceName, units: Sequence[DeviceID], poll: Poll) -> None:
        """
        Refuses to start a container with these units, and records that once, if it cannot have them together with all else
        that is held. Raises ShareSplit, InvalidShare and WholeGpuInUse, and Unavailable where the kubelet does not tell what
        the container has besides.
        """
        asked = frozenset(units)
        listing = poll.listing
        parts = live_parts(listing)
        starting = dict.fromkeys(
            Holder(part.pod_uid, part.container)
            for part in parts
            if part.resource == resource and part.devices == asked
        )
        if not starting:
            raise Unavailable(
                f"the kubelet's checkpoint does not have the {len(asked)} {resource} of the container yet",
                STARTED_AGAIN,
            )
        for mine in starting:
            try:
                self._check_container(mine, parts, poll)
            except NoFit as misfit:
                self._record(mine, listing, misfit)
                raise

    def _check_container(self, mine: Holder, parts: Sequence[Part], poll: Poll) -> None:
        """Raises ShareSplit, InvalidShare and WholeGpuInUse for a container with what these entries say."""
        fields = UnitFields(*(next(iter(named), "limits") for named in limits_of(mine, parts)))
        own = amounts_of(unit for part in of(mine, parts) for unit in part.devices)
        cores = sum(each.cores for each in own.values())
        memory = sum(each.memory for each in own.values())
        check_share(Share(cores, memory // MEMORY_BLOCK), fields)
        check_gpus(own, fields.memory, cards=None)
        for name, theirs in self._others(mine, parts, poll):
            if gpus := excluded(own, theirs):
                raise WholeGpuInUse(gpus, name, fields.cores)

    def _others(self, mine: Holder, parts: Sequence[Part], poll: Poll) -> Iterator[tuple[str, Amounts]]:
        """Each other container that counts, and what it has."""
        shown = {Holder(holding.pod_uid, holding.owner.container): holding.owner for holding in poll.listing.holdings}
        listing = poll.listing
        every = [each for each in self._ledger.state.allocations.values() if each.amounts]
        records = [each for each in every if not self._liveness.has_ended(each, listing, poll.at)]
        held = {holder: {*units} for holder, units in units_held(records, every, listing, self._liveness).items()}
        for part in parts:
            held.setdefault(Holder(part.pod_uid, part.container), set()).update(part.devices)
        for each, units in held.items():
            if each == mine or not each.pod or (each.pod == mine.pod and not {each, mine} <= shown.keys()):
                continue
            if can_start(each, parts):
                owner = shown.get(each)
                named = (
                    " ".join(each) if owner is None else f"{owner.namespace}/{owner.pod}, container {owner.container},"
                )
                yield named, amounts_of(units)

    def _record(self, mine: Holder, listing: Listing, misfit: NoFit) -> None:
        """Records that a container was not started, and why: once for each container and reason."""
        if (mine, misfit.code) in self._told:
            return
        owner = owner_of(mine, listing) or reserved_owner(self._reserved(), mine.pod, mine.container)
        if owner is None:
            return
        self._told[mine, misfit.code] = None
        if len(self._told) > MOST_TOLD:
            del self._told[next(iter(self._told))]
        record_refused_start(self._ledger, owner, misfit)


def live_parts(listing: Listing) -> tuple[Part, ...]:
    """The entries of the checkpoint with units of GPUs, without those of pods that are gone."""
    directories = listing.directories
    return tuple(
        part
        for part in listing.parts
        if amounts_of(part.devices) and (directories is None or not directories.is_gone(part.pod_uid))
    )


def can_start(holder: Holder, parts: Collection[Part]) -> bool:
    """Whether a container may run, by what these entries say: one with halves of different GPUs never did."""
    own = amounts_of(unit for part in of(holder, parts) for unit in part.devices)
    try:
        check_gpus(own, cards=None)
    except NoFit:
        return False
    return True


def of(holder: Holder, parts: Collection[Part]) -> Iterator[Part]:
    """The entries of one container."""
    return (part for part in parts if (part.pod_uid, part.container) == holder)


def limits_of(holder: Holder, parts: Collection[Part]) -> tuple[list[str], list[str]]:
    """The limits by which a container has computing time, and memory."""
    named: tuple[list[str], list[str]] = ([], [])
    for part in of(holder, parts):
        (amount, *_) = amounts_of(part.devices).values()
        named[0 if amount.cores else 1].append(f"limits[{part.resource}]")
    return named


def owner_of(holder: Holder, listing: Listing) -> Owner | None:
    """The container by its names, if PodResources shows it or another one of its pod; None: they are not known."""
    for holding in listing.holdings:
        if holder.pod and holding.pod_uid == holder.pod:
            owner = holding.owner
            return Owner(namespace=owner.namespace, pod=owner.pod, container=ContainerName(holder.container))
    return None
