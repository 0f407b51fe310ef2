"""
Creates the limiter vcuda when the configuration names a directory for it. Most nodes have none and import nothing of it.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from topoalign.allocator.ports import Poll
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Clock
from topoalign.runtime.clock import until_tick
from topoalign.runtime.metrics import ServiceMetric

if TYPE_CHECKING:
    from topoalign.allocator.containers.vcuda.limiter import RecordView, VcudaLimiter

LOOK_SECONDS = 5.0
"""Between two checks of the configuration."""


class LimiterOnDemand:
    """A `VcudaLimiter` that is created when it is needed."""

    def __init__(self, root: Callable[[], str], hardware: Callable[[], Topology]) -> None:
        """As `VcudaLimiter`."""
        self._root = root
        self._hardware = hardware

    @cached_property
    def _limiter(self) -> "VcudaLimiter":
        from topoalign.allocator.containers.vcuda.limiter import VcudaLimiter  # few nodes have it

        return VcudaLimiter(self._root, self._hardware)

    async def starting(self, resource: ResourceName, units: Sequence[DeviceID], poll: Poll) -> None:
        """As `VcudaLimiter.starting`."""
        if self._root():
            await self._limiter.starting(resource, units, poll)

    async def run(self, allocations: "RecordView", clock: Clock) -> None:
        """Runs `VcudaLimiter.run` as soon as a directory is configured."""
        while not self._root():
            await clock.sleep(until_tick(clock, LOOK_SECONDS))
        await self._limiter.run(allocations, clock)

    def figure(self) -> ServiceMetric:
        """How many registrations were refused, for /metrics."""
        help_text = (
            "Registrations on vcuda.sock that were refused: the process was not in the container with these units."
        )
        cached: dict[str, VcudaLimiter] = self.__dict__
        return ServiceMetric(
            "counter",
            "topoalign_allocator_vcuda_refused",
            help_text,
            lambda: cached["_limiter"].refused if "_limiter" in cached else 0,
        )
