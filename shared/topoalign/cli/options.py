"""Options that several commands share, and the type of sizes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from topoalign.core.model.errors import clean
from topoalign.core.model.requests import Placement, Policy, Scope
from topoalign.kubelet.files.resource_quantities import whole

Command = Callable[..., Any]
PATH = click.Path(path_type=Path)

NODE = click.option(
    "--node", envvar="TOPOALIGN_NODE", metavar="NODE", help="Name of the node.  [default: that of `up`, or this host]"
)
NATS = click.option("--nats", envvar="TOPOALIGN_NATS_URL", metavar="URL", help="URL of NATS.  [default: that of `up`]")
MACHINE = click.option(
    "--machine", metavar="NAME|FILE", help="A machine of the catalogue, or a file that describes one."
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
POLICY = click.option("--policy", type=click.Choice([p.value for p in Policy]), help="Topology policy.")
SCOPE = click.option("--scope", type=click.Choice([s.value for s in Scope]), help="What is aligned as one unit.")
PLACEMENT = click.option("--placement", type=click.Choice([p.value for p in Placement]), help="Device policy.")


def add_options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Adds these options to a command, in this order in its help."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def parse_size(text: str) -> int:
    """Bytes of a Kubernetes quantity: `64Gi`, `1.5G`, `1e9` or a plain number. A fraction of a byte is rounded up."""
    size = whole(text)
    if size is None:
        raise click.BadParameter(f"{clean(text, 40)!r} is not a size: write 64Gi, 512Mi, 1.5G or a number of bytes")
    return size
