"""What the view of the cluster has for each node, and what many nodes have in common."""

from dataclasses import dataclass
from typing import Any

from topoalign.core.admission.feasibility import digest, machine_key
from topoalign.core.admission.free_amounts import Free
from topoalign.core.admission.prediction import PredictionBasis
from topoalign.core.model.ids import NodeName, ResourceName
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.views import made_once
from topoalign.registry.scheduling.standing import UNKNOWN_NODE


@dataclass(frozen=True, eq=False)
class Kind:
    """What nodes have in common that differ in nothing but the ids of their devices and in what is free."""

    topology: Topology
    """Of one of them, with the devices of other plugins."""
    rules: AdmissionRules
    """Those of the kubelet."""
    registered: frozenset[ResourceName] | None
    """As in `PredictionBasis`."""


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


def kind_key(basis: PredictionBasis) -> object:
    """Equal for nodes of one kind."""
    hardware = basis.state.hardware
    machine = key_of_shape(hardware.shape) if hardware.shape is not hardware else machine_key(hardware)
    return machine, digest((basis.rules,)), basis.registered


key_of_shape = made_once(machine_key)
"""`machine_key` of what many nodes share."""
