"""
Generates the tables of docs/metrics.md from the code: every metric with its type, labels, unit and meaning.

The metrics are made by the code that makes them for /metrics, with one sample each, and read from the text that Prometheus
reads. `make event-documents` writes the tables; a test generates them again and expects no difference.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import anyio
from event_documents import cell, replace_generated
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from topoalign.allocator.containers.hami_core.shared_files import SharedFiles
from topoalign.allocator.containers.vcuda.limiter import VcudaLimiter
from topoalign.allocator.metrics import allocator_metrics, use_families
from topoalign.client.node_folds import Counts
from topoalign.core.model.allocations import Allocation, Owner
from topoalign.core.model.ids import AllocationID, ContainerName, Namespace, NodeName, PodName, ResourceName
from topoalign.core.model.processes import LibraryCount
from topoalign.core.state.fold import initial_state
from topoalign.core.usage.attribution import DeviceShares, Excess, HolderUse, NodeShares, OtherUse, Use
from topoalign.discovery.metrics import DiscoveryMetrics
from topoalign.discovery.offering import NodeOffering
from topoalign.machines import catalogue
from topoalign.mps import main as mps
from topoalign.registry.metrics import RegistryMetrics
from topoalign.registry.node_metrics import NodeSeries
from topoalign.registry.scheduling.extender.extender_server import call_seconds
from topoalign.registry.scheduling.service import SchedulingMetrics
from topoalign.runtime.health_pages import register_build
from topoalign.runtime.metrics import Collector, ServiceMetric, registry_of
from topoalign.runtime.watchdog import Watchdog
from topoalign.testing.manual_clock import ManualClock

UNITS = {"_bytes": "bytes", "_seconds": "seconds", "_ratio": "0 to 1"}
"""End of a metric's name -> unit; the others are numbers of things, or 0 and 1 if the meaning begins with `1`."""


NODE = NodeName("node")
MACHINE = catalogue.machine("dgx-a100")
GPU = MACHINE.gpus[0].id
USE = Use(memory=0, utilization=0, processes=())
HOLDER = HolderUse(
    owner=Owner(namespace=Namespace(""), pod=PodName(""), container=ContainerName("")),
    pod_uid="",
    allocations=(),
    devices=(GPU,),
    cores=0,
    memory=0,
    use=USE,
    library=LibraryCount(device=GPU, memory=0, utilization=0),
)
OTHER = OtherUse(where="pod", owner=None, pod_uid="", container_id="", cgroup="", use=USE)
SHARES = NodeShares(
    node=NODE,
    time=0.0,
    devices=(
        DeviceShares(
            device=GPU,
            gpu=GPU,
            memory=0,
            memory_used=0,
            utilization=0,
            memory_utilization=0,
            failure="",
            holders=(HOLDER,),
            others=(OTHER,),
        ),
    ),
    finding="",
    left_out=0,
)
"""A measurement in which nothing is used, so that each metric has a sample."""


class Documented(NamedTuple):
    """One row."""

    name: str
    kind: str
    labels: tuple[str, ...]
    unit: str
    meaning: str


def main(docs: Path) -> None:
    """Writes the tables of the page below this folder."""
    page = docs / "metrics.md"
    page.write_text(replace_generated(page.read_text(), tables()))


def tables() -> str:
    """A table for each service."""
    sections = []
    for heading, metrics in documented_metrics().items():
        rows = [
            f"| `{each.name}` | {each.kind} | {', '.join(f'`{label}`' for label in each.labels)} | {each.unit} "
            f"| {cell(each.meaning)} |"
            for each in metrics
        ]
        titles = ["| metric | type | labels | unit | meaning |", "|---|---|---|---|---|"]
        sections.append("\n".join([f"## {heading}", "", *titles, *rows]))
    return "\n\n".join(sections)


def documented_metrics() -> dict[str, list[Documented]]:
    """Service -> its metrics, sorted."""
    return {heading: sorted(read_metrics(make())) for heading, make in SERVICES.items()}


def read_metrics(text: str) -> Iterable[Documented]:
    """The metrics of a page in the text format of Prometheus."""
    for family in text_string_to_metric_families(text):
        if family.name.endswith("_created"):
            continue  # when a counter began, which the Python client adds to its own
        labels = dict.fromkeys(label for sample in family.samples for label in sample.labels if label != "le")
        name = {"counter": "_total", "info": "_info"}.get(family.type, "")
        switch = "0 or 1" if family.documentation.startswith("1 ") else ""
        unit = next((unit for end, unit in UNITS.items() if family.name.endswith(end)), switch)
        yield Documented(family.name + name, family.type, tuple(labels), unit, family.documentation)


def every_process() -> str:
    """The metrics of each service."""
    registry = registry_of(sampled(Watchdog(ManualClock()).metrics()))
    register_build(registry)
    return generate_latest(registry).decode()


def discovery() -> str:
    """The metrics of discovery."""
    return text_of([*DiscoveryMetrics().figures(), *NodeOffering(MagicMock()).figures()])


def allocator() -> str:
    """The metrics of the allocator."""
    limiter = VcudaLimiter(str, MagicMock())
    files = SharedFiles(str, MagicMock(), ManualClock())
    own = text_of([*allocator_metrics.figures(MagicMock(), int, int), limiter.figure(), files.figure()])
    amounts = use_families.Amounts(cores=0, memory=0, slots=0)
    usage = use_families.GpuUsage(gpu=MACHINE.gpus[0], containers=0, offered=amounts, asked=amounts, left=amounts)
    families = [
        use_families.measured_family(True),
        *use_families.own_partition_families([usage]),
        *use_families.own_use_families(SHARES, [Excess(GPU, HOLDER)]),
    ]
    return own + use_families.render_families(families).decode()


def mps_daemons() -> str:
    """The metrics of MPS."""
    return text_of(mps.figures(MagicMock()))


def registry() -> str:
    """The metrics of the registry."""
    own = CollectorRegistry()
    client = MagicMock(counts=Counts(), waiting={"": 0}, kept=MagicMock(dropped=0))
    RegistryMetrics(own, client).events.labels("")
    counts = {"": 0}
    watch = MagicMock()
    watch.refused.counts, watch.refused.deleted = {("", False): 0}, 0
    watch.reports.counts, watch.requeue.done = counts, 0
    own.register(SchedulingMetrics(watch, counts, counts, MagicMock(refusals={})))
    call_seconds(own).labels("")
    return generate_latest(own).decode() + anyio.run(node_series)


async def node_series() -> str:
    """The series of nodes, of a cluster of one node with one allocation."""
    owner = Owner(namespace=Namespace(""), pod=PodName(""), container=ContainerName(""))
    held = Allocation(id=AllocationID("1"), owner=owner, devices={ResourceName("nvidia.com/gpu"): (GPU,)})
    state = initial_state(NODE, MACHINE, {}, "described").holding(held)
    member: Any = SimpleNamespace(state=state, answering=True, derived=lambda text: text(state))
    cluster: Any = [member]
    chunks = [chunk async for chunk in NodeSeries(cluster, ManualClock(), per_allocation=True).write()]
    return b"".join(chunks).decode()


def text_of(collectors: Iterable[Collector]) -> str:
    """What /metrics has of these."""
    return generate_latest(registry_of(sampled(collectors))).decode()


def sampled(collectors: Iterable[Collector]) -> list[Collector]:
    """The same with one sample for each metric, so that its labels are written."""
    return [
        each._replace(read=read_zero(each.label)) if isinstance(each, ServiceMetric) else each for each in collectors
    ]


def read_zero(label: str | None) -> Callable[[], float | Mapping[str, float]]:
    """Reads 0, under an empty value of the label if there is one."""
    return lambda: 0.0 if label is None else {"": 0.0}


SERVICES: Mapping[str, Callable[[], str]] = {
    "Every service": every_process,
    "Discovery": discovery,
    "Allocator": allocator,
    "MPS": mps_daemons,
    "Registry": registry,
}
"""Heading -> makes the text of the metrics."""

if __name__ == "__main__":
    main(Path(sys.argv[1]))
