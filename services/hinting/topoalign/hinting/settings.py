"""Settings of hinting."""

import msgspec

from topoalign.core.model.ids import NodeName


class HintingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of hinting, each from the variable `TOPOALIGN_<FIELD>`; the runner sets `node`."""

    node: NodeName
    """Name of the Kubernetes node, or of this host, about which questions are answered."""
