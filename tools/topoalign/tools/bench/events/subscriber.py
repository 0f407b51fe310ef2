"""
`python -m …subscriber URL NODE FILE`: writes `ready` once it has the first snapshot, and then a line for each grant: one
device of it, and the monotonic second at which the event was there. The clock is the same for all processes of a machine.
"""

import sys
import time
from typing import TextIO

import anyio

from topoalign.client import connect
from topoalign.core.model.events import AllocationGranted
from topoalign.core.model.ids import NodeName


async def subscribe(url: str, node: NodeName, file: TextIO) -> None:
    """Until it is ended."""
    async with connect(url) as client:
        is_ready = False
        async for delivery in client.allocations(node=node):
            at = time.monotonic()
            if isinstance(delivery.event, AllocationGranted):
                print(min(delivery.event.allocation.device_ids), at, file=file, flush=True)
            elif not is_ready:
                is_ready = True
                print("ready", file=file, flush=True)


if __name__ == "__main__":
    with open(sys.argv[3], "w") as file:
        anyio.run(subscribe, sys.argv[1], NodeName(sys.argv[2]), file)
