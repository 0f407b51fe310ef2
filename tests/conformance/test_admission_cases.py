"""
The published sequences of whole admissions that use no option of the CPU manager, through `admission` and the fold of facts.

Each step's answer and the state after it must be the kubelet's: hints, CPUs, devices, memory blocks, reasons, free memory.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from topoalign.cli.conformance.kubelet_devices import KINDS as DEVICE_KINDS
from topoalign.cli.conformance.kubelet_memory import KINDS as MEMORY_KINDS
from topoalign.cli.conformance.kubelet_merge import written
from topoalign.cli.conformance.kubelet_pods import Pod
from topoalign.core.admission import Reply, admission, answer_to
from topoalign.core.decisions import Admission, Decision, PreferenceQuestion, Refusal
from topoalign.core.events import (
    AllocationGranted,
    AllocationReleased,
    DeviceHealth,
    DeviceHealthChanged,
    HealthState,
    MemoryUse,
    TopologyDiscovered,
)
from topoalign.core.hints.memory import memory_nodes
from topoalign.core.ids import DeviceID, NodeName, ResourceName
from topoalign.core.requests import AdmissionRules, Mode, PodRequest
from topoalign.core.state import NodeState
from topoalign.core.topology.bitmask import nodes_of
from topoalign.core.topology.cpuset import format_cpuset
from topoalign.core.topology.model import Cpu, NumaNode, PluginDevice, Topology

Json = dict[str, Any]
NODE = NodeName("case")

KINDS = {
    "Topology locality": "NotAligned",
    "not enough cpus available": "NotEnoughCpus",
    **DEVICE_KINDS,
    **MEMORY_KINDS,
}


class Sequence:
    """One case under way: the node, and what its plugins last listed."""

    def __init__(self, case: Json) -> None:
        self.machine: Json = case["machine"]
        self.rules = rules_of(case)
        self.healthy = {
            device: each["healthy"] for plugin in self.plugins.values() for device, each in plugin["devices"].items()
        }
        hardware = topology_of(self.machine)
        found = TopologyDiscovered(node=NODE, epoch=1, revision=1, boot_id="", source="case", topology=hardware)
        self.state = NodeState(node=NODE).apply(found)
        self.judge()

    @property
    def plugins(self) -> Json:
        plugins: Json = self.machine["devices"]
        return plugins

    def judge(self) -> None:
        health = {
            DeviceID(device): DeviceHealth(state=HealthState.HEALTHY if good else HealthState.UNHEALTHY)
            for device, good in self.healthy.items()
        }
        before = self.state.health.revision if self.state.health else 0
        fact = DeviceHealthChanged(node=NODE, epoch=1, revision=before + 1, devices=health)
        self.state = self.state.apply(fact)

    def step(self, step: Json) -> object:
        """Does a step; for an admission what the kubelet would say, else None."""
        match step["op"]:
            case "admit":
                decision = self.decide(msgspec.convert(step["pod"], Pod).read)
                if isinstance(decision, Refusal):
                    return (decision.reason, decision.code, decision.container, decision.provider)
                for allocation in decision.allocations:
                    fact = AllocationGranted(
                        node=NODE, epoch=self.state.epoch, seq=self.state.seq + 1, allocation=allocation
                    )
                    self.state = self.state.apply(fact)
                return told(decision)
            case "remove":
                self.release(step["pod_name"])
            case "start":
                self.release(step["pod_name"], memory_of_init_only=True)
            case "devices":
                self.healthy |= {d: d not in step["unhealthy"] for d in self.plugins[step["resource"]]["devices"]}
                self.judge()
        return None

    def decide(self, pod: PodRequest) -> Decision:
        steps = admission(self.state, pod, self.rules)
        reply: Reply = None
        try:
            while True:
                asked = steps.send(reply)
                if isinstance(asked, PreferenceQuestion):
                    reply = self.preferred(asked)
                else:
                    reply = answer_to(asked, self.state, self.rules)
        except StopIteration as end:
            decision: Decision = end.value
            return decision

    def preferred(self, asked: PreferenceQuestion) -> tuple[DeviceID, ...] | None:
        how = self.plugins[asked.resource]["plugin"]
        others = sorted({*asked.available} - {*asked.must_include}, reverse=how == "highest_ids")
        return None if how == "off" else (*asked.must_include, *others)[: asked.size]

    def release(self, pod: str, memory_of_init_only: bool = False) -> None:
        """A pod goes; or its containers start, which frees the memory of its plain init containers."""
        for held in [each for each in self.state.allocations.values() if each.owner and each.owner.pod == pod]:
            if memory_of_init_only and held.role != "init":
                continue
            gone = AllocationReleased(
                node=NODE, epoch=self.state.epoch, seq=self.state.seq + 1, allocation=held.id, reason="gone"
            )
            self.state = self.state.apply(gone)
            if memory_of_init_only:
                rest = msgspec.structs.replace(held, memory=())
                again = AllocationGranted(node=NODE, epoch=self.state.epoch, seq=self.state.seq + 1, allocation=rest)
                self.state = self.state.apply(again)

    def state_after(self) -> Json:
        state = self.state
        free_cpus = {cpu.id for cpu in state.hardware.cpus} - state.cpus_in_use
        after: Json = {
            "shared_cpus": format_cpuset(free_cpus),
            "free_devices": {name: sorted(state.free(ResourceName(name))) for name in self.plugins},
        }
        if self.rules.memory_manager == "Static":
            after["memory"] = {
                str(number): {
                    "free": dict(node.free),
                    "cells": list(nodes_of(node.group)),
                    "assignments": state.memory.get(number, MemoryUse()).assignments,
                }
                for number, node in memory_nodes(state, self.rules).items()
            }
        return after


def rules_of(case: Json) -> AdmissionRules:
    config = case["config"]
    return msgspec.convert(
        {
            "policy": config["topology_policy"],
            "scope": config["scope"],
            "mode": Mode.KUBELET,
            "prefer_closest_numa_nodes": config["prefer_closest_numa_nodes"],
            "reserved_cpus": case["expect"]["reserved_cpus"],
            "memory_manager": config["memory_policy"],
            "reserved_memory": {node["id"]: node["reserved"] for node in case["machine"]["numa_nodes"]},
        },
        AdmissionRules,
    )


def topology_of(machine: Json) -> Topology:
    nodes = machine["numa_nodes"]
    lowest: dict[tuple[int, int], int] = {}
    for node in nodes:
        for cpu, core, socket, _ in node["cpus"]:
            lowest[socket, core] = min(cpu, lowest.get((socket, core), cpu))
    cpus = [
        Cpu(id=cpu, core=lowest[socket, core], socket=socket, node=node["id"], uncore=cache)
        for node in nodes
        for cpu, core, socket, cache in node["cpus"]
    ]
    return Topology(
        cpus=tuple(sorted(cpus, key=lambda cpu: cpu.id)),
        nodes=tuple(
            NumaNode(id=node["id"], memory=node["memory_total"], hugepages=node["hugepages_total"]) for node in nodes
        ),
        distances=tuple(tuple(node["distances"]) for node in nodes),
        others=tuple(
            PluginDevice(
                id=DeviceID(device),
                resource=ResourceName(name),
                nodes=None if each["nodes"] is None else tuple(each["nodes"]),
            )
            for name, plugin in machine["devices"].items()
            for device, each in sorted(plugin["devices"].items())
        ),
    )


def told(decision: Admission) -> Json:
    """What each container got, as case files tell it."""
    hints = {each.container: msgspec.to_builtins(written(each.merged)) for each in decision.explanation.alignments}
    return {
        each.owner.container: {
            "hint": hints.get(each.owner.container, hints.get(None)),
            "cpus": each.cpus or None,
            "devices": {name: sorted(devices) for name, devices in each.devices.items()},
            "memory": [{"nodes": list(b.nodes), "type": b.resource, "size": b.size} for b in each.memory] or None,
        }
        for each in decision.allocations
        if each.owner is not None
    }


def expected(step: Json) -> object:
    expect = step["expect"]
    if step["op"] != "admit":
        return None
    if expect["admitted"]:
        return expect["containers"]
    kind = next(kind for text, kind in KINDS.items() if text in expect["message"])
    return (expect["reason"], kind, expect["container"], expect["provider"])


def test_sequences_without_cpu_options_go_as_in_the_kubelet(vectors: Path) -> None:
    cases = [json.loads(line) for line in (vectors / "kubelet" / "admission.jsonl").read_text().splitlines()]
    plain = [case for case in cases if not case["config"]["cpu_options"]]

    for case in plain:
        sequence = Sequence(case)
        for number, step in enumerate(case["steps"]):
            assert expected(step) == sequence.step(step), (case["id"], number)
            assert step["expect"]["state_after"] == sequence.state_after(), (case["id"], number)

    assert 70 == len(plain)
