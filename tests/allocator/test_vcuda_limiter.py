"""Containers with units that are limited by vcuda: what they find in /etc/vcuda, and when it is there."""

import os
from pathlib import Path, PurePosixPath

import anyio
import msgspec
import pytest
from disk_support import without_capabilities
from nvml_support import compiled
from share_support import DEFAULT, ShareNode
from unit_support import CORES, MEMORY
from vcuda_support import TWO, Host, Read, VcudaNode, read_config, register, with_addresses

from topoalign.allocator.containers.containers import Containers
from topoalign.allocator.containers.host_files import ContainerUnready
from topoalign.allocator.containers.vcuda.limiter import Calls, held_units, limits_for
from topoalign.allocator.containers.vcuda.unit_directories import Limits, encode_config, units_directory_name
from topoalign.allocator.ports import ResourceEntry
from topoalign.core.model.decisions import Admission
from topoalign.core.model.errors import Unavailable
from topoalign.core.model.events import Allocation, Displaced, Owner
from topoalign.core.model.ids import AllocationID, ContainerName, DeviceID, Namespace, NodeName, PodName, ResourceName
from topoalign.core.state.fold import NodeState
from topoalign.core.state.share_amounts import Holder
from topoalign.kubelet.control_groups import directory_of

pytestmark = pytest.mark.anyio
READER = Path(__file__).with_name("vcuda_reader.c")
BUS = "0000:00:0A.0"
ID = "9f86d081884c7d659a2feaa0c55ad015"


def test_units_of_a_container_that_was_displaced_are_held_as_well() -> None:
    """It may run on, and its library reads its directory again and again."""
    owner = Owner(namespace=Namespace("ml"), pod=PodName("p"), container=ContainerName("c"))
    first, second = (DeviceID(f"GPU-0::c{number}") for number in range(2))
    former = Displaced(allocation=AllocationID("1"), owner=owner, devices={CORES: (first,)})
    allocation = Allocation(id=AllocationID("2"), devices={CORES: (first, second)}, displaced=(former,))
    state = NodeState(node=NodeName("n")).holding(allocation)

    assert {(CORES, frozenset({first})), (CORES, frozenset({first, second}))} == {*held_units(state)}


async def test_both_halves_have_the_limits_before_the_container_starts() -> None:
    async with VcudaNode.running() as (it, _):
        assert isinstance(await it.admit("p", (20, 4)), Admission)
        mounts = it.mounts("p")

        assert {CORES, MEMORY} == {resource for _, resource in mounts}
        assert {directory.name for directory in mounts.values()} == it.directories()
        limits = Read("uid-p", "c0", BUS, 4 << 28, 20, 1, 1)
        assert [limits, limits] == [read_config(each / "vcuda.config") for each in mounts.values()]
        assert [0o666, 0o666] == [(each / "vcuda.sock").stat().st_mode & 0o777 for each in mounts.values()]


@pytest.mark.parametrize(
    ("cores", "blocks", "expected"),
    [
        ([], 4, Limits("uid-p", "c0", 0, 4 << 28, BUS)),
        ([0], 4, Limits("uid-p", "c0", 100, 16 << 28, BUS)),
        ([1, 0], 0, Limits("uid-p", "c0", 200, 32 << 28, BUS)),
    ],
    ids=["memory alone", "a whole GPU", "two whole GPUs"],
)
def test_limits_of_memory_alone_and_of_whole_gpus(cores: list[int], blocks: int, expected: Limits) -> None:
    """Who has no claim on computing time is held back by memory alone, and who has a whole GPU by nothing."""
    parts = (
        ResourceEntry(
            CORES, frozenset(DeviceID(f"GPU-{gpu}::c{n}") for gpu in cores for n in range(100)), "uid-p", "c0"
        ),
        ResourceEntry(MEMORY, frozenset(DeviceID(f"GPU-0::m{n}") for n in range(blocks)), "uid-p", "c0"),
        ResourceEntry(CORES, frozenset([DeviceID("GPU-1::c0")]), "uid-p", "c1"),
    )
    hardware = with_addresses(TWO)

    assert expected == limits_for(Holder("uid-p", "c0"), [each for each in parts if each.devices], hardware)
    assert (100 if not cores else expected.cores) == int.from_bytes(encode_config(expected)[8216:8220], "little")


def test_limits_of_equal_parts_of_two_gpus_are_those_of_one() -> None:
    """60 units and 8 blocks over two: the library looks at the first GPU, of which it has 30 and 4."""
    units = {CORES: ("c", 30), MEMORY: ("m", 4)}
    parts = [
        ResourceEntry(
            name, frozenset(DeviceID(f"GPU-{gpu}::{kind}{n}") for gpu in (0, 1) for n in range(many)), "uid-p", "c0"
        )
        for name, (kind, many) in units.items()
    ]

    assert Limits("uid-p", "c0", 30, 4 << 28, BUS) == limits_for(Holder("uid-p", "c0"), parts, with_addresses(TWO))


async def test_a_program_in_c_reads_limits_and_processes_as_the_library(tmp_path: Path) -> None:
    reader = compiled(READER, tmp_path / "reader")
    async with VcudaNode.running() as (it, _):
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
    async with VcudaNode.running() as (it, _):
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
                at = [it.root / units_directory_name(resource, parts[container, resource]) for resource in order]
                assert [limits, limits] == [read_config(each / "vcuda.config") for each in at]


async def test_the_same_units_for_another_pod_have_a_directory_made_anew() -> None:
    """What a former container has mounted is empty then: the library ends what still runs there."""
    async with VcudaNode.running() as (it, _):
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


def test_an_init_container_with_one_half_is_told_from_the_app_with_both() -> None:
    """The kubelet calls for both halves of the app, in any order; what the last call says is what the container gets."""
    shared = frozenset([DeviceID("GPU-0::m0")])
    cores = frozenset([DeviceID("GPU-0::c0")])
    init, app = Holder("uid-p", "c0"), Holder("uid-p", "c1")
    parts = (
        ResourceEntry(MEMORY, shared, *init),
        ResourceEntry(CORES, cores, *app),
        ResourceEntry(MEMORY, shared, *app),
    )
    calls, written = Calls(), None
    for expected, order in ((init, [MEMORY]), (app, [CORES, MEMORY]), (init, [MEMORY]), (app, [MEMORY, CORES])):
        for resource in order:
            written = calls.starting(resource, cores if resource == CORES else shared, parts, written, 7.0)

        assert expected == written
    calls.starting(CORES, cores, parts, written, 10.0)
    assert init == calls.starting(MEMORY, shared, parts, app, 16.0)


async def test_sweeps_between_the_calls_for_two_halves_change_nothing() -> None:
    """Where one fails, as on a full disk, they come twice a second."""
    async with VcudaNode.running() as (it, _):
        assert isinstance(await it.admit("p", (20, 4), init=((0, 4),)), Admission)
        app = {
            resource: [*units]
            for name, resource, units in it.kubelet.running[DEFAULT, PodName("p")].parts()
            if str(name) == "c1"
        }
        await it.allocations.start_container(CORES, app[CORES])
        for _ in range(3):
            await it.sweep()
        await it.allocations.start_container(MEMORY, app[MEMORY])

        limits = Read("uid-p", "c1", BUS, 4 << 28, 20, 1, 1)
        assert [limits, limits] == [
            read_config(it.root / units_directory_name(*each) / "vcuda.config") for each in app.items()
        ]


async def test_a_container_that_starts_again_finds_nothing_of_the_former() -> None:
    async with VcudaNode.running() as (it, _):
        await it.admit("p", (20, 4))
        it.host.run(os.getpid(), "uid-p", "c0", ID)
        (directory, *_) = it.mounts("p").values()
        assert "OK" == await register(directory)
        inode = directory.stat().st_ino
        await it.start("p")

        assert inode == directory.stat().st_ino
        assert {"vcuda.config", "vcuda.sock"} == {*os.listdir(directory)}
        assert "OK" == await register(directory)


async def test_allocate_is_refused_where_nobody_could_register(tmp_path: Path) -> None:
    """The agent does not see the node's processes, no control groups or its own alone, or has no place for its files."""
    async with VcudaNode.running() as (it, _):
        findings = ("node's processes", "control groups", "its directory", "host's control groups")
        for broken, finding in enumerate(findings):
            host, configuration = Host(tmp_path / str(broken)), it.configuration
            if broken == 0:
                (host.proc / "self" / "ns" / "pid").unlink()
            elif broken == 1:
                (host.cgroups / "cgroup.procs").unlink()
            elif broken == 3:
                (host.cgroups / "cgroup.events").touch()
            else:
                (tmp_path / "file").touch()
                flags = msgspec.structs.replace(configuration.flags, vcuda_root=str(tmp_path / "file" / "vcuda"))
                configuration = msgspec.structs.replace(configuration, flags=flags)
            containers = Containers(lambda now=configuration: now, proc=host.proc, cgroups=host.cgroups)  # type: ignore[misc]  # bound now

            with pytest.raises(ContainerUnready, match=finding):
                containers.now(it.machine, CORES)
            assert finding in str(containers.poll(it.machine))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a directory to another user")
async def test_control_groups_that_may_not_be_looked_at_are_none(tmp_path: Path) -> None:
    """As where SELinux denies it: an error here would end the agent."""
    async with VcudaNode.running() as (it, _):
        host = Host(tmp_path)
        os.chown(host.cgroups, 4711, 4711)
        host.cgroups.chmod(0o700)
        containers = Containers(lambda: it.configuration, proc=host.proc, cgroups=host.cgroups)
        with without_capabilities():
            assert "does not find the host's control groups" in str(containers.poll(it.machine))
            assert None is directory_of(host.cgroups, PurePosixPath("/kubepods/poduid-p/1"))


async def test_libraries_are_mounted_where_they_are_configured() -> None:
    async with VcudaNode.running() as (it, _):
        flags = msgspec.structs.replace(it.configuration.flags, vcuda_libraries="/opt/vcuda")
        it.configuration = msgspec.structs.replace(it.configuration, flags=flags)
        await it.admit("p", (20, 4))
        answers = it.answers("p").values()

        for answer in answers:
            assert "/usr/local/nvidia/lib64" == answer.envs["LD_LIBRARY_PATH"]
            assert [("/etc/vcuda", True), ("/usr/local/nvidia", True)] == [
                (mount.container_path, mount.read_only) for mount in answer.mounts
            ]
        assert 1 == len({msgspec.json.encode(dict(answer.envs)) for answer in answers})


async def test_without_the_limiter_nothing_is_mounted_and_nothing_written() -> None:
    async with ShareNode.running() as (it, _):
        await it.admit("p", (20, 4))

        assert [[], []] == [answer.mounts for answer in it.answers("p").values()]


async def test_units_of_which_the_checkpoint_names_two_pods_start_nobody() -> None:
    async with VcudaNode.running() as (it, _):
        await it.admit("p", (20, 4))
        poll = it.allocations.polled
        assert poll is not None
        _, resource, units = next(iter(it.kubelet.running[DEFAULT, PodName("p")].parts()))
        twice = (*poll.listing.parts, *(each._replace(pod_uid="uid-q") for each in poll.listing.parts))
        listing = msgspec.structs.replace(poll.listing, parts=twice, directories=None)

        with pytest.raises(Unavailable, match="2 pods"):
            await it.limiter.starting(resource, [*units], poll._replace(listing=listing))


async def test_units_that_the_node_does_not_offer_now_start_nobody() -> None:
    """The hardware may be unknown for a moment; without limits, the library would end the container's processes."""
    async with VcudaNode.running() as (it, _):
        poll = it.allocations.polled
        assert poll is not None
        with pytest.raises(Unavailable, match="does not offer example"):
            await it.limiter.starting(ResourceName("example.com/units"), [DeviceID("GPU-0::m0")], poll)
