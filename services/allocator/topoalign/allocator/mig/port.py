"""What is asked of the driver about the MIG instances of a GPU."""

from typing import NamedTuple, Protocol

from topoalign.core.model.errors import DriverFault, NoFit
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.mig import MigDevice, MigPlacement


class GpuInstance(NamedTuple):
    """A GPU instance that is there, whoever made it."""

    id: int
    """NVML's id of it on its GPU, which a later instance may have again."""
    profile: str
    """`1g.10gb`. Several profiles may have the same places: on an A100 3g.20gb and 4g.20gb at slice 0."""
    placement: MigPlacement
    uuids: frozenset[DeviceID]
    """Of the MIG devices in it, one for each compute instance."""


class InstanceInUse(DriverFault):
    """Raised where an instance is not destroyed because processes use it; the driver works."""

    code = "InstanceInUse"


class PlaceTaken(NoFit):
    """Raised where the driver has no room for an instance at a place that seemed free: nothing was made, and it works."""

    code = "PlaceTaken"

    def __init__(self, gpu: DeviceID, profile: str, placement: MigPlacement) -> None:
        super().__init__(
            f"{gpu}: the driver has no room for a MIG instance {profile} at slice {placement.start}",
            "see with `nvidia-smi mig -lgi` who has it",
        )


class InstanceMaker(Protocol):
    """
    Makes and destroys MIG instances. Each call ends within a time limit: DriverFault says that it failed, or that nothing is
    known of it because the driver does not answer. What such a call has done after all is seen by `there`.
    """

    async def there(self, gpu: DeviceID) -> tuple[GpuInstance, ...]:
        """All GPU instances of a GPU. Raises DriverFault."""

    async def make(self, gpu: DeviceID, profile: str, placement: MigPlacement) -> MigDevice:
        """
        Makes a GPU instance of this profile at this place, and one compute instance of all of it. Raises DriverFault, and
        PlaceTaken.
        """

    async def destroy(self, gpu: DeviceID, instance: int) -> None:
        """Destroys the GPU instance with this id and all in it, if it is there. Raises DriverFault, InstanceInUse."""
