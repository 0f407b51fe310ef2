"""Reads machines and kubelet configurations in the format of the suite `kubelet/admission`."""

from typing import Literal

import msgspec

from topoalign.core.model.decisions import PreferenceQuestion
from topoalign.core.model.ids import DeviceID, NodeName, ResourceName
from topoalign.core.model.requests import AdmissionRules, CpuOption, Mode, Policy, Scope
from topoalign.core.model.topology.cpuset import parse_cpuset
from topoalign.core.model.topology.model import Cpu, NumaNode, PluginDevice, Topology

NODE = NodeName("case")


class Node(msgspec.Struct, frozen=True):
    """A NUMA node of a machine; memory and hugepages are in bytes."""

    id: int
    memory_total: int
    cpus: list[tuple[int, int, int, int]]
    """CPU, core, socket, last-level cache."""
    hugepages_total: dict[ResourceName, int] = {}
    reserved: dict[ResourceName, int] = {}
    distances: tuple[int, ...] = ()


class Device(msgspec.Struct, frozen=True):
    """A device of a plugin; None: it has no NUMA nodes."""

    nodes: tuple[int, ...] | None = None
    healthy: bool = True


class Plugin(msgspec.Struct, frozen=True):
    """The devices of a resource, and the preference of its plugin."""

    devices: dict[DeviceID, Device]
    plugin: Literal["off", "lowest_ids", "highest_ids"] = "off"

    def preferred(self, asked: PreferenceQuestion) -> tuple[DeviceID, ...] | None:
        """What this plugin answers when it is asked for its preference."""
        others = sorted({*asked.available} - {*asked.must_include}, reverse=self.plugin == "highest_ids")
        return None if self.plugin == "off" else (*asked.must_include, *others)[: asked.size]


class Machine(msgspec.Struct, frozen=True):
    """A machine of a case."""

    numa_nodes: list[Node]
    devices: dict[ResourceName, Plugin] = {}

    @property
    def read(self) -> Topology:
        """The machine; as in the kubelet, the lowest CPU of a core names it."""
        lowest: dict[tuple[int, int], int] = {}
        for node in self.numa_nodes:
            for cpu, core, socket, _ in node.cpus:
                lowest[socket, core] = min(cpu, lowest.get((socket, core), cpu))
        cpus = [
            Cpu(id=cpu, core=lowest[socket, core], socket=socket, node=node.id, uncore=cache)
            for node in self.numa_nodes
            for cpu, core, socket, cache in node.cpus
        ]
        return Topology(
            cpus=tuple(sorted(cpus, key=lambda cpu: cpu.id)),
            nodes=tuple(
                NumaNode(id=node.id, memory=node.memory_total, hugepages=node.hugepages_total)
                for node in self.numa_nodes
            ),
            distances=tuple(node.distances for node in self.numa_nodes)
            if all(node.distances for node in self.numa_nodes)
            else None,
            others=tuple(
                PluginDevice(id=device, resource=name, nodes=plugin.devices[device].nodes)
                for name, plugin in self.devices.items()
                for device in sorted(plugin.devices)
            ),
        )


class Config(msgspec.Struct, frozen=True):
    """The kubelet's configuration of a case."""

    topology_policy: Policy
    scope: Scope = Scope.CONTAINER
    prefer_closest_numa_nodes: bool = False
    cpu_options: dict[CpuOption, Literal["true", "false"]] = {}
    reserved_cpus: str | None = None
    reserved_cpu_count: int = 0
    memory_policy: Literal["Static", "None"] = "None"

    def __post_init__(self) -> None:
        parse_cpuset(self.reserved_cpus or "")

    def rules(self, machine: Machine) -> AdmissionRules:
        """The rules in mode `kubelet` on this machine."""
        return AdmissionRules(
            policy=self.topology_policy,
            scope=self.scope,
            mode=Mode.KUBELET,
            prefer_closest_numa_nodes=self.prefer_closest_numa_nodes,
            cpu_options=frozenset(option for option, on in self.cpu_options.items() if on == "true"),
            reserved_cpus=self.reserved_cpus or "",
            reserved_cpu_count=self.reserved_cpu_count,
            memory_manager=self.memory_policy,
            reserved_memory={node.id: node.reserved for node in machine.numa_nodes},
        )
