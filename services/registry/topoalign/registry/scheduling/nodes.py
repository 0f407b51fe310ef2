"""What the view of the cluster has for each node."""

from dataclasses import dataclass
from typing import Any

from topoalign.core.admission.free_amounts import Free
from topoalign.core.admission.kinds import Kind
from topoalign.core.model.ids import NodeName
from topoalign.core.model.topology.model import Topology
from topoalign.registry.scheduling.standing import UNKNOWN_NODE


@dataclass(slots=True, eq=False)
class NodeView:
    """One node as the scheduler sees it."""

    name: NodeName
    place: int
    """Its index in whatever has an entry for each node."""
    version: int = 0
    """Of the cluster, when this changed last."""
    refusal: str = UNKNOWN_NODE
    """Why it is offered to no pod; empty: it is offered."""
    kind: Kind | None = None
    """None where it is not offered, as `free`."""
    free: Free | None = None
    shape: Topology | None = None
    """Of its hardware as it was announced."""
    left: Any = None
    """What is left on it, for its score; None where that cannot be told."""
