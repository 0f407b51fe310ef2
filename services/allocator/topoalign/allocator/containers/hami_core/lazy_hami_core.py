"""
Starts the cleanup, the feedback and the reader of HAMi-core's files when the configuration names a directory for them. Most
nodes have none and import nothing of it.
"""

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from topoalign.core import wire
from topoalign.core.model.errors import InvalidField, clean
from topoalign.core.model.requests import UseRequest
from topoalign.core.ports import Clock, Endpoint
from topoalign.core.state.fold import NodeState
from topoalign.runtime.clock import until_tick
from topoalign.runtime.metrics import ServiceMetric
from topoalign.runtime.replies import answer_with

if TYPE_CHECKING:
    from topoalign.allocator.containers.hami_core.shared_files import SharedFiles
    from topoalign.allocator.containers.hami_core.slot_directories import LedgerView
    from topoalign.core.model.processes import LibraryReading

LOOK_SECONDS = 5.0
"""Between two checks of the configuration."""


async def keep_directories(root: Callable[[], str], allocations: "LedgerView", clock: Clock) -> None:
    """Runs `DirectoryCleanup.run` as soon as a root is configured."""
    while not root():
        await clock.sleep(until_tick(clock, LOOK_SECONDS))
    from topoalign.allocator.containers.hami_core.slot_directories import DirectoryCleanup  # few nodes have it

    await DirectoryCleanup(root).run(allocations, clock)


async def keep_priorities(
    root: Callable[[], str], is_on: Callable[[], bool], state: Callable[[], NodeState], clock: Clock
) -> None:
    """Runs `Feedback.run` as soon as a root is configured, also if it is off, to reset notes of a former process."""
    while not root():
        await clock.sleep(until_tick(clock, LOOK_SECONDS))
    from topoalign.allocator.containers.hami_core.feedback import Feedback  # as above

    await Feedback(root, is_on, state).run(clock)


class SharedFilesOnDemand:
    """A `SharedFiles` that is created on the first read of a node with a root."""

    def __init__(self, root: Callable[[], str], state: Callable[[], NodeState], clock: Clock) -> None:
        """As `SharedFiles`."""
        self._root = root
        self._state = state
        self._clock = clock

    @cached_property
    def _files(self) -> "SharedFiles":
        from topoalign.allocator.containers.hami_core.shared_files import SharedFiles  # as above

        return SharedFiles(self._root, self._state, self._clock)

    async def read(self) -> "LibraryReading":
        """As `SharedFiles.read`."""
        if self._root():
            return await self._files.read()
        from topoalign.core.model.processes import LibraryReading  # as above

        return LibraryReading(node=self._state().node)

    def endpoint(self) -> Endpoint:
        """Answers UseRequest with what the libraries count."""
        subject = wire.admission_subject(self._state().node, "library-use")
        return Endpoint(name="library-use", subject=subject, answer=answer_with(UseRequest, self._answer))

    async def _answer(self, request: UseRequest) -> "LibraryReading":
        if request.node != (node := self._state().node):
            raise InvalidField("node", f"{clean(request.node)!r} is not this node", f"ask {node!r} here")
        return await self.read()

    def figure(self) -> ServiceMetric:
        """How many files could not be used, for /metrics."""
        cached: dict[str, SharedFiles] = self.__dict__
        return ServiceMetric(
            "counter",
            "topoalign_allocator_hami_core_unusable_files",
            "Files of HAMi-core in containers that were unusable, counted at each reading.",
            lambda: cached["_files"].refused if "_files" in cached else 0,
        )
