"""
`topoalign demo`: the main job, before your eyes, in a few seconds.

The four services and NATS run in this process, on the machine's own GPUs where there is an NVIDIA driver and on a described
machine elsewhere. A kubelet stand-in under policy `restricted` admits two pods, refuses one that cannot be aligned, and
lets one go again. The pods come in over the kubelet's own protocol; what happened is told by a subscriber that hears it
over NATS, as any other program could.

With `--nats` the hub runs elsewhere, and with `--kubelet-dir` the node's services do too: then this only plays the kubelet.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import click
import msgspec

from topoalign.cli import formatting, output
from topoalign.cli.link import connect_to_bus
from topoalign.client import Delivery
from topoalign.core.model.decisions import Admission, Decision, Refusal
from topoalign.core.model.errors import InvalidField, Unavailable, clean
from topoalign.core.model.events import AllocationBound, AllocationReleased
from topoalign.core.model.ids import GPU, NIC, AllocationID, NodeName
from topoalign.core.model.requests import PodRequest
from topoalign.core.model.topology.model import Topology
from topoalign.machines.nvidia_smi_print import print_matrix
from topoalign.runtime.clock import SystemClock
from topoalign.runtime.settings import PREFIX
from topoalign.runtime.shutdown import run_until_signal
from topoalign.runtime.tasks import background
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet
from topoalign.tools.demo.listener import EventListener, discovered, time_limit
from topoalign.tools.demo.pods import (
    REFUSED_BECAUSE,
    WANTED,
    aligned,
    first_pods,
    misaligned,
    second_pods,
    third_pods,
    worded,
)
from topoalign.tools.demo.stage import MACHINE, described_machine, hub, leaving_no_trace, rules, services, settings

NODE_SERVICES = ("discovery", "hinting", "allocator")
LOG_LEVEL = os.environ.get(PREFIX + "LOG_LEVEL", "error")
SETTLED = (
    "services that run elsewhere take a pod for gone only some minutes after a start of the kubelet: for the demo, start "
    "them with TOPOALIGN_SETTLE_SECONDS=0"
)
"""What to do where the end of a pod is not received."""


class NothingToShow(Unavailable):
    """Raised where the machine is too small for the pods of the demo."""

    code = "NothingToShow"

    def __init__(self) -> None:
        super().__init__("none of the demo's pods suits this machine", f"use another one: --machine {MACHINE}")


@click.command()
@click.option("--machine", metavar="NAME|FILE", help=f"Run on this machine.  [default: the GPUs here, else {MACHINE}]")
@click.option("--node", default="demo", show_default=True, metavar="NAME", help="Name of the node.")
@click.option("--nats", metavar="URL", help="URL of NATS.  [default: start NATS and a registry]")
@click.option(
    "--kubelet-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Act as the kubelet of services that run elsewhere. Needs --nats, and TOPOALIGN_SETTLE_SECONDS=0 for them.",
)
def command(machine: str | None, node: str, nats: str | None, kubelet_dir: Path | None) -> None:
    """
    Run an example in a few seconds: a machine, a kubelet, three pods, and the events that a subscriber receives.

    \b
    Examples:
      topoalign demo
      topoalign demo --machine hgx-h100
    """
    if kubelet_dir is not None and nats is None:
        raise InvalidField("--kubelet-dir", "given without --nats", "give the URL of the services' NATS")
    with tempfile.TemporaryDirectory(prefix="topoalign-") as scratch:
        if not run_until_signal(partial(demo, machine, NodeName(node), nats, kubelet_dir, Path(scratch))):
            raise click.Abort


async def demo(machine: str | None, node: NodeName, nats: str | None, kubelet_dir: Path | None, scratch: Path) -> None:
    """Runs the whole demo, with its files in the directory `scratch`. Raises TopoalignError for whatever fails."""
    clock = SystemClock()
    began = clock.monotonic()
    plugins = kubelet_dir or scratch / "device-plugins"
    resources = plugins.parent / "pod-resources"
    for directory in (plugins, resources):
        directory.mkdir(parents=True, exist_ok=True)
    if kubelet_dir is None:
        machine = machine or described_machine()
    async with (
        hub(nats, scratch) as url,
        connect_to_bus(url, LOG_LEVEL) as bus,
        leaving_no_trace(bus, node, nats is not None and kubelet_dir is None),
        background() as tasks,
    ):
        if kubelet_dir is None:
            names = NODE_SERVICES if nats is not None else (*NODE_SERVICES, "registry")
            await tasks.start(services, names, settings(machine, node, url, plugins, scratch))
        topology = await discovered(bus, node)
        introduce(topology, machine)
        kubelet = FakeKubelet(plugins, resources, topology, rules(topology))
        await tasks.start(kubelet.run)
        for left_over in tuple(kubelet.running):  # in the checkpoint of an earlier demo that was cut short
            await kubelet.remove(*left_over)
        listener = EventListener(bus, node)
        await tasks.start(listener.listen)
        async with time_limit("the devices were not registered with the kubelet"):
            await kubelet.until(lambda seen: offered(seen, topology))
        offer = ", ".join(f"{kubelet.allocatable(name)} {name}" for name in (GPU, NIC) if kubelet.allocatable(name))
        output.print_line(output.heading(f"A kubelet under policy restricted has {offer} from us"))
        await play(kubelet, listener, topology)
        output.print_line(f"Done in {clock.monotonic() - began:.1f} s. Next: `topoalign up`, then `topoalign watch`.")


async def play(kubelet: FakeKubelet, listener: EventListener, topology: Topology) -> None:
    """Admits two pods, shows the refusal of a third, and removes the first. Raises NothingToShow, DemoStuck."""
    first = await admitted(kubelet, listener, first_pods(topology), topology)
    second = await admitted(kubelet, listener, second_pods(topology), topology)
    free = len(kubelet.state().ownership.free(GPU))
    third = await choose(kubelet, third_pods(topology, free), misaligned)
    output.print_line(
        f"\n{output.heading(f'pod {third.name}')} asks for {worded(third)}: {REFUSED_BECAUSE[third.name]}"
    )
    show(await kubelet.admit(third), topology)
    output.print_line(f"\n{output.heading(f'pod {first.name}')} goes")
    await kubelet.remove(first.namespace, first.name)
    await listener.tell_until(lambda delivery: released(delivery, first), SETTLED)
    await kubelet.remove(second.namespace, second.name)
    output.print_line()


def released(delivery: Sequence[Delivery], pod: PodRequest) -> bool:
    """Whether these events tell that every allocation of the pod was released."""
    gone = {one.event.allocation for one in delivery if isinstance(one.event, AllocationReleased)}
    return bindings(delivery, pod) <= gone


async def admitted(
    kubelet: FakeKubelet, listener: EventListener, candidates: Iterable[PodRequest], topology: Topology
) -> PodRequest:
    """Admits the first of these pods that fits here, and waits until its owner is known to the subscriber."""
    pod = await choose(kubelet, candidates, aligned)
    cut = "" if worded(pod) == WANTED[pod.name] else f", cut down from {WANTED[pod.name]} to what is here"
    output.print_line(f"\n{output.heading(f'pod {pod.name}')} asks for {worded(pod)}{cut}")
    decision = await kubelet.admit(pod)
    show(decision, topology)
    parts = sum(len(a.devices) for a in decision.allocations) if isinstance(decision, Admission) else 0
    await listener.tell_until(lambda delivery: len(bindings(delivery, pod)) >= parts)
    return pod


def bindings(delivery: Iterable[Delivery], pod: PodRequest) -> set[AllocationID]:
    """The ids of the allocations that these events bind to the pod."""
    events = (one.event for one in delivery)
    return {event.allocation for event in events if isinstance(event, AllocationBound) and event.owner.pod == pod.name}


async def choose(
    kubelet: FakeKubelet, candidates: Iterable[PodRequest], fits: Callable[[Decision], bool]
) -> PodRequest:
    """The first pod for which the kubelet's decision `fits`. Raises NothingToShow if there is none."""
    for pod in candidates:
        if fits(await kubelet.decide(pod)):
            return pod
    raise NothingToShow


def show(decision: Decision, topology: Topology) -> None:
    """Prints a decision: a line for each allocation of an admitted pod, or why a pod was refused."""
    match decision:
        case Admission():
            for allocation in decision.allocations:
                numa = formatting.format_numa_nodes(allocation.affinity)
                output.print_line(f"  {good('admitted')}  {formatting.brief(allocation, topology)}, NUMA {numa}")
        case Refusal():
            output.print_line(f"  {bad('refused')}   {decision.reason}: {clean(decision.finding, 400)}")
            output.print_line(f"            {clean(decision.remedy, 400)}")


def introduce(topology: Topology, machine: str | None) -> None:
    """Prints which machine the demo runs on (None: this one), and how its devices are connected."""
    source = "the GPUs of this machine" if machine is None else f"{clean(machine, 200)}, a described machine"
    output.print_line(output.heading(f"{source}: {topology.describe()}"))
    output.print_line()
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    output.print_line(matrix(topology, columns))
    output.print_line()


def matrix(topology: Topology, columns: int | None) -> str:
    """
    The matrix of connections; without the NICs where it is wider than `columns`, the width of the terminal (None: any).
    """
    whole = print_matrix(topology).split("\nLegend:")[0].rstrip()
    widest = max(len(line.expandtabs()) for line in whole.splitlines())
    if columns is None or widest <= columns or not topology.nics:
        return whole
    gpus = print_matrix(msgspec.structs.replace(topology, nics=())).split("\nLegend:")[0].rstrip()
    return f"{gpus}\n\n{len(topology.nics)} NICs are left out, for which the terminal would have to be {widest} wide."


def offered(kubelet: FakeKubelet, topology: Topology) -> bool:
    """Whether the kubelet has every device of the topology, healthy or not, and a GPU that it can allocate."""
    listed = all(kubelet.capacity(resource) == len(ids) for resource, ids in topology.devices.items())
    return listed and kubelet.allocatable(GPU) > 0


def good(text: str) -> str:
    """The text in green, where the terminal has colours."""
    return click.style(text, fg="green")


def bad(text: str) -> str:
    """The text in red, where the terminal has colours."""
    return click.style(text, fg="red")
