"""The poll of a kubelet that is slow, for a call that waits for it and would fail the pod without an answer."""

from collections.abc import Awaitable, Callable

from topoalign.allocator.ports import Poll
from topoalign.core.model.errors import Unavailable
from topoalign.core.ports import Clock

GRANT_SECONDS = 4.0
"""How long after its arrival a call waits for a slow kubelet: well within the time to drain."""
AGAIN_SECONDS = 0.5
"""Between the beginnings of two tries."""


async def poll_for_grant(poll: Callable[[float | None], Awaitable[Poll]], clock: Clock, arrived: float) -> Poll:
    """
    Polls until the kubelet answers, for `GRANT_SECONDS`: it sets Allocate no time limit and PreStartContainer one of 30 s,
    and a pod that is refused here stays refused. A connection may have gone silently, so the first try is short; each other
    one has all the time that is left, because a kubelet that needs two seconds answers none of four tries of one. `poll`:
    with so many seconds, None: as many as it has always; `arrived`: monotonic seconds of the call. Raises Unavailable.
    """
    until = arrived + GRANT_SECONDS
    seconds: float | None = None
    while True:
        again_at = clock.monotonic() + AGAIN_SECONDS
        try:
            return await poll(seconds)
        except Unavailable:
            if max(again_at, clock.monotonic()) >= until:
                raise
        await clock.sleep(again_at - clock.monotonic())
        seconds = until - clock.monotonic()
