"""
Writes the files that a kubelet would keep: the other way round from `topoalign.kubelet`, with its checksums. And reads them
as a prediction does.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from topoalign.allocator.requests.kubelet_files import KubeletFiles
from topoalign.core.admission.prediction import PredictionBasis, prediction_basis
from topoalign.core.hints.cpu import shared_cpus
from topoalign.core.model.events import Allocation, UsageObserved
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.cpuset import format_cpuset
from topoalign.core.state.fold import NodeState
from topoalign.kubelet.files import cpu_checkpoint, device_checkpoint, memory_checkpoint
from topoalign.kubelet.files.device_checkpoint import CheckpointData, PodDevicesEntry
from topoalign.testing.fake_kubelet.files import cpu_file, machine_state, memory_file

VOLUME = "volumes/kubernetes.io~projected/kube-api-access"
"""What a pod that runs has in its directory."""


def write_files(root: Path, state: NodeState, rules: AdmissionRules) -> None:
    """What a kubelet with these rules has in its root directory when the node is in this state."""
    (root / "device-plugins").mkdir(exist_ok=True)
    cpus: dict[str, dict[str, str]] = {}
    blocks: dict[str, dict[str, list[Any]]] = {}
    entries = []
    for held in state.allocations.values():
        assert held.owner is not None
        (root / "pods" / held.owner.pod / VOLUME).mkdir(parents=True, exist_ok=True)
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
    shared = format_cpuset(shared_cpus(state, rules))
    (root / cpu_checkpoint.NAME).write_bytes(cpu_file(rules.cpu_manager, shared, cpus))
    (root / memory_checkpoint.NAME).write_bytes(
        memory_file(rules.memory_manager, machine_state(state.hardware, rules, state.memory), blocks)
    )
    registered = {name: list(state.healthy(name)) for name in state.hardware.devices}
    device_checkpoint.store(root / "device-plugins", CheckpointData(entries, registered))  # type: ignore[arg-type]  # names are str


async def basis_from(files: KubeletFiles, state: NodeState, ended: Sequence[Allocation] = ()) -> PredictionBasis:
    """What a prediction stands on when a node in this state has just read these files."""
    kubelet = await files.read(state, [each.id for each in ended])
    usage = msgspec.structs.replace(
        state.usage or UsageObserved(node=state.node, epoch=1, revision=0, containers=(), containers_known=False),
        kubelet=kubelet,
    )
    return prediction_basis(msgspec.structs.replace(state, usage=usage), 0.0)
