"""Containers with units that are limited by vcuda: what they find in /etc/vcuda, and when it is there."""

import os
import shutil
from pathlib import Path
from typing import NamedTuple

import anyio
import msgspec
import pytest
from kubelet_support import NODE
from share_support import DEFAULT, share_node
from unit_support import CORES, MEMORY
from vcuda_support import Host, Read, VcudaNode, read_config, register, vcuda_node

from topoalign.allocator.device_plugin.containers import Containers
from topoalign.allocator.device_plugin.host import ContainerUnready
from topoalign.allocator.vcuda.directories import name_of
from topoalign.allocator.vcuda.on_demand import LimiterOnDemand
from topoalign.core.model.decisions import Admission
from topoalign.core.model.errors import Unavailable
from topoalign.core.model.ids import PodName
from topoalign.core.state.fold import NodeState
from topoalign.plugin_config.configuration import Sharing, Units
from topoalign.runtime.clock import ManualClock
from topoalign.runtime.tasks import background

pytestmark = pytest.mark.anyio
READER = Path(__file__).with_name("vcuda_reader.c")
BUS = "0000:00:0A.0"
ID = "9f86d081884c7d659a2feaa0c55ad015"


def directories(it: VcudaNode) -> set[str]:
    return {each.name for each in it.root.iterdir()} if it.root.exists() else set()


async def test_both_halves_have_the_limits_before_the_container_starts() -> None:
    async with vcuda_node() as (it, _):
        assert isinstance(await it.admit("p", (20, 4)), Admission)
        mounts = it.mounts("p")

        assert {CORES, MEMORY} == {resource for _, resource in mounts}
        assert {directory.name for directory in mounts.values()} == directories(it)
        limits = Read("uid-p", "c0", BUS, 4 << 28, 20, 1, 1)
        assert [limits, limits] == [read_config(each / "vcuda.config") for each in mounts.values()]
        assert [0o666, 0o666] == [(each / "vcuda.sock").stat().st_mode & 0o777 for each in mounts.values()]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((0, 4), Read("uid-p", "c0", BUS, 4 << 28, 100, 1, 1)),
        ((100, 0), Read("uid-p", "c0", BUS, 16 << 28, 100, 1, 0)),
        ((200, 0), Read("uid-p", "c0", BUS, 32 << 28, 200, 1, 0)),
    ],
    ids=["memory alone", "a whole GPU", "two whole GPUs"],
)
async def test_limits_of_memory_alone_and_of_whole_gpus(asked: tuple[int, int], expected: Read) -> None:
    """Who has no claim on computing time is held back by memory alone, and who has a whole GPU by nothing."""
    async with vcuda_node() as (it, _):
        assert isinstance(await it.admit("p", asked), Admission)

        assert [expected] == [read_config(each / "vcuda.config") for each in it.mounts("p").values()]


async def test_a_program_in_c_reads_limits_and_processes_as_the_library(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) to build the reader with")
    reader = tmp_path / "reader"
    await anyio.run_process([compiler, "-O1", "-Wall", "-Werror", "-o", str(reader), str(READER)])
    async with vcuda_node() as (it, _):
        await it.admit("p", (20, 4))
        it.host.run(os.getpid(), "uid-p", "c0", ID, 70_000, 12)
        directory = it.mounts("p")["c0", MEMORY]
        assert "OK" == await register(directory)
        wanted = ["12", "70000", str(os.getpid()), "13"]
        for place in (directory, directory / ID):
            files = [place / "vcuda.config", place / "pids.config"]
            read = await anyio.run_process([str(reader), *map(str, files), *wanted])

            assert [f"uid-p|c0|{BUS}|1073741824|20|1|0|1", "1110"] == read.stdout.decode().split()


async def test_an_init_container_and_the_app_with_its_units_have_their_own() -> None:
    """Both have the same computing time; which of them starts is told by the memory, in either order of the calls."""
    async with vcuda_node() as (it, _):
        assert isinstance(await it.admit("p", (20, 4), init=((20, 8),)), Admission)
        parts = {
            (str(name), resource): [*units]
            for name, resource, units in it.kubelet.running[DEFAULT, PodName("p")].parts()
        }
        assert {*parts["c0", CORES]} == {*parts["c1", CORES]}

        for container, memory in (("c0", 8), ("c1", 4), ("c0", 8)):
            for order in ((CORES, MEMORY), (MEMORY, CORES)):
                for resource in order:
                    await it.allocations.start_container(resource, parts[container, resource])
                limits = Read("uid-p", container, BUS, memory << 28, 20, 1, 1)
                at = [it.root / name_of(resource, parts[container, resource]) for resource in order]
                assert [limits, limits] == [read_config(each / "vcuda.config") for each in at]


async def test_the_same_units_for_another_pod_have_a_directory_made_anew() -> None:
    """What a former container has mounted does not change, and is served no more."""
    async with vcuda_node() as (it, _):
        await it.admit("old", (20, 4))
        (directory, *_) = it.mounts("old").values()
        it.host.run(os.getpid(), "uid-old", "c0", ID)
        assert "OK" == await register(directory)
        old = os.open(directory, os.O_RDONLY)
        await it.drop("old")
        await it.admit("new", (20, 8))
        (again, *_) = (each for each in it.mounts("new").values() if each == directory)

        assert "uid-new" == read_config(again / "vcuda.config").pod_uid
        assert {"vcuda.config", "vcuda.sock"} == {*os.listdir(again)}
        assert [] == os.listdir(old)
        os.close(old)


async def test_a_container_that_starts_again_finds_nothing_of_the_former() -> None:
    async with vcuda_node() as (it, _):
        await it.admit("p", (20, 4))
        it.host.run(os.getpid(), "uid-p", "c0", ID)
        (directory, *_) = it.mounts("p").values()
        assert "OK" == await register(directory)
        inode = directory.stat().st_ino
        await it.start("p")

        assert inode == directory.stat().st_ino
        assert {"vcuda.config", "vcuda.sock"} == {*os.listdir(directory)}
        assert "OK" == await register(directory)


async def test_a_directory_that_is_gone_is_there_when_the_container_starts() -> None:
    async with vcuda_node() as (it, _):
        await it.admit("p", (20, 4))
        shutil.rmtree(it.root)
        await it.sweep()
        await it.start("p")

        assert 2 == len([read_config(each / "vcuda.config") for each in it.mounts("p").values()])


async def test_an_agent_that_starts_serves_the_directories_of_its_record() -> None:
    """Also while the kubelet does not answer."""
    async with vcuda_node() as (it, _):
        await it.admit("p", (20, 4))
        it.host.run(os.getpid(), "uid-p", "c0", ID)
        await it.end_agent()
        it.new_limiter()
        for directory in it.mounts("p").values():
            assert not (directory / "vcuda.sock").exists()
        await it.limiter.sweep(it.ledger.state, None)

        for directory in it.mounts("p").values():
            assert "OK" == await register(directory)
        await it.limiter.close()
        _, resource, units = next(iter(it.kubelet.running[DEFAULT, PodName("p")].parts()))
        poll = it.allocations.polled
        assert poll is not None
        with pytest.raises(Unavailable, match="stopping"):
            await it.limiter.starting(resource, [*units], poll)


async def test_directories_go_with_their_allocations_and_nothing_else_does(tmp_path: Path) -> None:
    async with vcuda_node() as (it, _):
        await it.admit("p", (20, 4))
        await it.admit("q", (20, 4))
        kept = {directory.name for directory in it.mounts("q").values()}
        (tmp_path / "file").touch()
        link = it.root / f"units-{'0' * 32}"
        link.symlink_to(tmp_path)
        (it.root / "notes").mkdir()
        await it.sweep()
        before = directories(it)
        await it.remove("p")
        await it.sweep()

        assert {*kept, link.name, "notes"} == directories(it) < before
        assert ["file"] == os.listdir(tmp_path)


async def test_a_directory_of_nobody_goes_and_one_that_was_being_removed() -> None:
    async with vcuda_node() as (it, _):
        await it.admit("p", (20, 4))
        unknown, half = it.root / f"units-{'0' * 32}", it.root / f".gone-units-{'1' * 32}"
        for directory in (unknown, half):
            (directory / ID).mkdir(parents=True)
        await it.sweep()

        assert {directory.name for directory in it.mounts("p").values()} == directories(it)


async def test_nothing_is_removed_without_an_answer_of_the_kubelet() -> None:
    """Not even what an agent that has just started does not have in its record."""
    async with vcuda_node() as (it, _):
        await it.admit("p", (20, 4))
        before = directories(it)
        await it.end_agent()
        it.new_limiter()
        for name in it.ledger.state.allocations:
            it.ledger.release([name], "gone")
        await it.limiter.sweep(it.ledger.state, None)

        assert before == directories(it)
        await it.limiter.close()


class Nothing(NamedTuple):
    """An allocator without a record, and a kubelet that does not answer."""

    state: NodeState = NodeState(node=NODE)
    polled: None = None


async def test_the_limiter_runs_from_when_its_directory_is_configured(tmp_path: Path) -> None:
    root, clock, left = [""], ManualClock(), tmp_path / f".gone-units-{'1' * 32}"
    left.mkdir()
    limiter = LimiterOnDemand(lambda: root[0], lambda: NodeState(node=NODE).hardware)
    async with background() as tasks:
        tasks.start_soon(limiter.run, Nothing(), clock)
        await clock.advance(10)
        assert left.exists() and 0 == limiter.figure().read()
        root[0] = str(tmp_path)
        await clock.advance(10)

        assert not left.exists()
        assert 0 == limiter.figure().read()


async def test_allocate_is_refused_where_nobody_could_register(tmp_path: Path) -> None:
    """The agent does not see the node's processes, has no control groups, or no place for its files."""
    async with vcuda_node() as (it, _):
        for broken, finding in ((0, "node's processes"), (1, "control groups"), (2, "its directory")):
            host, configuration = Host(tmp_path / str(broken)), it.configuration
            if broken == 0:
                (host.proc / "self" / "ns" / "pid").unlink()
            elif broken == 1:
                (host.cgroups / "cgroup.procs").unlink()
            else:
                (tmp_path / "file").touch()
                flags = msgspec.structs.replace(configuration.flags, vcuda_root=str(tmp_path / "file" / "vcuda"))
                configuration = msgspec.structs.replace(configuration, flags=flags)
            containers = Containers(lambda now=configuration: now, proc=host.proc, cgroups=host.cgroups)  # type: ignore[misc]  # bound now

            with pytest.raises(ContainerUnready, match=finding):
                containers.now(it.machine, CORES)
            assert finding in str(containers.poll(it.machine))


async def test_libraries_are_mounted_where_they_are_configured() -> None:
    async with vcuda_node() as (it, _):
        flags = msgspec.structs.replace(it.configuration.flags, vcuda_libraries="/opt/vcuda")
        it.configuration = msgspec.structs.replace(it.configuration, flags=flags)
        await it.admit("p", (20, 4))
        answers = it.kubelet.running[DEFAULT, PodName("p")].responses.values()

        for answer in answers:
            assert "/usr/local/nvidia/lib64" == answer.envs["LD_LIBRARY_PATH"]
            assert [("/etc/vcuda", True), ("/usr/local/nvidia", True)] == [
                (mount.container_path, mount.read_only) for mount in answer.mounts
            ]
        assert 1 == len({msgspec.json.encode(dict(answer.envs)) for answer in answers})


async def test_without_the_limiter_nothing_is_mounted_and_nothing_written() -> None:
    async with share_node() as (it, _):
        await it.admit("p", (20, 4))

        assert [[], []] == [answer.mounts for answer in it.kubelet.running[DEFAULT, PodName("p")].responses.values()]


async def test_a_container_keeps_its_directory_when_the_limiter_is_switched_off() -> None:
    """It has the mount still, and starts again."""
    async with vcuda_node() as (it, tasks):
        await it.admit("p", (20, 4))
        it.configuration = msgspec.structs.replace(it.configuration, sharing=Sharing(units=Units()))
        offers = tuple(msgspec.structs.replace(each, limiter="none") for each in it.machine.offered)
        await it.start_agent(tasks, msgspec.structs.replace(it.machine, offers=offers))
        await it.start("p")
        await it.sweep()

        assert {directory.name for directory in it.mounts("p").values()} == directories(it)


async def test_units_of_which_the_checkpoint_names_two_pods_start_nobody() -> None:
    async with vcuda_node() as (it, _):
        await it.admit("p", (20, 4))
        poll = it.allocations.polled
        assert poll is not None
        _, resource, units = next(iter(it.kubelet.running[DEFAULT, PodName("p")].parts()))
        twice = (*poll.listing.parts, *(each._replace(pod_uid="uid-q") for each in poll.listing.parts))
        listing = msgspec.structs.replace(poll.listing, parts=twice, directories=None)

        with pytest.raises(Unavailable, match="2 pods"):
            await it.limiter.starting(resource, [*units], poll._replace(listing=listing))
