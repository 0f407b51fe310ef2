"""What the reconciliation remembers between two polls, by its transitions."""

from collections.abc import Callable

import pytest

from topoalign.allocator.reconciliation.liveness import Grant, LivenessCheck, Rest
from topoalign.allocator.reconciliation.reconciliation import PollFinding, Presence, Settling
from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import GPU, AllocationID, DeviceID

OLD, NEW = (1, 1), (2, 2)
GRANT = Grant(written=(7,), at=3.0)


@pytest.mark.parametrize(
    ("before", "transition", "after"),
    [
        (Presence(), lambda it: it.miss(5.0), Presence(missing_since=5.0)),
        (Presence(missing_since=5.0), lambda it: it.miss(9.0), Presence(missing_since=5.0)),
        (Presence(is_inherited=True), lambda it: it.miss(0.0), Presence(is_inherited=True, missing_since=0.0)),
        (Presence(missing_since=0.0), lambda it: it.miss(9.0), Presence(missing_since=0.0)),
        (Presence(is_inherited=True, missing_since=5.0), Presence.show, Presence()),
        (Presence(apart_since=4.0), Presence.show, Presence(apart_since=4.0)),
        (Presence(finding=PollFinding.APART), Presence.show, Presence(finding=PollFinding.APART)),
        (Presence(), lambda it: it.find(PollFinding.APART, 7.0), Presence(finding=PollFinding.APART, apart_since=7.0)),
        (Presence(apart_since=4.0), lambda it: it.find(PollFinding.SHOWN, 7.0), Presence(finding=PollFinding.SHOWN)),
        (Presence(is_inherited=True, missing_since=5.0), Presence.restart_wait, Presence(is_inherited=True)),
        (
            Presence(missing_since=5.0, finding=PollFinding.MISSING),
            lambda it: it.find(PollFinding.FORGOTTEN, 7.0),
            Presence(missing_since=5.0, finding=PollFinding.FORGOTTEN),
        ),
    ],
)
def test_a_presence_changes_as_polls_find_it(
    before: Presence, transition: Callable[[Presence], Presence], after: Presence
) -> None:
    """The wait for an end runs from the first poll that misses it, until it is shown or another kubelet answers."""
    assert after == transition(before)


def test_reports_of_a_kubelet_outlive_a_grant_and_go_to_a_remainder() -> None:
    """What the kubelet reports and when it was granted is kept apart; a remainder keeps its own grant."""
    liveness = LivenessCheck()
    whole, rest = (Allocation(id=AllocationID(name), devices={GPU: (DeviceID("GPU-0"),)}) for name in ("1-1", "1-2"))
    liveness.shown(whole.id, OLD)
    liveness.granted([whole], [whole], GRANT)
    liveness.granted([rest], [rest], GRANT._replace(at=5.0))
    liveness.inherit([Rest(rest, whole.id)])

    assert [True, True] == [liveness.was_reported(each.id, OLD) for each in (whole, rest)]

    liveness.inherit([Rest(rest, AllocationID("1-0"))])  # of which nothing is known
    liveness.shown(whole.id, NEW)

    assert [False, True] == [liveness.was_reported(each.id, OLD) for each in (whole, rest)]


@pytest.mark.parametrize(
    ("before", "kubelet", "age", "rebooted", "until"),
    [
        (Settling(), OLD, 4.0, False, 126.0),  # the first one, of which the wall clock tells the age
        (Settling(), OLD, 500.0, False, 100.0),  # it has settled long ago
        (Settling(), OLD, -50.0, False, 130.0),  # its start is in the future: the wall clock was set
        (Settling(), OLD, 4.0, True, 130.0),  # after a reboot the wall clock is not believed
        (Settling(kubelet=OLD, until=60.0), NEW, 500.0, False, 130.0),  # one that was seen to start
        (Settling(kubelet=OLD, until=60.0), OLD, 500.0, False, 60.0),  # the same one
        (Settling(kubelet=OLD, until=60.0), OLD, 500.0, True, 130.0),
    ],
)
def test_a_new_kubelet_has_time_to_settle(
    before: Settling, kubelet: tuple[int, ...], age: float, rebooted: bool, until: float
) -> None:
    """At second 100, with 30 seconds to settle: from its start as far as that is known, else from now."""
    assert Settling(kubelet=kubelet, until=until) == before.meet(kubelet, 100.0, 30.0, age, rebooted=rebooted)


def test_a_known_boot_stays_known() -> None:
    """Once the hardware was known at a poll, the boot is known, whatever later polls know."""
    settling = Settling()
    known = [(settling := settling.know_boot(each)).is_boot_known for each in (False, True, False)]

    assert [False, True, True] == known
