"""
What a container gets of GPUs that are shared by MPS: the pipes of their control daemon and its shared memory.

Nothing is given out while the daemon is away, because a CUDA program that finds no daemon goes on without one, and without
limits.

- Of shares (`sharing.mps`) the limits are the daemon's defaults; a variable in the container could only lower them, or be
  removed by the pod.
- Of units and slots (`sharing.limiter: mps`) a container has limits of its own, in variables that a pod can change. Of units
  each of the two answers says its half: computing time the threads, memory the memory. The kubelet gives the container both,
  and pipes and mounts are the same in both, because one daemon serves both resources. Example: 20 cores and 16 blocks are 20
  per cent of the threads and `0=4096M`.
- Threads are not limited for who has no cores, or all of a GPU's.

Sources: k8s-device-plugin v0.20.0, internal/plugin/mps.go; NVIDIA's Multi-Process Service, "Environment Variables".
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from topoalign.allocator.containers.host_files import ContainerUnready
from topoalign.allocator.containers.limiter_files import amount_of_slot
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.holdings import Amount, base_of, unit_kind
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.device_offers import CORES, MEMORY_BLOCK
from topoalign.core.model.topology.model import Topology
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.plugin_config.mps_files import CONTAINER_ROOT, CONTAINER_SHM, PIPE, SHM, Serves, root_here, serving

PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
THREAD_LIMIT = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MEMORY_LIMIT = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
MIB = 1024 * 1024


class MpsTeller(NamedTuple):
    """Adds what one resource needs of MPS to answers to Allocate."""

    daemon: ResourceName
    """The resource after which the daemon is called."""
    host_root: str
    serves: Serves | None
    """None: no daemon is ready."""

    def add(
        self, response: v1beta1.ContainerAllocateResponse, topology: Topology, devices: Collection[DeviceID]
    ) -> None:
        """
        Adds pipes and shared memory if one of these devices is shared by MPS. Raises ContainerUnready if the daemon does not
        serve it.
        """
        shared = {
            device: 0 if offer.by_amounts else offer.replicas
            for device in devices
            for offer in topology.offers_by_base.get(device, ())
            if offer.sharing == "mps"
        }
        if not shared:
            return
        remedy = "see that topoalign mps runs on this node, and what its /readyz says"
        if self.serves is None:
            raise ContainerUnready(f"the MPS daemon of {self.daemon} is not ready", remedy)
        if not self.serves.devices.issuperset(shared) or {*shared.values()} != {self.serves.replicas}:
            finding = f"the MPS daemon of {self.daemon} serves other devices or shares than are offered"
            raise ContainerUnready(finding, remedy)
        pipe = CONTAINER_ROOT / self.daemon / PIPE
        response.envs[PIPE_VARIABLE] = str(pipe)
        response.mounts += [
            v1beta1.Mount(container_path=str(pipe), host_path=f"{self.host_root}/{self.daemon}/{PIPE}"),
            v1beta1.Mount(container_path=CONTAINER_SHM, host_path=f"{self.host_root}/{SHM}"),
        ]

    def tell_limits(
        self,
        response: v1beta1.ContainerAllocateResponse,
        resource: ResourceName,
        allocation: Allocation,
        hardware: Topology,
    ) -> None:
        """
        Adds the limits of the container of this allocation to an answer that has pipes, if it has units or slots. Raises
        ContainerUnready for a GPU that is not in slots any more.
        """
        if PIPE_VARIABLE in response.envs:
            limits = limits_of(allocation.from_kubelet[resource], allocation.slots, hardware)
            response.envs = dict(sorted({**response.envs, **limits}.items()))


def limits_of(devices: Sequence[DeviceID], amounts: Mapping[DeviceID, Amount], hardware: Topology) -> Mapping[str, str]:
    """
    The variables that limit a container with these units of one kind, or these slots, of which some amounts are known;
    nothing for shares. GPUs are counted as the container is told of them.
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
    """The limit for these hundredths of each GPU: one value holds for all, so the smallest where they are not alike."""
    limited = [each for each in cores if 0 < each < CORES]
    return {THREAD_LIMIT: str(min(limited))} if limited else {}


def memory_limit(memory: Iterable[int]) -> Mapping[str, str]:
    """The limit for these bytes of each GPU, in whole MiB: `0=4096M,1=4096M`. Less than one would be no limit."""
    return {MEMORY_LIMIT: ",".join(f"{place}={max(1, each // MIB)}M" for place, each in enumerate(memory))}


def mps_teller(root: str, topology: Topology, resource: ResourceName) -> MpsTeller:
    """What is to be told of a resource now. `root`: `flags.mpsRoot`."""
    daemon = daemon_of(topology, resource)
    return MpsTeller(daemon, root.rstrip("/"), serving(root_here(root), daemon))


def daemon_of(topology: Topology, resource: ResourceName) -> ResourceName:
    """After which resource the daemon is called that serves one: for memory of GPUs in units their computing time."""
    in_blocks = (offer.devices[0] for offer in topology.offers_of.get(resource, ()) if offer.unit == "memory")
    beside = (each for base in in_blocks for each in topology.offers_by_base[base])
    return next((each.resource for each in beside if each.unit == "cores"), resource)


def unserved(root: str, topology: Topology) -> str | None:
    """Why shares by MPS cannot be given out now; None: they can."""
    here = root_here(root)
    for resource, offers in topology.offers_of.items():
        shared = [offer for offer in offers if offer.sharing == "mps"]
        if shared and serving(here, daemon := daemon_of(topology, resource)) is None:
            return f"the MPS daemon of {daemon} is not ready; see that topoalign mps runs on this node"
    return None
