"""The bus over NATS: the only package that imports the NATS client library."""

from topoalign.runtime.nats_bus.access import Access
from topoalign.runtime.nats_bus.bus import NatsBus, connect_bus

__all__ = ["Access", "NatsBus", "connect_bus"]
