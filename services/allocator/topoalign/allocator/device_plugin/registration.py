"""
The registration of a resource with the kubelet, as a state machine. It does no I/O and takes the time as an argument.

An event has the same effect in each state: `NEXT_STATE` defines the next state; `apply` updates counters and deadlines.

A kubelet can lose the devices although its stream is open. So the devices that it shows as allocatable are checked
separately (`DeviceVisibility`). The first loss leads to a new registration immediately. Later losses lead to one at
least 10, 20, 40 ... 640 s after the previous registration.
"""

from collections.abc import Callable, Mapping
from enum import Enum, auto

from topoalign.kubelet.grpc.unix_sockets import Identity
from topoalign.runtime.clock import backoff_seconds

POLL_SECONDS = 0.5
"""Poll interval of the sockets. A restarted kubelet gets its resources back within a second."""

QUIET_SECONDS = 10.0
"""Poll interval while the kubelet's stream is open and changes in the directory are reported."""

SETTLE_SECONDS = 0.02
"""Delay from a change in the directory to the poll. Changes come in groups, and a socket exists before it is served."""

LISTEN_SECONDS = 5.0
"""Maximum time from a registration to the kubelet's ListAndWatch stream. Afterwards the plugin registers again."""

FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 16.0
"""Longest time between two registrations, doubled each time, if the kubelet refuses or ends its stream early."""

FIRST_LOSS_SECONDS = 10.0
LAST_LOSS_SECONDS = 640.0
"""Longest time between two registrations, doubled each time, if the stream is open and the kubelet shows no device."""

Jitter = Callable[[], float]
"""A number from 0 to 1."""


class RegistrationState(Enum):
    """The state of the registration."""

    UNREGISTERED = auto()
    """Not registered. The next registration is at `ask_at`."""
    REGISTERED = auto()
    """The kubelet has accepted the registration, and must open its stream before `listen_by`."""
    LISTENING = auto()
    """The kubelet's stream was open at the last poll."""


class RegistrationEvent(Enum):
    """An event that affects the registration."""

    KUBELET_AWAY = auto()
    """The kubelet's socket does not exist."""
    KUBELET_CHANGED = auto()
    """The socket is served by another kubelet than at the last registration."""
    ACCEPTED = auto()
    """The kubelet has registered the resource."""
    REFUSED = auto()
    """The kubelet refused the registration, or did not answer."""
    WATCHED = auto()
    """The kubelet's stream is open. If it is open `LISTEN_SECONDS` after the registration, the failure count resets."""
    UNWATCHED = auto()
    """The kubelet's stream has ended, or was not opened in time. The kubelet does not open another by itself."""
    LOST = auto()
    """The stream is open, but the kubelet has lost the devices, or has outdated options."""
    SOCKET_LOST = auto()
    """The plugin's socket was deleted and is closed. The old stream must end before a new registration."""
    STOPPED = auto()
    """The plugin's socket was closed."""


NEXT_STATE: Mapping[RegistrationEvent, RegistrationState] = {
    RegistrationEvent.ACCEPTED: RegistrationState.REGISTERED,
    RegistrationEvent.WATCHED: RegistrationState.LISTENING,
}
"""The state after an event. After any other event the resource is UNREGISTERED."""


class DeviceVisibility:
    """
    Determines whether the kubelet has lost the devices of the resource, from the devices that it shows as allocatable.

    If it shows none at one poll, it may not have read the list. If it shows none at two polls in a row, they are lost.
    """

    def __init__(self) -> None:
        self.is_lost = False
        """Whether the kubelet is assumed to have lost the devices. The plugin may have registered again since."""
        self.was_hidden = False
        """Whether the kubelet showed none of the devices at the last poll. Reset if this led to a new registration."""
        self.losses = 0
        """Number of losses since the kubelet last showed a device."""
        self.again_at = 0.0
        """Monotonic time, in seconds, before which a loss does not lead to a registration."""

    def show(self) -> None:
        """Records that the kubelet shows some of the devices, or that none of them is healthy."""
        self.is_lost = self.was_hidden = False
        self.losses = 0

    def hide(self, now: float) -> bool:
        """Records that the kubelet shows none of the devices at `now`. Returns whether to register again."""
        again = self.was_hidden and now >= self.again_at
        self.is_lost = self.is_lost or self.was_hidden
        self.was_hidden = not again
        if again:
            self.losses += 1
            self.again_at = now + backoff_seconds(self.losses, FIRST_LOSS_SECONDS, LAST_LOSS_SECONDS)
        return again

    def stop_listening(self) -> None:
        """Records that the kubelet's stream is not open, so that the devices that it shows prove nothing."""
        self.was_hidden = False


class Registration:
    """Tracks the registration of one resource: its state, its failures, and the time of the next attempt."""

    def __init__(self, jitter: Jitter) -> None:
        self.state = RegistrationState.UNREGISTERED
        self.kubelet: Identity | None = None
        """The kubelet of the last registration."""
        self.visibility = DeviceVisibility()
        self.failures = 0
        """Number of consecutive failed registrations: refused, or the stream did not stay open."""
        self.ask_at = 0.0
        """Monotonic time, in seconds, of the next registration with `kubelet`."""
        self.listen_by = 0.0
        """Monotonic time, in seconds, by which the kubelet must open its stream."""
        self._success_at = 0.0
        self._jitter = jitter

    @property
    def is_registered(self) -> bool:
        """Whether the kubelet has accepted the registration, and is not known to have dropped it."""
        return self.state is not RegistrationState.UNREGISTERED

    def meet(self, kubelet: Identity, now: float) -> bool:
        """Records the kubelet that serves the socket. Returns whether it has changed."""
        if kubelet == self.kubelet:
            return False
        self.kubelet = kubelet
        self.apply(RegistrationEvent.KUBELET_CHANGED, now)
        return True

    def listen(self, *, is_open: bool, has_ended: bool, now: float) -> RegistrationEvent | None:
        """The event for the current state of the kubelet's stream; None: the kubelet can still open it."""
        if is_open:
            event = RegistrationEvent.WATCHED
        elif has_ended or now >= self.listen_by:
            event = RegistrationEvent.UNWATCHED
        else:
            return None
        self.apply(event, now)
        return event

    def apply(self, event: RegistrationEvent, now: float) -> None:
        """Changes to the next state for an event at monotonic time `now`, and updates counters and deadlines."""
        self.state = NEXT_STATE.get(event, RegistrationState.UNREGISTERED)
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
