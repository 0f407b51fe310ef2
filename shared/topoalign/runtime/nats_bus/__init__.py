"""The bus over NATS: the only package that imports the NATS client library."""

from topoalign.runtime.logging import hide_module

# The library needs aiohttp only for WebSockets (`load_websockets`). It would cost each agent 0.12 s and 10 MiB.
with hide_module("aiohttp"):
    import nats.aio.client  # noqa: F401  # before the modules below import it with aiohttp

from topoalign.runtime.nats_bus.bus import NatsBus, apply_stores, connect_bus

__all__ = ["NatsBus", "apply_stores", "connect_bus"]
