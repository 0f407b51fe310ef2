"""`topoalign fragmentation`: the quality of the GPU sets that are still free on a node."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from topoalign.cli import options, output
from topoalign.cli.divisions import MIB, document, left_text, rows
from topoalign.core.model.errors import clean
from topoalign.core.model.ids import GPU, DeviceID
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.names import named
from topoalign.core.placement.fragmentation import Fragmentation
from topoalign.core.placement.fragmentation import fragmentation as measured
from topoalign.core.state.divisions import Division, divisions

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
    percent. The loss shrinks when GPUs are released. Of GPUs that are divided also who has which part, what is left of each,
    and the largest share that one of them still has room for.

    \b
    Examples:
      topoalign fragmentation
      topoalign fragmentation --node gpu-7 --json | jq .lost
    """
    from topoalign.cli import link  # brings in what talks to the network

    standing = link.discovered(node, nats, os.environ)
    free = free_gpus(standing)
    found = measured(standing.topology, free)
    divided = {gpu: each for gpu, each in divisions(standing.state).items() if not each.is_whole}
    if as_json:
        sets = [{**each._asdict(), "lost": round(each.lost, 4)} for each in found.sets]
        lost = round(found.overall, 4)
        parts = {gpu: document(each) for gpu, each in divided.items()}
        output.document(
            {"node": standing.node, "free": free, "sets": sets, "lost": lost, "exact": found.exact, "divided": parts}
        )
        return
    shorts = " ".join(named(standing.topology, GPU, gpu).short for gpu in free)
    gpus = len(standing.topology.gpus)
    output.say(f"{clean(standing.node)}: {len(free)} of {gpus} GPUs free{': ' if shorts else ''}{shorts}")
    show_sets(found)
    show_divided(standing.topology, divided)


def show_sets(found: Fragmentation) -> None:
    """The sets of whole GPUs that are free, against those that could be."""
    if not found.sets:
        output.say("too few for a set of two")
        return
    sets = [(each.size, each.best, each.possible, f"{each.lost:.0%}") for each in found.sets]
    output.columns(("GPUS", "BEST FREE", "BEST POSSIBLE", "LOST"), sets)
    output.say(
        f"lost on average: {found.overall:.0%}{'' if found.exact else ' (of good sets: too many GPUs to be sure)'}"
    )


def show_divided(topology: Topology, divided: Mapping[DeviceID, Division]) -> None:
    """The GPUs that are divided, and the largest share in units that fits; nothing where none is."""
    if not divided:
        return
    output.say()
    output.columns(("GPU", "DIVIDED", "HELD BY", "LEFT"), rows(topology, divided.items()))
    in_units = {gpu: each for gpu, each in divided.items() if each.ways == ("units",)}
    if in_units:
        gpu, most = max(in_units.items(), key=lambda one: (one[1].left.cores, one[1].left.memory))
        cores, memory = (sum(getattr(each.left, what) for each in in_units.values()) for what in ("cores", "memory"))
        output.say(
            f"left of {len(in_units)} GPUs in units: {cores} cores, {memory // MIB} MiB; "
            f"most of one: {left_text(most)} ({named(topology, GPU, gpu).short})"
        )


def free_gpus(standing: "link.Standing") -> tuple[DeviceID, ...]:
    """Those that may be handed out and that nobody holds."""
    held = standing.holders
    return tuple(gpu.id for gpu in standing.topology.gpus if gpu.id not in held and standing.health_of(gpu.id).usable)
