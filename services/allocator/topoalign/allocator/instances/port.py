"""What is asked of the driver about the MIG instances of a GPU."""

from typing import NamedTuple, Protocol

from topoalign.core.model.errors import DriverFault
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.mig import MigDevice, MigPlacement


class GpuInstance(NamedTuple):
    """A GPU instance that is there, whoever made it."""

    id: int
    """NVML's id of it on its GPU, which a later instance may have again."""
    placement: MigPlacement
    uuids: frozenset[DeviceID]
    """Of the MIG devices in it, one for each compute instance."""


class InstanceInUse(DriverFault):
    """Raised where an instance is not destroyed because processes use it; the driver works."""

    code = "InstanceInUse"


class InstanceMaker(Protocol):
    """
    Makes and destroys MIG instances. Each call ends within a time limit: DriverFault says that it failed, or that nothing is
    known of it because the driver does not answer. What such a call has done after all is seen by `there`.
    """

    async def there(self, gpu: DeviceID) -> tuple[GpuInstance, ...]:
        """All GPU instances of a GPU. Raises DriverFault."""

    async def make(self, gpu: DeviceID, profile: str, placement: MigPlacement) -> MigDevice:
        """Makes a GPU instance of this profile at this place, and one compute instance of all of it. Raises DriverFault."""

    async def destroy(self, gpu: DeviceID, instance: int) -> None:
        """Destroys the GPU instance with this id and all in it, if it is there. Raises DriverFault, InstanceInUse."""
