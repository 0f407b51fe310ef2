"""Judges the health of a device from one reading."""

from topoalign.core.model.events import HEALTHY, DeviceHealth, HealthState
from topoalign.core.model.topology.model import Nic


def unhealthy(*reasons: str) -> DeviceHealth:
    """Returns the health of a device with errors, each reason once."""
    return DeviceHealth(state=HealthState.UNHEALTHY, reason="; ".join(dict.fromkeys(reasons)))


def unknown_health(reason: str) -> DeviceHealth:
    """Returns the health of a device that cannot be judged, with the reason."""
    return DeviceHealth(state=HealthState.UNKNOWN, reason=reason)


def nic_health(nic: Nic) -> DeviceHealth:
    """Judges a NIC: it needs one active port. If a port reports no state, the NIC counts as healthy."""
    states = [port.state for port in nic.ports]
    if all(states) and states and "ACTIVE" not in states:
        return unhealthy(f"no port is active: {', '.join(f'{port.number} {port.state}' for port in nic.ports)}")
    return HEALTHY
