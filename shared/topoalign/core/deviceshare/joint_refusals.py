"""The errors of joint allocation: a status and reasons as in Koordinator's pod events, and topoalign's own message."""

from enum import StrEnum

from topoalign.core.deviceshare.koordinator_names import DeviceType
from topoalign.core.model.errors import InvalidField, NoFit, clean


class FrameworkStatus(StrEnum):
    """Status codes of the Kubernetes scheduling framework."""

    UNSCHEDULABLE = "Unschedulable"
    """The pod can fit after other pods end."""
    UNRESOLVABLE = "UnschedulableAndUnresolvable"
    """The pod does not fit, whatever other pods release."""


class InvalidShareRequest(InvalidField):
    """Raised when an annotation or a combination of requested resources is invalid on every node."""

    code = "InvalidField"

    status = FrameworkStatus.UNRESOLVABLE

    def __init__(self, field: str, reason: str, remedy: str) -> None:
        self.reasons = (reason,)
        super().__init__(field, clean(reason, 400), remedy)


class DevicesDoNotFit(NoFit):
    """
    Raised when no free devices match the pod's device annotations.

    Remedy: Ask for less, change the device annotations, or wait until pods end.
    """

    def __init__(self, reason: str, status: FrameworkStatus = FrameworkStatus.UNSCHEDULABLE, more: str = "") -> None:
        self.status = status
        self.reasons = (reason,)
        super().__init__(
            f"{reason}{more}",
            "ask for less or ease the pod's device annotations; where others hold the devices, wait until some are released"
            if status is FrameworkStatus.UNSCHEDULABLE
            else "ask for what this node has (`topoalign topo --wide`), or another node",
        )


class SharesNeedUnits(NoFit):
    """
    Raised when a part of a GPU is asked for, and no GPU is offered in units.

    Remedy: Offer GPUs in units (`sharing.units`), or ask for whole ones.
    """

    def __init__(self) -> None:
        super().__init__(
            "a part of a GPU is asked for, which is so many of its units, and this node offers no GPU in units",
            "offer GPUs in units (sharing.units in the configuration of the node), or ask for whole GPUs: nvidia.com/gpu or "
            "koordinator.sh/gpu in multiples of 100",
        )


def refuse_too_few(kind: DeviceType) -> DevicesDoNotFit:
    """The error for too few free devices of a type. It can resolve when other pods end."""
    return DevicesDoNotFit(f"Insufficient {kind} devices")


def refuse_missing_type(kind: DeviceType, what: str = "devices") -> DevicesDoNotFit:
    """The error for a device type that the node does not have."""
    return DevicesDoNotFit(f"Insufficient {kind} {what}", FrameworkStatus.UNRESOLVABLE)


def refuse_same_pcie() -> DevicesDoNotFit:
    """The error for `SamePCIe` without enough free devices below the same PCIe scopes."""
    return DevicesDoNotFit(
        "node(s) Device Joint-Allocate rules violation",
        more=": SamePCIe asks for devices side by side that are not free",
    )
