"""Deletes the facts of a node that is gone for good, and detects that they were deleted."""

from topoalign.core import wire
from topoalign.core.model.events import ReservationsChanged
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Bus, Stream


def subjects_of(node: NodeName) -> list[tuple[Stream, str]]:
    """Stream and subject of everything that the services of a node can have said."""
    return [
        (wire.STORED[event], f"{wire.PREFIX}.{pattern.format(node=wire.token(node))}")
        for event, (pattern, _) in wire.SUBJECTS.items()
        if event is not ReservationsChanged
    ]


async def has_spoken(bus: Bus, node: NodeName) -> bool:
    """Whether the streams keep anything that this node said. Raises BusUnavailable, BusRefused."""
    return any([await bus.last_position(stream, subject) for stream, subject in subjects_of(node)])


async def forget_node(bus: Bus, node: NodeName) -> None:
    """
    Deletes everything that the node said, and what was reserved on it. Raises BusUnavailable, and BusRefused where it may
    not be done.
    """
    for stream, subject in [*subjects_of(node), (Stream.RESERVATIONS, wire.reservation_subject(node))]:
        await bus.forget(stream, subject)
