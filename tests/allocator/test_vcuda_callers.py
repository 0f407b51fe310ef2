"""Who may register on vcuda.sock, and what others can do there: nothing."""

import json
import os
import shutil
import socket
import struct
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path

import anyio
import grpc
import pytest
from anyio.abc import ByteReceiveStream, Process
from anyio.lowlevel import checkpoint
from faults_support import THOROUGH
from structlog.testing import capture_logs
from unit_support import CORES, MEMORY
from vcuda_support import PARTS, Host, VcudaNode, read_config, register, registered

from topoalign.allocator.containers.vcuda import limiter
from topoalign.allocator.containers.vcuda.limiter import CGROUPS, VcudaLimiter
from topoalign.core.model.decisions import Admission
from topoalign.kubelet.control_groups import sees_all_processes
from topoalign.testing.manual_clock import all_tasks_blocked


def read_pids(file: Path) -> Sequence[int]:
    return [pid for (pid,) in struct.iter_unpack("=i", file.read_bytes())]


pytestmark = pytest.mark.anyio
FLOOD = Path(__file__).with_name("vcuda_flood.py")
CALLS = 10_000 if THOROUGH else 50
ID, OTHER_ID = "9f86d081884c7d659a2feaa0c55ad015", "60303ae22b998861bce3b28f33eec1be"
ME = os.getpid()


def files(directory: Path) -> list[str]:
    return sorted(str(each.relative_to(directory)) for each in directory.rglob("*"))


async def test_a_process_registers_by_what_the_kernel_tells_of_it(tmp_path: Path) -> None:
    """Whatever it says of itself: here the names of another pod. Groups that the container has made below count as well."""
    async with VcudaNode.running() as (it, _):
        await it.admit("p", (20, 4))
        for number, (version, driver) in enumerate(PARTS):
            it.host, container = Host(tmp_path / str(number), version, driver), f"{number}{ID[1:]}"
            it.limiter._proc = it.host.proc
            it.limiter._cgroups = it.host.cgroups
            group = it.host.run(ME, "uid-p", "c0", container, 70_000)
            (group / "init.scope").mkdir()
            (group / "init.scope" / "cgroup.procs").write_text("12\n0\n")

            for directory in it.mounts("p").values():
                assert "OK" == await register(directory, "0000:FF:00.0", "uid-q", "c1", OTHER_ID)
                assert read_config(directory / "vcuda.config") == read_config(directory / container / "vcuda.config")
                assert sorted((12, ME, 70_000)) == read_pids(directory / container / "pids.config")
                assert sorted((12, ME, 70_000)) == read_pids(directory / "pids.config")
                assert not (directory / OTHER_ID).exists()


async def test_everybody_else_is_refused_counted_and_changes_nothing() -> None:
    """Another pod, another container of the pod, none at all, one that ends while it is looked at, one that is not seen."""
    async with VcudaNode.running() as (it, _):
        await it.admit("p", (20, 4))
        await it.admit("q", (20, 4))
        (directory, *_) = it.mounts("p").values()
        before = files(it.root)

        async def refused(finding: str) -> None:
            answer = await register(directory, "", "uid-p", "c0", ID)
            assert answer.startswith("PERMISSION_DENIED: ") and finding in answer, answer

        with capture_logs() as logs:
            await refused("not known")
            it.host.run(ME, "uid-q", "c0", ID)
            await refused("not of container c0 of pod uid-q")
            await refused("not of container c0 of pod uid-q")
            it.host.run(ME, "uid-p", "c1", ID)
            await refused("not of container c1 of pod uid-p")
            (it.host.proc / str(ME) / "mountinfo").unlink()
            await refused("not known")
            (it.host.proc / str(ME) / "mountinfo").write_text("")
            await refused("not known")
            (it.host.proc / str(ME) / "cgroup").write_text("0::/system.slice/ssh.service\n")
            await refused("not known")

        assert before == files(it.root)
        assert 7 == it.limiter.refused
        assert 3 == len([each for each in logs if each["event"] == "registration refused"])


async def test_a_container_without_processes_that_are_found_is_told_why() -> None:
    async with VcudaNode.running() as (it, _):
        await it.admit("p", (20, 4))
        group = it.host.run(ME, "uid-p", "c0", ID)
        (directory, *_) = it.mounts("p").values()
        (group / "cgroup.procs").unlink()

        assert "mounted" in await register(directory)
        (group / "cgroup.procs").write_text("17\n")
        assert "OK" == await register(directory)
        assert [17] == read_pids(directory / "pids.config")


async def test_a_control_group_that_is_made_later_is_found_after_the_next_sweep() -> None:
    async with VcudaNode.running() as (it, _):
        await it.admit("p", (20, 4))
        shutil.rmtree(it.host.run(ME, "uid-p", "c0", ID))
        (directory, *_) = it.mounts("p").values()

        assert "mounted" in await register(directory)
        it.host.run(ME, "uid-p", "c0", ID)
        await it.sweep()
        assert "OK" == await register(directory)


async def test_a_kubelet_that_lost_its_checkpoint_takes_no_directory_away() -> None:
    """The container runs on; whose directory it is stands in the directory."""
    async with VcudaNode.running() as (it, _):
        await it.admit("p", (20, 4))
        it.host.run(ME, "uid-p", "c0", ID)
        await it.restart_kubelet(knowing=False)
        await it.allocations.reconcile()
        await it.sweep()

        for directory in it.mounts("p").values():
            assert "OK" == await register(directory)
            assert "uid-p" == read_config(directory / ID / "vcuda.config").pod_uid


@asynccontextmanager
async def calling(directory: Path, times: int, *before: str) -> AsyncIterator[tuple[Process, ByteReceiveStream]]:
    """A process that calls so often once it is told to, and what it prints. `before`: a program that becomes it."""
    command = [*before, sys.executable, str(FLOOD), str(directory), str(times)]
    async with await anyio.open_process(command, stderr=None) as process:
        assert process.stdin is not None and process.stdout is not None
        yield process, process.stdout


async def begin(process: Process) -> None:
    assert process.stdin is not None
    await process.stdin.send(b"\n")


async def test_many_calls_of_another_pod_leave_nothing_and_slow_nobody() -> None:
    """10,000 in a thorough run. Any user of a container may call: here nobody."""
    async with VcudaNode.running() as (it, _):
        await it.admit("p", (20, 4))
        await it.admit("q", (20, 4))
        it.host.run(ME, "uid-p", "c0", ID)
        (directory, *_) = it.mounts("p").values()
        assert "OK" == await register(directory)
        before = files(it.root)

        async with calling(directory, CALLS) as (flood, printed):
            it.host.run(flood.pid, "uid-q", "c0", OTHER_ID)
            await begin(flood)
            async with grpc.aio.insecure_channel(f"unix://{directory / 'vcuda.sock'}") as channel:
                for _ in range(CALLS // 10):
                    assert "OK" == await registered(channel)
            assert {"PERMISSION_DENIED": CALLS} == json.loads(await printed.receive())
        assert CALLS == it.limiter.refused
        assert before == files(it.root)
        assert isinstance(await it.admit("r", (20, 4)), Admission)


async def test_calls_that_come_at_once_are_answered_one_in_a_round_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a container of 30,000 processes, or as many mounts, each takes 20 ms: the kubelet is answered in between."""
    rounds: list[int] = [0]
    answered: list[int] = []
    monkeypatch.setattr(VcudaLimiter, "register", lambda *_: answered.append(rounds[0]))

    async def count() -> None:
        while True:
            rounds[0] += 1
            await checkpoint()

    async with VcudaNode.running() as (it, tasks):
        await it.admit("p", (20, 4))
        (directory, *_) = it.mounts("p").values()
        tasks.start_soon(count)
        async with (
            grpc.aio.insecure_channel(f"unix://{directory / 'vcuda.sock'}") as channel,
            anyio.create_task_group() as calls,
        ):
            for _ in range(20):
                calls.start_soon(registered, channel)

        assert 20 == len(answered) == len({*answered})


async def test_a_real_control_group_and_real_mounts_tell_who_calls(tmp_path: Path) -> None:
    """Nothing is made up here: a process in a group and in a mount namespace as the kubelet and a runtime make them."""
    root = next((at for at in (CGROUPS / "memory", CGROUPS) if (at / "cgroup.procs").is_file()), None)
    source, target = tmp_path / "pods" / "uid-p" / "containers" / "c0" / "2b6a9c1e", tmp_path / "termination-log"
    source.parent.mkdir(parents=True)
    for file in (source, target):
        file.touch()
    if root is None or not sees_all_processes(Path("/proc")) or not os.access(root, os.W_OK):
        pytest.skip("no control group can be made here")
    parent = root / f"kubepods-{tmp_path.parent.name}"
    group = parent / "kubepods" / "poduid-p" / ID
    try:
        group.mkdir(parents=True)
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error.strerror}")
    mounts = f'mount --bind {source} {target} && echo $$ > {group}/cgroup.procs && exec "$@"'
    try:
        async with VcudaNode.running() as (it, _):
            it.limiter._proc = Path("/proc")
            it.limiter._cgroups = CGROUPS
            await it.admit("p", (20, 4))
            (directory, *_) = it.mounts("p").values()
            async with calling(directory, 1, "unshare", "--mount", "sh", "-c", mounts, "sh") as (process, printed):
                await begin(process)
                assert {"OK": 1} == json.loads(await printed.receive())

                assert [process.pid] == read_pids(directory / ID / "pids.config")
    finally:
        for each in (group, group.parent, group.parent.parent, parent):
            each.rmdir()


async def test_half_calls_cost_a_bounded_number_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have been silent longest make room, of the socket that has most; others are served."""
    monkeypatch.setattr(limiter, "MOST_CONNECTIONS", 8)
    async with VcudaNode.running() as (it, _):
        await it.admit("p", (20, 4))
        it.host.run(ME, "uid-p", "c0", ID)
        mounts = it.mounts("p")
        path = mounts["c0", CORES] / "vcuda.sock"
        held = []
        for _ in range(40):
            half = socket.socket(socket.AF_UNIX)
            await anyio.to_thread.run_sync(half.connect, str(path))
            half.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0\0\0\xff\1\4\0\0\0\1")
            held.append(half)
            await all_tasks_blocked()

        assert "OK" == await register(mounts["c0", MEMORY])
        assert "OK" == await register(mounts["c0", CORES])
        assert 8 >= sum(len(server.connections) for server in it.limiter._servers.values())
        for half in held:
            with closing(half):
                pass
