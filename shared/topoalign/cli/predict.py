"""
A prediction without any service: the decision of the kubelet of a described machine.

The rules come from the kubelet's configuration, the held resources from its root directory, and the offered resources
from the plugin configuration. Without a kubelet configuration, the rules are topoalign's own. Without a root directory,
nothing is held. Without a plugin configuration, the machine description's offers apply: whole devices by default.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from topoalign.core.admission.kubelet_devices import explain_unavailable_resources
from topoalign.core.admission.resolvability import explain_decision
from topoalign.core.demand.device_lists import list_notes
from topoalign.core.demand.pod_demand import pod_demand
from topoalign.core.demand.pod_validation import validate_pod
from topoalign.core.demand.shares import unit_resource_names
from topoalign.core.demand.unserved import unserved_names
from topoalign.core.model.decisions import Decision, with_notes, with_unserved
from topoalign.core.model.events import HEALTHY
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import AdmissionRules, Mode, PodRequest, RuleChanges, override_rules
from topoalign.core.model.topology.model import Topology
from topoalign.core.sharing.pod_checks import offers_of_machines
from topoalign.core.sharing.slot_defaults import slot_defaults, with_defaults
from topoalign.core.state.fold import NodeState, initial_state
from topoalign.core.state.share_amounts import held_by_slot
from topoalign.kubelet.files import kubelet_configuration
from topoalign.kubelet.files.node_state import KubeletNode, node_state, unsettled_reason
from topoalign.machines import Machine, load_machine
from topoalign.plugin_config.configuration import PluginFlags
from topoalign.plugin_config.file import load_plugin_config
from topoalign.plugin_config.resource_offers import offer_resources


def fill_in_defaults(pod: PodRequest, machine: Topology) -> tuple[PodRequest, tuple[str, ...]]:
    """The pod with the defaults that the webhook adds in a cluster of such machines, and notes. `pod`: valid."""
    units, slots, otherwise = offers_of_machines((machine,))
    filled = slot_defaults(pod, slots, otherwise, unit_resource_names(units))
    notes = (
        f"{each.where}.resources.limits[{name}]: {amount} is what the webhook fills in"
        for each in filled
        for name, amount in each.limits.items()
    )
    return with_defaults(pod, filled), tuple(notes)


def amounts_note(state: NodeState) -> str | None:
    """The note that the kubelet's files lack the amounts of slots; None: no container has a slot."""
    slots = sum(map(len, held_by_slot(state.hardware, state.allocations.values()).values()))
    if not slots:
        return None
    return (
        f"the kubelet's files have no amounts: the slots that containers have ({slots}) count as equal parts of their GPUs; "
        "the running node has the amounts (`topoalign what-if` without --machine)"
    )


@dataclass(frozen=True)
class Described:
    """A node without running services: its machine, and the paths of its kubelet's files."""

    machine: str
    """A name of the catalogue, or a file or folder that describes one."""
    kubelet_config: Path | None
    kubelet_root: Path | None
    plugin_config: Path | None = None
    """The plugin configuration, as in `topoalign node --config`."""

    def predict(self, pod: PodRequest, changes: RuleChanges) -> tuple[NodeName, Decision, Topology]:
        """
        The node's name, the decision, and the machine's topology. `changes`: rules that override the configuration.
        Raises the errors of reading the machine, the configurations and the kubelet's files.
        """
        machine, plugin, found = self.offering_machine()
        taken = None
        rules = AdmissionRules(mode=Mode.KUBELET)
        if self.kubelet_config is not None:
            rules, taken = kubelet_configuration.load_with_note(self.kubelet_config)
        node = self.node(machine, rules)
        pod = validate_pod(pod)
        rules = override_rules(rules, changes)
        if rules.mode is Mode.KUBELET:
            pod, filled = fill_in_defaults(pod, machine.topology)
            found = (*found, *filled)
        demand = pod_demand(pod, rules)
        passed_over = explain_unavailable_resources(demand, machine.topology, node.registered)
        decision = with_unserved(explain_decision(node.state, demand), unserved_names(demand, machine.topology))
        starting = unsettled_reason(self.kubelet_root, time.time()) if self.kubelet_root is not None else None
        lists = list_notes(machine.topology, demand) if plugin.by_variable_alone else ()
        notes = [taken, *found, *node.findings, amounts_note(node.state), starting, *passed_over, *lists]
        return node.state.node, with_notes(decision, tuple(filter(None, notes))), machine.topology

    def offering_machine(self) -> tuple[Machine, PluginFlags, tuple[str, ...]]:
        """The machine with its offers, how containers receive these, and findings. Raises the errors of `predict`."""
        machine = load_machine(self.machine)
        if self.plugin_config is None:
            return machine, PluginFlags(), ()
        read = load_plugin_config(self.plugin_config)
        offering = offer_resources(machine.topology, read.configuration)
        topology = msgspec.structs.replace(machine.topology, offers=offering.offers)
        findings = (
            *map(str, read.findings),
            *(f"{each}; {each.remedy}" if each.remedy else str(each) for each in offering.findings),
        )
        return msgspec.structs.replace(machine, topology=topology), read.configuration.flags.plugin, findings

    def node(self, machine: Machine, rules: AdmissionRules) -> KubeletNode:
        """The state of the node. Every device counts as healthy, unless the kubelet's files show otherwise."""
        hardware = machine.topology
        devices = {hardware.parent_of(device): HEALTHY for listed in hardware.devices.values() for device in listed}
        state = initial_state(NodeName(machine.name), hardware, devices, f"described: {machine.name}")
        if self.kubelet_root is None:
            return KubeletNode(state=state, registered=None, findings=())
        assert state.topology is not None and state.health is not None, "both have been announced"
        return node_state(state.topology, state.health, self.kubelet_root, rules)
