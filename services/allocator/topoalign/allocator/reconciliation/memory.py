"""
What this process remembers between two polls of the kubelet: small values with named transitions, without I/O.

Of each allocation it remembers where it was found (`Presence`) and what the kubelet has told of it (`Evidence`); of the
kubelet, how long it needs to settle (`Settling`). None of it is in the record: a process that starts anew knows nothing of
this but which allocations are live.

A presence goes one way at each poll: `show` where the kubelet shows the container, `miss` where it does not and the wait for
its end goes on, or neither where the kubelet has lost the container. What the poll found is kept by `find`.
"""

from enum import Enum, auto
from typing import NamedTuple

from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import AllocationID

APART_SECONDS = 1.0
"""
For so long, and for two polls, the kubelet shows something else than a record before that makes way. Polls for an owner may
be 0.1 s apart.
"""

Kubelet = tuple[int, ...]
"""Tells one run of the kubelet from another (`Listing.kubelet`)."""


class PollFinding(Enum):
    """What a poll finds of an allocation."""

    NOTHING = auto()
    """It is not judged, as when it was granted since the kubelet was asked."""
    SHOWN = auto()
    """Its devices are shown with one owner."""
    APART = auto()
    """
    Its devices are shown with several owners, some with none, or with others; or it has no owner, and the checkpoint has
    some of its devices. For a while that contradicts the record.
    """
    FORGOTTEN = auto()
    """The kubelet has lost its container, which runs."""
    MISSING = auto()
    """The kubelet does not show it."""


class Presence(NamedTuple):
    """What the polls have found of one allocation so far."""

    is_inherited: bool = False
    """Live at our start, and not shown since: should it have ended, then while no allocator ran."""
    missing_since: float | None = None
    """Monotonic seconds of the first poll at which it was missing; None: it is not missing."""
    finding: PollFinding = PollFinding.NOTHING
    """What the last poll found."""
    apart_since: float | None = None
    """Monotonic seconds of the first of the last polls that found it APART; None: the last did not."""
    is_explained: bool = False
    """A poll has told why it is not shown although it may run. One at which less can be read does not change that."""

    def show(self) -> "Presence":
        """The presence after the kubelet has shown the allocation, or named it as held."""
        return Presence(finding=self.finding, apart_since=self.apart_since)

    def miss(self, at: float) -> "Presence":
        """The presence after a poll of monotonic second `at` that misses it; the wait runs from the first such poll."""
        return self if self.missing_since is not None else self._replace(missing_since=at)

    def explain(self) -> "Presence":
        """The presence where it may run unshown, as the kubelet has lost it or waits for its pod: it is not missing yet."""
        return self._replace(missing_since=None, is_explained=True)

    def await_anew(self) -> "Presence":
        """The presence after a change of the kubelet: what the former one did not show means nothing."""
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
    """The version of the checkpoint when the kubelet asked for it."""
    at: float
    """Monotonic seconds."""


class Rest(NamedTuple):
    """What is left of an allocation that was replaced by others."""

    allocation: Allocation
    former: AllocationID
    """What it is left of."""


class Evidence(NamedTuple):
    """What runs of the kubelet have shown or written of one allocation."""

    shown_by: Kubelet | None = None
    """The kubelet that showed it last."""
    written_by: Kubelet | None = None
    """The kubelet that wrote last that the allocation's pod has something of it."""
    grant: Grant | None = None
    """None: it was there before this process."""

    def show(self, kubelet: Kubelet) -> "Evidence":
        """The evidence after this kubelet has shown the allocation."""
        return self._replace(shown_by=kubelet)

    def write(self, kubelet: Kubelet) -> "Evidence":
        """The evidence after this kubelet has written an entry for the allocation's pod with a device of it."""
        return self._replace(written_by=kubelet)

    def give(self, grant: Grant) -> "Evidence":
        """The evidence of an allocation that was granted at this moment."""
        return self._replace(grant=grant)

    def inherit(self, former: "Evidence") -> "Evidence":
        """The evidence of what is left of a former allocation: what is known of that holds for it, too."""
        return self._replace(shown_by=former.shown_by or self.shown_by, written_by=former.written_by or self.written_by)


class Settling(NamedTuple):
    """How far the kubelet that answers has come: one that has just started lists fewer pods than run."""

    kubelet: Kubelet | None = None
    """None: none has answered yet."""
    until: float = 0.0
    """Monotonic seconds until which it settles."""
    is_boot_known: bool = False
    """Whether there was a poll since the hardware is known, and with it the boot."""

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
