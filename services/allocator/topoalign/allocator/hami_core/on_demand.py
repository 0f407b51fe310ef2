"""The sweeps, from when the configuration names a directory for them: most nodes have none, and import nothing of it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from topoalign.core.ports import Clock
from topoalign.runtime.clock import until_tick

if TYPE_CHECKING:
    from topoalign.allocator.hami_core.sweeps import Allocations

LOOK_SECONDS = 5.0
"""Between two looks at the configuration."""


async def keep_directories(root: Callable[[], str], allocations: "Allocations", clock: Clock) -> None:
    """`Sweeps.run`, from when there is a root."""
    while not root():
        await clock.sleep(until_tick(clock, LOOK_SECONDS))
    from topoalign.allocator.hami_core.sweeps import Sweeps  # few nodes have it

    await Sweeps(root).run(allocations, clock)
