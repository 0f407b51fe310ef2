"""Groups nodes into kinds: what a pod needs on one node of a kind, it needs on all of them."""

from dataclasses import dataclass

from topoalign.core.admission.feasibility import machine_key, order_free_digest
from topoalign.core.admission.prediction import PredictionBasis
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.derived_tables import computed_once
from topoalign.core.model.topology.model import Topology


@dataclass(frozen=True, eq=False)
class NodeKind:
    """What nodes have in common that differ in nothing but the ids of their devices and in what is free."""

    topology: Topology
    """Of one of them, with the devices of other plugins."""
    rules: AdmissionRules
    """Those of the kubelet."""
    registered: frozenset[ResourceName] | None
    """As in `PredictionBasis`."""


def kind_key(basis: PredictionBasis) -> object:
    """Equal for nodes of one kind."""
    hardware = basis.state.hardware
    machine = key_of_shape(hardware.shape) if hardware.shape is not hardware else machine_key(hardware)
    return machine, order_free_digest((basis.rules,)), basis.registered


key_of_shape = computed_once(machine_key)
"""`machine_key` of what many nodes share."""
