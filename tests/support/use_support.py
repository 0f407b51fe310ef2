"""A node of two GPUs and one with MIG instances, and who holds and uses them."""

from topoalign.core.model.events import Allocation, AllocationsSnapshot, Owner
from topoalign.core.model.ids import (
    GPU,
    AllocationID,
    ContainerName,
    DeviceID,
    Namespace,
    NodeName,
    PodName,
    ResourceName,
)
from topoalign.core.model.processes import DeviceUse, GpuProcess, Measurement, ProcessIdentity
from topoalign.core.model.topology.mig import MigDevice
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.core.state.fold import NodeState, initial_state
from topoalign.core.usage.attribution import DeviceShares, NodeShares, attribute_use

GIB = 1 << 30
NODE = NodeName("node-1")
UIDS = tuple(f"1b4e28ba-2fa1-11d2-883f-{n:012}" for n in range(4))
SHARED = ResourceName("nvidia.com/gpu.shared")
INSTANCES = tuple(
    MigDevice(uuid=DeviceID(f"MIG-{n}"), profile="1g.10gb", gpu_instance=n, compute_instance=0, memory=10 * GIB)
    for n in range(2)
)
MACHINE = Topology(
    gpus=tuple(
        Gpu(id=DeviceID(f"GPU-{n}"), index=n, name="NVIDIA H100", memory=80 * GIB, mig=INSTANCES if n == 2 else None)
        for n in range(3)
    )
)


def owner(pod: str, container: str = "main") -> Owner:
    return Owner(namespace=Namespace("ml"), pod=PodName(pod), container=ContainerName(container))


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


def use(
    device: str,
    *processes: GpuProcess,
    used: int = 0,
    utilization: int | None = None,
    memory_utilization: int | None = None,
) -> DeviceUse:
    return DeviceUse(
        device=DeviceID(device),
        memory_used=used,
        utilization=utilization,
        memory_utilization=memory_utilization,
        processes=processes,
    )


def measurement(*uses: DeviceUse, finding: str = "", time: float = 1.0, left_out: int = 0) -> Measurement:
    return Measurement(node=NODE, time=time, devices=uses, finding=finding, left_out=left_out)


def shares(state: NodeState, *uses: DeviceUse, finding: str = "", left_out: int = 0) -> dict[str, DeviceShares]:
    """By device."""
    found: NodeShares = attribute_use(state, measurement(*uses, finding=finding, left_out=left_out))
    return {row.device: row for row in found.devices}
