"""Prints who gets and gives back which devices, on every node: `python examples/subscribe_allocations.py nats://HOST:4222`."""

import sys
from contextlib import suppress

import anyio

from topoalign.client import connect
from topoalign.core.model.events import AllocationGranted, AllocationReleased, AllocationsSnapshot
from topoalign.runtime.logging import configure_logging


async def main(url: str) -> None:
    configure_logging(level="warning")
    async with connect(url) as client:
        async for heard in client.allocations():
            match heard.event:
                case AllocationsSnapshot(node=node, allocations=live):
                    print(f"{node}: {len(live)} allocations are live", flush=True)
                case AllocationGranted(node=node, allocation=allocation):
                    print(f"{node}: {allocation.id} got {sorted(allocation.device_ids)}", flush=True)
                case AllocationReleased(node=node, allocation=name, reason=reason):
                    print(f"{node}: {name} is over ({reason})", flush=True)


with suppress(KeyboardInterrupt):
    anyio.run(main, sys.argv[1] if len(sys.argv) > 1 else "nats://127.0.0.1:4222")
