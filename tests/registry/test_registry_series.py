"""/metrics has every node's series in the form that Prometheus reads, and makes again only what has changed."""

from collections.abc import Iterator

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from view_support import HOSTILE, allocation, announce, gpu, tell

from topoalign.core.model.events import AllocationReleased
from topoalign.core.model.ids import AllocationID, NodeName
from topoalign.core.state.fold import NodeState
from topoalign.registry import node_metrics
from topoalign.registry.cluster_nodes import Cluster
from topoalign.registry.main import serve
from topoalign.registry.node_metrics import NODES_PER_CHUNK, NodeSeries
from topoalign.runtime.context import Context
from topoalign.runtime.health_pages import build_application
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.tasks import background
from topoalign.testing.manual_clock import ManualClock

pytestmark = pytest.mark.anyio

NODE = NodeName("node-1")
Labels = frozenset[tuple[str, str]]


async def written(cluster: Cluster, *, per_allocation: bool = True) -> str:
    node_metrics = NodeSeries(cluster, ManualClock(), per_allocation=per_allocation)
    return b"".join([chunk async for chunk in node_metrics.write()]).decode()


def samples(text: str) -> dict[str, dict[Labels, float]]:
    """Family -> labels -> value."""
    return {
        family.name: {frozenset(sample.labels.items()): sample.value for sample in family.samples}
        for family in text_string_to_metric_families(text)
    }


def labels(**values: str) -> Labels:
    return frozenset(values.items())


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def written_for(monkeypatch: pytest.MonkeyPatch) -> list[NodeName]:
    """The nodes whose GPUs were counted, in order."""
    nodes: list[NodeName] = []
    gpu_lines = node_metrics.gpu_state_lines

    def counting(state: NodeState) -> bytes:
        nodes.append(state.node)
        return gpu_lines(state)

    monkeypatch.setattr(node_metrics, "gpu_state_lines", counting)
    return nodes


async def test_each_gpu_is_counted_in_one_state_and_joins_dcgm_by_uuid(cluster: Cluster) -> None:
    """Each gpu is counted in one state and an allocated one joins with dcgm by uuid."""
    announce(cluster, NODE, allocation("a", "train", 0, 3))

    found = samples(await written(cluster))

    states = {"free": 2, "allocated": 2, "unhealthy": 0, "unknown": 0, "cordoned": 0}
    assert {labels(node=NODE, state=state): n for state, n in states.items()} == found["topoalign_gpus"]
    owner = {"allocation": "a", "namespace": "ml", "pod": "train", "container": "main"}
    assert {labels(node=NODE, gpu_uuid=uuid, **owner): 1 for uuid in (gpu(0), gpu(3))} == found[
        "topoalign_gpu_allocation_info"
    ]


async def test_a_stale_node_and_an_answering_one_are_told_apart(cluster: Cluster) -> None:
    announce(cluster, "node-1")
    announce(cluster, "node-2")
    cluster.answers(NODE, True)

    found = samples(await written(cluster))

    assert {labels(node="node-1"): 0, labels(node="node-2"): 1} == found["topoalign_node_stale"]


async def test_the_text_is_what_prometheus_client_writes_for_the_same_values(cluster: Cluster) -> None:
    """Backslashes and quotes are escaped, other hostile characters replaced, labels in the same order."""
    announce(cluster, NODE, allocation("a", f'\\{HOSTILE}"', 0, namespace="n" * 300))

    class Same(Collector):
        def collect(self) -> Iterator[Metric]:
            names = ["node", "gpu_uuid", "allocation", "namespace", "pod", "container"]
            meaning = "1 for each allocated GPU; gpu_uuid equals the UUID label of DCGM's exporter."
            family = GaugeMetricFamily("topoalign_gpu_allocation_info", meaning, labels=names)
            pod = '\\?[31mred?[0m<script>{{x}}?"'
            family.add_metric([NODE, gpu(0), "a", "n" * 252 + "…", pod, "main"], 1)
            yield family

    registry = CollectorRegistry()
    registry.register(Same())

    assert generate_latest(registry).decode() in await written(cluster)


async def test_a_scrape_writes_again_only_the_nodes_that_have_changed(
    cluster: Cluster, written_for: list[NodeName]
) -> None:
    for n in range(5):
        announce(cluster, f"node-{n}", allocation("a", "train", 0))
    await written(cluster)
    first = list(written_for)
    await written(cluster)
    again = written_for[len(first) :]
    tell(cluster, AllocationReleased(node=NODE, epoch=5, seq=3, allocation=AllocationID("a"), reason="gone"))
    cluster.answers(NodeName("node-2"), True)
    found = samples(await written(cluster))

    assert [f"node-{n}" for n in range(5)] == first
    assert [] == again
    assert [NODE] == written_for[len(first) :]
    assert 3 == found["topoalign_gpus"][labels(node=NODE, state="free")]
    assert 0 == found["topoalign_node_stale"][labels(node="node-2")]


async def test_nodes_that_come_and_go_during_a_scrape_do_not_break_it(cluster: Cluster) -> None:
    for n in range(2 * NODES_PER_CHUNK):
        announce(cluster, f"node-{n:03}")
    text = b""
    async for chunk in NodeSeries(cluster, ManualClock(), per_allocation=True).write():
        text += chunk
        cluster.forget(NodeName(f"node-{2 * NODES_PER_CHUNK - 1:03}"))
        announce(cluster, "node-000a")

    found = samples(text.decode())
    assert 5 * 2 * NODES_PER_CHUNK == len(found["topoalign_gpus"])
    assert labels(node="node-000a") in found["topoalign_node_stale"]


@pytest.mark.parametrize(("setting", "shown"), [({}, True), ({"TOPOALIGN_REGISTRY_ALLOCATION_SERIES": "false"}, False)])
async def test_the_page_has_all_families_once_and_allocations_as_set(setting: dict[str, str], shown: bool) -> None:
    context = Context(bus=MemoryBus(), clock=ManualClock(), environment=setting)
    async with background() as tasks:
        await tasks.start(lambda *, task_status: serve(context, task_status=task_status))
        transport = httpx.ASGITransport(build_application(context))
        async with httpx.AsyncClient(transport=transport, base_url="http://registry") as client:
            answer = await client.get("/metrics")

    families = [line.split()[2] for line in answer.text.splitlines() if line.startswith("# TYPE")]
    assert len(set(families)) == len(families)
    assert {"topoalign_gpus", "topoalign_node_stale", "topoalign_registry_gaps_total"} <= set(families)
    assert shown == ("topoalign_gpu_allocation_info" in families)
    assert answer.headers["content-type"].startswith("text/plain; version=")


async def test_a_name_that_is_made_printable_makes_no_series_twice(cluster: Cluster) -> None:
    """Prometheus refuses a page on which two samples have the same labels."""
    for name in ("node?", "node\n"):
        announce(cluster, name, allocation("a", "p", 0))
    lines = [line for line in (await written(cluster)).splitlines() if not line.startswith("#")]

    assert len(lines) == len({line.rpartition(" ")[0] for line in lines}) > 0
