"""
What a container gets of GPUs that are shared by MPS: the pipes of their control daemon and its shared memory.

Nothing is given out while the daemon is away, because a CUDA program that finds no daemon goes on without one, and without
limits. The limits are the daemon's defaults; a variable in the container could only lower them, or be removed by the pod.

Source: k8s-device-plugin v0.20.0, internal/plugin/mps.go.
"""

from collections.abc import Collection
from typing import NamedTuple

from topoalign.allocator.device_plugin.host import ContainerUnready
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.plugin_config.mps_files import CONTAINER_ROOT, CONTAINER_SHM, PIPE, SHM, Serves, root_here, serving

PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"


class MpsTeller(NamedTuple):
    """Adds what one resource needs of MPS to answers to Allocate."""

    resource: ResourceName
    host_root: str
    serves: Serves | None
    """None: no daemon is ready."""

    def tell(self, told: v1beta1.ContainerAllocateResponse, topology: Topology, devices: Collection[DeviceID]) -> None:
        """
        Adds pipes and shared memory if one of these devices is shared by MPS. Raises ContainerUnready if the daemon does not
        serve it.
        """
        shared = {
            device: offer.replicas
            for device in devices
            for offer in topology.offers_by_base.get(device, ())
            if offer.sharing == "mps"
        }
        if not shared:
            return
        remedy = "see that topoalign mps runs on this node, and what its /readyz says"
        if self.serves is None:
            raise ContainerUnready(f"the MPS daemon of {self.resource} is not ready", remedy)
        if not self.serves.devices.issuperset(shared) or {*shared.values()} != {self.serves.replicas}:
            finding = f"the MPS daemon of {self.resource} serves other devices or shares than are offered"
            raise ContainerUnready(finding, remedy)
        pipe = CONTAINER_ROOT / self.resource / PIPE
        told.envs[PIPE_VARIABLE] = str(pipe)
        told.mounts += [
            v1beta1.Mount(container_path=str(pipe), host_path=f"{self.host_root}/{self.resource}/{PIPE}"),
            v1beta1.Mount(container_path=CONTAINER_SHM, host_path=f"{self.host_root}/{SHM}"),
        ]


def mps_teller(root: str, resource: ResourceName) -> MpsTeller:
    """What is to be told of a resource now. `root`: `flags.mpsRoot`."""
    return MpsTeller(resource, root.rstrip("/"), serving(root_here(root), resource))


def unserved(root: str, topology: Topology) -> str | None:
    """Why shares by MPS cannot be given out now; None: they can."""
    here = root_here(root)
    for resource, offers in topology.offers_of.items():
        shared = [offer for offer in offers if offer.sharing == "mps"]
        if shared and serving(here, resource) is None:
            return f"the MPS daemon of {resource} is not ready; see that topoalign mps runs on this node"
    return None
