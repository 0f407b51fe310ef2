"""`topoalign draw`: the command."""

import shutil
import sys
from pathlib import Path

import click

from topoalign.cli import link, options, output
from topoalign.core.model.errors import clean
from topoalign.core.state.gpu_partitioning import partitioning_by_gpu
from topoalign.core.state.holding_health import UNKNOWN
from topoalign.machines import load_machine
from topoalign.tools.draw.diagram import Diagram, diagram_of
from topoalign.tools.draw.layout import scene_of
from topoalign.tools.draw.svg import png, svg
from topoalign.tools.draw.text import coloured, render_text

FORMATS = {".svg": "svg", ".png": "png", ".txt": "ascii", "": "ascii"}
"""The formats by the suffix of a file's name."""
WIDTH = 100
WIDEST = 160
"""Columns if the width of the terminal is not known, and the most that are used of it."""


@click.command()
@click.option(
    "--of",
    "form",
    type=click.Choice(["svg", "png", "ascii"]),
    help="Format.  [default: from the name in --out, else ascii]",
)
@options.MACHINE
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
      topoalign draw
      topoalign draw --out node.svg
      topoalign draw --machine dgx-a100 --of png > dgx-a100.png
    """
    form = form or drawing_format(out)
    if form != "ascii" and out is None and sys.stdout.isatty():
        raise click.UsageError(
            f"a terminal cannot show {form}: give --out FILE, or redirect the output to a file or a program"
        )
    if machine is not None:
        described = load_machine(machine)
        diagram = diagram_of(described.name, described.topology)
    else:
        diagram = of_node(node, nats)
    if form == "ascii":
        print_drawing(diagram, out, ascii_only)
        return
    scene = scene_of(diagram)
    picture = svg(scene).encode() if form == "svg" else png(scene)
    if out is None:
        click.echo(picture, nl=False)
    else:
        out.write_bytes(picture)
        note_written_file(out)


def drawing_format(out: Path | None) -> str:
    """The format by the suffix of the file's name. Raises UsageError for an unknown one."""
    suffix = out.suffix.lower() if out is not None else ""
    if suffix not in FORMATS:
        raise click.UsageError(
            f"the format {clean(suffix)} is not supported: end the name in .svg, .png or .txt, or give --of"
        )
    return FORMATS[suffix]


def of_node(node: str | None, nats: str | None) -> Diagram:
    """The diagram of a running node, else of this machine. Devices of unknown health get no mark."""
    status = link.read_node_or_machine(node, nats)
    devices = (*status.topology.gpu_by_id, *status.topology.nic_by_id)
    known = {device: status.health_of(device) for device in devices}
    health = {device: found for device, found in known.items() if found is not UNKNOWN}
    divided = partitioning_by_gpu(status.state) if status.announced else {}
    parts = {gpu: each for gpu, each in divided.items() if not each.is_whole}
    return diagram_of(status.node, status.topology, status.allocations, health, parts)


def print_drawing(diagram: Diagram, out: Path | None, ascii_only: bool) -> None:
    """Prints the drawing in characters, or writes it to a file."""
    if out is not None:
        out.write_text(render_text(diagram, WIDTH, ascii_only) + "\n", "utf-8")
        note_written_file(out)
        return
    columns = shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH
    encoding = (sys.stdout.encoding or "ascii").lower().replace("-", "")
    drawn = render_text(diagram, min(columns, WIDEST), ascii_only or encoding != "utf8")
    output.print_line(coloured(drawn, diagram) if output.colours(sys.stdout) else drawn)


def note_written_file(out: Path) -> None:
    """Notes on stderr that a file was written."""
    output.note(f"written to {clean(str(out), 200)}")
