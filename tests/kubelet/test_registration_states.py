"""The registration with the kubelet, by its tables: what follows from an event in a state, and when it is asked again."""

from itertools import pairwise

import pytest

from topoalign.allocator.device_plugin.registration import (
    FIRST_LOSS_SECONDS,
    LAST_LOSS_SECONDS,
    LISTEN_SECONDS,
    NEXT_STATE,
    POLL_SECONDS,
    DeviceVisibility,
    Registration,
    RegistrationEvent,
    RegistrationState,
)
from topoalign.kubelet.grpc.unix_sockets import Identity

KUBELET, OTHER = Identity(1, 2, 3), Identity(1, 5, 6)
NOW = 1000.0


def registration(state: RegistrationState = RegistrationState.UNREGISTERED, jitter: float = 1.0) -> Registration:
    """Of a kubelet that was met, in this state since `NOW`."""
    made = Registration(lambda: jitter)
    made.meet(KUBELET, NOW)
    if state is not RegistrationState.UNREGISTERED:
        made.apply(RegistrationEvent.ACCEPTED, NOW)
    if state is RegistrationState.LISTENING:
        made.apply(RegistrationEvent.WATCHED, NOW)
    assert state is made.state
    return made


@pytest.mark.parametrize("state", RegistrationState)
@pytest.mark.parametrize("event", RegistrationEvent)
def test_only_two_events_keep_or_make_a_registration(state: RegistrationState, event: RegistrationEvent) -> None:
    """Whatever else happens ends the registration, and the kubelet is asked anew."""
    made = registration(state)
    made.apply(event, NOW)

    kept = {
        RegistrationEvent.ACCEPTED: RegistrationState.REGISTERED,
        RegistrationEvent.WATCHED: RegistrationState.LISTENING,
    }
    assert kept.get(event, RegistrationState.UNREGISTERED) is made.state


@pytest.mark.parametrize("state", [RegistrationState.REGISTERED, RegistrationState.LISTENING])
@pytest.mark.parametrize(
    ("is_open", "has_ended", "seconds", "event"),
    [
        (True, False, 0.5, RegistrationEvent.WATCHED),
        (True, False, LISTEN_SECONDS, RegistrationEvent.WATCHED),
        (False, True, 0.5, RegistrationEvent.UNWATCHED),
        (False, False, LISTEN_SECONDS - 0.5, None),
        (False, False, LISTEN_SECONDS, RegistrationEvent.UNWATCHED),
    ],
)
def test_the_stream_says_whether_the_kubelet_listens(
    state: RegistrationState, is_open: bool, has_ended: bool, seconds: float, event: RegistrationEvent | None
) -> None:
    """So many seconds after the registration a stream is received, waited for, or given up."""
    made = registration(state)

    assert event is made.listen(is_open=is_open, has_ended=has_ended, now=NOW + seconds)
    assert (state if event is None else NEXT_STATE.get(event, RegistrationState.UNREGISTERED)) is made.state


@pytest.mark.parametrize(("jitter", "share"), [(0.0, 0.5), (0.5, 0.75), (1.0, 1.0)])
def test_a_kubelet_that_refuses_is_asked_less_and_less_often(jitter: float, share: float) -> None:
    """After 1, 2, 4, 8, 16 and then every 16 seconds, of which chance takes up to a half."""
    made, waits = registration(jitter=jitter), []
    for _ in range(7):
        made.apply(RegistrationEvent.REFUSED, NOW)
        waits.append(made.ask_at - NOW)

    assert [share * wait for wait in (1, 2, 4, 8, 16, 16, 16)] == waits


def test_only_a_stream_that_goes_on_ends_the_row_of_failures() -> None:
    """A stream that was open for a moment is no success; one that is open five seconds after the registration is."""
    made, failures = registration(), []
    for seconds in (LISTEN_SECONDS - POLL_SECONDS, LISTEN_SECONDS):
        made.apply(RegistrationEvent.REFUSED, NOW)
        made.apply(RegistrationEvent.ACCEPTED, NOW)
        made.listen(is_open=True, has_ended=False, now=NOW + seconds)
        failures.append(made.failures)
        made.apply(RegistrationEvent.STOPPED, NOW + seconds)

    assert [1, 0] == failures


def test_another_kubelet_starts_without_failures_and_doubts() -> None:
    """It is noticed once, and neither the failures nor the losses of the one before count against it."""
    made = registration()
    made.apply(RegistrationEvent.REFUSED, NOW)
    assert [False, True] == [made.visibility.hide(NOW), made.visibility.hide(NOW)]
    met = [made.meet(OTHER, NOW), made.meet(OTHER, NOW)]

    assert [True, False] == met
    assert (OTHER, 0, 0, 0.0, False) == (
        made.kubelet,
        made.failures,
        made.visibility.losses,
        made.visibility.again_at,
        made.visibility.is_lost,
    )


@pytest.mark.parametrize(
    ("event", "state", "seconds"),
    [
        (RegistrationEvent.SOCKET_LOST, RegistrationState.UNREGISTERED, POLL_SECONDS),
        (RegistrationEvent.LOST, RegistrationState.LISTENING, 0.0),
    ],
)
def test_a_registration_that_we_end_is_soon_made_anew(
    event: RegistrationEvent, state: RegistrationState, seconds: float
) -> None:
    """No failure is counted for it: the kubelet did not refuse."""
    made = registration(state)
    made.apply(event, NOW)

    assert (NOW + seconds, 0) == (made.ask_at, made.failures)


VISIBLE = (False, False)
HIDDEN = (False, True)
LOST = (True, False)
LOST_AND_HIDDEN = (True, True)


@pytest.mark.parametrize(
    ("signs", "states"),
    [
        ("hide show hide show", [HIDDEN, VISIBLE, HIDDEN, VISIBLE]),  # once may be too early
        ("hide stop hide show", [HIDDEN, VISIBLE, HIDDEN, VISIBLE]),  # nor does what it showed before its stream ended
        ("hide again hide hide show", [HIDDEN, LOST, LOST_AND_HIDDEN, LOST_AND_HIDDEN, VISIBLE]),
        ("hide again stop hide later", [HIDDEN, LOST, LOST, LOST_AND_HIDDEN, LOST]),
        ("stop hide show", [VISIBLE, HIDDEN, VISIBLE]),
        ("hide again hide stop hide later", [HIDDEN, LOST, LOST_AND_HIDDEN, LOST, LOST_AND_HIDDEN, LOST]),
    ],
)
def test_a_loss_is_told_by_two_polls_in_a_row(signs: str, states: list[tuple[bool, bool]]) -> None:
    """One poll of a kubelet that shows none of the devices is not believed, and a loss ends when it shows one again."""
    visibility, found = DeviceVisibility(), []
    for word in signs.split():
        match word:
            case "show":
                visibility.show()
            case "stop":
                visibility.stop_listening()
            case _:
                again = visibility.hide(NOW + LAST_LOSS_SECONDS if word == "later" else NOW)
                assert again == (word != "hide")
        found.append((visibility.is_lost, visibility.was_hidden))

    assert states == found


def test_losses_lead_to_new_registrations_at_growing_intervals() -> None:
    """At once, then 10, 20, 40 and at last 640 seconds after the one before, while the kubelet is looked at every second."""
    registered: list[float] = []
    visibility, now = DeviceVisibility(), NOW
    while len(registered) < 10:
        if visibility.hide(now):
            registered.append(now)
        now += 1.0

    waits = [after - before for before, after in pairwise(registered)]
    assert [FIRST_LOSS_SECONDS, 20, 40, 80, 160, 320, 640, LAST_LOSS_SECONDS, LAST_LOSS_SECONDS] == waits
