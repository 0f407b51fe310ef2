"""Answers over the bus which nodes HAMi runs: `topoalign why` has no access to Kubernetes."""

from bisect import bisect_right

import anyio
from anyio.abc import TaskStatus

from topoalign.core import wire
from topoalign.core.diagnosis.foreign import ForeignPage, ForeignRequest
from topoalign.core.model.errors import Unavailable
from topoalign.core.ports import Bus, Endpoint
from topoalign.registry.foreign import ForeignNodes
from topoalign.runtime.answers import answering

SERVICE = "topoalign-registry"
MOST = 1_000
"""Nodes of a page: with names of 253 characters it is far below what a bus takes."""


class NodesUnknown(Unavailable):
    """Raised while it is not known which nodes HAMi runs."""

    code = "NodesUnknown"

    def __init__(self, finding: str) -> None:
        super().__init__(finding, "wait until the registry has read what Kubernetes has; /readyz tells when")


async def serve_foreign(
    bus: Bus, foreign: ForeignNodes, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
) -> None:
    """Answers `ForeignRequest`, for ever; has started once it does."""

    async def page(request: ForeignRequest) -> ForeignPage:
        if (finding := foreign.behind()) is not None:
            raise NodesUnknown(finding)
        return page_of(foreign, request)

    endpoint = Endpoint(name="foreign", subject=wire.foreign_subject(), answer=answering(ForeignRequest, page))
    async with bus.serve(SERVICE, [endpoint]):
        task_status.started()
        await anyio.sleep_forever()


def page_of(foreign: ForeignNodes, request: ForeignRequest) -> ForeignPage:
    """The nodes after the one that the request names."""
    names = sorted(foreign.refusals)
    start = bisect_right(names, request.after)
    shown = names[start : start + MOST]
    return ForeignPage(nodes={name: foreign.refusal(name) for name in shown}, has_more=start + MOST < len(names))
