"""
Commands of an operator to a node: to its discovery about devices, to its allocator about the record; and what a service
of the node reports of devices.
"""

from typing import Literal

import msgspec

from topoalign.core.model.ids import NodeName

Override = Literal["cordon", "uncordon", "heal", "report"]
"""`cordon`: not offered; `uncordon`: offered again; `heal`: trusted again; `report`: a service saw it fail."""


class DevicesRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """
    Asks discovery to cordon, uncordon or heal devices, or reports that they fail; answered with the health of each. It holds
    for all of the devices or for none, and repeating it changes nothing.
    """

    node: NodeName
    devices: tuple[str, ...]
    """Each by its id, its PCI address, `GPU3` or `NIC2`, or its index among the GPUs; a MIG instance by its uuid."""
    reason: str = ""
    """Why devices are cordoned or fail, for people who look at them later."""


class TrustRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Confirms that a damaged journal has recovered all that is held; answered with the doubt that this ends."""

    node: NodeName
