"""Defects of registries that are planted on purpose: a simulation of clusters that does not find these finds nothing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from topoalign.core.model.events import ReservationsChanged
from topoalign.core.model.ids import NodeName
from topoalign.registry.scheduling import service
from topoalign.registry.scheduling.binding.cluster_reservations import ClusterReservations, ReservationChange
from topoalign.registry.scheduling.binding.gang_binding import Gangs
from topoalign.registry.scheduling.filter.scheduler import BestNodes
from topoalign.registry.scheduling.scheduling_api import PodToSchedule


class RereadingReservations(ClusterReservations):
    """Reads the newest message and writes after it, whatever it has decided on: what came meanwhile is not looked at."""

    async def write(self, changes: Sequence[ReservationChange]) -> None:
        for each in changes:
            await self.refresh(each.node)
        await super().write([msgspec.structs.replace(each, position=self.of(each.node).position) for each in changes])


class ForgetfulReservations(ClusterReservations):
    """Takes in the message before the newest once more, as a bus may deliver it again."""

    before: dict[NodeName, tuple[ReservationsChanged, int]]

    def __init__(self, *details: Any) -> None:
        super().__init__(*details)
        self.before = {}

    def _apply(self, event: ReservationsChanged, position: int) -> None:
        super()._apply(event, position)
        if event.node in self.before:
            super()._apply(*self.before[event.node])
        self.before[event.node] = event, position


class HalvingGangs(Gangs):
    """Plans the pod that is to be bound, and not the others of its gang."""

    async def _plan(
        self,
        gang: str,
        waiting: Sequence[PodToSchedule],
        best: BestNodes,
        pod: PodToSchedule,
        node: NodeName | None,
        least: int,
        version: int | None = None,
    ) -> list[ReservationChange] | None:
        return await super()._plan(gang, [each for each in waiting if each.uid == pod.uid], best, pod, node, 1, version)


class ClusterPlant(NamedTuple):
    breaks: str
    """The invariant."""
    first: int
    """The seed from which on it is looked for: what takes a rare chain of events is found sooner from here."""
    name: str
    """Of what the registry is made of."""
    part: type[Any]


CLUSTER_PLANTS = {
    "rereads-the-position": ClusterPlant("K1", 32, "ClusterReservations", RereadingReservations),
    "believes-older-messages": ClusterPlant("K5", 0, "ClusterReservations", ForgetfulReservations),
    "binds-half-a-gang": ClusterPlant("K3", 5, "Gangs", HalvingGangs),
}


@contextmanager
def planted(plant: str | None) -> Iterator[None]:
    """Registries have this defect while the context is open; None: they have none."""
    if plant is None:
        yield
        return
    _, _, name, part = CLUSTER_PLANTS[plant]
    had = getattr(service, name)
    setattr(service, name, part)
    try:
        yield
    finally:
        setattr(service, name, had)
