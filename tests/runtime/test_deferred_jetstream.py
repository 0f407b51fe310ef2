"""What the NATS library has for some is loaded for those who use it, and for nobody else: JetStream, and WebSockets."""

import subprocess
import sys

import pytest
from nats.js.api import Header

from topoalign.runtime.nats_bus import deferred

BUS = "import sys, topoalign.runtime.nats_bus, nats.aio.client, nats.micro"
LOADED = "print(*sorted(name for name in sys.modules if name.startswith('nats.js.')))"


def printed(*lines: str) -> str:
    """What a process of its own prints, because this one has loaded the library."""
    return subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


def test_the_bus_does_not_load_the_jetstream_of_the_library() -> None:
    assert "" == printed(BUS, LOADED)


@pytest.mark.parametrize(
    "use",
    [
        "from nats.js import JetStreamContext, JetStreamManager; found = JetStreamContext",
        "import nats.js.client; found = nats.js.client.JetStreamContext",
        "found = type(nats.aio.client.Client().jetstream())",
        "from nats.js.api import ConsumerConfig; found = nats.js.JetStreamContext",
    ],
)
def test_whoever_uses_it_finds_all_of_it(use: str) -> None:
    """In whatever order its parts are asked for, each of them is loaded once."""
    same = "print(found is sys.modules['nats.js.client'].JetStreamContext, nats.js.api is sys.modules['nats.js.api'])"

    assert "True True" == printed(BUS, use, "import nats.js.api", same)


def test_what_the_library_had_loaded_before_stays() -> None:
    assert "False" == printed("import sys, nats.js", BUS, "print('deferred' in repr(type(nats.js)))")


def test_the_names_of_headers_are_those_of_the_library() -> None:
    assert {each.name: Header[each.name].value for each in deferred.ReservedHeader} == {
        each.name: each.value for each in deferred.ReservedHeader
    }


def test_what_jetstream_does_not_have_is_not_found() -> None:
    assert "False" == printed(BUS, "print(hasattr(nats.js, 'no_such_name'))")


def test_the_bus_loads_what_websockets_need_where_an_address_has_them() -> None:
    loaded = "print('aiohttp' in sys.modules, nats.aio.transport.aiohttp is not None)"
    load = "topoalign.runtime.nats_bus.deferred.load_websockets()"

    assert "False False" == printed(BUS, loaded)
    assert "True True" == printed(BUS, load, loaded)
