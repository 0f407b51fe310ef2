"""
The files of the CPU and the memory manager, as the fake kubelet writes them.

Source: kubelet v1.36.3, cm/cpumanager/state, cm/memorymanager/state and checkpointmanager.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from topoalign.core.hints.memory_hints import memory_node
from topoalign.core.model.events import MemoryUse
from topoalign.core.model.ids import MEMORY
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.model import Topology
from topoalign.kubelet.files import checkpoint, cpu_checkpoint, memory_checkpoint
from topoalign.kubelet.files.cpu_checkpoint import CpuManagerState
from topoalign.kubelet.files.memory_checkpoint import MemoryManagerState


def cpu_file(policy: str, shared: str, entries: Mapping[str, Mapping[str, str]]) -> bytes:
    """`cpu_manager_state`: pod UID -> container -> CPUs."""
    content: dict[str, Any] = {"policyName": policy, "defaultCpuSet": shared} | kept(entries)
    text = next(iter(cpu_checkpoint.spew_cpu_state(msgspec.convert({**content, "entries": entries}, CpuManagerState))))
    return msgspec.json.encode({**content, "checksum": checkpoint.fnv1a(text)})


def memory_file(policy: str, nodes: Mapping[int, Any], entries: Mapping[str, Any]) -> bytes:
    """`memory_manager_state`: pod UID -> container -> blocks."""
    content = msgspec.json.encode({"policyName": policy, "machineState": nodes} | kept(entries))
    whole = msgspec.json.encode({"policyName": policy, "machineState": nodes, "entries": entries})
    text = next(iter(memory_checkpoint.spew_memory_state(msgspec.json.decode(whole, type=MemoryManagerState))))
    return msgspec.json.encode({**msgspec.json.decode(content), "checksum": checkpoint.fnv1a(text)})


def kept(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Go leaves an empty map out."""
    return {"entries": entries} if entries else {}


def machine_state(machine: Topology, rules: AdmissionRules, memory: Mapping[int, MemoryUse]) -> dict[int, Any]:
    """The memory manager's account of each NUMA node."""
    nodes = {}
    for node in machine.nodes:
        use = memory.get(node.id, MemoryUse())
        reserved = rules.reserved_memory.get(node.id, {})
        now = memory_node(node, reserved, use)
        tables = {
            name: {
                "total": (node.memory or 0) if name == MEMORY else node.hugepages[name],
                "systemReserved": reserved.get(name, 0),
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


def replace(path: Path, content: bytes) -> None:
    """Puts it in place of what was there, at once or not at all."""
    scratch = path.with_name(f".{path.name}")
    scratch.write_bytes(content)
    os.replace(scratch, path)


def nothing() -> None:
    """What happens between two writes, unless a test wants to look."""
