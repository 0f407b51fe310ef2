"""`topoalign fragmentation`: the quality of the GPU sets that are still free on a node."""

from collections.abc import Mapping

import click

from topoalign.cli import output
from topoalign.cli.gpu_partitioning import format_parts, list_partitioning_rows, partitioning_document
from topoalign.cli.link import NodeLink, on_node
from topoalign.core.model.errors import clean
from topoalign.core.model.ids import GPU, DeviceID
from topoalign.core.model.topology.device_names import name_device
from topoalign.core.model.topology.model import Topology
from topoalign.core.placement.gpu_fragmentation import measure_fragmentation
from topoalign.core.state.gpu_partitioning import GpuPartitioning, Parts, Way, partitioning_by_gpu, sum_parts

IN_ALL: tuple[Way, ...] = ("units", "slots", "time slices", "MPS")
"""Sharing strategies whose parts can be summed over GPUs. MIG is not included, because instances differ in size."""


@click.command("fragmentation")
@on_node
def compare_free_sets(link: NodeLink) -> None:
    """
    Compare the best free sets of GPUs with the best sets of the machine.

    For sets of 2, 4 and 8 GPUs: the weakest seam of the best free set, that of the best set of the empty machine, and the
    loss of bandwidth in percent. The loss shrinks when GPUs are released. For each shared GPU: its containers with their
    parts, and what is left. At the end: the largest share that still fits on one GPU.

    \b
    Examples:
      topoalign fragmentation
      topoalign fragmentation --node gpu-7 --json | jq .lost
    """
    status = link.read_node()
    gpus = [gpu.id for gpu in status.topology.gpus]
    free = [gpu for gpu in gpus if gpu not in status.holders and status.health_of(gpu).usable]
    found = measure_fragmentation(status.topology, free)
    divided = {gpu: each for gpu, each in partitioning_by_gpu(status.state).items() if not each.is_whole}
    if link.as_json:
        sets = [
            {
                "size": each.size,
                "best": each.best.text(each.model),
                "best_gbps": each.best.bandwidth(each.model),
                "possible": each.possible.text(each.model),
                "possible_gbps": each.possible.bandwidth(each.model),
                "lost": round(each.lost, 4),
            }
            for each in found.sets
        ]
        lost = round(found.overall, 4)
        parts = {gpu: partitioning_document(each) for gpu, each in divided.items()}
        output.print_json(
            {"node": status.node, "free": free, "sets": sets, "lost": lost, "exact": found.exact, "divided": parts}
        )
        return
    shorts = " ".join(name_device(status.topology, GPU, gpu).short for gpu in free)
    output.print_line(f"{clean(status.node)}: {len(free)} of {len(gpus)} GPUs free{': ' if shorts else ''}{shorts}")
    if found.sets:
        rows = [
            (each.size, each.best.text(each.model), each.possible.text(each.model), f"{each.lost:.0%}")
            for each in found.sets
        ]
        output.columns(("GPUS", "BEST FREE", "BEST POSSIBLE", "LOST"), rows)
        sure = "" if found.exact else " (of good sets: too many GPUs to be sure)"
        output.print_line(f"lost on average: {found.overall:.0%}{sure}")
    else:
        output.print_line("too few for a set of two")
    show_divided(status.topology, divided)


def show_divided(topology: Topology, divided: Mapping[DeviceID, GpuPartitioning]) -> None:
    """Prints the partitioned GPUs, and for each sharing strategy the remaining amounts; nothing without such GPUs."""
    if not divided:
        return
    output.print_line()
    output.columns(("GPU", "DIVIDED", "HELD BY", "LEFT"), list_partitioning_rows(topology, divided.items()))
    for way in IN_ALL:
        left = {gpu: each.left for gpu, each in divided.items() if each.ways == (way,)}
        if left:
            gpus = f"{len(left)} GPU{'s' * (len(left) > 1)} {'by' if way == 'MPS' else 'in'} {way}"
            output.print_line(f"left of {gpus}: {format_total_left(topology, left)}")


def format_total_left(topology: Topology, left: Mapping[DeviceID, Parts]) -> str:
    """The total remaining amounts, and the most of one GPU: `8 slices; most of one: 5 slices (GPU1)`, or `nothing`."""
    gpu, most = max(
        left.items(),
        key=lambda one: (
            one[1].cores,  # the most computing time,
            one[1].memory,  # then memory,
            one[1].slots,  # then slots, then slices; if equal, the GPU with the lowest index
            one[1].slices,
        ),
    )
    if not format_parts(most):
        return "nothing"
    in_all = format_parts(sum_parts(left.values()))
    return f"{in_all}; most of one: {format_parts(most)} ({name_device(topology, GPU, gpu).short})"
