"""
The public subscriber: which containers hold which GPUs, now and after each change.

    async with connect("nats://127.0.0.1:4222") as client:
        async for delivery in client.allocations():
            print(delivery.event)

It yields first a snapshot of every node and then every event, each once and without gaps, even if the connection fails.
To continue after a restart, pass the last `delivery.position`: `client.allocations(since=position)`. Logging uses
structlog; `topoalign.runtime.logging.configure_logging` sends the log to stderr.
"""

from topoalign.client.node_folds import Counts, Delivery
from topoalign.client.subscriber import Client, connect

__all__ = ["Client", "Counts", "Delivery", "connect"]
