"""
Defects planted on purpose: a simulation that does not find these finds nothing.

Each breaks one promise of the reservation step in the way in which real allocators broke it (kubernetes 137534, HAMi-core
273): between choosing and reserving there is a pause, or what was chosen is not looked at again.
"""

from collections.abc import Sequence
from types import TracebackType

import anyio
from simulation.node import Parts

from topoalign.allocator.admissions import Admissions
from topoalign.allocator.handouts import Handouts
from topoalign.allocator.ledger import Ledger
from topoalign.core.decisions import Decision
from topoalign.core.events import Allocation
from topoalign.core.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.requests import AdmissionRules, PodRequest
from topoalign.core.state import NodeState


class NoTurn:
    """Stands where a lock should be."""

    async def __aenter__(self) -> None:
        await anyio.lowlevel.checkpoint()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await anyio.lowlevel.checkpoint()


class PausingAdmissions(Admissions):
    """Decides, pauses, and records what it decided, although another has been given the devices meanwhile."""

    async def _decide(self, pod: PodRequest, rules: AdmissionRules) -> Decision:
        self._turn = NoTurn()  # type: ignore[assignment]  # that is the defect
        decision = await super()._decide(pod, rules)
        await anyio.lowlevel.checkpoint()
        return decision


class PausingHandouts(Handouts):
    """Looks at the record, pauses, and records what the kubelet chose by what it saw before."""

    seen: NodeState | None = None

    @property
    def state(self) -> NodeState:
        return self.seen or self._ledger.state

    async def allocate(
        self, resource: ResourceName, containers: Sequence[Sequence[DeviceID]]
    ) -> tuple[Allocation, ...]:
        seen = self._ledger.state
        await anyio.lowlevel.checkpoint()
        self.seen = seen
        try:
            return self._grant(resource, containers, None)
        finally:
            self.seen = None


class HalvingLedger(Ledger):
    """Of several allocations that ended it releases only some."""

    def release(self, allocations: Sequence[AllocationID], reason: str) -> None:
        super().release(allocations[: len(allocations) // 2], reason)


class PausingAdmissionsParts(Parts):
    admissions = PausingAdmissions


class PausingHandoutsParts(Parts):
    handouts = PausingHandouts


class HalvingParts(Parts):
    ledger = HalvingLedger


PLANTS: dict[str, Parts] = {
    "pause-in-admissions": PausingAdmissionsParts(),
    "pause-in-handouts": PausingHandoutsParts(),
    "half-a-release": HalvingParts(),
}
