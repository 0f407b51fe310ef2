"""
Runs services as a process of their own, which sets up logging, signals and the garbage collector.

A node agent must start fast: it starts with its node, and pods wait for its first list of devices.
"""

import gc
import signal
from collections.abc import Mapping, Sequence

import anyio

from topoalign.core.ports import Bus
from topoalign.runtime.collector import importing
from topoalign.runtime.logging import configure_logging
from topoalign.runtime.settings import RuntimeSettings, from_environment


def run_process(names: Sequence[str], environment: Mapping[str, str], *, bus: Bus | None = None) -> None:
    """Runs services until SIGTERM or SIGINT. `bus` None: connects to NATS. Raises as `runner.run_services`."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it can be handled, and after it no longer can
    settings = from_environment(RuntimeSettings, environment)
    configure_logging(settings.log_format, settings.log_level)
    with importing():
        from topoalign.runtime.installed import load_services  # here, because the collector is off
        from topoalign.runtime.runner import RunningServices, run_services

        services = load_services(names)

    def serving(running: RunningServices) -> None:
        gc.collect()
        gc.freeze()  # the objects that the services have created also stay

    anyio.run(lambda: run_services(services, environment, bus=bus, ready=serving), backend="asyncio")
