"""`topoalign fragmentation`: the quality of the GPU sets that are still free on a node."""

import os
from typing import TYPE_CHECKING

import click

from topoalign.cli import options, output
from topoalign.core.model.errors import clean
from topoalign.core.model.ids import GPU, DeviceID
from topoalign.core.model.topology.names import named
from topoalign.core.placement.fragmentation import fragmentation as measured

if TYPE_CHECKING:
    from topoalign.cli import link


@click.command()
@options.NODE
@options.NATS
@click.option("--json", "as_json", is_flag=True, help="Print one object.")
def fragmentation(node: str | None, nats: str | None, as_json: bool) -> None:
    """
    Compare the best free sets of GPUs with the best sets of the machine.

    For sets of 2, 4 and 8 GPUs: the link score of the best free set, the best score on the empty machine, and the loss in
    percent. The loss shrinks when GPUs are released.

    \b
    Examples:
      topoalign fragmentation
      topoalign fragmentation --node gpu-7 --json | jq .lost
    """
    from topoalign.cli import link  # brings in what talks to the network

    standing = link.discovered(node, nats, os.environ)
    free = free_gpus(standing)
    found = measured(standing.topology, free)
    if as_json:
        sets = [{**each._asdict(), "lost": round(each.lost, 4)} for each in found.sets]
        lost = round(found.overall, 4)
        output.document({"node": standing.node, "free": free, "sets": sets, "lost": lost, "exact": found.exact})
        return
    shorts = " ".join(named(standing.topology, GPU, gpu).short for gpu in free)
    gpus = len(standing.topology.gpus)
    output.say(f"{clean(standing.node)}: {len(free)} of {gpus} GPUs free{': ' if shorts else ''}{shorts}")
    if not found.sets:
        output.say("too few for a set of two")
        return
    rows = [(each.size, each.best, each.possible, f"{each.lost:.0%}") for each in found.sets]
    output.columns(("GPUS", "BEST FREE", "BEST POSSIBLE", "LOST"), rows)
    output.say(
        f"lost on average: {found.overall:.0%}{'' if found.exact else ' (of good sets: too many GPUs to be sure)'}"
    )


def free_gpus(standing: "link.Standing") -> tuple[DeviceID, ...]:
    """Those that may be handed out and that nobody holds."""
    held = standing.holders
    return tuple(gpu.id for gpu in standing.topology.gpus if gpu.id not in held and standing.health_of(gpu.id).usable)
