"""The connection to the kubelet's PodResources that is kept between two questions."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from grpclib.client import Channel
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.protocol import H2Protocol
from kubelet_support import short_directory

from topoalign.allocator.reconciliation.pod_resources import PodResourcesClient
from topoalign.core.model.ids import ResourceName
from topoalign.kubelet.grpc import kubelet_client
from topoalign.kubelet.grpc.api import v1
from topoalign.kubelet.grpc.grpc_connection import GrpcConnection
from topoalign.kubelet.grpc.kubelet_client import KubeletAway
from topoalign.kubelet.grpc.transport import GrpcServer, Servicer, caller
from topoalign.testing.manual_clock import ManualClock

pytestmark = pytest.mark.anyio

AGAIN = 0.05
"""Seconds until a question is asked again that was turned away."""


class Kubelet(Servicer, v1.PodResourcesListerBase):
    """Lists one pod more at each List. Its only resource bears its name."""

    def __init__(self, name: str = "first") -> None:
        self.name = name
        self.asked: list[GrpcConnection | None] = []
        """The connection of each List."""
        self.hangs_up: set[int] = set()
        """The numbers of the List calls whose connection it closes instead of an answer, from 1."""
        self.turned_away = 0
        """So many calls more it turns away, as a kubelet does that has had more of all its clients than it answers."""
        self.listing, self.telling = anyio.Event(), anyio.Event()
        """Until these are set, List and GetAllocatableResources wait."""
        self.listing.set()
        self.telling.set()

    async def list(self, message: v1.ListPodResourcesRequest) -> v1.ListPodResourcesResponse:
        self.asked.append(connection := caller())
        assert connection is not None
        number = len(self.asked)
        if number in self.hangs_up:
            connection.close("test")
        if self.turned_away:
            self.turned_away -= 1
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "too many calls")
        await self.listing.wait()
        return v1.ListPodResourcesResponse(pod_resources=[v1.PodResources(name="p")] * number)

    async def get_allocatable_resources(
        self, message: v1.AllocatableResourcesRequest
    ) -> v1.AllocatableResourcesResponse:
        await self.telling.wait()
        return v1.AllocatableResourcesResponse(devices=[v1.ContainerDevices(resource_name=self.name, device_ids=["d"])])


class CountingServer(GrpcServer):
    """Counts the connections that were made to it."""

    accepted = 0

    def admits(self, connection: GrpcConnection) -> bool:
        self.accepted += 1
        return super().admits(connection)


@asynccontextmanager
async def serving(path: Path, kubelet: Kubelet) -> AsyncIterator[CountingServer]:
    server = CountingServer(kubelet, path, "directory")
    await server.listen()
    try:
        yield server
    finally:
        with anyio.CancelScope(shield=True):
            await server.stop(0.01)


class Node:
    """A kubelet that can be asked."""

    def __init__(
        self, kubelet: Kubelet, server: CountingServer, client: PodResourcesClient, clock: ManualClock
    ) -> None:
        self.kubelet, self.server, self.client, self.clock = kubelet, server, client, clock

    async def disconnected(self) -> None:
        """Waits until the server has no connection."""
        while self.server.connections:
            await anyio.lowlevel.checkpoint()


@asynccontextmanager
async def node() -> AsyncIterator[Node]:
    clock = ManualClock()
    with short_directory() as directory, anyio.fail_after(20):
        path, kubelet = directory / "kubelet.sock", Kubelet()
        async with serving(path, kubelet) as server, PodResourcesClient(path, directory, clock) as client:
            yield Node(kubelet, server, client, clock)


async def test_questions_of_both_kinds_use_one_connection() -> None:
    """An answer to GetAllocatableResources that has not changed is not decoded again."""
    async with node() as it:
        devices = [await it.client.devices()]
        pods = [(await it.client.listing()).pods]
        devices.append(await it.client.devices())
        devices.append(await it.client.devices([ResourceName("first")]))
        pods.append((await it.client.listing()).pods)

        assert [1, 2] == pods
        assert [["first"], ["first"], []] == [list(found) for found in devices]
        assert devices[0] is devices[1]
        assert 1 == it.server.accepted


async def test_another_socket_at_the_path_is_connected_to_though_the_old_answers() -> None:
    """A kubelet that restarts makes its socket anew; the process before may still be ending, with its connections open."""
    async with node() as it:
        before = await it.client.devices()
        it.server.path.unlink()
        async with serving(it.server.path, Kubelet("second")) as second:
            after = [await it.client.devices(), await it.client.devices()]

            assert [["first"], ["second"], ["second"]] == [list(found) for found in (before, *after)]
            assert (1, 1) == (it.server.accepted, second.accepted)
            await it.disconnected()


@pytest.mark.parametrize("noticed", [False, True])
async def test_a_connection_that_the_kubelet_has_closed_costs_no_question(noticed: bool) -> None:
    """Whether or not this process has seen the end of the connection when it asks again."""
    async with node() as it:
        await it.client.listing()
        for connection in tuple(it.server.connections):
            connection.close("test")
        for _ in range(10 * noticed):  # rounds of the event loop: it ends in the first, and is seen in the next
            await anyio.lowlevel.checkpoint()
        pods = [(await it.client.listing()).pods for _ in range(2)]

        assert [2, 3] == pods
        assert 2 == it.server.accepted


async def test_a_connection_that_is_lost_during_a_question_costs_no_question() -> None:
    async with node() as it:
        it.kubelet.hangs_up = {2}
        await it.client.listing()
        pods = (await it.client.listing()).pods

        assert 3 == pods, "the second question was asked twice"
        assert 2 == it.server.accepted


async def test_two_questions_over_one_lost_connection_share_the_new_one() -> None:
    async with node() as it:
        await it.client.listing()
        it.kubelet.listing = anyio.Event()
        found: list[int] = []

        async def ask() -> None:
            found.append((await it.client.listing()).pods)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            tasks.start_soon(ask)
            while len(it.kubelet.asked) < 3:
                await anyio.lowlevel.checkpoint()
            it.kubelet.listing.set()
            for connection in tuple(it.server.connections):
                connection.close("test")

        assert [4, 5] == sorted(found), "both were asked twice"
        assert 2 == it.server.accepted


async def test_a_kubelet_that_always_hangs_up_is_asked_twice_and_no_more() -> None:
    async with node() as it:
        await it.client.listing()
        it.kubelet.hangs_up = {2, 3}
        with pytest.raises(KubeletAway, match="Connection lost"):
            await it.client.listing()
        asked = len(it.kubelet.asked)

        assert 3 == asked
        assert 4 == (await it.client.listing()).pods


async def test_a_first_question_whose_connection_is_lost_is_not_asked_again() -> None:
    """A connection that was made for the question was not closed before it."""
    async with node() as it:
        it.kubelet.hangs_up = {1}
        with pytest.raises(KubeletAway, match="Connection lost"):
            await it.client.listing()

        assert 1 == len(it.kubelet.asked)


async def test_a_question_that_is_turned_away_is_asked_again_soon() -> None:
    """The kubelet counts the calls of all its clients, so others may be the cause; the connection is as good as before."""
    async with node() as it:
        it.kubelet.turned_away = 3
        found: list[int] = []

        async def ask() -> None:
            found.append((await it.client.listing()).pods)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            for turned_away in (1, 2, 3):
                while len(it.kubelet.asked) < turned_away:
                    await anyio.lowlevel.checkpoint()
                await it.clock.advance(AGAIN)

        assert [4] == found
        assert 1 == it.server.accepted


async def test_who_is_turned_away_until_the_deadline_says_so() -> None:
    async with node() as it:
        it.kubelet.turned_away = 1_000
        refusals: list[str] = []

        async def ask() -> None:
            with pytest.raises(KubeletAway) as away:
                await it.client.listing()
            refusals.append(str(away.value))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            while not refusals:
                await it.clock.advance(AGAIN)
        asked, it.kubelet.turned_away = len(it.kubelet.asked), 0

        assert "RESOURCE_EXHAUSTED too many calls" in refusals[0]
        assert 1 < asked <= 21
        assert asked + 1 == (await it.client.listing()).pods


async def test_after_a_mute_kubelet_the_next_question_has_a_new_connection() -> None:
    """The mute one costs its deadline; who shares its connection meanwhile keeps it to the end."""
    async with node() as it:
        await it.client.devices()
        it.kubelet.listing, it.kubelet.telling = anyio.Event(), anyio.Event()
        found: list[list[ResourceName]] = []

        async def ask_mute() -> None:
            with pytest.raises(KubeletAway, match="no answer within 1 s"):
                await it.client.listing()
            it.kubelet.telling.set()

        async def ask_late() -> None:
            found.append(list(await it.client.devices()))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask_mute)
            await it.clock.advance(0.5)
            tasks.start_soon(ask_late)
            await it.clock.advance(0.5)
        accepted = it.server.accepted
        await it.disconnected()
        it.kubelet.listing.set()
        pods = (await it.client.listing()).pods

        assert ([["first"]], 1) == (found, accepted)
        assert (2, 2) == (pods, it.server.accepted)


async def test_a_failure_over_an_older_connection_leaves_the_new_one() -> None:
    async with node() as it:
        it.kubelet.listing, it.kubelet.telling = anyio.Event(), anyio.Event()

        async def ask_for_pods() -> None:
            with pytest.raises(KubeletAway, match="no answer within 1 s"):
                await it.client.listing()

        async def ask_for_devices() -> None:
            with pytest.raises(KubeletAway, match="no answer within 1 s"):
                await it.client.devices()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask_for_pods)
            await it.clock.advance(0.5)
            tasks.start_soon(ask_for_devices)
            await it.clock.advance(0.5)
            it.kubelet.listing.set()
            await it.client.listing()
            await it.clock.advance(0.5)
        await it.client.listing()

        assert 2 == it.server.accepted


async def test_a_connection_ends_after_so_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would remember each of them."""
    monkeypatch.setattr(kubelet_client, "MOST_CALLS", 2)
    async with node() as it:
        pods = [(await it.client.listing()).pods for _ in range(5)]
        while len(it.server.connections) > 1:
            await anyio.lowlevel.checkpoint()

        assert [1, 2, 3, 4, 5] == pods
        assert 3 == it.server.accepted


async def test_the_end_of_the_client_ends_its_connection() -> None:
    async with node() as it:
        async with PodResourcesClient(it.server.path, it.server.path.parent, it.clock) as client:
            await client.listing()
            open_before = len(it.server.connections)
        await it.disconnected()

        assert 1 == open_before


async def test_a_connection_closed_before_the_request_fails_like_a_lost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = Channel.__connect__

    async def connect_and_lose(channel: Channel) -> H2Protocol:
        protocol = await connect(channel)
        protocol.connection_lost(None)
        return protocol

    monkeypatch.setattr(Channel, "__connect__", connect_and_lose)
    async with node() as it:
        with pytest.raises(KubeletAway, match="Connection lost"):
            await it.client.listing()

        assert [] == it.kubelet.asked
