"""Settings of hinting."""

import msgspec

from topoalign.core.model.ids import NodeName


class HintingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`TOPOALIGN_<FIELD>` each; the runner fills in `node`."""

    node: NodeName
    """Name of the Kubernetes node, or of this host, whose questions are answered."""
