"""
What the demo runs on: a NATS, the services, a machine, and the rules of its kubelet.

Whatever is there already is used: a NATS that was named, the machine of the environment, the GPUs of an NVIDIA driver.
"""

import ctypes
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
from anyio.abc import TaskStatus

from topoalign.client.stored_records import forget_node, has_published
from topoalign.core.model.errors import Unavailable
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import AdmissionRules, Policy
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Bus
from topoalign.runtime.installed import load_services
from topoalign.runtime.nats_server import local_nats
from topoalign.runtime.runner import run_services
from topoalign.runtime.settings import PREFIX

MACHINE = "dgx-a100"
"""What is played where there is no GPU driver."""
CLEANING_SECONDS = 5.0
"""For what the demo's node said to be deleted; a NATS that takes longer keeps it."""
KUBELETS_NUMA_NODES = 8
"""Unless it is told to take more (kubelet v1.36.3, max-allowable-numa-nodes)."""


@asynccontextmanager
async def hub(nats: str | None, scratch: Path) -> AsyncIterator[str]:
    """The URL of the NATS to use: the one that was named, else a local server for as long as the context is open."""
    if nats is not None:
        yield nats
        return
    async with local_nats(scratch / "nats") as url:
        yield url


@asynccontextmanager
async def leaving_no_trace(bus: Bus, node: NodeName, ours: bool) -> AsyncIterator[None]:
    """
    Deletes from the streams, when the context ends, what the demo's node said, so that no registry shows it for good.
    `ours`: the node's services run here, on streams that live on. What a node of this name said before the demo is left
    alone.
    """
    ours = ours and not await has_published(bus, node)
    try:
        yield
    finally:
        if ours:
            with anyio.move_on_after(CLEANING_SECONDS, shield=True), suppress(Unavailable):
                await forget_node(bus, node)


async def services(names: Sequence[str], environment: Mapping[str, str], *, task_status: TaskStatus[None]) -> None:
    """Runs these services until cancelled; started when all of them serve."""
    await run_services(load_services(names), environment, ready=lambda _: task_status.started(), signals=False)


def settings(machine: str | None, node: NodeName, nats: str, plugins: Path, scratch: Path) -> dict[str, str]:
    """The environment of the services. Its waits are short, so that a pod that has gone is noticed at once."""
    told = {
        "NODE": node,
        "NATS_URL": nats,
        "STATE_DIR": str(scratch / "state"),
        "KUBELET_DIR": str(plugins),
        "POLICY": Policy.RESTRICTED.value,
        "RECONCILE_SECONDS": "0.2",
        "GONE_SECONDS": "0.4",
        "SETTLE_SECONDS": "0",
    }
    if machine is not None:
        told["MACHINE"] = machine
    return {**os.environ, **{PREFIX + name: value for name, value in told.items()}}


def rules(topology: Topology) -> AdmissionRules:
    """
    The rules of the demo's kubelet: policy restricted, and memory managed where it is known and on no more NUMA nodes
    than a kubelet takes.
    """
    few = len(topology.nodes) <= KUBELETS_NUMA_NODES
    return AdmissionRules(
        policy=Policy.RESTRICTED,
        max_allowable_numa_nodes=max(KUBELETS_NUMA_NODES, len(topology.nodes)),
        memory_manager="Static" if few and known_memory(topology) else "None",
    )


def described_machine() -> str | None:
    """The machine to play: that of the environment, else none where a driver has GPUs, else one of the catalogue."""
    return os.environ.get(PREFIX + "MACHINE") or (None if driver_has_gpus() else MACHINE)


def driver_has_gpus() -> bool:
    """Whether NVML initialises here and counts a GPU. Discovery reads everything else."""
    count = ctypes.c_uint()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return False
        counted = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
        nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return False
    return counted and count.value > 0


def known_memory(topology: Topology) -> bool:
    """Whether the memory of every NUMA node is known: a machine read from a matrix does not tell it."""
    return all(node.memory is not None for node in topology.nodes)
