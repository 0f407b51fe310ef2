"""What a kubelet says of its containers, as a test writes it: less than `simulation.kubelet`, which lives."""

import anyio

from topoalign.allocator.ports import KubeletListing, ReportedDevices, ResourceEntry
from topoalign.core.model.errors import Unavailable
from topoalign.core.model.events import Owner
from topoalign.core.model.ids import GPU, ContainerName, DeviceID, Namespace, PodName


class KubeletRecord:
    """What PodResources and the checkpoint say."""

    def __init__(self) -> None:
        self.pods: dict[str, frozenset[DeviceID]] = {}
        self.init: set[DeviceID] = set()
        """What init containers have: in the checkpoint, and shown nowhere."""
        self.answering = self.readable = True

    async def listing(self, seconds: float | None = None) -> KubeletListing:
        await anyio.lowlevel.checkpoint()
        if not self.answering:
            raise Unavailable("PodResources does not answer", "look at the kubelet")
        places = frozenset((GPU, device) for device in self.shown | self.init)
        return KubeletListing(
            kubelet=(1,),
            since=0.0,
            pods=len(self.pods) + 1,
            holdings=tuple(
                ReportedDevices(owner=owner(pod), resource=GPU, devices=devices) for pod, devices in self.pods.items()
            ),
            checkpoint=places if self.readable else None,
            parts=tuple(ResourceEntry(GPU, devices) for devices in (*self.pods.values(), frozenset(self.init)))
            if self.readable
            else (),
        )

    def written(self) -> tuple[int, ...]:
        return ()

    @property
    def shown(self) -> set[DeviceID]:
        return {device for devices in self.pods.values() for device in devices}


def owner(pod: str) -> Owner:
    return Owner(namespace=Namespace("default"), pod=PodName(pod), container=ContainerName("main"))
