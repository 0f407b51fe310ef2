"""`topoalign topo draw`: the command."""

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from topoalign.cli import options, output
from topoalign.core.model.errors import clean
from topoalign.core.state.gpu_partitioning import partitioning_by_gpu
from topoalign.core.state.holding_health import UNKNOWN

if TYPE_CHECKING:
    from topoalign.cli.draw.diagram import Diagram

FORMATS = {".svg": "svg", ".png": "png", ".txt": "ascii", "": "ascii"}
"""By the end of a file's name."""
WIDTH = 100
WIDEST = 160
"""Columns where nobody says how wide the terminal is, and the most that are used of one."""


@click.command()
@click.option(
    "--of",
    "form",
    type=click.Choice(["svg", "png", "ascii"]),
    help="Format.  [default: from the name in --out, else ascii]",
)
@click.option("--machine", metavar="NAME|FILE", help="A machine of the catalogue, or a file that describes one.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write the picture to this file."
)
@click.option("--ascii-only", is_flag=True, help="Use no line-drawing characters.")
@options.NODE
@options.NATS
def draw(
    form: str | None,
    machine: str | None,
    out: Path | None,
    ascii_only: bool,
    node: str | None,
    nats: str | None,
) -> None:
    """
    Draw a machine: sockets, NUMA nodes, PCIe switches, GPUs, NICs and NVLinks.

    Without --machine: a running node, else this machine. The picture of a running node also shows which pods hold which
    devices, the weakest seam of a container's GPUs, how GPUs are divided and what is left of them, and which devices are
    unhealthy or cordoned. Degraded GPUs are marked on every machine.

    \b
    Examples:
      topoalign topo draw
      topoalign topo draw --out node.svg
      topoalign topo draw --machine dgx-a100 --of png > dgx-a100.png
    """
    form = form or form_of(out)
    if form != "ascii" and out is None and sys.stdout.isatty():
        raise click.UsageError(
            f"a terminal cannot show {form}: give --out FILE, or redirect the output to a file or a program"
        )
    diagram = of_machine(machine) if machine is not None else of_node(node, nats)
    if form == "ascii":
        say(diagram, out, ascii_only)
        return
    from topoalign.cli.draw.layout import scene_of  # only for pictures

    scene = scene_of(diagram)
    if form == "svg":
        from topoalign.cli.draw.svg import svg

        picture = svg(scene).encode()
    else:
        from topoalign.cli.draw.svg import png  # brings in Pillow

        picture = png(scene)
    if out is None:
        click.echo(picture, nl=False)
    else:
        out.write_bytes(picture)
        written(out)


def form_of(out: Path | None) -> str:
    """What the name of the file asks for. Raises UsageError where it asks for what is not drawn."""
    suffix = out.suffix.lower() if out is not None else ""
    if suffix not in FORMATS:
        raise click.UsageError(
            f"the format {clean(suffix)} is not supported: end the name in .svg, .png or .txt, or give --of"
        )
    return FORMATS[suffix]


def of_machine(source: str) -> "Diagram":
    """The diagram of a described machine. Raises what `load_machine` raises."""
    from topoalign.cli.draw.diagram import diagram_of
    from topoalign.machines import load_machine  # the readers are not needed for a running node

    machine = load_machine(source)
    return diagram_of(machine.name, machine.topology)


def of_node(node: str | None, nats: str | None) -> "Diagram":
    """The diagram of a running node, else of this machine. Devices of unknown health get no mark."""
    from topoalign.cli import link  # brings in what talks to the network
    from topoalign.cli.draw.diagram import diagram_of

    status = link.discovered_or_read(node, nats, os.environ)
    cards = (*status.topology.gpu_by_id, *status.topology.nic_by_id)
    known = {card: status.health_of(card) for card in cards}
    health = {card: told for card, told in known.items() if told is not UNKNOWN}
    divided = partitioning_by_gpu(status.state) if status.announced else {}
    parts = {gpu: each for gpu, each in divided.items() if not each.is_whole}
    return diagram_of(status.node, status.topology, status.allocations, health, parts)


def say(diagram: "Diagram", out: Path | None, ascii_only: bool) -> None:
    """Prints the drawing in characters, or writes it to a file."""
    from topoalign.cli.draw.text import coloured, text

    if out is not None:
        out.write_text(text(diagram, WIDTH, ascii_only) + "\n", "utf-8")
        written(out)
        return
    columns = shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH
    encoding = (sys.stdout.encoding or "ascii").lower().replace("-", "")
    drawn = text(diagram, min(columns, WIDEST), ascii_only or encoding != "utf8")
    output.say(coloured(drawn, diagram) if output.colours(sys.stdout) else drawn)


def written(out: Path) -> None:
    """Note on stderr that a file was written."""
    output.note(f"written to {clean(str(out), 200)}")
