"""
`topoalign node` and the commands of the services, and the translation of their flags into settings.

A flag is another name for a `TOPOALIGN_*` setting. It overrides the environment; the services read nothing else.
"""

import os
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import click

from topoalign.cli.options import PLACEMENT, POLICY, SCOPE, Command, add_options
from topoalign.core.model.errors import clean
from topoalign.runtime.process import run_process
from topoalign.runtime.settings import PREFIX

NODE_SERVICES = ("discovery", "hinting", "allocator")
KUBELET_DIR = Path("/var/lib/kubelet/device-plugins")
"""The default of the kubelet's device plugin directory (kubelet v1.36.3)."""


def parse_address(text: str) -> tuple[str, int]:
    """`HOST:PORT`, with an IPv6 address in brackets, which are removed; the port is from 0 to 65535."""
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 65_536):
        raise click.BadParameter(f"{clean(text, 80)!r} is not HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


MACHINE = click.option("--machine", metavar="NAME|FILE", help="Use this machine in place of the hardware.")
NODE = click.option("--node", metavar="NAME", help="Name of the Kubernetes node.  [default: host name]")
CONFIG = click.option("--config", metavar="FILE", help="What devices are offered as: resources, sharing, health.")
PAGES_AND_LOG = (
    click.option(
        "--http", type=parse_address, metavar="HOST:PORT", help="Address of the HTTP pages; port 0 picks a free one."
    ),
    click.option("--log-format", type=click.Choice(["console", "json"]), help="Format of the log on stderr."),
    click.option(
        "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="Lowest level that is logged."
    ),
)
EVERYWHERE = (click.option("--nats", "nats_url", metavar="URL", help="URL of NATS."), *PAGES_AND_LOG)
ALLOCATING = (
    NODE,
    click.option("--state-dir", metavar="DIR", help="Directory of the allocator's journal."),
    click.option("--take-over", flag_value="true", help="Replace the running allocator of this node: it hands over."),
    click.option("--kubelet-dir", metavar="DIR", help="The kubelet's device plugin directory."),
    click.option("--kubelet-config", metavar="FILE", help="The kubelet's configuration file."),
    CONFIG,
    POLICY,
    SCOPE,
    PLACEMENT,
)


def settings(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Adds these options to a command, and calls it with the environment, in which given options override variables."""

    def add(command: Command) -> Command:
        @add_options(*options)
        @wraps(command)
        def with_environment(**flags: Any) -> Any:
            return command({**os.environ, **flag_variables(**flags)})

        return with_environment

    return add


def flag_variables(http: tuple[str, int] | None, **flags: str | None) -> dict[str, str]:
    """Variable -> value of the settings that flags set."""
    given = {name: value for name, value in flags.items() if value is not None}
    if http is not None:
        given |= {"http_host": http[0], "http_port": str(http[1])}
    return {PREFIX + name.upper(): value for name, value in given.items()}


def on_a_node(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with the kubelet's directory, if that exists and none is set."""
    usual = {PREFIX + "KUBELET_DIR": str(KUBELET_DIR)} if KUBELET_DIR.is_dir() else {}
    return {**usual, **environment}


@click.command("node")
@settings(MACHINE, *ALLOCATING, *EVERYWHERE)
def run_node(environment: dict[str, str]) -> None:
    """
    Run discovery, hinting and allocator in one process: the agent of a GPU node.

    If the kubelet's device plugin directory exists, the kubelet gives out the devices; otherwise requests come over
    NATS. Use `--kubelet-dir ""` to ignore the node's kubelet.

    \b
    Examples:
      topoalign node --nats nats://hub:4222
      topoalign node --machine dgx-a100 --kubelet-dir "" --state-dir ./state
    """
    run_process(NODE_SERVICES, on_a_node(environment))


@click.command("discovery")
@settings(MACHINE, NODE, CONFIG, *EVERYWHERE)
def run_discovery(environment: dict[str, str]) -> None:
    """
    Run only the service that reads the hardware.

    \b
    Examples:
      topoalign discovery --nats nats://hub:4222
    """
    run_process(("discovery",), environment)


@click.command("hinting")
@settings(NODE, *EVERYWHERE)
def run_hinting(environment: dict[str, str]) -> None:
    """
    Run only the service that answers hint questions.

    \b
    Examples:
      topoalign hinting --nats nats://hub:4222
    """
    run_process(("hinting",), environment)


@click.command("allocator")
@settings(*ALLOCATING, *EVERYWHERE)
def run_allocator(environment: dict[str, str]) -> None:
    """
    Run only the service that gives devices to containers.

    \b
    Examples:
      topoalign allocator --nats nats://hub:4222 --kubelet-dir /var/lib/kubelet/device-plugins
    """
    run_process(("allocator",), environment)


@click.command("mps")
@settings(CONFIG, *PAGES_AND_LOG)
def run_mps(environment: dict[str, str]) -> None:
    """
    Run NVIDIA's MPS daemons: one for each resource whose GPUs the configuration shares by MPS.

    It sets these GPUs to compute mode EXCLUSIVE_PROCESS, and back to DEFAULT at its end, so it runs as root. It needs no
    NATS. Where nothing is shared by MPS it waits for a configuration that does.

    \b
    Examples:
      topoalign mps --config topoalign.yaml --http 127.0.0.1:8472
    """
    from topoalign.runtime.memory_bus import MemoryBus  # only for this command

    run_process(("mps",), environment, bus=MemoryBus())


@click.command("registry")
@settings(*EVERYWHERE)
def run_registry(environment: dict[str, str]) -> None:
    """
    Run only the service that shows the cluster over HTTP and answers the scheduler.

    \b
    Examples:
      topoalign registry --nats nats://hub:4222 --http 127.0.0.1:8470
    """
    run_process(("registry",), environment)
