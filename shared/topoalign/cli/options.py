"""Options that several commands share, and the types of numbers and sizes."""

import re
from collections.abc import Callable
from typing import Any

import click

from topoalign.core.model.errors import clean
from topoalign.core.model.requests import Placement, Policy, Scope
from topoalign.kubelet.files.resource_quantities import whole

Command = Callable[..., Any]

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


MOST = 1_000_000
"""Larger than any count on any machine."""

_WHOLE = re.compile(r"[0-9]{1,19}")


class Count(click.ParamType[int]):
    """A whole number of things, in the digits 0 to 9 and nothing else."""

    name = "N"

    def __init__(self, least: int = 0, most: int = MOST) -> None:
        self.least = least
        self.most = most

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number. Fails with a usage error for any other text or a number out of range."""
        if isinstance(value, int):
            return value
        text = str(value)
        if not _WHOLE.fullmatch(text) or not self.least <= int(text) <= self.most:
            self.fail(f"{clean(text, 40)!r} is not a whole number from {self.least} to {self.most}", param, ctx)
        return int(text)


class Size(click.ParamType[int]):
    """Bytes, as Kubernetes writes quantities: `64Gi`, `1.5G`, `1e9` or a plain number. Parts of a byte are rounded up."""

    name = "SIZE"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The size in bytes, fractions rounded up. Fails with a usage error for any other text."""
        if isinstance(value, int):
            return value
        size = whole(str(value))
        if size is None:
            self.fail(
                f"{clean(str(value), 40)!r} is not a size: write 64Gi, 512Mi, 1.5G or a number of bytes", param, ctx
            )
        return size
