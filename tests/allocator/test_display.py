"""gpu-manager's display on a node: a gRPC client of another make, and Gaia's pages, read the use of its GPUs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from anyio.abc import TaskStatus
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_tools import protoc
from kubelet_support import short_directory
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs
from use_support import ALLOCATIONS, UIDS, Node

from topoalign.allocator import main as allocator
from topoalign.allocator.metrics.display import LOOK_SECONDS, VERSION, Display
from topoalign.allocator.metrics.use_series import UseSeries
from topoalign.core.model.errors import DriverFault, InvalidField
from topoalign.discovery import main as discovery
from topoalign.runtime.context import Context
from topoalign.runtime.health_pages import build_application
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.tasks import background
from topoalign.testing.manual_clock import ManualClock, all_tasks_blocked

pytestmark = pytest.mark.anyio
PROTO = Path(__file__).parents[2] / "proto"


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, type[Any]]:
    """The messages as Google's own runtime makes them of the .proto file."""
    made = tmp_path_factory.mktemp("display") / "display.pb"
    assert 0 == protoc.main(["", f"-I{PROTO}", f"--descriptor_set_out={made}", str(PROTO / "display.proto")])
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(made.read_bytes()).file:
        pool.Add(file)
    classes: dict[str, type[Any]] = message_factory.GetMessageClassesForFiles(["display.proto"], pool)
    return classes


@asynccontextmanager
async def served(node: Node, clock: ManualClock, path: Path) -> AsyncIterator[Display]:
    display = Display(lambda: node.ledger.state, UseSeries(node.ledger, node.bus, ()).shares)
    async with node.answering(), background() as tasks:
        tasks.start_soon(display.run, path, clock)
        await all_tasks_blocked()
        yield display


async def call(path: Path, method: str, answer: type[Any]) -> Any:
    async with grpc.aio.insecure_channel(f"unix://{path}") as channel:
        unary = channel.unary_unary(
            f"/display.GPUDisplay/{method}", request_serializer=bytes, response_deserializer=answer.FromString
        )
        return await unary(b"", timeout=10)


async def page(display: Display, path: str) -> httpx.Response:
    context = Context(bus=Node().bus, clock=ManualClock(), environment={})
    context.pages.update(display.pages())
    transport = httpx.ASGITransport(build_application(context))
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        return await client.get(path)


async def test_a_client_of_another_make_reads_graph_usage_and_version(messages: dict[str, type[Any]]) -> None:
    """By grpcio and Google's protobuf: the numbers of the fields are those of the file."""
    with short_directory() as directory:
        path = directory / "gpu-manager.sock"
        async with served(Node(*ALLOCATIONS), ManualClock(), path):
            graph = await call(path, "PrintGraph", messages["display.GraphResponse"])
            usage = await call(path, "PrintUsages", messages["display.UsageResponse"])
            version = await call(path, "Version", messages["display.VersionResponse"])

    assert "ROOT:" == graph.graph[:5] and "|---GPU0 (pids: [1 2]" in graph.graph
    assert {UIDS[0], UIDS[1]} == set(usage.usage)
    train = usage.usage[UIDS[0]]
    first = train.stat["main"].dev[0]
    assert ("0", 60.0, 12 * 1024.0, [1], 80 * 1024.0) == (
        first.card_idx, first.gpu, first.mem, list(first.pids), first.device_mem,
    )  # fmt: skip
    assert ("ml", 2.0) == (train.project, train.spec["main"].gpu)
    assert VERSION == version.version


def test_fields_have_the_numbers_that_gaias_clients_know(messages: dict[str, type[Any]]) -> None:
    """Source: gpu-manager 8cd842ed, api/runtime/display."""
    numbers = {
        name.removeprefix("display."): {field.name: field.number for field in kind.DESCRIPTOR.fields}
        for name, kind in messages.items()
    }

    assert {
        "id": 1, "card_idx": 2, "gpu": 10, "mem": 11, "pids": 12, "device_mem": 13,
    } == numbers["DeviceInfo"]  # fmt: skip
    assert {"stat": 1, "project": 2, "user": 3, "cluster": 4, "spec": 5} == numbers["ContainerStat"]
    assert [{"graph": 1}, {"usage": 1}, {"version": 1}, {"dev": 1}, {"gpu": 1, "mem": 2}] == [
        numbers[name] for name in ("GraphResponse", "UsageResponse", "VersionResponse", "Devices", "Spec")
    ]


async def test_the_pages_say_the_same_in_gaias_json() -> None:
    with short_directory() as directory:
        async with served(Node(*ALLOCATIONS), ManualClock(), directory / "d.sock") as display:
            graph, usage, version, metric = [
                await page(display, path) for path in ("/graph", "/usage", "/version", "/metric")
            ]

    assert graph.json()["graph"].startswith("ROOT:")
    assert {"version": VERSION} == version.json()
    (first, mig) = usage.json()["usage"][UIDS[0]]["stat"]["main"]["dev"]
    assert (60.0, 12 * 1024, "2") == (first["gpu"], first["mem"], mig["card_idx"])
    names = {family.name for family in text_string_to_metric_families(metric.text)}
    assert {"container_gpu_utilization", "container_request_gpu_memory"} <= names
    assert ["application/json"] * 3 == [each.headers["content-type"] for each in (graph, usage, version)]


async def test_what_cannot_be_measured_is_an_error_and_not_zero(messages: dict[str, type[Any]]) -> None:
    node = Node(*ALLOCATIONS)
    node.fault = DriverFault("no driver", "install it")
    with short_directory() as directory:
        path = directory / "d.sock"
        async with served(node, ManualClock(), path) as display:
            for method in ("PrintGraph", "PrintUsages"):
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await call(path, method, messages["display.GraphResponse"])
                assert grpc.StatusCode.UNAVAILABLE is raised.value.code()
            answers = [await page(display, name) for name in ("/graph", "/usage", "/metric", "/version")]

    assert [503, 503, 503, 200] == [each.status_code for each in answers]
    assert "no driver" in answers[0].json()["finding"]


async def test_the_socket_is_made_again_and_no_other_is_taken_away(messages: dict[str, type[Any]]) -> None:
    """As after a client of gpu-manager, or another one, has cleaned up the directory."""
    clock, answer = ManualClock(), messages["display.VersionResponse"]
    with short_directory() as directory:
        path = directory / "d.sock"
        async with served(Node(), clock, path):
            path.unlink()
            await clock.advance(LOOK_SECONDS)
            await all_tasks_blocked()
            assert VERSION == (await call(path, "Version", answer)).version
            with capture_logs() as logs:
                async with served(Node(), clock, path):
                    for _ in range(3):
                        await clock.advance(LOOK_SECONDS)
                        await all_tasks_blocked()
            assert VERSION == (await call(path, "Version", answer)).version

        assert not path.exists()
    assert ["the display is not served"] == [line["event"] for line in logs]


@pytest.mark.parametrize("is_asked", [True, False])
async def test_a_node_serves_it_where_that_is_set(messages: dict[str, type[Any]], is_asked: bool) -> None:
    with short_directory() as directory:
        path = directory / "d.sock"
        settings = {"NODE": "node-1", "MACHINE": "dgx-a100", "STATE_DIR": str(directory / "state")}
        if is_asked:
            settings["DISPLAY"] = str(path)
        environment = {f"TOPOALIGN_{name}": value for name, value in settings.items()}
        context = Context(bus=MemoryBus(), clock=ManualClock(), environment=environment)
        async with background() as tasks:
            for service in (discovery, allocator):
                await tasks.start(partial(run, service.serve, context))
            await all_tasks_blocked()
            if is_asked:
                answer = await call(path, "Version", messages["display.VersionResponse"])
                assert VERSION == answer.version

            assert (is_asked, is_asked) == (path.exists(), "/graph" in context.pages)


async def run(serve, context: Context, *, task_status: TaskStatus[None]) -> None:  # type: ignore[no-untyped-def]  # either service
    await serve(context, task_status=task_status)


async def test_a_path_that_no_socket_can_have_names_the_setting(tmp_path: Path) -> None:
    display = Display(lambda: Node().ledger.state, UseSeries(Node().ledger, Node().bus, ()).shares)
    with pytest.raises(InvalidField) as raised:
        await display.run(tmp_path / ("x" * 200), ManualClock())

    assert "TOPOALIGN_DISPLAY" == raised.value.field
