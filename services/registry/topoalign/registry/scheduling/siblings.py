"""
What a node would be that is not there yet, by the labels that it would have: a node that an autoscaler may add.

`topoalign.io/machine` is the label of nodes that are there, or names the machine that they play, or one of the catalogue;
else nodes with the same `node.kubernetes.io/instance-type` tell. The new node is like the first of these by name: of its
hardware, and under the rules of its kubelet, with nothing allocated. Where no node is like the new one, a machine of the
catalogue has the rules of a kubelet without any configuration.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache

from topoalign.core.admission.kinds import Kind
from topoalign.core.model.events import DESCRIBED
from topoalign.core.model.requests import AdmissionRules, Mode, Policy
from topoalign.machines import catalogue
from topoalign.registry.scheduling.view import ClusterView

MACHINE = "topoalign.io/machine"
INSTANCE_TYPE = "node.kubernetes.io/instance-type"

UNCONFIGURED = AdmissionRules(mode=Mode.KUBELET, policy=Policy.NONE, cpu_manager="none", memory_manager="None")


def sibling(view: ClusterView, labels: Mapping[str, str]) -> Kind | None:
    """The kind of a new node with these labels. None: it cannot be told."""
    return next(likely(view, labels.get(MACHINE, ""), labels.get(INSTANCE_TYPE, "")), None)


def likely(view: ClusterView, machine: str, instance_type: str) -> Iterator[Kind]:
    """What it may be, the most certain first. Empty texts tell nothing."""
    if machine:
        yield from labelled(view, MACHINE, machine)
        yield from playing(view, machine)
        if machine in catalogue.names():
            alike = next(labelled(view, INSTANCE_TYPE, instance_type), None)
            yield described(machine) if alike is None else Kind(described(machine).topology, alike.rules, None)
    if instance_type:
        yield from labelled(view, INSTANCE_TYPE, instance_type)


def labelled(view: ClusterView, label: str, value: str) -> Iterator[Kind]:
    """The kinds of the offered nodes whose Kubernetes Node has this label, by name of the node."""
    for name in sorted(view.nodes):
        kind = view.nodes[name].kind
        if kind is not None and view.labels(name).get(label) == value:
            yield kind


def playing(view: ClusterView, machine: str) -> Iterator[Kind]:
    """The kinds of the offered nodes that play this described machine, by name."""
    for name in sorted(view.nodes):
        kind, announced = view.nodes[name].kind, view.facts(name).topology
        if kind is not None and announced is not None and announced.source == DESCRIBED + machine:
            yield kind


@lru_cache(maxsize=32)
def described(machine: str) -> Kind:
    """A machine of the catalogue under a kubelet without any configuration."""
    return Kind(catalogue.machine(machine), UNCONFIGURED, None)
