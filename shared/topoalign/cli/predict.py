"""
A prediction without any service: the decision of the kubelet of a described machine.

The rules come from the kubelet's configuration file, the held resources from the files in its root directory. Without a
configuration the rules are topoalign's own; without a root directory nothing is held.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from topoalign.core.admission.admit import decide
from topoalign.core.admission.kubelet_devices import check_resources
from topoalign.core.demand.device_lists import list_notes
from topoalign.core.demand.pod_demand import pod_demand
from topoalign.core.demand.validate import validate_pod
from topoalign.core.model.decisions import Decision, noted
from topoalign.core.model.events import DeviceHealth, HealthState
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import AdmissionRules, Mode, PodRequest, overridden
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import announced
from topoalign.kubelet.files import configuration
from topoalign.kubelet.files.node_state import KubeletNode, node_state
from topoalign.kubelet.files.settling import settling
from topoalign.machines import Machine, load_machine


@dataclass(frozen=True)
class Described:
    """A node that no service runs on: its machine, and where its kubelet keeps its files."""

    machine: str
    """A name of the catalogue, or a file or folder that describes one."""
    kubelet_config: Path | None
    kubelet_root: Path | None

    def predict(self, pod: PodRequest, changes: Mapping[str, str | int | bool]) -> tuple[NodeName, Decision, Topology]:
        """
        The node's name, the decision and the machine it is about; `changes` are rules that differ from the configuration.

        Raises what reading the machine, the configuration or the kubelet's files raises.
        """
        machine = load_machine(self.machine)
        rules = AdmissionRules(mode=Mode.KUBELET)
        if self.kubelet_config is not None:
            rules = configuration.load_configuration(self.kubelet_config)
        node = self.node(machine, rules)
        pod, rules = validate_pod(pod), overridden(rules, changes)
        demand = pod_demand(pod, rules)
        passed_over = check_resources(demand, machine.topology, node.registered)
        decision = decide(node.state, demand, explain=True)
        starting = settling(self.kubelet_root, time.time()) if self.kubelet_root is not None else None
        lists = list_notes(machine.topology, pod)
        notes = (*node.findings, *([starting] if starting is not None else []), *passed_over, *lists)
        return node.state.node, noted(decision, notes), machine.topology

    def node(self, machine: Machine, rules: AdmissionRules) -> KubeletNode:
        """Every device is taken as healthy, unless the kubelet's files tell otherwise."""
        healthy = DeviceHealth(state=HealthState.HEALTHY)
        hardware = machine.topology
        devices = {hardware.card_of(device): healthy for listed in hardware.devices.values() for device in listed}
        state = announced(NodeName(machine.name), hardware, devices, f"described: {machine.name}")
        if self.kubelet_root is None:
            return KubeletNode(state=state, registered=None, findings=())
        assert state.topology is not None and state.health is not None, "both have been announced"
        return node_state(state.topology, state.health, self.kubelet_root, rules)
