"""How a device is, given what is told of it and of the card that it is a part of."""

from collections.abc import Sequence

import msgspec

from topoalign.core.events import DeviceHealth, HealthState

UNKNOWN = DeviceHealth(state=HealthState.UNKNOWN, reason="not judged yet")

BLOCKED = DeviceHealth(
    state=HealthState.UNHEALTHY, reason="held by an allocation from before it was divided as it is offered now"
)


BADNESS = (HealthState.HEALTHY, HealthState.UNKNOWN, HealthState.UNHEALTHY)


def worst(healths: Sequence[DeviceHealth]) -> DeviceHealth:
    """Of a part and of its card: the worse state with its reason; cordoned if either is."""
    found = max(reversed(healths), key=lambda health: (BADNESS.index(health.state), bool(health.reason)))
    cordoned = any(health.cordoned for health in healths)
    return found if found.cordoned == cordoned else msgspec.structs.replace(found, cordoned=cordoned)
