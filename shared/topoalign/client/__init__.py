"""
The public subscriber: who holds which GPUs, now and from now on.

    async with connect("nats://127.0.0.1:4222") as client:
        async for delivery in client.allocations():
            print(delivery.event)

It yields a snapshot of every node first and then every event, each once and without gaps, whatever happens to the network
in between; `delivery.position` is where to go on after a restart: `client.allocations(since=position)`. Log lines go the way
of structlog; `topoalign.runtime.logging.configure_logging` sends them to stderr.
"""

from topoalign.client.node_folds import Counts, Delivery
from topoalign.client.subscriber import Client, connect

__all__ = ["Client", "Counts", "Delivery", "connect"]
