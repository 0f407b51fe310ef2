"""
Who uses the GPUs of one node now: asked of its discovery for each request, because nothing stores measurements.

Who holds what is taken from the fold; a node that is stale is asked all the same, because its discovery may well answer.
"""

import msgspec

from topoalign.core import wire
from topoalign.core.model.errors import TopoalignError
from topoalign.core.model.ids import NodeName
from topoalign.core.model.library_use import LibraryReading
from topoalign.core.model.processes import Measurement
from topoalign.core.model.requests import UseRequest
from topoalign.core.ports import Bus
from topoalign.core.usage.attribution import DeviceShares, shares_of
from topoalign.core.usage.library import has_library, with_library
from topoalign.registry.cluster import Member, bare
from topoalign.registry.views import rfc3339

ANSWER_SECONDS = 10.0
"""For a measurement: as long as the command line waits, and below the time-outs of clients."""
LIBRARY_SECONDS = 3.0
"""For what libraries count, which is left out otherwise."""


class SharedDevice(DeviceShares, frozen=True, kw_only=True):
    """One GPU or MIG instance, who holds it and who uses it; with the index and PCI address of its card."""

    index: int
    pci: str | None


class SharesView(msgspec.Struct, frozen=True, kw_only=True):
    """All GPUs of one node."""

    node: NodeName
    measured: str | None
    """RFC 3339 time."""
    stale: bool
    """The node's allocator does not answer: who holds what was true, and nobody vouches for it now."""
    finding: str
    """Why it is not known where processes run; empty: it is."""
    left_out: int
    """Processes that are not listed because there are too many."""
    library_finding: str
    """Why it is not known what the libraries that limit containers count; empty: it is, or there are none."""
    items: tuple[SharedDevice, ...]


async def measured(bus: Bus, node: NodeName) -> Measurement:
    """The use of a node's GPUs now. Raises Unavailable where its discovery does not answer or cannot measure."""
    question = msgspec.json.encode(UseRequest(node=node))
    return wire.answered(await bus.ask(wire.use_subject(node), question, within=ANSWER_SECONDS), Measurement)


async def counted(bus: Bus, member: Member) -> LibraryReading:
    """What the libraries that limit a node's containers count; nothing where there are none, or its allocator is silent."""
    state = bare(member.state)
    if not has_library(state):
        return LibraryReading(node=state.node)
    question = msgspec.json.encode(UseRequest(node=state.node))
    try:
        return wire.answered(
            await bus.ask(wire.admission_subject(state.node, "library-use"), question, within=LIBRARY_SECONDS),
            LibraryReading,
        )
    except TopoalignError as error:
        return LibraryReading(node=state.node, finding=error.finding)


def shares_view(member: Member, measurement: Measurement, reading: LibraryReading) -> SharesView:
    """The measurement and what libraries count, with the node's allocations of this moment."""
    state = bare(member.state)
    shares = with_library(shares_of(state, measurement), reading)
    gpus = state.hardware.gpu_by_id
    return SharesView(
        node=shares.node,
        measured=rfc3339(shares.time),
        stale=not member.answering,
        finding=shares.finding,
        left_out=shares.left_out,
        library_finding=shares.library_finding,
        items=tuple(
            SharedDevice(
                **{name: getattr(row, name) for name in DeviceShares.__struct_fields__},
                index=gpus[row.card].index,
                pci=gpus[row.card].pci,
            )
            for row in shares.devices
        ),
    )
