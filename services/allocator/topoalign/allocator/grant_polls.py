"""The poll of a kubelet that is slow, for an Allocate that waits for it."""

from collections.abc import Awaitable, Callable

from topoalign.allocator.ports import Poll
from topoalign.core.model.errors import Unavailable
from topoalign.core.ports import Clock

GRANT_SECONDS = 4.0
"""How long after its arrival an Allocate waits for a slow kubelet: well within the time to drain."""
SLOW_SECONDS = 0.5
"""A poll that fails sooner was refused, and is not repeated; one that takes longer found no answer in time."""


async def poll_for_grant(poll: Callable[[float | None], Awaitable[Poll]], clock: Clock, arrived: float) -> Poll:
    """
    A poll, tried again where the kubelet is slow: it sets Allocate no time limit, and a pod that is refused here stays
    refused. A connection may have gone silently, so the first try is short; the last one has all the time that is left,
    because a kubelet that needs two seconds answers none of four tries of one. `poll`: with so many seconds, None: as
    many as it has always; `arrived`: monotonic seconds of the Allocate. Raises Unavailable.
    """
    seconds: float | None = None
    while True:
        began = clock.monotonic()
        try:
            return await poll(seconds)
        except Unavailable:
            seconds = arrived + GRANT_SECONDS - clock.monotonic()
            if clock.monotonic() - began < SLOW_SECONDS or seconds <= 0:
                raise
