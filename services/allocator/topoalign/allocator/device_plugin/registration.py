"""
The registration of one resource with the kubelet, as a state with a table of transitions. No I/O: the time is an argument.

The rule: whatever happens to the registration is a `RegistrationEvent`, and `TRANSITIONS` has the next state for it in
each state. An event that is not in the table of a state cannot happen there. What an event does to the counters and
deadlines depends on the event alone (`Registration.apply`).

A kubelet with an open stream may still have lost the devices. This is checked independently of the registration, by what
the kubelet shows as allocatable (`DeviceVisibility`). Each loss leads to a new registration, at once, then at least
10, 20, 40 ... 640 s after the previous one.
"""

from collections.abc import Callable, Mapping
from enum import Enum, auto

from topoalign.kubelet.grpc.unix_sockets import Identity
from topoalign.runtime.clock import backoff_seconds

POLL_SECONDS = 0.5
"""Between two polls of the sockets. A kubelet that restarts has its resources back within a second."""

QUIET_SECONDS = 10.0
"""The same while the kubelet's stream is open, in a directory whose changes are reported."""

SETTLE_SECONDS = 0.02
"""After a change in the directory, before it is polled: changes come together, and a socket is made before it is served."""

LISTEN_SECONDS = 5.0
"""How long a kubelet may have no ListAndWatch stream after a registration before the plugin registers again."""

FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 16.0
"""Between two registrations with a kubelet that refuses, or that ends its stream early; doubled each time."""

FIRST_LOSS_SECONDS = 10.0
LAST_LOSS_SECONDS = 640.0
"""Between two registrations with a kubelet whose stream is open and that shows no device; doubled each time."""

Jitter = Callable[[], float]
"""A number from 0 to 1."""


class RegistrationState(Enum):
    """What the kubelet knows of the resource."""

    UNREGISTERED = auto()
    """Nothing: it is asked to register the resource when `ask_at` has come."""
    REGISTERED = auto()
    """It has accepted the registration, and is to open its stream until `listen_by`."""
    LISTENING = auto()
    """Its stream was open at the last poll."""


class RegistrationEvent(Enum):
    """What may happen to the registration."""

    KUBELET_AWAY = auto()
    """The kubelet's socket is not there."""
    KUBELET_CHANGED = auto()
    """Another kubelet serves the socket than the one that was asked last."""
    ACCEPTED = auto()
    """The kubelet has registered the resource."""
    REFUSED = auto()
    """It refused to, or did not answer."""
    WATCHED = auto()
    """Its stream is open. Only if it still is `LISTEN_SECONDS` after the registration, that was a success."""
    UNWATCHED = auto()
    """Its stream has ended, or was not opened in time: it will not connect again by itself."""
    LOST = auto()
    """Its stream is open and it has lost the devices, or the options that it received are outdated."""
    SOCKET_LOST = auto()
    """The plugin's socket was missing and is closed: the kubelet must see its stream end before a new registration."""
    STOPPED = auto()
    """The plugin's socket was closed."""


S = RegistrationState
E = RegistrationEvent
WHILE_REGISTERED = {
    E.KUBELET_AWAY: S.UNREGISTERED,
    E.KUBELET_CHANGED: S.UNREGISTERED,
    E.WATCHED: S.LISTENING,
    E.UNWATCHED: S.UNREGISTERED,
    E.LOST: S.UNREGISTERED,
    E.STOPPED: S.UNREGISTERED,
}
TRANSITIONS: Mapping[RegistrationState, Mapping[RegistrationEvent, RegistrationState]] = {
    S.UNREGISTERED: {
        E.KUBELET_AWAY: S.UNREGISTERED,
        E.KUBELET_CHANGED: S.UNREGISTERED,
        E.ACCEPTED: S.REGISTERED,
        E.REFUSED: S.UNREGISTERED,
        E.SOCKET_LOST: S.UNREGISTERED,
        E.STOPPED: S.UNREGISTERED,
    },
    S.REGISTERED: WHILE_REGISTERED,
    S.LISTENING: WHILE_REGISTERED,
}


class DeviceVisibility:
    """
    Decides from what the kubelet shows as allocatable whether it still has the devices of the resource.

    No device at one poll may mean that the kubelet has not read a list yet; none at two polls in a row is a loss.
    """

    def __init__(self) -> None:
        self.is_lost = False
        """Whether the kubelet is assumed to have lost the devices. The plugin may have registered again since."""
        self.was_hidden = False
        """Whether the kubelet showed none of them at the last poll. False after a registration for that reason."""
        self.losses = 0
        """In a row, since the kubelet last showed a device."""
        self.again_at = 0.0
        """Monotonic seconds before which a loss is no reason to register again."""

    def show(self) -> None:
        """The kubelet shows some of the devices, or none of them is healthy."""
        self.is_lost = self.was_hidden = False
        self.losses = 0

    def hide(self, now: float) -> bool:
        """The kubelet shows none of them at monotonic second `now`. Returns whether the plugin registers again."""
        again = self.was_hidden and now >= self.again_at
        self.is_lost = self.is_lost or self.was_hidden
        self.was_hidden = not again
        if again:
            self.losses += 1
            self.again_at = now + backoff_seconds(self.losses, FIRST_LOSS_SECONDS, LAST_LOSS_SECONDS)
        return again

    def stop_listening(self) -> None:
        """The kubelet's stream is not open: what it shows, and showed at the last poll, proves nothing."""
        self.was_hidden = False


class Registration:
    """Tracks the registration of one resource: its state, its failures, and when the kubelet is asked next."""

    def __init__(self, jitter: Jitter) -> None:
        self.state = RegistrationState.UNREGISTERED
        self.kubelet: Identity | None = None
        """The one that was asked last."""
        self.visibility = DeviceVisibility()
        self.failures = 0
        """Registrations in a row that were refused, or after which the kubelet did not go on listening."""
        self.ask_at = 0.0
        """Monotonic seconds before which `kubelet` is not asked again."""
        self.listen_by = 0.0
        """Monotonic seconds until which a kubelet that has registered the resource need not have a stream."""
        self._success_at = 0.0
        self._jitter = jitter

    @property
    def is_registered(self) -> bool:
        """Whether the kubelet has accepted the registration and has not been seen to drop it."""
        return self.state is not RegistrationState.UNREGISTERED

    def meet(self, kubelet: Identity, now: float) -> bool:
        """Notes the kubelet that serves the socket. Returns whether it is another one than before."""
        if kubelet == self.kubelet:
            return False
        self.kubelet = kubelet
        self.apply(RegistrationEvent.KUBELET_CHANGED, now)
        return True

    def listen(self, *, is_open: bool, has_ended: bool, now: float) -> RegistrationEvent | None:
        """What follows from the kubelet's stream as it is now; None: it is still waited for."""
        if is_open:
            event = RegistrationEvent.WATCHED
        elif has_ended or now >= self.listen_by:
            event = RegistrationEvent.UNWATCHED
        else:
            return None
        self.apply(event, now)
        return event

    def apply(self, event: RegistrationEvent, now: float) -> None:
        """
        Moves to the state that follows from an event at monotonic second `now`, and sets counters and deadlines. Raises
        KeyError for an event that cannot happen in this state: a defect of the caller.
        """
        self.state = TRANSITIONS[self.state][event]
        match event:
            case RegistrationEvent.KUBELET_CHANGED:
                self.failures = 0
                self.visibility = DeviceVisibility()
            case RegistrationEvent.ACCEPTED:
                self._success_at = self.listen_by = now + LISTEN_SECONDS
            case RegistrationEvent.REFUSED | RegistrationEvent.UNWATCHED:
                self.failures += 1
                wait = backoff_seconds(self.failures, FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS)
                self.ask_at = now + wait * (0.5 + self._jitter() / 2)
            case RegistrationEvent.WATCHED:
                self.listen_by = now + LISTEN_SECONDS
                if now >= self._success_at:
                    self.failures = 0
            case RegistrationEvent.LOST:
                self.ask_at = now
            case RegistrationEvent.SOCKET_LOST:
                self.ask_at = now + POLL_SECONDS
