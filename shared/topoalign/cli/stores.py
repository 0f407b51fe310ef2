"""`topoalign stores`: the administrative step that creates and changes the stores at NATS."""

import os

import anyio
import click

from topoalign.cli import options, output
from topoalign.cli.link import locate_bus
from topoalign.runtime.nats_bus import apply_stores
from topoalign.runtime.settings import RuntimeSettings, from_environment


@click.group()
def stores() -> None:
    """
    Create and change the stores of events at NATS.

    Services never create or change stores.

    \b
    Examples:
      topoalign stores apply
    """


@stores.command()
@options.NATS
@click.option("--replicas", type=click.Choice(["1", "3"]), help="Copies of each store. Default: 1; existing ones stay.")
def apply(nats: str | None, replicas: str | None) -> None:
    """
    Create the stores that are missing and change those of another version.

    What is stored stays, and so do bounds of age and size that were set with other tools. Run it as the administrator of
    NATS, before the services of a new version start. It may be repeated.

    \b
    Examples:
      topoalign stores apply
      topoalign stores apply --nats nats://nats:4222 --replicas 3
    """
    settings = from_environment(RuntimeSettings, os.environ)
    copies = None if replicas is None else int(replicas)
    changes = anyio.run(apply_stores, locate_bus(nats)[0], settings, copies)
    for change in changes:
        output.note(change)
    if not changes:
        output.note("all stores are up to date")
