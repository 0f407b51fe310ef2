"""Directories of containers that are limited by vcuda, through agents that end, full disks, and pods that go."""

import asyncio
import fcntl
import os
import shutil
import socket
from contextlib import AsyncExitStack, closing
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import grpc
import msgspec
import pytest
from anyio import fail_after
from anyio.lowlevel import checkpoint
from disk_support import fill, small_disk
from grpclib.exceptions import GRPCError
from kubelet_support import NODE
from share_support import DEFAULT
from unit_support import limited
from vcuda_support import METHOD, VcudaNode, read_config, register

from topoalign.allocator.allocate.service import DeviceAllocations
from topoalign.allocator.containers.vcuda import limiter
from topoalign.allocator.containers.vcuda.limiter import VcudaLimiter
from topoalign.core.model.errors import StateFault, Unavailable
from topoalign.core.model.ids import PodName
from topoalign.core.state.fold import NodeState
from topoalign.plugin_config.configuration import Flags, SharingSection, Units
from topoalign.runtime.tasks import background
from topoalign.testing.manual_clock import ManualClock, all_tasks_blocked

pytestmark = pytest.mark.anyio
ID = "9f86d081884c7d659a2feaa0c55ad015"


async def answers(it: VcudaNode) -> set[str]:
    """What a process of pod p is answered in either directory."""
    it.host.run(os.getpid(), "uid-p", "c0", ID)
    return {await register(directory) for directory in it.mounts("p").values()}


async def test_a_directory_that_is_gone_is_there_when_the_container_starts() -> None:
    async with VcudaNode.running() as (it, _):
        await it.admit("p", (20, 4))
        shutil.rmtree(it.root)
        await it.sweep()
        await it.start("p")

        assert 2 == len([read_config(each / "vcuda.config") for each in it.mounts("p").values()])


async def test_an_agent_that_starts_serves_the_directories_of_its_record() -> None:
    """Also while the kubelet does not answer, and where a killed one has left its sockets. One that stops starts nobody."""
    async with VcudaNode.running() as (it, _):
        await it.admit("p", (20, 4))
        for has_left in (False, True):
            await it.end_agent()
            it.new_limiter()
            for directory in it.mounts("p").values():
                assert not (directory / "vcuda.sock").exists()
                if has_left:
                    with closing(socket.socket(socket.AF_UNIX)) as dead:
                        dead.bind(str(directory / "vcuda.sock"))
            await it.limiter.clean_up(it.ledger.state, None)

            assert {"OK"} == await answers(it)
            await it.limiter.close()
        _, resource, units = next(iter(it.kubelet.running[DEFAULT, PodName("p")].parts()))
        poll = it.allocations.polled
        assert poll is not None
        with pytest.raises(Unavailable, match="stopping"):
            await it.limiter.starting(resource, [*units], poll)


async def test_a_successor_serves_when_its_predecessor_has_let_go() -> None:
    """Of a take-over: while the former agent has the sockets, the next one does not take them away."""
    async with VcudaNode.running() as (it, _):
        await it.admit("p", (20, 4))
        predecessor = it.limiter
        it.new_limiter()
        with pytest.raises(StateFault, match="already serves"):
            await it.sweep()
        assert {"OK"} == await answers(it)
        await predecessor.close()
        await it.sweep()

        assert {"OK"} == await answers(it)
        await it.limiter.close()


async def test_a_lock_that_a_container_holds_on_its_directory_is_not_waited_for() -> None:
    """It can lock what it may read; and the next agent serves it all the same."""
    async with VcudaNode.running() as (it, _):
        await it.admit("p", (20, 4))
        locked = [os.open(directory, os.O_RDONLY) for directory in it.mounts("p").values()]
        for directory in locked:
            fcntl.flock(directory, fcntl.LOCK_EX)
        await it.end_agent()
        it.new_limiter()
        await it.limiter.clean_up(it.ledger.state, None)

        assert {"OK"} == await answers(it)
        for directory in locked:
            os.close(directory)
        await it.limiter.close()


async def test_a_kubelet_that_hangs_up_at_any_step_leaves_no_socket_of_nobody() -> None:
    """grpclib cancels the call then; the next start finds a place for its sockets."""
    async with VcudaNode.running() as (it, _):
        await it.admit("p", (20, 4))
        _, resource, units = next(iter(it.kubelet.running[DEFAULT, PodName("p")].parts()))
        poll = it.allocations.polled
        assert poll is not None
        for steps in range(10):
            shutil.rmtree(it.root)
            call = asyncio.create_task(it.limiter.starting(resource, [*units], poll))
            for _ in range(steps):
                await checkpoint()  # one turn of the loop: the call is cancelled at each of its steps
            call.cancel()
            await asyncio.wait([call])
            await it.limiter.starting(resource, [*units], poll)

            assert {"OK"} == await answers(it)


async def test_a_full_disk_fails_the_start_and_the_next_one_succeeds() -> None:
    async with VcudaNode.running() as (it, _):
        with small_disk(it.root) as disk:
            await it.admit("p", (20, 4))
            mounts = [*it.mounts("p").values()]
            for directory in mounts:
                shutil.rmtree(directory)
            filler = fill(disk)

            with pytest.raises(GRPCError, match=r"container c0 .* No space left on device"):
                await it.start("p")
            assert [] == [*disk.rglob("*config*")]
            filler.unlink()
            await it.start("p")
            assert [8240, 8240] == [(each / "vcuda.config").stat().st_size for each in mounts]
            await it.limiter.close()


async def test_directories_go_with_their_allocations_and_nothing_else_does(tmp_path: Path) -> None:
    async with VcudaNode.running() as (it, _):
        await it.admit("p", (20, 4))
        await it.admit("q", (20, 4))
        kept = {directory.name for directory in it.mounts("q").values()}
        (tmp_path / "file").touch()
        link = it.root / f"units-{'0' * 32}"
        link.symlink_to(tmp_path)
        (it.root / "notes").mkdir()
        await it.sweep()
        before = it.directories()
        await it.remove("p")
        await it.sweep()

        assert {*kept, link.name, "notes"} == it.directories() < before
        assert ["file"] == os.listdir(tmp_path)


async def test_a_directory_of_nobody_goes_and_one_that_was_being_removed() -> None:
    async with VcudaNode.running() as (it, _):
        await it.admit("p", (20, 4))
        unknown, half = it.root / f"units-{'0' * 32}", it.root / f".gone-{'1' * 16}"
        for directory in (unknown, half):
            (directory / ID).mkdir(parents=True)
        await it.sweep()

        assert {directory.name for directory in it.mounts("p").values()} == it.directories()


async def test_nothing_is_removed_without_an_answer_of_the_kubelet() -> None:
    """Not even what an agent that has just started does not have in its record."""
    async with VcudaNode.running() as (it, _):
        await it.admit("p", (20, 4))
        before = it.directories()
        await it.end_agent()
        it.new_limiter()
        for name in it.ledger.state.allocations:
            it.ledger.release([name], "gone")
        await it.limiter.clean_up(it.ledger.state, None)

        assert before == it.directories()
        await it.limiter.close()


async def test_nothing_is_removed_while_the_checkpoint_cannot_be_read() -> None:
    """Nor while the pods' directories cannot: under load both are given up on. The record is a new one here."""
    async with VcudaNode.running() as (it, _):
        await it.admit("p", (20, 4))
        before, poll = it.directories(), it.allocations.polled
        assert poll is not None
        for name in [*it.ledger.state.allocations]:
            it.ledger.release([name], "gone")
        unread = msgspec.structs.replace(poll.listing, checkpoint=None, parts=(), directories=None)
        await it.limiter.clean_up(it.ledger.state, poll._replace(listing=unread))

        assert before == it.directories()
        assert {"OK"} == await answers(it)


@pytest.mark.parametrize("stops", [True, False], ids=["the agent stops", "the directory is another one"])
async def test_calls_that_do_not_end_keep_no_other_socket_from_being_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, stops: bool
) -> None:
    """A container may hold a call open; an agent that lets go of sockets lets go of all at once."""
    monkeypatch.setattr(limiter, "DRAIN_SECONDS", 0.05)
    async with VcudaNode.running() as (it, _), AsyncExitStack() as channels:
        await it.admit("p", (20, 4))
        sockets = [directory / "vcuda.sock" for directory in it.mounts("p").values()]
        held = []
        for path in sockets:
            channel = await channels.enter_async_context(grpc.aio.insecure_channel(f"unix://{path}"))
            held.append(channel.stream_unary(METHOD, request_serializer=bytes)())
        while not all(server.servicer.calls for server in it.limiter._servers.values()):
            await checkpoint()
        it.configuration = msgspec.structs.replace(it.configuration, flags=Flags(vcuda_root=str(tmp_path / "another")))
        async with background() as tasks:
            tasks.start_soon(it.limiter.close if stops else partial(it.limiter.clean_up, it.ledger.state, None))
            await all_tasks_blocked()

            assert [False, False] == [path.exists() for path in sockets]


class Nothing(NamedTuple):
    """An allocator without a record, and a kubelet that does not answer."""

    state: NodeState = NodeState(node=NODE)
    polled: None = None


async def test_the_limiter_runs_from_when_its_directory_is_configured(tmp_path: Path) -> None:
    root, clock, left = [""], ManualClock(), tmp_path / f".gone-{'1' * 16}"
    left.mkdir()
    registrar = VcudaLimiter(lambda: root[0], lambda: NodeState(node=NODE).hardware)
    async with background() as tasks:
        tasks.start_soon(registrar.run, cast(DeviceAllocations, Nothing()), clock)
        await clock.advance(10)
        assert left.exists() and 0 == registrar.figure().read()
        root[0] = str(tmp_path)
        await clock.advance(10)
        with fail_after(20):
            while left.exists():  # it is removed in a thread
                await checkpoint()

        assert 0 == registrar.figure().read()


async def test_a_container_keeps_its_directory_when_the_limiter_is_switched_off() -> None:
    """It has the mount still, and starts again."""
    async with VcudaNode.running() as (it, tasks):
        await it.admit("p", (20, 4))
        it.configuration = msgspec.structs.replace(it.configuration, sharing=SharingSection(units=Units()))
        await it.start_agent(tasks, limited(it.machine, limiter="none"))
        await it.start("p")
        await it.sweep()

        assert {directory.name for directory in it.mounts("p").values()} == it.directories()
