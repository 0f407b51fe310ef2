"""Who has asked for a pod, and until when they wait for the answer: nothing may be granted after that."""

from math import inf

from simulation.world import Violation, World

from topoalign.core.model.events import AllocationGranted, LedgerEvent

ROUNDING = 1e-6
"""Seconds: a deadline is a difference of floats."""


class Patience:
    """I13. Pods that nobody with a deadline has asked for may be granted at any time."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._until: dict[str, float] = {}
        """Pod -> the virtual time at which the last of its askers gives up."""

    def waits(self, pod: str, seconds: float = inf) -> None:
        self._until[pod] = max(self._until.get(pod, 0.0), self._world.loop.time() + seconds)

    def hear(self, event: LedgerEvent) -> None:
        """A fact that has just reached the disk."""
        if not isinstance(event, AllocationGranted) or event.allocation.owner is None:
            return
        pod, now = event.allocation.owner.pod, self._world.loop.time()
        late = now - self._until.get(pod, inf)
        if late > ROUNDING:
            self._world.violate(Violation("I13", f"{pod} was granted {late:g} s after its asker gave up"))
