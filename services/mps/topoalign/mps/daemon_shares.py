"""
Computes what each MPS daemon of a node serves and which limits it sets, from the GPUs and the configuration.

The rule is that of NVIDIA's device plugin v0.20.0 (cmd/mps-control-daemon/mps): with n replicas, a client may use 1/n
of the GPU's memory in whole MiB, and 100/n per cent of its threads, rounded down. Example: with 80 GiB and 3 replicas,
a client may use 27306 MiB and 33 per cent. A GPU with a compute capability below 7.5 serves at most 16 clients, any
other GPU 48. The plugin compares with 7.5 for Volta, which has 7.0, so a V100 can have at most 16 clients here as well.

If MPS limits vcuda units or vGPU slots, the daemon sets no limits: each container has its own, from the environment that
Allocate sets. The two resources of GPUs in units have one daemon, named after the resource of computing time.
"""

from collections.abc import Sequence

import msgspec

from topoalign.core.model.byte_sizes import MIB
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.plugin_config.configuration import Configuration
from topoalign.plugin_config.mps_files import Serves
from topoalign.plugin_config.resource_offers import offer_resources

MANY_CLIENTS = 48
FEW_CLIENTS = 16
SINCE_MANY = (7, 5)
"""The first compute capability with `MANY_CLIENTS`."""


class MpsGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU as NVML reports it."""

    gpu: Gpu
    capability: tuple[int, int]
    """Compute capability, major and minor."""


class MpsShare(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs and replicas that one daemon serves."""

    resource: ResourceName
    replicas: int
    """Replicas of each GPU; 0: the GPU is in units, and every container with units is a client."""
    own_limits: bool = False
    """Whether each client has its own limits, so that the daemon sets no default limits."""
    gpus: tuple[MpsGpu, ...]
    """In NVML's order; never empty."""

    @property
    def devices(self) -> tuple[DeviceID, ...]:
        """The uuids of its GPUs."""
        return tuple(each.gpu.id for each in self.gpus)

    @property
    def serves(self) -> Serves:
        """The announcement to the allocator."""
        return Serves(devices=frozenset(self.devices), replicas=0 if self.own_limits else self.replicas)

    @property
    def thread_percentage(self) -> int:
        """The percentage of a GPU's threads that one client may use."""
        return 100 // self.replicas

    @property
    def memory_limits(self) -> dict[DeviceID, str]:
        """GPU -> memory limit of one client, such as `27306M`; without GPUs whose memory is not reported."""
        memory = {each.gpu.id: each.gpu.memory for each in self.gpus}
        return {gpu: f"{size // self.replicas // MIB}M" for gpu, size in memory.items() if size}

    @property
    def with_too_few_clients(self) -> tuple[Gpu, ...]:
        """The GPUs that serve fewer clients than there are replicas."""
        found = []
        for each in self.gpus:
            most = MANY_CLIENTS if each.capability >= SINCE_MANY else FEW_CLIENTS
            if self.replicas > most:
                found.append(each.gpu)
        return tuple(found)


def mps_shares(found: Sequence[MpsGpu], configuration: Configuration) -> dict[ResourceName, MpsShare]:
    """Resource -> what its daemon serves, for the resources that the configuration shares by MPS on this node."""
    by_id = {each.gpu.id: each for each in found}
    return {
        offer.resource: MpsShare(
            resource=offer.resource,
            replicas=0 if offer.unit else offer.replicas,
            own_limits=offer.by_amounts,
            gpus=tuple(by_id[device] for device in offer.devices),
        )
        for offer in offer_resources(Topology(gpus=tuple(each.gpu for each in found)), configuration).offers
        if offer.sharing == "mps" and offer.unit != "memory"
    }
