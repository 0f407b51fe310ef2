"""`topoalign topo`: the matrix that everybody knows from `nvidia-smi topo -m`, of a described machine or a running node."""

import os
import sys
from pathlib import Path

import click
import msgspec

from topoalign.cli import output
from topoalign.core.topology.model import Topology


@click.group(invoke_without_command=True)
@click.option("--machine", metavar="NAME|FILE", help="A machine of the catalogue, or a file that describes one.")
@click.option("--node", metavar="NODE", help="A running node.  [default: this host, or the one `up` plays]")
@click.option("--url", envvar="TOPOALIGN_URL", metavar="URL", help="HTTP API to ask for the node.")
@click.option("--nats", envvar="TOPOALIGN_NATS_URL", metavar="URL", help="NATS to ask where there is no HTTP API.")
@click.option("--wide", is_flag=True, help="More columns, to the right of the familiar ones.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole topology as JSON.")
@click.pass_context
def topo(
    ctx: click.Context,
    machine: str | None,
    node: str | None,
    url: str | None,
    nats: str | None,
    wide: bool,
    as_json: bool,
) -> None:
    """
    How the GPUs and NICs of a machine are connected, in the format of `nvidia-smi topo -m`.

    FILE is anything `topo import` reads. Without --machine: what a running node has discovered.

    \b
    Examples:
      topoalign topo --machine dgx-a100
      topoalign topo --machine pasted.txt --wide
      topoalign topo --json | jq '.gpus[].pci'
    """
    if ctx.invoked_subcommand is not None:
        return
    show(described(machine) if machine is not None else discovered(node, url, nats), wide, as_json)


def show(topology: Topology, wide: bool, as_json: bool) -> None:
    if as_json:
        output.document(topology)
        return
    from topoalign.machines.nvidia_smi import print_matrix  # JSON needs no printer

    sys.stdout.write(print_matrix(topology, wide=wide))


def described(source: str) -> Topology:
    """The machine of this name or file. Raises NotFound, InvalidMachine."""
    from topoalign.machines import load  # the readers are not needed for a running node

    return load(source).topology


def discovered(node: str | None, url: str | None, nats: str | None) -> Topology:
    """What a running node has announced. Raises NotFound, Unavailable."""
    from topoalign.cli import link  # brings in what talks to the network

    return link.discovered(node, url, nats, os.environ)


@topo.command(name="import")
@click.argument("source", metavar="FILE|-")
@click.option(
    "--output", "target", type=click.Path(dir_okay=False, path_type=Path), help="Write the JSON to this file."
)
def import_machine(source: str, target: Path | None) -> None:
    """
    Read any description of a machine and print it as topoalign's own JSON, which --machine takes.

    Reads the output of `nvidia-smi topo -m`, lstopo XML, a captured sysfs tree (a folder) and our own JSON.

    \b
    Examples:
      nvidia-smi topo -m | topoalign topo import - --output this.json
      lstopo --of xml | topoalign topo import -
    """
    topology = described(source)
    if target is None:
        output.document(topology)
        return
    target.write_bytes(msgspec.json.format(msgspec.json.encode(topology), indent=2) + b"\n")
    output.note(f"{target}: {topology.describe()}")
