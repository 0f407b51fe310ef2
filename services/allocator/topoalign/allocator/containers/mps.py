"""
Adds to Allocate responses what a container needs for GPUs shared by MPS: the control daemon's pipes and shared memory.

Nothing is allocated while the daemon does not serve, because a CUDA program that finds no daemon runs without limits.
Shares (`sharing.mps`) have the daemon's limits. A container with vcuda units or vGPU slots (`sharing.limiter: mps`) has
its own limits, in environment variables that a pod can change. For units, the response for cores sets the thread limit,
and the response for memory sets the memory limit. Example: 20 cores and 16 blocks are 20 percent of the threads and
`0=4096M`. Threads are not limited if a container has no cores, or all cores of a GPU.

Sources: k8s-device-plugin v0.20.0, internal/plugin/mps.go; NVIDIA's Multi-Process Service, "Environment Variables".
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from topoalign.allocator.containers.host_files import ContainerUnready
from topoalign.allocator.containers.limiter_files import amount_of_slot
from topoalign.allocator.containers.responses import ContainerDevices, EditProvider, VisibleDevice
from topoalign.core.model.byte_sizes import MIB
from topoalign.core.model.holdings import Amount, base_of, unit_kind
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.device_offers import CORES, MEMORY_BLOCK
from topoalign.core.model.topology.model import Topology
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.plugin_config.mps_files import CONTAINER_ROOT, CONTAINER_SHM, PIPE, SHM, Serves, read_served, root_here

PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
THREAD_LIMIT = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MEMORY_LIMIT = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"


class MpsEdits(EditProvider, frozen=True):
    """Adds the MPS edits of one resource to Allocate responses."""

    daemon: ResourceName
    """The resource after which the daemon is named."""
    host_root: str
    serves: Serves | None
    """None: no daemon is ready."""

    def check(self, hardware: Topology, gpus: Sequence[VisibleDevice]) -> None:
        """Raises ContainerUnready if the daemon does not serve one of these devices that is shared by MPS."""
        shared = shared_devices(hardware, gpus)
        if not shared:
            return
        remedy = "see that topoalign mps runs on this node, and read its /readyz"
        if self.serves is None:
            raise ContainerUnready(f"the MPS daemon of {self.daemon} is not ready", remedy)
        if not self.serves.devices.issuperset(shared) or {*shared.values()} != {self.serves.replicas}:
            finding = f"the MPS daemon of {self.daemon} serves other devices or shares than are offered"
            raise ContainerUnready(finding, remedy)

    def edit(self, response: v1beta1.ContainerAllocateResponse, devices: ContainerDevices) -> None:
        """Adds pipes, shared memory and limits if a device is shared by MPS."""
        if not shared_devices(devices.hardware, devices.gpus):
            return
        pipe = CONTAINER_ROOT / self.daemon / PIPE
        response.envs[PIPE_VARIABLE] = str(pipe)
        response.mounts += [
            v1beta1.Mount(container_path=str(pipe), host_path=f"{self.host_root}/{self.daemon}/{PIPE}"),
            v1beta1.Mount(container_path=CONTAINER_SHM, host_path=f"{self.host_root}/{SHM}"),
        ]
        held = devices.allocation.from_kubelet[devices.resource]
        response.envs.update(client_limits(held, devices.allocation.slots, devices.hardware))


def shared_devices(hardware: Topology, gpus: Iterable[VisibleDevice]) -> dict[DeviceID, int]:
    """Returns GPU or MIG instance that is shared by MPS -> its number of shares; 0: shared by amounts."""
    return {
        each.base: 0 if offer.by_amounts else offer.replicas
        for each in gpus
        for offer in hardware.offers_by_base.get(each.base, ())
        if offer.sharing == "mps"
    }


def client_limits(
    devices: Sequence[DeviceID], amounts: Mapping[DeviceID, Amount], hardware: Topology
) -> Mapping[str, str]:
    """
    Returns the variables that limit a container with these units of one kind, or these slots; empty for shares.
    `amounts`: slot -> recorded amount; others have an equal part. GPUs are numbered as the container sees them.
    """
    units = Counter(map(base_of, devices))
    match unit_kind(devices[0]) if devices else None:
        case "cores":
            return thread_limit(units.values())
        case "memory":
            return memory_limit(blocks * MEMORY_BLOCK for blocks in units.values())
    if not any(offer.by_amounts for base in units for offer in hardware.offers_by_base.get(base, ())):
        return {}
    held = {base_of(slot): amount_of_slot(slot, base_of(slot), amounts, hardware) for slot in devices}
    return {
        **thread_limit(each.cores for each in held.values()),
        **memory_limit(each.memory for each in held.values()),
    }


def thread_limit(cores: Iterable[int]) -> Mapping[str, str]:
    """Returns the limit for these cores (hundredths) of each GPU: the smallest, because one value applies to all."""
    limited = [each for each in cores if 0 < each < CORES]
    return {THREAD_LIMIT: str(min(limited))} if limited else {}


def memory_limit(memory: Iterable[int]) -> Mapping[str, str]:
    """The limit for these bytes of each GPU, in whole MiB: `0=4096M,1=4096M`. Zero would mean no limit."""
    return {MEMORY_LIMIT: ",".join(f"{place}={max(1, each // MIB)}M" for place, each in enumerate(memory))}


def mps_edits(root: str, topology: Topology, resource: ResourceName) -> MpsEdits:
    """Returns the current edits of a resource. `root`: `flags.mpsRoot`."""
    # The daemon of both kinds of units is named after the resource of computing time.
    in_blocks = (offer.devices[0] for offer in topology.offers_of.get(resource, ()) if offer.unit == "memory")
    same_gpu = (each for base in in_blocks for each in topology.offers_by_base[base])
    daemon = next((each.resource for each in same_gpu if each.unit == "cores"), resource)
    return MpsEdits(daemon, root.rstrip("/"), read_served(root_here(root), daemon))
