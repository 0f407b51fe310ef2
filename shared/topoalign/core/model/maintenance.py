"""Commands to a node's discovery about its devices, from operators and its services that report failing devices."""

from typing import Literal

import msgspec

from topoalign.core.model.ids import NodeName

Override = Literal["cordon", "uncordon", "heal", "report"]
"""
`cordon`: do not allocate the device; `uncordon`: allocate it again; `heal`: treat it as healthy again; `report`: a
service found that it fails.
"""


class DevicesRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """
    Asks discovery to cordon, uncordon or heal devices, or reports that they fail. The answer is the health of each. The
    request applies to all of the devices or to none, and may be repeated.
    """

    node: NodeName
    devices: tuple[str, ...]
    """Ids, PCI addresses, names such as `GPU3` or `NIC2`, or GPU indexes. MIG instances only by uuid."""
    reason: str = ""
    """Why the devices are cordoned or fail, for people."""
