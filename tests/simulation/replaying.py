"""What a start would find on the disk."""

from simulation.journal import Disk
from simulation.world import NODE

from topoalign.core.model.errors import TopoalignError
from topoalign.core.model.events import AllocationsSnapshot
from topoalign.core.state.fold import NodeState, replay


def replayed(disk: Disk) -> NodeState:
    """The state that a start would find on disk now."""
    events = [event for entry in disk.journal.load() for event in entry.events]
    newest = max((at for at, event in enumerate(events) if isinstance(event, AllocationsSnapshot)), default=0)
    return replay(NODE, events[newest:])


def digest_on(disk: Disk) -> str:
    """Of the state that a start would find; why there is none, if the journal cannot be read."""
    try:
        return replayed(disk).digest
    except TopoalignError as error:
        return str(error)
