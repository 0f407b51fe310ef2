"""
Compares the ledger with each kubelet poll: binds owners, releases ended allocations, and adopts unrecorded containers.

- A kubelet that has just started lists fewer pods than are running. So the allocation of a missing container is
  released after a delay. The delay is longer after a restart of the kubelet.
- A container that is reported with unallocated devices is adopted.
- If a container ended while no allocator was running, its allocation is an orphan. It is released at the first poll of
  a settled kubelet whose checkpoint does not have the devices either.
- If the kubelet rejected a pod after Allocate, the pod has checkpoint entries but no directory. It counts as missing.
- If the kubelet has lost the devices of a container, the allocation stays as long as the pod exists. If the kubelet has
  meanwhile allocated the devices to another container, the first container is displaced (`Allocation.displaced`). It
  gets them back when the other container ends.
- After a damaged journal, the ledger is unconfirmed. When discovery has published the hardware, devices that only the
  checkpoint has are adopted, too. Then the ledger is confirmed.
"""

from collections import defaultdict
from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

import structlog

from topoalign.allocator.hardware_watch import is_confirmed
from topoalign.allocator.ledger.ledger import Binding, Ledger
from topoalign.allocator.ports import KubeletListing, Place, Poll, ReportedDevices
from topoalign.allocator.reconciliation.displacement import (
    adopt_unrecorded,
    log_forgotten,
    return_displaced,
)
from topoalign.allocator.reconciliation.liveness import (
    Kubelet,
    LivenessCheck,
    checkpoint_entries_of,
    is_before,
    kubelet_places,
    still_displaced,
)
from topoalign.allocator.reconciliation.usage_publisher import is_recorded_here, usage_of_others
from topoalign.core.model.events import Allocation, Owner
from topoalign.core.model.ids import AllocationID
from topoalign.core.ports import Clock

APART_SECONDS = 1.0
"""
How long the kubelet must contradict an allocation, in at least two polls, before it is released. The time between two
polls for an owner can be 0.1 s or less.
"""


log = structlog.get_logger("topoalign.allocator.reconciliation.reconciliation")


class PollFinding(Enum):
    """The result of a poll for one allocation."""

    NOTHING = auto()
    """Not checked, for example because it was granted after the poll."""
    SHOWN = auto()
    """Its devices, and no others, are reported with one owner."""
    APART = auto()
    """
    Its devices are reported with several owners, only in part, together with other devices, or for another pod. If this
    persists, the kubelet contradicts the allocation.
    """
    FORGOTTEN = auto()
    """The kubelet has lost the devices of its container, which may still run."""
    MISSING = auto()
    """The kubelet does not report it."""


class Presence(NamedTuple):
    """The results of the polls for one allocation so far."""

    is_inherited: bool = False
    """Whether it was live when this process started and not reported since. If it ended, no allocator ran then."""
    missing_since: float | None = None
    """Monotonic seconds of the first poll in which it was missing; None if it is not missing."""
    finding: PollFinding = PollFinding.NOTHING
    """The result of the last poll."""
    apart_since: float | None = None
    """Monotonic seconds of the first poll since which all polls found it APART; None if the last poll did not."""
    is_explained: bool = False
    """Whether a poll has shown why it may run unreported. A later poll that reads fewer files does not change that."""

    def show(self) -> "Presence":
        """Returns the presence after the kubelet has reported the allocation."""
        return Presence(finding=self.finding, apart_since=self.apart_since)

    def miss(self, at: float) -> "Presence":
        """Returns the presence after it was missing in a poll at `at`. The delay starts at the first such poll."""
        return self if self.missing_since is not None else self._replace(missing_since=at)

    def explain(self) -> "Presence":
        """Returns the presence if the container may run unreported because the kubelet lost it or waits for its pod."""
        return self._replace(missing_since=None, is_explained=True)

    def restart_wait(self) -> "Presence":
        """Returns the presence after a restart of the kubelet, which restarts the delay."""
        return self._replace(missing_since=None)

    def find(self, finding: PollFinding, at: float) -> "Presence":
        """Returns the presence after a poll at `at` with this finding."""
        since = at if self.apart_since is None else self.apart_since
        return self._replace(finding=finding, apart_since=since if finding is PollFinding.APART else None)


class Settling(NamedTuple):
    """Whether the kubelet has settled. A kubelet that has just started lists fewer pods than are running."""

    kubelet: Kubelet | None = None
    """The last run of the kubelet that answered; None if none has answered yet."""
    until: float = 0.0
    """Monotonic seconds at which the kubelet counts as settled."""
    is_boot_known: bool = False
    """Whether the hardware, and therefore the boot, was known at a poll."""

    def meet(self, kubelet: Kubelet, at: float, seconds: float, age: float, *, rebooted: bool) -> "Settling":
        """
        Returns the settling after a kubelet has answered at monotonic seconds `at`. A kubelet counts as settled
        `seconds` after its start. Its `age` by the wall clock is used only for the first kubelet, and not after a
        reboot. Example with `seconds` 120 and age 100: the first kubelet settles at `at + 20`, any other at `at + 120`.
        """
        if kubelet == self.kubelet and not rebooted:
            return self
        is_new = self.kubelet is not None or rebooted
        return self._replace(kubelet=kubelet, until=at + max(0.0, seconds - (0.0 if is_new else max(0.0, age))))

    def know_boot(self, known: bool) -> "Settling":
        """Returns the settling after a poll. `known`: whether the hardware, and so the boot, was known at the poll."""
        return self._replace(is_boot_known=self.is_boot_known or known)


class Reconciliation:
    """Compares the ledger with each poll of the kubelet and records the changes. There is no await in between."""

    def __init__(
        self, ledger: Ledger, clock: Clock, *, gone_seconds: float, unbound_seconds: float, settle_seconds: float
    ) -> None:
        """
        How long a container must be missing, in at least two polls, before its allocation is released:

        - `gone_seconds` by default;
        - `unbound_seconds` if it was never reported, is not in the checkpoint, and its pod is not known to be deleted;
        - at least `settle_seconds` while the kubelet has not settled or lists no pods.

        An allocation that was never reported stays while the checkpoint cannot be read.
        """
        self.liveness = LivenessCheck()
        self._ledger = ledger
        self._clock = clock
        self._gone_seconds = gone_seconds
        self._unbound_seconds = unbound_seconds
        self._settle_seconds = settle_seconds
        self._settling = Settling()
        self._presence: defaultdict[AllocationID, Presence] = defaultdict(Presence)
        self._presence.update(dict.fromkeys(ledger.state.allocations, Presence(is_inherited=True)))
        self._noted = 0.0
        """Monotonic seconds at the start of the newest poll."""
        self._early: set[str] = set()
        """UIDs of the pods whose allocations were released because the pods had no directory."""

    def compare(self, poll: Poll) -> None:
        """Binds, releases and adopts based on this poll. If it raises StateFault, some changes may be recorded."""
        self._settle(poll)
        listing = poll.listing
        if self._ledger.state.topology is None:
            return
        bound: list[Binding] = []
        gone: list[Allocation] = []
        findings: dict[AllocationID, PollFinding] = {}
        for allocation in self._ledger.state.allocations.values():
            if allocation.id not in poll.live:
                continue
            finding, binding = self._find(allocation, poll)
            findings[allocation.id] = finding
            if binding is not None:
                bound.append(binding)
            if finding is PollFinding.FORGOTTEN:
                self._presence[allocation.id] = self._presence[allocation.id].explain()
            if finding is PollFinding.MISSING and self._is_gone(allocation, poll):
                gone.append(allocation)
        self._ledger.bind(bound)
        self._release(gone, listing)
        forgotten = [
            self._ledger.state.allocations[name] for name, found in findings.items() if found is PollFinding.FORGOTTEN
        ]
        log_forgotten(each for each in forgotten if self._presence[each.id].finding is not PollFinding.FORGOTTEN)
        live = self._ledger.state.allocations
        if poll.live >= live.keys():  # otherwise the answer is older than the ledger
            apart = [live[name] for name, finding in sorted(findings.items()) if finding is PollFinding.APART]
            contradicted = [each for each in apart if self._is_contradicted(each, poll)]
            directories = listing.directories
            late = {uid for uid in self._early if directories is not None and not directories.is_gone(uid)}
            found = adopt_unrecorded(self._ledger, listing, contradicted, late)
            self._ledger.grant(found, instead_of=[record.id for record in contradicted])
            if found:
                log.warning("unrecorded containers are added to the record", containers=len(found))
            self._confirm(poll)
        live = self._ledger.state.allocations
        for name in self._presence.keys() - live.keys():
            del self._presence[name]
        for name, presence in self._presence.items():
            self._presence[name] = presence.find(findings.get(name, PollFinding.NOTHING), poll.at)
        self._early &= {part.pod_uid for part in listing.parts}
        self.liveness.forget_all_but(live.keys())
        self._ledger.observe(containers=usage_of_others(listing.usage, self._ledger.state.hardware))

    def _settle(self, poll: Poll) -> None:
        """Notes a new kubelet. After a reboot, its age is not used, because the wall clock is often adjusted then."""
        state = self._ledger.state
        before = self._settling
        rebooted = not before.is_boot_known and bool(state.stale)
        age = self._clock.wall() - poll.listing.since
        settling = before.meet(poll.listing.kubelet, poll.at, self._settle_seconds, age, rebooted=rebooted)
        self._settling = settling.know_boot(state.topology is not None)
        if settling is before:
            return
        for name, presence in self._presence.items():
            self._presence[name] = presence.restart_wait()
        if stale := state.stale:
            log.info(
                "allocations from before the reboot are kept until the kubelet has settled", allocations=len(stale)
            )

    def note(self, poll: Poll) -> None:
        """Notes a poll's reported allocations and checkpoint entries, even if the ledger is not compared with it."""
        if poll.at < self._noted:
            return
        self._noted = poll.at
        listing = poll.listing
        known = [each for each in self._ledger.state.allocations.values() if each.id in poll.live]
        for each in known:
            if not self.liveness.was_reported(each.id, listing.kubelet) and listing.shows(each):
                self.seen(each.id, listing)
        self.liveness.note_written(known, listing)

    def seen(self, allocation: AllocationID, listing: KubeletListing) -> None:
        """Notes that the kubelet has just reported an allocation."""
        self._presence[allocation] = self._presence[allocation].show()
        self.liveness.shown(allocation, listing.kubelet)

    def _find(self, allocation: Allocation, poll: Poll) -> tuple[PollFinding, Binding | None]:
        held = kubelet_places(allocation)
        listing = poll.listing
        boot = self._ledger.boot
        holdings = [listing.shown.get(place) for place in held]
        if any(holdings):
            self.seen(allocation.id, listing)
            owner = self._owner(held, holdings)
            uid = self.liveness.uid_of(allocation, holdings, listing)
            if owner is None or (uid and allocation.pod_uid not in ("", uid)):
                return PollFinding.APART, None
            return PollFinding.SHOWN, self._binding(allocation, owner, uid, listing)
        if self.liveness.is_forgotten(allocation, listing, boot):
            return PollFinding.FORGOTTEN, None
        if self._is_settled(poll) and self.liveness.has_returned(allocation, listing):
            assert allocation.owner is not None
            return PollFinding.FORGOTTEN, Binding(allocation.id, allocation.owner, allocation.pod_uid)
        return PollFinding.MISSING, None

    def _binding(self, allocation: Allocation, owner: Owner, uid: str, listing: KubeletListing) -> Binding | None:
        """Returns the binding to record for an allocation that is reported with this owner; None if nothing changed."""
        known = allocation.pod_uid if owner == allocation.owner else ""
        before = is_before(allocation, self._ledger.boot)
        displaced = () if before else still_displaced(allocation.displaced, listing, owner, uid)
        binding = Binding(allocation.id, owner, uid or known, displaced)
        boot = self._ledger.boot
        recorded = Binding(allocation.id, allocation.owner or owner, allocation.pod_uid, allocation.displaced)
        is_recorded = allocation.owner is not None and binding == recorded and (not boot or boot == allocation.boot)
        return None if is_recorded else binding

    def _release(self, gone: Sequence[Allocation], listing: KubeletListing) -> None:
        """Releases these allocations. If displaced containers get devices back, the same journal entry records that."""
        for reason, ended in (
            ("gone", [each for each in gone if not self._presence[each.id].is_inherited]),
            ("orphan", [each for each in gone if self._presence[each.id].is_inherited]),
        ):
            back = return_displaced(self._ledger, ended, listing)
            if back:
                names = [each.id for each in ended]
                self._ledger.grant(back, instead_of=names, reasons=dict.fromkeys(names, reason))
                log.warning("displaced containers have their devices back", containers=len(back))
            else:
                self._ledger.release([each.id for each in ended], reason)
        if directories := listing.directories:
            without_owner = [each for each in gone if each.owner is None]
            uids = {part.pod_uid for each in without_owner for part in checkpoint_entries_of(each, listing)}
            self._early |= {uid for uid in uids if directories.is_gone(uid) and uid not in directories.torn_down}

    def _owner(self, held: Sequence[Place], holdings: Sequence[ReportedDevices | None]) -> Owner | None:
        """Returns the container that is reported with exactly these devices, or None."""
        hardware = self._ledger.state.hardware
        each_once = {id(holding): holding for holding in holdings}.values()  # a share may have hundreds of units
        owners = {holding.owner if holding is not None else None for holding in each_once}
        shown = {(holding.resource, device) for holding in filter(None, each_once) for device in holding.devices}
        # If it also has other devices of this allocator, they must not count as free.
        has_more = any(is_recorded_here(hardware, *place) for place in shown.difference(held))
        return owners.pop() if len(owners) == 1 and not has_more else None

    def _is_contradicted(self, allocation: Allocation, poll: Poll) -> bool:
        """Whether the kubelet has contradicted an allocation in at least two polls and long enough to release it."""
        since = self._presence[allocation.id].apart_since
        return since is not None and poll.at - since >= APART_SECONDS

    def _is_settled(self, poll: Poll) -> bool:
        return poll.at >= self._settling.until and poll.listing.pods > 0

    def _is_gone(self, allocation: Allocation, poll: Poll) -> bool:
        """Whether an unreported container has been missing long enough."""
        before = self._presence[allocation.id]
        presence = self._presence[allocation.id] = before.miss(poll.at)
        kept = self.liveness.is_kept(allocation, poll.listing)
        settled = self._is_settled(poll)
        is_unread = None in (poll.listing.checkpoint, poll.listing.directories)
        patience = self._gone_seconds
        if allocation.owner is None:
            if kept:
                return False
            if not self.liveness.is_gone(allocation, poll.listing):
                patience = self._unbound_seconds
        elif self.liveness.is_waited_for(allocation, poll.listing):
            self._presence[allocation.id] = before.explain()
            return False
        elif before.is_explained and is_unread and not self.liveness.is_gone(allocation, poll.listing):
            return False
        elif presence.is_inherited and settled and not kept:
            return True
        if not settled:
            patience = max(patience, self._settle_seconds)
        return before.missing_since is not None and poll.at - before.missing_since >= patience

    def _confirm(self, poll: Poll) -> None:
        """
        Confirms the ledger if the hardware is confirmed, and the checkpoint is readable or the kubelet has settled.
        """
        if is_confirmed(self._ledger.state.health) and (poll.listing.checkpoint is not None or self._is_settled(poll)):
            self._ledger.confirm("the kubelet")
