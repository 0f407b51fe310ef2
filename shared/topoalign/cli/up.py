"""
`topoalign up`: all services in one process, with everything that a laptop lacks.

It adds a NATS server, a described machine if there is no GPU driver, and a temporary state directory. It reports
readiness only after the hardware facts have reached the registry, so that the first command in another terminal works.
"""

import json
import os
import socket
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path
from urllib.request import urlopen

import anyio
import click

from topoalign.cli import output
from topoalign.cli.doctor import why_no_driver
from topoalign.cli.running import RunningUp, announce_running
from topoalign.cli.serve import ALLOCATING, EVERYWHERE, MACHINE, NODE_SERVICES, settings
from topoalign.core.model.errors import clean
from topoalign.plugin_config import nvidia_fields
from topoalign.runtime.installed import load_services
from topoalign.runtime.logging import configure_logging
from topoalign.runtime.nats_bus import apply_stores
from topoalign.runtime.nats_server import local_nats
from topoalign.runtime.runner import RunningServices, run_services
from topoalign.runtime.settings import PREFIX, RuntimeSettings, from_environment
from topoalign.runtime.shutdown import run_until_signal
from topoalign.runtime.tasks import background

ALL = (*NODE_SERVICES, "registry")
SIMULATED = "dgx-a100"
"""The machine that `up` simulates without a GPU driver."""
HTTP_PORT = 8470
"""The port of the HTTP pages, if it is free."""
NATS_PORT = 4222
"""The port of its NATS server, if it is free: the default of every NATS client."""
READY_TRIES = 500
READY_PAUSE = 0.02
"""The maximum number of readiness checks of `up` at its start, and the seconds between them."""


@click.command()
@settings(MACHINE, *ALLOCATING, *EVERYWHERE)
def up(environment: dict[str, str]) -> None:
    """
    Run all services in one process, with NATS and the HTTP API, until Ctrl-C.

    Without a GPU driver the machine is a described dgx-a100. Without --nats a NATS server is started on port 4222 of the
    loopback address, or on a free port. Without --state-dir allocations are lost at the end.

    \b
    Examples:
      topoalign up
      topoalign up --machine pasted.txt --policy restricted
    """
    defaults = {PREFIX + "LOG_LEVEL": "warning", PREFIX + "NATS_WAIT": "10"}
    environment = {**defaults, **nvidia_fields.drop_nvidia_variables(environment)}
    if PREFIX + "HTTP_PORT" not in environment:
        environment[PREFIX + "HTTP_PORT"] = str(HTTP_PORT if is_free(HTTP_PORT) else 0)
    if PREFIX + "MACHINE" not in environment and why_no_driver() is not None:
        environment[PREFIX + "MACHINE"] = SIMULATED
    runtime = from_environment(RuntimeSettings, environment)
    configure_logging(runtime.log_format, runtime.log_level)
    with tempfile.TemporaryDirectory(prefix="topoalign-") as scratch:
        run_until_signal(partial(serve_with_nats, environment, Path(scratch)))


async def serve_with_nats(environment: dict[str, str], scratch: Path) -> None:
    """Runs all services, and a NATS server if `environment` has none. The files are below `scratch`."""
    environment = {PREFIX + "STATE_DIR": str(scratch / "state"), **environment}
    async with AsyncExitStack() as servers:
        if PREFIX + "NATS_URL" not in environment:
            environment[PREFIX + "NATS_URL"] = await start_nats(servers, scratch, NATS_PORT)
        else:
            runtime = from_environment(RuntimeSettings, environment)
            await apply_stores(runtime.nats_url, runtime)
        with ExitStack() as while_running:
            async with background() as tasks:

                def ready(running: RunningServices) -> None:
                    tasks.start_soon(welcome_once_ready, running, environment, while_running)

                await run_services(load_services(ALL), environment, ready=ready, signals=False)


async def start_nats(servers: AsyncExitStack, scratch: Path, port: int) -> str:
    """Starts NATS on this port of the loopback, or on another if it is taken. Returns its URL. Raises NatsServerFailed."""
    return await servers.enter_async_context(local_nats(scratch / "nats", port if is_free(port) else None))


async def welcome_once_ready(
    running: RunningServices, environment: Mapping[str, str], while_running: ExitStack
) -> None:
    """
    Waits until the first fact has reached the registry, so that all commands work. Then lets other terminals find this
    process, and prints its addresses and commands to try.
    """
    for _ in range(READY_TRIES):
        if await anyio.to_thread.run_sync(is_ready, running, abandon_on_cancel=True):
            break
        await anyio.sleep(READY_PAUSE)
    else:
        output.note(f"not ready yet: {running.http}/readyz?verbose shows why")
    assert running.nats is not None and running.http is not None, "`up` has both"
    found = RunningUp(pid=os.getpid(), nats=environment[PREFIX + "NATS_URL"], http=running.http, node=running.node)
    while_running.enter_context(announce_running(found))
    machine = environment.get(PREFIX + "MACHINE")
    described = f", with the described machine {clean(machine, 200)}" if machine else ""
    output.note(f"node    {clean(running.node)}{described}")
    output.note(f"http    {running.http}/v1/nodes  /v1/allocations  /metrics  /readyz?verbose")
    output.note(f"nats    {running.nats}")
    output.note("")
    output.note("In another terminal:")
    for command in ("topo", "watch", "allocate --gpus 2"):
        output.note(f"  topoalign {command}")
    output.note("Ctrl-C ends it.")


def is_ready(services: RunningServices) -> bool:
    """Whether every check passes, and the registry has the node with its hardware and its allocator."""
    try:
        with urlopen(f"{services.http}/readyz", timeout=1):  # noqa: S310  # our own address
            pass
        with urlopen(f"{services.http}/v1/nodes", timeout=1) as nodes:  # noqa: S310  # as above
            listed = json.load(nodes)["items"]
    except OSError:
        return False
    return any(node["name"] == services.node and node["source"] and not node["stale"] for node in listed)


def is_free(port: int) -> bool:
    """Whether this port of the loopback can be listened on now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
