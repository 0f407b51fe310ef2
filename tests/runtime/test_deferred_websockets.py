"""aiohttp, which the NATS library uses for WebSockets alone, is loaded where an address has them, and nowhere else."""

import subprocess
import sys

LOADED = "print('aiohttp' in sys.modules, nats.aio.transport.aiohttp is not None)"


def printed(*lines: str) -> str:
    """What a process of its own prints, because this one has loaded the library."""
    bus = "import sys, topoalign.runtime.nats_bus, nats.aio.transport"
    return subprocess.run(
        [sys.executable, "-c", "\n".join([bus, *lines])], check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


def test_the_bus_loads_what_websockets_need_where_an_address_has_them() -> None:
    assert "False False" == printed(LOADED)
    assert "True True" == printed("topoalign.runtime.nats_bus.nats_library.load_websockets()", LOADED)
