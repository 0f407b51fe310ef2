"""Writes the files that a kubelet would keep: the other way round from `topoalign.kubelet`, with its checksums."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from topoalign.core.events import MemoryUse
from topoalign.core.hints.memory import memory_node
from topoalign.core.hints.providers import shared_cpus
from topoalign.core.ids import MEMORY
from topoalign.core.requests import AdmissionRules
from topoalign.core.state import NodeState
from topoalign.core.topology.cpuset import format_cpuset
from topoalign.kubelet import cpu_checkpoint, device_checkpoint, memory_checkpoint, spew
from topoalign.kubelet.cpu_checkpoint import CpuManagerState
from topoalign.kubelet.device_checkpoint import CheckpointData, PodDevicesEntry
from topoalign.kubelet.memory_checkpoint import MemoryManagerState

VOLUME = "volumes/kubernetes.io~projected/kube-api-access"
"""What a pod that runs has in its directory."""


def cpu_file(policy: str, shared: str, entries: Mapping[str, Mapping[str, str]]) -> bytes:
    """`cpu_manager_state`."""
    content: dict[str, Any] = {"policyName": policy, "defaultCpuSet": shared, "entries": entries}
    text = next(iter(cpu_checkpoint.printed(msgspec.convert(content, CpuManagerState))))
    return msgspec.json.encode({**content, "checksum": spew.fnv1a(text)})


def memory_file(policy: str, nodes: Mapping[int, Any], entries: Mapping[str, Any]) -> bytes:
    """`memory_manager_state`."""
    content = msgspec.json.encode({"policyName": policy, "machineState": nodes, "entries": entries})
    text = next(iter(memory_checkpoint.printed(msgspec.json.decode(content, type=MemoryManagerState))))
    return msgspec.json.encode({**msgspec.json.decode(content), "checksum": spew.fnv1a(text)})


def write_files(root: Path, state: NodeState, rules: AdmissionRules) -> None:
    """What a kubelet with these rules has in its root directory when the node is in this state."""
    (root / "device-plugins").mkdir(exist_ok=True)
    cpus: dict[str, dict[str, str]] = {}
    blocks: dict[str, dict[str, list[Any]]] = {}
    entries = []
    for held in state.allocations.values():
        assert held.owner is not None
        if held.cpus:
            cpus.setdefault(held.owner.pod, {})[held.owner.container] = held.cpus
        if held.memory:
            blocks.setdefault(held.owner.pod, {})[held.owner.container] = [
                {"numaAffinity": block.nodes, "type": block.resource, "size": block.size} for block in held.memory
            ]
        for resource, devices in held.devices.items():
            near = state.hardware.devices[resource]
            by_node: dict[int, list[str]] = {}
            for device in devices:
                for node in near[device] or (device_checkpoint.NO_NODE,):
                    by_node.setdefault(node, []).append(device)
            entries.append(PodDevicesEntry(held.owner.pod, held.owner.container, resource, by_node, b""))
    for held in state.allocations.values():
        assert held.owner is not None
        (root / "pods" / held.owner.pod / VOLUME).mkdir(parents=True, exist_ok=True)
    shared = format_cpuset(shared_cpus(state, rules))
    (root / cpu_checkpoint.NAME).write_bytes(cpu_file(rules.cpu_manager, shared, cpus))
    (root / memory_checkpoint.NAME).write_bytes(memory_file(rules.memory_manager, machine_state(state, rules), blocks))
    registered = {name: list(state.healthy(name)) for name in state.hardware.devices}
    device_checkpoint.store(root / "device-plugins", CheckpointData(entries, registered))  # type: ignore[arg-type]  # names are str


def machine_state(state: NodeState, rules: AdmissionRules) -> dict[int, Any]:
    nodes = {}
    for node in state.hardware.nodes:
        use = state.memory.get(node.id, MemoryUse())
        kept = rules.reserved_memory.get(node.id, {})
        now = memory_node(node, kept, use)
        tables = {
            name: {
                "total": (node.memory or 0) if name == MEMORY else node.hugepages[name],
                "systemReserved": kept.get(name, 0),
                "allocatable": amount,
                "reserved": use.reserved.get(name, 0),
                "free": now.free[name],
            }
            for name, amount in now.allocatable.items()
        }
        nodes[node.id] = {
            "numberOfAssignments": use.assignments,
            "memoryMap": tables,
            "cells": list(use.cells or (node.id,)),
        }
    return nodes
