"""A node of two GPUs and one with MIG instances, who holds and uses them, and a discovery that says what it is told to."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import fact_support
from fact_support import discovered, mig_device

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.core import wire
from topoalign.core.model.errors import DriverFault
from topoalign.core.model.events import Allocation, AllocationsSnapshot, Owner
from topoalign.core.model.ids import GPU, AllocationID, ContainerName, DeviceID, NodeName, ResourceName
from topoalign.core.model.processes import DeviceUse, GpuProcess, Measurement, ProcessIdentity
from topoalign.core.model.requests import NodeRequest
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.core.ports import Endpoint
from topoalign.core.state.fold import NodeState, initial_state
from topoalign.core.usage.attribution import DeviceShares, NodeShares, attribute_use
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.replies import answer_with
from topoalign.testing.manual_clock import ManualClock
from topoalign.testing.memory_journal import MemoryJournal

GIB = 1 << 30
NODE = NodeName("node-1")
UIDS = tuple(f"1b4e28ba-2fa1-11d2-883f-{n:012}" for n in range(4))
SHARED = ResourceName("nvidia.com/gpu.shared")
INSTANCES = tuple(mig_device(f"MIG-{n}", n) for n in range(2))
MACHINE = Topology(
    gpus=tuple(
        Gpu(id=DeviceID(f"GPU-{n}"), index=n, name="NVIDIA H100", memory=80 * GIB, mig=INSTANCES if n == 2 else None)
        for n in range(3)
    )
)


def owner(pod: str, container: str = "main") -> Owner:
    return fact_support.owner(pod, container, "ml")


def held(number: int, *devices: str, of: Owner | None, uid: str = "", resource: ResourceName = GPU) -> Allocation:
    """The allocation `a-<number>`."""
    ids = tuple(map(DeviceID, devices))
    return Allocation(id=AllocationID(f"a-{number}"), owner=of, pod_uid=uid, devices={resource: ids})


def state_of(*allocations: Allocation, machine: Topology = MACHINE) -> NodeState:
    snapshot = AllocationsSnapshot(node=NODE, epoch=1, seq=1, allocations=allocations, digest="")
    return initial_state(NODE, machine, {}, "test").apply(snapshot)


def in_pod(uid: str, container: str = "main") -> ProcessIdentity:
    return ProcessIdentity(pod_uid=uid, container_id="c" * 64, container=ContainerName(container), command="python3")


def on_host() -> ProcessIdentity:
    return ProcessIdentity(cgroup="/user.slice", command="Xorg")


def process(
    pid: int, memory: int | None, identity: ProcessIdentity | None, utilization: int | None = None
) -> GpuProcess:
    return GpuProcess(pid=pid, kinds=("compute",), memory=memory, utilization=utilization, identity=identity)


def use(device: str, *processes: GpuProcess, used: int = 0, **more: Any) -> DeviceUse:
    return DeviceUse(device=DeviceID(device), memory_used=used, processes=processes, **more)


def measurement(*uses: DeviceUse, time: float = 1.0, **more: Any) -> Measurement:
    return Measurement(node=NODE, time=time, devices=uses, **more)


def shares(state: NodeState, *uses: DeviceUse, **more: Any) -> dict[str, DeviceShares]:
    found: NodeShares = attribute_use(state, measurement(*uses, **more))
    return {row.device: row for row in found.devices}


TRAIN, INFER = owner("train"), owner("infer", 'a"b\n')
ALLOCATIONS = (
    held(1, "GPU-0", of=TRAIN, uid=UIDS[0]),
    held(2, "GPU-1::0", of=INFER, uid=UIDS[1], resource=SHARED),
    held(3, "MIG-1", of=TRAIN, uid=UIDS[0]),
    held(4, "GPU-1::1", of=None, resource=SHARED),
)
MEASURED = measurement(
    use(
        "GPU-0",
        process(1, 12 * GIB, in_pod(UIDS[0]), 60),
        process(2, GIB, on_host(), 0),
        used=14 * GIB,
        utilization=61,
        memory_utilization=17,
    ),
    use("GPU-1", process(3, 2 * GIB, in_pod(UIDS[1], 'a"b\n'), 5), used=2 * GIB),
    use("GPU-2", used=3 * GIB),
    use("MIG-0"),
    use("MIG-1", process(4, 3 * GIB, in_pod(UIDS[0]))),
)


class Node:
    """An allocator's ledger, and a discovery that says what it is told to."""

    def __init__(self, *allocations: Allocation) -> None:
        self.bus, self.measured = MemoryBus(), MEASURED
        self.fault: DriverFault | None = None
        self.asked = 0
        self.ledger = Ledger(NODE, MemoryJournal(), ManualClock())
        self.ledger.take_reading(discovered(MACHINE))
        self.ledger.grant(allocations)

    async def answer(self, request: NodeRequest) -> Measurement:
        self.asked += 1
        if self.fault is not None:
            raise self.fault
        return self.measured

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        endpoint = Endpoint(
            name="use", subject=wire.discovery_subject(NODE, "use"), answer=answer_with(NodeRequest, self.answer)
        )
        async with self.bus.serve("topoalign-discovery", [endpoint]):
            yield
