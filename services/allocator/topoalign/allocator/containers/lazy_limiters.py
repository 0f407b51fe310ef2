"""
Starts what keeps the files of the limiters when the configuration names a directory for them. Most nodes have none, and do
not import the modules of vcuda and HAMi-core.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from topoalign.allocator.containers.limiter_files import RecordView
from topoalign.allocator.ports import Poll
from topoalign.core import wire
from topoalign.core.model.errors import InvalidField, clean
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.requests import NodeRequest
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Clock, Endpoint
from topoalign.core.state.fold import NodeState
from topoalign.runtime.clock import until_tick
from topoalign.runtime.metrics import ServiceMetric
from topoalign.runtime.replies import answer_with

if TYPE_CHECKING:
    from topoalign.allocator.containers.hami_core.shared_files import SharedFiles
    from topoalign.allocator.containers.vcuda.limiter import VcudaLimiter
    from topoalign.core.model.processes import LibraryReading

LOOK_SECONDS = 5.0
"""Between two checks of the configuration."""


async def until_configured(root: Callable[[], str], clock: Clock) -> None:
    """Waits until there is a root."""
    while not root():
        await clock.sleep(until_tick(clock, LOOK_SECONDS))


class LimiterOnDemand:
    """A `VcudaLimiter` that is created when it is needed."""

    def __init__(self, root: Callable[[], str], hardware: Callable[[], Topology]) -> None:
        """As `VcudaLimiter`."""
        self._root = root
        self._hardware = hardware
        self._limiter: VcudaLimiter | None = None

    def _created(self) -> "VcudaLimiter":
        if self._limiter is None:
            from topoalign.allocator.containers.vcuda.limiter import VcudaLimiter

            self._limiter = VcudaLimiter(self._root, self._hardware)
        return self._limiter

    async def starting(self, resource: ResourceName, units: Sequence[DeviceID], poll: Poll) -> None:
        """As `VcudaLimiter.starting`."""
        if self._root():
            await self._created().starting(resource, units, poll)

    async def run(self, allocations: RecordView, clock: Clock) -> None:
        """Runs `VcudaLimiter.run` as soon as a directory is configured."""
        await until_configured(self._root, clock)
        await self._created().run(allocations, clock)

    def figure(self) -> ServiceMetric:
        """How many registrations were refused, for /metrics."""
        return ServiceMetric(
            "counter",
            "topoalign_allocator_vcuda_refused",
            "Registrations on vcuda.sock that were refused: the process was not in the container with these units.",
            lambda: self._limiter.refused if self._limiter is not None else 0,
        )


async def keep_directories(root: Callable[[], str], allocations: RecordView, clock: Clock) -> None:
    """Runs `DirectoryCleanup.run` of HAMi-core as soon as a root is configured."""
    await until_configured(root, clock)
    from topoalign.allocator.containers.hami_core.slot_directories import DirectoryCleanup

    await DirectoryCleanup(root).run(allocations, clock)


async def keep_priorities(
    root: Callable[[], str], is_on: Callable[[], bool], state: Callable[[], NodeState], clock: Clock
) -> None:
    """Runs `Feedback.run` as soon as a root is configured, also if it is off, to reset notes of a former process."""
    await until_configured(root, clock)
    from topoalign.allocator.containers.hami_core.feedback import Feedback

    await Feedback(root, is_on, state).run(clock)


class SharedFilesOnDemand:
    """A `SharedFiles` of HAMi-core that is created on the first read of a node with a root."""

    def __init__(self, root: Callable[[], str], state: Callable[[], NodeState], clock: Clock) -> None:
        """As `SharedFiles`."""
        self._root = root
        self._state = state
        self._clock = clock
        self._files: SharedFiles | None = None

    async def read(self) -> "LibraryReading":
        """As `SharedFiles.read`."""
        if not self._root():
            from topoalign.core.model.processes import LibraryReading

            return LibraryReading(node=self._state().node)
        if self._files is None:
            from topoalign.allocator.containers.hami_core.shared_files import SharedFiles

            self._files = SharedFiles(self._root, self._state, self._clock)
        return await self._files.read()

    def endpoint(self) -> Endpoint:
        """Answers NodeRequest with what the libraries count."""
        subject = wire.admission_subject(self._state().node, "library-use")
        return Endpoint(name="library-use", subject=subject, answer=answer_with(NodeRequest, self._answer))

    async def _answer(self, request: NodeRequest) -> "LibraryReading":
        if request.node != (node := self._state().node):
            raise InvalidField("node", f"{clean(request.node)!r} is not this node", f"ask {node!r} here")
        return await self.read()

    def figure(self) -> ServiceMetric:
        """How many files could not be used, for /metrics."""
        return ServiceMetric(
            "counter",
            "topoalign_allocator_hami_core_unusable_files",
            "Files of HAMi-core in containers that were unusable, counted at each reading.",
            lambda: self._files.refused if self._files is not None else 0,
        )
