"""
Keeps what this process remembers between two polls of the kubelet: small values with named transitions, without I/O.

For each allocation these are where polls found it (`Presence`) and what the kubelet has reported of it (`Evidence`); for the
kubelet, how long it needs to settle (`Settling`). None of this is in the record, so a process that has just started knows
only which allocations are live.

At each poll a presence takes `show` if the kubelet reports the container, `miss` if it does not and the wait for its end
goes on, and neither if the kubelet has lost the container. `find` keeps the finding of the poll.
"""

from enum import Enum, auto
from typing import NamedTuple

from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import AllocationID

APART_SECONDS = 1.0
"""
How long, and for at least two polls, the kubelet must contradict a record before the record is released. Polls for an owner
may be 0.1 s apart.
"""

Kubelet = tuple[int, ...]
"""Identifies a run of the kubelet (`KubeletListing.kubelet`)."""


class PollFinding(Enum):
    """The result of a poll for one allocation."""

    NOTHING = auto()
    """It is not judged, for example because it was granted after the poll."""
    SHOWN = auto()
    """Its devices are reported with one owner."""
    APART = auto()
    """
    Its devices are reported with several owners, some with none, or together with others; or it has no owner, and the
    checkpoint has some of its devices. If this lasts, it contradicts the record.
    """
    FORGOTTEN = auto()
    """The kubelet has lost its container, which runs."""
    MISSING = auto()
    """The kubelet does not report it."""


class Presence(NamedTuple):
    """The results of the polls for one allocation so far."""

    is_inherited: bool = False
    """Live at the start of this process, and not reported since: if it has ended, it ended while no allocator ran."""
    missing_since: float | None = None
    """Monotonic seconds of the first poll at which it was missing; None: it is not missing."""
    finding: PollFinding = PollFinding.NOTHING
    """What the last poll found."""
    apart_since: float | None = None
    """Monotonic seconds of the first of the last polls that found it APART; None: the last did not."""
    is_explained: bool = False
    """A poll has shown why it is not reported although it may run. A poll that can read less does not change that."""

    def show(self) -> "Presence":
        """The presence after the kubelet has reported the allocation."""
        return Presence(finding=self.finding, apart_since=self.apart_since)

    def miss(self, at: float) -> "Presence":
        """The presence after a poll of monotonic second `at` that misses it; the wait runs from the first such poll."""
        return self if self.missing_since is not None else self._replace(missing_since=at)

    def explain(self) -> "Presence":
        """
        The presence if it may run unreported, because the kubelet has lost it or waits for its pod: it is not missing
        yet.
        """
        return self._replace(missing_since=None, is_explained=True)

    def restart_wait(self) -> "Presence":
        """The presence after a restart of the kubelet: what the former run did not report does not count."""
        return self._replace(missing_since=None)

    def find(self, finding: PollFinding, at: float) -> "Presence":
        """The presence with this as the finding of the last poll, of monotonic second `at`."""
        since = at if self.apart_since is None else self.apart_since
        return self._replace(finding=finding, apart_since=since if finding is PollFinding.APART else None)

    def is_contradicted(self, at: float, seconds: float) -> bool:
        """Whether a poll of monotonic second `at` finds it APART, and those before it did for so many `seconds`."""
        return self.apart_since is not None and at - self.apart_since >= seconds


class Grant(NamedTuple):
    """The moment at which an allocation was granted."""

    written: tuple[int, ...]
    """The version of the checkpoint at the kubelet's call."""
    at: float
    """Monotonic seconds."""


class Rest(NamedTuple):
    """The remainder of an allocation that was replaced by others."""

    allocation: Allocation
    former: AllocationID
    """The replaced allocation."""


class Evidence(NamedTuple):
    """What runs of the kubelet have reported or written of one allocation."""

    reported_by: Kubelet | None = None
    """The kubelet that reported it last."""
    written_by: Kubelet | None = None
    """The kubelet that last wrote an entry of the allocation's pod with a device of it."""
    grant: Grant | None = None
    """None: it is older than this process."""

    def show(self, kubelet: Kubelet) -> "Evidence":
        """The evidence after this kubelet has reported the allocation."""
        return self._replace(reported_by=kubelet)

    def write(self, kubelet: Kubelet) -> "Evidence":
        """The evidence after this kubelet has written an entry for the allocation's pod with a device of it."""
        return self._replace(written_by=kubelet)

    def give(self, grant: Grant) -> "Evidence":
        """The evidence of an allocation that was granted at this moment."""
        return self._replace(grant=grant)

    def inherit(self, former: "Evidence") -> "Evidence":
        """The evidence of the remainder of a former allocation: the former evidence applies to it, too."""
        return self._replace(
            reported_by=former.reported_by or self.reported_by, written_by=former.written_by or self.written_by
        )


class Settling(NamedTuple):
    """Whether the kubelet has settled: a kubelet that has just started lists fewer pods than run."""

    kubelet: Kubelet | None = None
    """None: none has answered yet."""
    until: float = 0.0
    """Monotonic seconds until which it settles."""
    is_boot_known: bool = False
    """Whether there was a poll with known hardware, and so a known boot."""

    def meet(self, kubelet: Kubelet, at: float, seconds: float, age: float, *, rebooted: bool) -> "Settling":
        """
        The settling after a kubelet has answered at monotonic second `at`, which needs `seconds` from its start to settle.

        By the wall clock it is `age` seconds old, which counts only for the first kubelet, and not after a reboot. Example:
        with `seconds` 120, the first kubelet of age 100 settles until `at + 20`, any other one until `at + 120`.
        """
        if kubelet == self.kubelet and not rebooted:
            return self
        is_new = self.kubelet is not None or rebooted
        return self._replace(kubelet=kubelet, until=at + max(0.0, seconds - (0.0 if is_new else max(0.0, age))))

    def know_boot(self, known: bool) -> "Settling":
        """The settling after a poll at which the hardware, and with it the boot, was `known` or not."""
        return self._replace(is_boot_known=self.is_boot_known or known)
