"""The plugins stay registered, whatever the kubelet and its directory do. Time moves only when a test says so."""

import os
import socket
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import anyio
import pytest
import structlog
from device_allocations_support import MemoryAllocator
from grpclib.client import Channel
from kubelet_support import node, offers, pod, short_directory, two_nodes
from slot_support import in_slots

from topoalign.allocator.device_plugin.front import KubeletFront
from topoalign.allocator.device_plugin.plugin_server import REGISTER_SECONDS, register
from topoalign.allocator.device_plugin.registration import FIRST_RETRY_SECONDS, LISTEN_SECONDS, POLL_SECONDS
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.events import DeviceHealth, HealthState
from topoalign.core.model.ids import GPU, NIC, DeviceID, ResourceName
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Clock
from topoalign.kubelet.grpc import unix_sockets
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.transport import GrpcServer
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet
from topoalign.testing.fake_kubelet.plugins import GRACE_SECONDS, Endpoint, Plugins
from topoalign.testing.manual_clock import ManualClock, all_tasks_blocked

pytestmark = pytest.mark.anyio
MACHINE = two_nodes()
MUTE_THEN_ERROR = ("the kubelet does not listen", "no answer within 12 s", "the kubelet was told to refuse")


async def test_each_resource_of_the_node_is_registered_under_its_own_socket() -> None:
    async with node(MACHINE) as it:
        assert ["topoalign-nvidia.com_gpu.sock", "topoalign-topoalign.io_nic.sock"] == sorted(
            path.name for path in (it.directory / "device-plugins").glob("topoalign-*")
        )
        assert (8, 2) == (it.kubelet.allocatable(GPU), it.kubelet.allocatable(NIC))
        assert it.front.reason() is None


async def test_a_resource_without_devices_on_the_node_is_not_served() -> None:
    async with node(two_nodes(nics=0)) as it:
        assert {GPU} == set(it.kubelet.plugins.endpoints)


async def test_sockets_are_for_their_owner_alone() -> None:
    async with node(MACHINE) as it:
        modes = [path.stat().st_mode & 0o777 for path in it.directory.rglob("*.sock")]

        assert [0o600] * 4 == modes


async def test_a_node_whose_topology_comes_late_is_served_from_then_on() -> None:
    allocator = MemoryAllocator(None)
    with short_directory() as directory:
        kubelet = stand_in(directory)
        front = KubeletFront(allocator, directory / "device-plugins", ManualClock())
        async with anyio.create_task_group() as tasks:
            await tasks.start(kubelet.run)
            await tasks.start(front.run)
            assert "the node has no devices to offer yet" == front.reason()
            allocator.discover(MACHINE)
            await kubelet.until(offers(MACHINE))
            tasks.cancel_scope.cancel()


async def test_a_kubelet_that_comes_half_a_minute_late_is_waited_for() -> None:
    """Neither its directory nor its socket is there; we say what is missing, once, and do not end."""
    with short_directory() as directory:
        clock = ManualClock()
        front = KubeletFront(MemoryAllocator(MACHINE), directory / "device-plugins", clock)
        async with anyio.create_task_group() as tasks:
            with structlog.testing.capture_logs() as logs:
                await tasks.start(front.run)
                await clock.advance(15)
                without_directory = front.reason()
                (directory / "device-plugins").mkdir()
                await clock.advance(15)
                without_kubelet = front.reason()
            kubelet = stand_in(directory)
            await tasks.start(kubelet.run)
            # its start has swept our sockets away: they are made anew at the next look
            await clock.advance(2 * POLL_SECONDS)
            await kubelet.until(offers(MACHINE))
            tasks.cancel_scope.cancel()

        assert "No such file or directory; check the directory" in (without_directory or "")
        assert "the kubelet has no kubelet.sock" in (without_kubelet or "")
        assert "; check that it runs, and that TOPOALIGN_KUBELET_DIR is right" in (without_kubelet or "")
        assert 4 == len(logs)  # two resources, two reasons


async def test_after_a_kubelet_restart_all_devices_are_back_at_the_next_look() -> None:
    """The kubelet starts with nothing; our sockets are made anew, and the first list has every device."""
    clock = ManualClock()
    async with node(MACHINE, clock=clock) as it:
        await it.kubelet.restart()
        assert (0, 0) == (it.kubelet.capacity(GPU), it.kubelet.capacity(NIC))
        await clock.advance(POLL_SECONDS)
        await clock.advance(POLL_SECONDS)
        await it.kubelet.until(offers(MACHINE))

        assert it.front.reason() is None


async def test_a_kubelet_learns_that_starts_are_judged_when_gpus_become_slots() -> None:
    """It reads what a plugin wants of it when that registers, and the resource keeps its name."""
    clock, told = ManualClock(), []
    async with node(two_nodes(nics=0), clock=clock) as it:
        for machine in (in_slots(two_nodes(nics=0)), two_nodes(nics=0)):
            told.append(it.kubelet.plugins.endpoints[GPU].options.pre_start_required)
            it.allocator.discover(machine)
            for _ in range(3):
                await clock.advance(POLL_SECONDS)
            await it.kubelet.until(offers(machine))
        told.append(it.kubelet.plugins.endpoints[GPU].options.pre_start_required)

    assert [False, True, False] == told


async def test_no_call_of_a_former_kubelet_goes_on_when_the_next_one_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An Allocate of a kubelet that has restarted is not judged after those of the next one: it ends with its connection."""
    clock, calls = ManualClock(), []
    async with node(two_nodes(nics=0), clock=clock) as it, anyio.create_task_group() as tasks:
        it.allocator.pause = anyio.Event()
        service = it.front.plugins[GPU].service

        async def noted(path: Path, resource: ResourceName, clock: Clock, *, by_amounts: bool) -> None:
            calls.append(service.calls)
            await register(path, resource, clock, by_amounts=by_amounts)

        monkeypatch.setattr("topoalign.allocator.device_plugin.plugin.register", noted)
        tasks.start_soon(it.kubelet.admit, pod("train", gpus=1))
        await it.allocator.started.wait()
        before = service.calls
        await it.kubelet.restart()
        await clock.advance(POLL_SECONDS)
        await clock.advance(POLL_SECONDS)
        await it.kubelet.until(offers(two_nodes(nics=0)))
        it.allocator.pause.set()

    assert (1, [0]) == (before, calls)
    assert {} == it.allocator.state.allocations


async def made_anew(directory: Path, kubelet: FakeKubelet) -> GrpcServer:
    """The kubelet's socket, by the same kubelet."""
    path = directory / "device-plugins" / "kubelet.sock"
    path.unlink()
    fresh = GrpcServer(kubelet.plugins, path, "directory")
    await fresh.listen()
    return fresh


async def test_a_new_kubelet_socket_beside_ours_is_enough_to_register_again() -> None:
    """A kubelet socket that is made anew beside ours is enough to register again."""
    clock = ManualClock()
    async with node(MACHINE, clock=clock) as it:
        before = it.kubelet.plugins.registrations
        fresh = await made_anew(it.directory, it.kubelet)
        await clock.advance(POLL_SECONDS)
        await it.kubelet.until(lambda kubelet: kubelet.plugins.registrations == before + 2)
        await it.kubelet.until(offers(MACHINE))

        assert it.front.reason() is None
        await fresh.stop(0)


async def test_an_old_stream_that_does_not_end_is_cut_before_a_registration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """
    An old stream that does not end is cut off before the plugin registers again. Its client reads no more. Were it to
    end after the registration, the kubelet would drop the new one with it.
    """

    async def stuck() -> None:
        pass

    clock = ManualClock()
    async with node(two_nodes(nics=0), clock=clock) as it:
        monkeypatch.setattr(it.front.plugins[GPU].service.watches, "end", stuck)
        before = it.kubelet.plugins.registrations
        fresh = await made_anew(it.directory, it.kubelet)
        await clock.advance(POLL_SECONDS)
        await it.kubelet.until(lambda kubelet: kubelet.allocatable(GPU) == 0)
        meanwhile = it.kubelet.plugins.registrations
        await clock.advance(POLL_SECONDS)
        await it.kubelet.until(lambda kubelet: kubelet.allocatable(GPU) == 8)

        assert (before, before + 1) == (meanwhile, it.kubelet.plugins.registrations)
        await fresh.stop(0)


@pytest.mark.parametrize("name", ["kubelet.sock", "topoalign-nvidia.com_gpu.sock"])
async def test_another_mode_of_a_socket_is_no_other_socket(name: str) -> None:
    """An administrator's chmod, or a relabelling by SELinux, costs nobody a device for a moment."""
    clock = ManualClock()
    async with node(MACHINE, clock=clock) as it:
        registrations = it.kubelet.plugins.registrations
        seen: list[int] = []

        def look(kubelet: FakeKubelet) -> bool:
            seen.append(kubelet.allocatable(GPU))
            return False

        it.tasks.start_soon(it.kubelet.until, look)
        path = it.directory / "device-plugins" / name
        for mode in (0o660, 0o600):
            path.chmod(mode)
            await clock.advance(3 * POLL_SECONDS)

        assert registrations == it.kubelet.plugins.registrations
        assert {8} == set(seen)


def test_a_socket_made_anew_is_another_even_where_the_inode_is_used_again() -> None:
    with short_directory() as directory:
        path = directory / "one.sock"
        found = []
        for seconds in (1, 2):
            with closing(unix_sockets.listen_on_path(path, "directory")):
                os.utime(path, (seconds, seconds))  # as two moments at which it was made
                found.append(unix_sockets.identity(path))
            path.unlink()

        assert None not in found
        assert found[0] != found[1]


async def test_a_wiped_directory_gets_its_sockets_back() -> None:
    clock = ManualClock()
    async with node(MACHINE, clock=clock) as it:
        await it.kubelet.wipe()
        await clock.advance(POLL_SECONDS)
        await clock.advance(POLL_SECONDS)
        await it.kubelet.until(offers(MACHINE))

        assert it.front.reason() is None


async def test_a_resource_that_returns_while_its_plugin_drains_is_served_again() -> None:
    """A resource that comes back while its plugin drains is served again."""
    clock, allocator = ManualClock(), MemoryAllocator(MACHINE)
    async with node(MACHINE, allocator=allocator, clock=clock) as it:
        allocator.pause = anyio.Event()
        channel = Channel(path=str(it.front.plugins[NIC].path))
        one = v1beta1.AllocateRequest(container_requests=[v1beta1.ContainerAllocateRequest(devices_ids=["mlx5_0"])])
        it.tasks.start_soon(v1beta1.DevicePluginStub(channel).allocate, one)
        await allocator.started.wait()
        allocator.discover(two_nodes(nics=0))
        await clock.advance(POLL_SECONDS)
        await it.kubelet.until(lambda kubelet: kubelet.allocatable(NIC) == 0)
        allocator.discover(MACHINE)
        await all_tasks_blocked()
        allocator.pause.set()
        await looking(clock, partial(has_tried, it.kubelet.plugins, 3))
        await it.kubelet.until(offers(MACHINE))
        channel.close()

        assert {GPU, NIC} == set(it.front.plugins)


async def test_if_only_our_socket_is_deleted_the_kubelet_sees_the_end_first() -> None:
    """
    If only our socket is deleted, the kubelet sees the end of the stream first. Registering before the kubelet has seen
    the old stream end would cost us the new client.
    """
    clock = ManualClock()
    async with node(MACHINE, clock=clock) as it:
        (it.directory / "device-plugins" / "topoalign-nvidia.com_gpu.sock").unlink()
        await clock.advance(POLL_SECONDS)
        await it.kubelet.until(lambda kubelet: kubelet.allocatable(GPU) == 0)
        assert 8 == it.kubelet.capacity(GPU)
        await clock.advance(2 * POLL_SECONDS)
        await it.kubelet.until(offers(MACHINE))

        assert it.front.reason() is None


async def test_a_kubelet_that_is_mute_and_then_refuses_is_asked_on() -> None:
    """
    A kubelet that does not answer and then refuses is asked on, and each state is logged once. It accepts the
    connection and never answers: that is given up at a deadline. Each state is logged once, not each try.
    """
    clock = ManualClock()
    async with node(two_nodes(nics=0), clock=clock) as it:
        plugins = it.kubelet.plugins
        with structlog.testing.capture_logs() as logs:
            plugins.fault = "mute"
            plugins.endpoints[GPU].stop(clock.monotonic())
            for tries in (2, 3):
                await looking(clock, partial(has_tried, plugins, tries))
                await clock.advance(REGISTER_SECONDS)
            assert "no answer within 12 s" in (it.front.reason() or "")
            plugins.fault = "error"
            await looking(clock, partial(has_tried, plugins, 6))
            assert "the kubelet was told to refuse" in (it.front.reason() or "")
            plugins.fault = None
            await looking(clock, lambda: it.front.reason() is None)
        await it.kubelet.until(lambda kubelet: kubelet.allocatable(GPU) == 8)

    said = [line["reason"] for line in logs if line["event"] == "not registered with the kubelet"]
    assert MUTE_THEN_ERROR == tuple(
        words for reason, words in zip(said, MUTE_THEN_ERROR, strict=True) if words in reason
    )


async def test_a_kubelet_that_refuses_is_asked_less_often_and_logged_once() -> None:
    """A kubelet that refuses is asked less and less often, and logged once."""
    clock = ManualClock()
    asked = []
    with short_directory() as directory, structlog.testing.capture_logs() as logs:
        kubelet = stand_in(directory)
        async with anyio.create_task_group() as tasks:
            await tasks.start(kubelet.run)
            kubelet.plugins.fault = "error"
            front = KubeletFront(MemoryAllocator(MACHINE), directory / "device-plugins", clock, jitter=lambda: 1.0)
            plugin = front.plugin_for(GPU)
            for _ in range(2 * 32):
                plugin.settle(await plugin.poll())
                asked.append(kubelet.plugins.registrations)
                await clock.advance(POLL_SECONDS)
            await plugin.stop()
            tasks.cancel_scope.cancel()

    attempts = [looks * POLL_SECONDS for looks, count in enumerate(asked) if count > ([0, *asked])[looks]]
    assert [0, 1, 3, 7, 15, 31] == attempts
    assert 1 == len([line for line in logs if line["event"].startswith("not registered")])


async def test_a_kubelet_that_drops_our_stream_is_registered_with_again() -> None:
    """
    A kubelet that drops our stream without restarting is registered with again. It never dials again by itself
    (kubernetes issue 125501).
    """
    clock = ManualClock()
    async with node(two_nodes(nics=0), clock=clock) as it:
        it.kubelet.plugins.endpoints[GPU].stop(clock.monotonic())
        await it.front.plugins[GPU].service.watch.ended.wait()
        await clock.advance(FIRST_RETRY_SECONDS + 2 * POLL_SECONDS)

        await it.kubelet.until(lambda kubelet: kubelet.allocatable(GPU) == 8)


async def test_a_kubelet_that_keeps_dropping_our_stream_is_called_less_often() -> None:
    """
    A kubelet that drops our stream again and again is registered with less and less often. That it listened for a
    moment in between is no success.
    """
    clock = ManualClock()
    async with node(two_nodes(nics=0), clock=clock) as it:
        for wait in (FIRST_RETRY_SECONDS, 2 * FIRST_RETRY_SECONDS, 4 * FIRST_RETRY_SECONDS):
            before = it.kubelet.plugins.registrations
            it.kubelet.plugins.endpoints[GPU].stop(clock.monotonic())
            await it.front.plugins[GPU].service.watch.ended.wait()
            await clock.advance(wait)
            for _ in range(100):  # a registration would be known by now
                await anyio.lowlevel.checkpoint()
            too_early = it.kubelet.plugins.registrations - before
            await clock.advance(2 * POLL_SECONDS)
            await it.kubelet.until(lambda kubelet: kubelet.allocatable(GPU) == 8)
            await clock.advance(POLL_SECONDS)

            assert 0 == too_early


async def test_a_kubelet_that_is_slow_to_listen_is_given_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """
    A kubelet that is slow to listen is given time before the plugin registers again. The stream that ended before the
    registration says nothing about the one that is to come.
    """
    clock = ManualClock()
    async with node(two_nodes(nics=0), clock=clock) as it:
        plugins = it.kubelet.plugins

        undelivered: list[Endpoint] = []

        async def slow(endpoint: Endpoint) -> None:
            undelivered.append(endpoint)

        monkeypatch.setattr(plugins, "watch", slow)
        before = plugins.registrations
        plugins.endpoints[GPU].stop(clock.monotonic())
        await looking(clock, lambda: plugins.registrations == before + 1)
        again = clock.monotonic()
        await looking(clock, lambda: plugins.registrations == before + 2)

        assert LISTEN_SECONDS <= clock.monotonic() - again
        for endpoint in undelivered:
            endpoint.stop(clock.monotonic())


async def test_a_new_kubelet_does_not_wait_for_the_failures_of_the_old_one() -> None:
    """A new kubelet is not made to wait for the failures of the one before."""
    clock = ManualClock()
    async with node(two_nodes(nics=0), clock=clock) as it:
        it.kubelet.plugins.fault = "error"
        it.kubelet.plugins.endpoints[GPU].stop(clock.monotonic())
        await looking(clock, partial(has_tried, it.kubelet.plugins, 6))
        fresh = await made_anew(it.directory, it.kubelet)
        await looking(clock, partial(has_tried, it.kubelet.plugins, 7))
        first = clock.monotonic()
        await looking(clock, partial(has_tried, it.kubelet.plugins, 8))

        assert FIRST_RETRY_SECONDS <= clock.monotonic() - first <= FIRST_RETRY_SECONDS + 2 * POLL_SECONDS
        await fresh.stop(0)


async def test_a_gpu_that_falls_ill_is_unhealthy_in_the_kubelet_and_stays_listed() -> None:
    async with node(MACHINE) as it:
        it.allocator.judge({DeviceID("GPU-3"): DeviceHealth(state=HealthState.UNHEALTHY, reason="Xid 79")})
        await it.kubelet.until(lambda kubelet: kubelet.allocatable(GPU) == 7)

        assert 8 == it.kubelet.capacity(GPU)


async def test_when_we_stop_the_kubelet_sees_the_end_and_no_socket_of_ours_stays() -> None:
    """Its capacity stays for five minutes, in which another of us may come; then the resource is no more."""
    allocator, clock = MemoryAllocator(MACHINE), ManualClock()
    with short_directory() as directory:
        kubelet = stand_in(directory, clock=clock)
        async with anyio.create_task_group() as tasks:
            await tasks.start(kubelet.run)
            async with anyio.create_task_group() as ours:
                await ours.start(KubeletFront(allocator, directory / "device-plugins", ManualClock()).run)
                await kubelet.until(offers(MACHINE))
                ours.cancel_scope.cancel()
            await kubelet.until(lambda kubelet: kubelet.allocatable(GPU) == 0)

            assert [] == list((directory / "device-plugins").glob("topoalign-*"))
            await clock.advance(GRACE_SECONDS)
            assert 8 == kubelet.capacity(GPU)
            await clock.advance(1)
            assert 0 == kubelet.capacity(GPU)
            assert {} == kubelet.plugins.endpoints
            tasks.cancel_scope.cancel()


@pytest.mark.parametrize(("jitter", "seconds"), [(0.0, 0.5), (0.5, 1.0), (1.0, 1.0)])
async def test_retries_are_spread_over_half_of_their_interval(jitter: float, seconds: float) -> None:
    """A thousand nodes whose kubelets restart together do not come back together (looks are half a second apart)."""
    clock = ManualClock()
    with short_directory() as directory:
        kubelet = stand_in(directory)
        async with anyio.create_task_group() as tasks:
            await tasks.start(kubelet.run)
            kubelet.plugins.fault = "error"
            front = KubeletFront(MemoryAllocator(MACHINE), directory / "device-plugins", clock, jitter=lambda: jitter)
            plugin = front.plugin_for(GPU)
            began = clock.monotonic()
            while kubelet.plugins.registrations < 2:
                plugin.settle(await plugin.poll())
                again = clock.monotonic() - began
                await clock.advance(POLL_SECONDS)
            await plugin.stop()
            tasks.cancel_scope.cancel()

    assert seconds == again


async def test_a_path_too_long_for_a_socket_is_refused_naming_its_setting(tmp_path: Path) -> None:
    """A path too long for a socket is refused by the name of its setting."""
    front = KubeletFront(MemoryAllocator(MACHINE), tmp_path / ("d" * 90), ManualClock())
    with pytest.raises(InvalidField, match=r"TOPOALIGN_KUBELET_DIR: the socket path .* has [0-9]+ bytes"):
        await front.run()


async def test_a_socket_that_another_process_serves_is_left_alone() -> None:
    """We wait, and say whose it is, until that process has gone."""
    with short_directory() as directory:
        path = directory / "topoalign-nvidia.com_gpu.sock"
        other = socket.socket(socket.AF_UNIX)
        other.bind(str(path))
        other.listen()
        theirs = unix_sockets.identity(path)
        clock = ManualClock()
        front = KubeletFront(MemoryAllocator(two_nodes(nics=0)), directory, clock)
        async with anyio.create_task_group() as tasks:
            await tasks.start(front.run)
            await clock.advance(POLL_SECONDS)

            assert "already serves" in (front.reason() or "")
            assert theirs == unix_sockets.identity(path)
            other.close()
            await clock.advance(POLL_SECONDS)
            assert theirs != unix_sockets.identity(path)
            tasks.cancel_scope.cancel()


@pytest.mark.parametrize("kind", ["file", "link"])
async def test_what_is_in_the_way_and_no_socket_is_not_removed(kind: str) -> None:
    with short_directory() as directory:
        path = directory / "topoalign-nvidia.com_gpu.sock"
        precious = directory / "precious"
        precious.write_text("data")
        if kind == "link":
            path.symlink_to(precious)
        else:
            path.write_text("data")
        front = KubeletFront(MemoryAllocator(two_nodes(nics=0)), directory, ManualClock())
        async with anyio.create_task_group() as tasks:
            await tasks.start(front.run)
            await all_tasks_blocked()
            tasks.cancel_scope.cancel()

        assert "is not a socket" in (front.reason() or "")
        assert "data" == path.read_text()


def has_tried(plugins: Plugins, tries: int) -> bool:
    return plugins.registrations >= tries


async def looking(clock: ManualClock, true: Callable[[], bool]) -> None:
    """Lets look after look pass until this holds, with time in between for what goes over sockets."""
    while not true():
        await clock.advance(POLL_SECONDS)
        for _ in range(20):
            await anyio.lowlevel.checkpoint()


def stand_in(directory: Path, machine: Topology = MACHINE, clock: ManualClock | None = None) -> FakeKubelet:
    return FakeKubelet(directory / "device-plugins", directory / "pod-resources", machine, AdmissionRules(), clock)
