"""The health of a device from one reading."""

from topoalign.core.model.events import DeviceHealth, HealthState
from topoalign.core.model.topology.model import Nic

HEALTHY = DeviceHealth(state=HealthState.HEALTHY)


def unhealthy(*reasons: str) -> DeviceHealth:
    """The health of a device with errors; a reason that is given twice is said once."""
    return DeviceHealth(state=HealthState.UNHEALTHY, reason="; ".join(dict.fromkeys(reasons)))


def unknown_health(reason: str) -> DeviceHealth:
    """The health of a device that cannot be judged, with the reason."""
    return DeviceHealth(state=HealthState.UNKNOWN, reason=reason)


def nic_health(nic: Nic) -> DeviceHealth:
    """A NIC needs one port that is active; one whose ports do not say is trusted."""
    states = [port.state for port in nic.ports]
    if all(states) and states and "ACTIVE" not in states:
        return unhealthy(f"no port is active: {', '.join(f'{port.number} {port.state}' for port in nic.ports)}")
    return HEALTHY
