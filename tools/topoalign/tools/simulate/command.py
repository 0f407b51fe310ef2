"""`topoalign simulate`: the command line of `topoalign.tools.simulate`."""

import sys

import click
import msgspec
from rich.console import Console
from rich.progress import Progress

from topoalign.cli import output
from topoalign.cli.exit_codes import FINDINGS
from topoalign.core.model.requests import Policy
from topoalign.runtime.logging import configure_logging
from topoalign.runtime.shutdown import run_until_signal
from topoalign.tools.simulate import simulate as run
from topoalign.tools.simulate.cases import lines
from topoalign.tools.simulate.load import read_shape
from topoalign.tools.simulate.report import Report

SHAPES = ("40:gpus=1,cpus=4,memory=8", "20:gpus=2,cpus=8,memory=16", "10:gpus=4")
PODS_HELP = (
    "Pods to create, COUNT:gpus=N,cpus=N,memory=GIB,nics=N,same-pcie; may be repeated.  "
    "[default: 70 with 1, 2 and 4 GPUs]"
)


@click.command()
@click.option("--nodes", type=click.IntRange(1, 1000), default=4, show_default=True, help="Number of nodes.")
@click.option(
    "--machine",
    "machines",
    multiple=True,
    default=("dgx-a100",),
    show_default=True,
    metavar="NAME|FILE",
    help="Machine of a node; if repeated, nodes use them in turn.",
)
@click.option(
    "--policy",
    "policies",
    type=click.Choice([policy.value for policy in Policy]),
    multiple=True,
    default=(Policy.RESTRICTED.value,),
    show_default=True,
    help="Topology policy of a node's kubelet; if repeated, used in turn.",
)
@click.option("--pods", "shapes", multiple=True, metavar="SHAPE", help=PODS_HELP)
@click.option("--foreign", metavar="SHAPE", multiple=True, help="Pods that another scheduler binds, as --pods.")
@click.option("--registries", type=click.IntRange(1, 5), default=1, show_default=True, help="Replicas of the registry.")
@click.option(
    "--shuffle", "shuffled", is_flag=True, help="Kubelets take pods late and in a random order, not as they were bound."
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of the order of the pods and of how long they run."
)
@click.option(
    "--seconds", type=click.IntRange(1), default=600, show_default=True, help="Seconds after which the run is given up."
)
@click.option("--json", "as_json", is_flag=True, help="Print the counts as JSON.")
def simulate(  # noqa: PLR0913  # one parameter for each option
    nodes: int,
    machines: tuple[str, ...],
    policies: tuple[str, ...],
    shapes: tuple[str, ...],
    foreign: tuple[str, ...],
    registries: int,
    shuffled: bool,
    seed: int,
    seconds: int,
    as_json: bool,
) -> int | None:
    """
    Run a cluster on this machine: nodes, registries, a scheduler, and pods that come and go.

    The nodes play described machines; API server, scheduler and kubelets are stand-ins, all else is the product. The exit
    code is 6 if a node refused a pod or gave a device to two containers, or if a pod waits without a reason.

    \b
    Examples:
      topoalign simulate
      topoalign simulate --nodes 20 --registries 2 --pods 300:gpus=1,cpus=4,memory=8 --pods 100:gpus=4
    """
    read = [read_shape(text) for text in shapes or SHAPES]
    found: Report | None = None
    configure_logging("console", "error")
    bar = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    with bar:
        bound = bar.add_task("pods that a node has judged", total=sum(shape.count for shape in read))

        async def simulated() -> None:
            nonlocal found
            found = await run(
                nodes,
                machines,
                policies,
                read,
                foreign=[read_shape(text) for text in foreign],
                registries=registries,
                shuffled=shuffled,
                seed=seed,
                most_seconds=seconds,
                progress=lambda done: bar.update(bound, completed=done),
            )

        run_until_signal(simulated)
    if found is None:
        raise click.Abort
    show(found, as_json=as_json)
    return FINDINGS if found.refused or found.doubled or found.apart or found.unexplained else None


def show(found: Report, *, as_json: bool) -> None:
    """Print the counts."""
    counts = msgspec.to_builtins(found)
    if as_json:
        output.print_json(counts)
        return
    del counts["cases"]
    for name, value in counts.items():
        text = ", ".join(f"{key} {count}" for key, count in value.items()) or "0" if isinstance(value, dict) else value
        output.print_line(f"{name.replace('_', ' '):<18}{text}")
    for case in found.cases:
        for line in lines(case):
            output.print_line(line)
