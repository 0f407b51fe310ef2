"""
How services are started, watched and ended in one process: they are drained after SIGTERM, and what stops by itself ends the
process with an error.
"""

import asyncio
import importlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType

import anyio
import httpx
import pytest
from anyio.abc import TaskStatus
from bus_support import GRANTED, killable, said
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from structlog.testing import capture_logs

from topoalign.core.model.errors import BusRefused, InvalidField, NotFound, StateFault
from topoalign.runtime import installed, runner
from topoalign.runtime.context import Context, Serve
from topoalign.runtime.http_server import AddressInUse
from topoalign.runtime.installed import ENTRY_POINTS, ServiceFailed, find_unknown_variables, load_services
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.runner import RunningServices, run_services
from topoalign.runtime.tasks import StoppedUnasked
from topoalign.runtime.watchdog import Watchdog
from topoalign.testing.manual_clock import ManualClock, all_tasks_blocked

pytestmark = pytest.mark.anyio
ENVIRONMENT = {"TOPOALIGN_NODE": "gpu-1", "TOPOALIGN_HTTP_PORT": "0"}


class Recorder:
    """Services that write down what happens to them."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.ready = anyio.Event()
        self.running: RunningServices | None = None

    def service(self, name: str) -> Serve:
        async def serve(context: Context, *, task_status: TaskStatus[None]) -> None:
            self.events.append(f"{name} starts on {context.environment['TOPOALIGN_NODE']}")
            task_status.started()
            try:
                await anyio.sleep_forever()
            finally:
                self.events.append(f"{name} ends")

        return serve

    def note(self, running: RunningServices) -> None:
        self.running = running
        self.ready.set()


async def returns(context: Context) -> None:
    """A service that has nothing more to do."""


async def waits_for_what_is_cancelled(context: Context) -> None:
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


async def has_a_task_that_waits_for_what_is_cancelled(context: Context) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(waits_for_what_is_cancelled, context)
        await anyio.sleep_forever()


@pytest.mark.parametrize("end", [returns, waits_for_what_is_cancelled, has_a_task_that_waits_for_what_is_cancelled])
async def test_a_service_that_stops_although_nobody_asked_it_to_has_failed(
    end: Callable[[Context], Awaitable[None]],
) -> None:
    """Without an error of its own the process would end with exit code 0, and say nothing."""
    recorder = Recorder()

    async def serve(context: Context, *, task_status: TaskStatus[None]) -> None:
        task_status.started()
        await recorder.ready.wait()
        await end(context)

    with anyio.fail_after(30), pytest.raises(StoppedUnasked, match="hinting stopped although nothing asked it to"):
        await run_services(
            {"discovery": recorder.service("discovery"), "hinting": serve},
            ENVIRONMENT,
            bus=MemoryBus(),
            ready=recorder.note,
        )

    assert "discovery ends" == recorder.events[-1]


async def test_a_service_that_stops_before_it_serves_has_failed() -> None:
    async def serve(context: Context, *, task_status: TaskStatus[None]) -> None:
        return

    with anyio.fail_after(30), pytest.raises(StoppedUnasked, match="hinting stopped although nothing asked it to"):
        await run_services({"hinting": serve}, ENVIRONMENT, bus=MemoryBus())


async def test_what_runs_beside_the_services_does_not_end_them_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()

    async def run(self: Watchdog) -> None:
        await recorder.ready.wait()
        await waits_for_what_is_cancelled(Context(bus=MemoryBus(), clock=ManualClock(), environment={}))

    monkeypatch.setattr(Watchdog, "run", run)
    with anyio.fail_after(30), pytest.raises(StoppedUnasked, match="discovery stopped although nothing asked it to"):
        await run_services(
            {"discovery": recorder.service("discovery")}, ENVIRONMENT, bus=MemoryBus(), ready=recorder.note
        )


@pytest.mark.parametrize("patient", [True, False])
async def test_a_service_that_ends_when_asked_to_has_not_failed(patient: bool) -> None:
    """However a service ends after it was asked to stop, it has not failed."""
    recorder = Recorder()

    async def serve(context: Context, *, task_status: TaskStatus[None]) -> None:
        task_status.started()
        try:
            await anyio.sleep_forever()
        except asyncio.CancelledError:  # bad manners, and no failure
            if patient:
                raise

    async def stop() -> None:
        await recorder.ready.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop)
        with anyio.fail_after(30):
            await run_services({"hinting": serve}, ENVIRONMENT, bus=MemoryBus(), ready=recorder.note)


PLANTED = """
import asyncio
from topoalign.cli import main
from topoalign.runtime.nats_bus.nats_connection import NatsConnection

async def until_lost(self):
    raise asyncio.CancelledError

NatsConnection.until_lost = until_lost
main()
"""


async def test_an_agent_whose_bus_ends_by_itself_exits_with_a_reason(tmp_path: Path) -> None:
    """In a process of its own: the exit code is what a supervisor restarts it by."""
    async with killable(tmp_path / "nats") as server:
        environment = {**os.environ, **ENVIRONMENT, "TOPOALIGN_NATS_URL": server.url}
        done = await anyio.run_process(
            [sys.executable, "-c", PLANTED, "hinting"], env=environment, check=False, stderr=subprocess.PIPE
        )

    assert 69 == done.returncode
    assert "the connection to NATS stopped although nothing asked it to" in done.stderr.decode()


DRAIN_SECONDS = 5.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_services_go_on_while_they_drain_and_no_page_is_ready(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM is what a kubelet sends; Ctrl-C in a terminal ends the services at once."""
    clock = ManualClock()
    monkeypatch.setattr(runner, "SystemClock", lambda: clock)
    recorder = Recorder()
    draining = anyio.Event()
    ended = anyio.Event()

    async def serve(context: Context, *, task_status: TaskStatus[None]) -> None:
        context.drain.seconds = DRAIN_SECONDS
        context.readiness["scheduler"] = {}
        task_status.started()
        try:
            await context.drain.begun.wait()
            draining.set()
            await anyio.sleep_forever()
        finally:
            ended.set()

    async def run() -> None:
        await run_services({"registry": serve}, ENVIRONMENT, bus=MemoryBus(), ready=recorder.note)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await recorder.ready.wait()
        assert recorder.running is not None and recorder.running.http is not None
        async with httpx.AsyncClient(base_url=recorder.running.http) as http:
            before = [(await http.get(page)).status_code for page in ("/readyz", "/readyz/scheduler")]
            os.kill(os.getpid(), number)
            if number == signal.SIGTERM:
                await draining.wait()
                after = [(await http.get(page)).status_code for page in ("/livez", "/readyz", "/readyz/scheduler")]
                assert [200, 503, 503] == after
                await clock.advance(DRAIN_SECONDS - 0.1)
                await all_tasks_blocked()
                assert not ended.is_set()
                await clock.advance(0.1)
        with anyio.fail_after(30):
            await ended.wait()

    assert [200, 200] == before


async def test_services_start_in_order_and_a_signal_ends_all_of_them() -> None:
    recorder = Recorder()
    services = {name: recorder.service(name) for name in ("registry", "allocator", "discovery", "hinting")}

    async def stop() -> None:
        await recorder.ready.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop)
        with anyio.fail_after(30):
            await run_services(services, ENVIRONMENT, bus=MemoryBus(), ready=recorder.note)

    assert [f"{name} starts on gpu-1" for name in ("discovery", "hinting", "allocator", "registry")] == (
        recorder.events[:4]
    )
    assert {f"{name} ends" for name in services} == set(recorder.events[4:])
    assert recorder.running is not None
    assert ("discovery", "hinting", "allocator", "registry") == recorder.running.services


async def test_the_node_is_this_host_where_nothing_says_otherwise() -> None:
    recorder = Recorder()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: run_services({"a": recorder.service("a")}, {}, bus=MemoryBus(), ready=recorder.note))
        await recorder.ready.wait()
        tasks.cancel_scope.cancel()

    assert recorder.running is not None
    assert (socket.gethostname().lower(), None) == (recorder.running.node, recorder.running.http)


async def test_the_error_that_ends_a_service_is_raised_and_ends_the_others() -> None:
    """The error that ends a service is raised as itself, and the other services end."""
    recorder = Recorder()

    async def fail(context: Context, *, task_status: TaskStatus[None]) -> None:
        task_status.started()
        await recorder.ready.wait()
        async with anyio.create_task_group():
            raise StateFault("the disk is full", "make room")

    with pytest.raises(StateFault, match="the disk is full"):
        await run_services(
            {"discovery": recorder.service("discovery"), "failing": fail},
            ENVIRONMENT,
            bus=MemoryBus(),
            ready=recorder.note,
        )

    assert "discovery ends" == recorder.events[-1]


async def test_an_error_while_starting_comes_out_as_itself() -> None:
    async def fail(context: Context, *, task_status: TaskStatus[None]) -> None:
        raise InvalidField("TOPOALIGN_POLICY", "odd", "choose another")

    with pytest.raises(InvalidField, match="TOPOALIGN_POLICY"):
        await run_services({"a": fail}, ENVIRONMENT, bus=MemoryBus())


async def test_a_service_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "START_SECONDS", 0.01)

    async def hang(context: Context, *, task_status: TaskStatus[None]) -> None:
        await anyio.sleep_forever()

    with pytest.raises(ServiceFailed, match="slowpoke did not start within"):
        await run_services({"slowpoke": hang}, ENVIRONMENT, bus=MemoryBus())


def test_a_service_that_is_not_installed_is_not_found() -> None:
    with pytest.raises(NotFound, match="no service named 'scheduler'") as caught:
        load_services(["scheduler"])

    assert "discovery, hinting, allocator, mps, registry" in caught.value.remedy


def test_the_own_services_are_found_without_reading_what_others_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their list is read alone at a start; it would be among all that is installed."""
    read: list[str] = []

    def entry_points(group: str) -> metadata.EntryPoints:
        read.append(group)
        return metadata.EntryPoints([metadata.EntryPoint("another", "topoalign.hinting.main:serve", group)])

    monkeypatch.setattr(metadata, "entry_points", entry_points)

    assert ["allocator", "hinting"] == list(load_services(["allocator", "hinting"]))
    assert [] == read
    assert ["another", "hinting"] == list(load_services(["another", "hinting"]))
    assert [ENTRY_POINTS] == read


async def test_a_variable_that_is_no_setting_is_named_once_at_the_start() -> None:
    """The process runs all the same: Kubernetes sets such variables itself."""
    recorder = Recorder()
    environment = {**ENVIRONMENT, "TOPOALIGN_POLCY": "restricted", "TOPOALIGN_REGISTRY_ASK_SECONDS": "5"}
    with capture_logs() as logs:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(
                lambda: run_services({"a": recorder.service("a")}, environment, bus=MemoryBus(), ready=recorder.note)
            )
            await recorder.ready.wait()
            tasks.cancel_scope.cancel()
    warnings = [each["findings"] for each in logs if each["log_level"] == "warning" and "findings" in each]

    assert [["TOPOALIGN_POLCY is set but is not a setting"]] == warnings


def test_what_a_kubelet_sets_for_a_service_is_no_misspelt_setting() -> None:
    of_kubelet = {
        "TOPOALIGN_NATS_SERVICE_HOST": "10.0.0.1",
        "TOPOALIGN_NATS_SERVICE_PORT_CLIENT": "4222",
        "TOPOALIGN_NATS_PORT": "tcp://10.0.0.1:4222",
        "TOPOALIGN_NATS_PORT_4222_TCP": "tcp://10.0.0.1:4222",
        "TOPOALIGN_NATS_PORT_4222_TCP_PROTO": "tcp",
        "TOPOALIGN_PORT_53_UDP_ADDR": "10.0.0.1",
    }

    assert [] == find_unknown_variables(of_kubelet)
    found = find_unknown_variables({"TOPOALIGN_HTP_PORT": "8080"})
    assert ["TOPOALIGN_HTP_PORT is set but is not a setting"] == found


def test_settings_of_other_services_are_read_only_where_they_may_be_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of a service load modules that a node agent does without."""
    loaded: list[str] = []

    def load(name: str) -> ModuleType:
        loaded.append(name)
        return importlib.import_module(name)

    monkeypatch.setattr(installed, "import_module", load)
    find_unknown_variables({"TOPOALIGN_NODE": "n", "TOPOALIGN_POLICY": "none"}, ["allocator"])
    own = [*loaded]
    find_unknown_variables({"TOPOALIGN_POLCY": "none"}, ["allocator"])

    assert ["topoalign.allocator.settings"] == own
    assert "topoalign.registry.settings" in loaded


async def test_a_setting_that_cannot_be_meant_is_named() -> None:
    for variable, value in {
        "HTTP_PORT": "70000",
        "LOG_LEVEL": "loud",
        "NATS_URL": "http://x",
    }.items():
        with pytest.raises(InvalidField, match=f"TOPOALIGN_{variable}"):
            await run_services({}, {f"TOPOALIGN_{variable}": value})


async def test_the_pages_show_life_readiness_metrics_and_service_pages() -> None:
    """The pages show life, readiness and metrics, and include the pages of services."""
    recorder = Recorder()
    reasons: dict[str, str | None] = {"disk": "full of \x1b[31mred"}

    async def serve(context: Context, *, task_status: TaskStatus[None]) -> None:
        context.checks["disk"] = lambda: reasons["disk"]
        context.routes.append(Route("/v1/own", lambda request: PlainTextResponse("mine")))
        task_status.started()
        await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: run_services({"a": serve}, ENVIRONMENT, bus=MemoryBus(), ready=recorder.note))
        await recorder.ready.wait()
        assert recorder.running is not None and recorder.running.http is not None
        async with httpx.AsyncClient(base_url=recorder.running.http) as http:
            alive, ill = await http.get("/livez"), await http.get("/readyz?verbose")
            missing, wrong = await http.get("/no/such"), await http.post("/livez")
            reasons["disk"] = None
            well = await http.get("/readyz")
            metrics, own = await http.get("/metrics"), await http.get("/v1/own")
        tasks.cancel_scope.cancel()

    assert (200, 503, 200, "mine") == (alive.status_code, ill.status_code, well.status_code, own.text)
    assert "[+] bus\n[-] disk: full of ?[31mred\nnot ready\n" == ill.text
    assert 'topoalign_build_info{version="' in metrics.text
    assert [(404, "NotFound"), (405, "BadRequest")] == [(r.status_code, r.json()["code"]) for r in (missing, wrong)]


async def test_an_address_in_use_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUse, match=f"127.0.0.1 port {port}"):
            await run_services({}, {"TOPOALIGN_HTTP_PORT": str(port)}, bus=MemoryBus())


async def test_systemd_is_told_of_readiness_life_and_end(tmp_path: Path) -> None:
    recorder = Recorder()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(5)
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "1000000"}

        async def stop() -> None:
            await recorder.ready.wait()
            await all_tasks_blocked()
            os.kill(os.getpid(), signal.SIGINT)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stop)
            await run_services({}, environment, bus=MemoryBus(), ready=recorder.note)
        told = [listener.recv(100) for _ in range(3)]

    assert [b"READY=1", b"WATCHDOG=1", b"STOPPING=1"] == told


async def test_without_nats_everything_starts_and_readiness_says_what_is_missing() -> None:
    """C31."""
    recorder = Recorder()
    environment = {**ENVIRONMENT, "TOPOALIGN_NATS_URL": "nats://user:canary@127.0.0.1:9"}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: run_services({"a": recorder.service("a")}, environment, ready=recorder.note))
        await recorder.ready.wait()
        assert recorder.running is not None and recorder.running.http is not None
        async with httpx.AsyncClient(base_url=recorder.running.http) as http:
            while "no connection" not in (answer := await http.get("/readyz")).text:  # over HTTP
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()

    assert 503 == answer.status_code
    assert recorder.running is not None
    assert "[-] bus: no connection to nats://127.0.0.1:9" in answer.text
    assert "nats://127.0.0.1:9" == recorder.running.nats


def speaker(done: anyio.Event) -> Mapping[str, Serve]:
    async def serve(context: Context, *, task_status: TaskStatus[None]) -> None:
        task_status.started()
        await context.bus.publish(said(1))
        done.set()
        await anyio.sleep_forever()

    return {"allocator": serve}


async def test_services_speak_over_nats(tmp_path: Path) -> None:
    done = anyio.Event()
    async with killable(tmp_path) as server, anyio.create_task_group() as tasks:
        environment = {"TOPOALIGN_NATS_URL": server.url, "TOPOALIGN_NATS_WAIT": "5"}
        tasks.start_soon(run_services, speaker(done), environment)
        await done.wait()
        tasks.cancel_scope.cancel()


async def test_a_service_without_publish_rights_is_refused_at_the_start(tmp_path: Path) -> None:
    """C40: tried before anything happens on the node, on the subjects of exactly the services that run."""
    rule = '{ user: u, password: p, permissions: { publish: { deny: ["topoalign.v1.allocation.node-1.granted"] } } }'
    async with killable(tmp_path, f"authorization {{ users: [ {rule} ] }}\n", administrator="u:p") as server:
        environment = {
            "TOPOALIGN_NODE": "node-1",
            "TOPOALIGN_NATS_URL": server.url.replace("nats://", "nats://u:p@"),
            "TOPOALIGN_NATS_WAIT": "5",
        }
        with anyio.fail_after(30), pytest.raises(BusRefused, match=f"no permission on {GRANTED}"):
            await run_services(speaker(anyio.Event()), environment)
