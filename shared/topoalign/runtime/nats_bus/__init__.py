"""The bus over NATS: the only package that imports the NATS client library."""

from topoalign.runtime.nats_bus.deferred import defer_jetstream

defer_jetstream()

from topoalign.runtime.nats_bus.access import Access  # noqa: E402  # it imports the library
from topoalign.runtime.nats_bus.bus import NatsBus, apply_stores, connect_bus  # noqa: E402  # so does this

__all__ = ["Access", "NatsBus", "apply_stores", "connect_bus"]
