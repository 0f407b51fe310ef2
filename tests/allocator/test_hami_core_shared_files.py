"""What HAMi-core's files say is read as its library writes it; a file that is something else costs its own container."""

import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from threading import Event

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slot_node_support import LIBRARIES, NAME, Ask, HamiCoreNode, put_region
from structlog.testing import capture_logs

from topoalign.allocator.containers.hami_core import shared_files
from topoalign.allocator.containers.hami_core.shared_files import SharedFiles
from topoalign.core import wire
from topoalign.core.model.errors import BadRequest
from topoalign.core.model.holdings import base_of
from topoalign.core.model.ids import NodeName
from topoalign.core.model.processes import LibraryReading, LibraryUse
from topoalign.core.model.requests import NodeRequest
from topoalign.runtime.memory_bus import MemoryBus

pytestmark = pytest.mark.anyio
ONE = "1:1:2:3:6:7"


def files_of(it: HamiCoreNode) -> SharedFiles:
    return SharedFiles(lambda: f"{it.root}/", lambda: it.ledger.state, it.clock)


def gpus_of(it: HamiCoreNode, name: str) -> list[str]:
    return sorted(map(base_of, it.slots_of(name)["c0"]))


def of(reading: LibraryReading, it: HamiCoreNode, name: str) -> LibraryUse | None:
    ids = {each.id for each in it.records(name)}
    return next((each for each in reading.containers if each.allocation in ids), None)


@pytest.mark.parametrize("library", LIBRARIES)
async def test_what_each_version_of_the_library_writes_is_read_by_gpu(library: str) -> None:
    """The sum over the processes that run; in the order of the file, whatever order the slots are in."""
    async with HamiCoreNode.running() as (it, _):
        await it.run_pod("a", Ask(2, memory=6_000, cores=40))
        first, second = gpus_of(it, "a")
        processes = ("1:100:20:3:123:40", "1:1:2:3:6:7", "1:1000:0:0:1000:0", "0:9:9:9:27:99")
        put_region(it.cache("a") / NAME, f"{second},{first}", *processes, last_kernel=1_700_000_000, library=library)
        (use,) = (await files_of(it).read()).containers

        assert ("", [second, first]) == (use.failure, [each.device for each in use.counts])
        assert [(1123, 1100, 20, 3, 40), (6, 1, 2, 3, 7)] == [
            (each.memory, each.context, each.modules, each.buffers, each.utilization) for each in use.counts
        ]
        assert {1_700_000_000} == {each.last_kernel for each in use.counts}


async def test_before_the_library_has_made_its_file_there_is_nothing() -> None:
    """It makes a file, then its size, and writes the magic number last."""
    async with HamiCoreNode.running() as (it, _):
        files = files_of(it)
        assert () == (await files.read()).containers
        await it.run_pod("a", Ask(memory=1_000))
        await it.clock.advance(2)
        for make in (Path.touch, lambda path: os.truncate(path, 2_008_953)):
            make(it.cache("a") / NAME)
            await it.clock.advance(2)
            assert () == (await files.read()).containers
        assert 0 == files.refused


async def test_gpus_that_a_container_does_not_hold_are_passed_over() -> None:
    async with HamiCoreNode.running() as (it, _):
        await it.run_pod("a", Ask(memory=1_000))
        (own,) = gpus_of(it, "a")
        other = next(gpu.id for gpu in it.machine.gpus if gpu.id != own)
        put_region(it.cache("a") / NAME, f"{other},-,{own}", "1:1:1:1:9:1", "1:0:0:0:0:0", "1:2:2:2:8:5")
        (use,) = (await files_of(it).read()).containers

        assert [(own, 8)] == [(each.device, each.memory) for each in use.counts]


async def test_counts_that_cannot_be_parts_are_not_told() -> None:
    """A library that takes away more than it has added has a number near 2**64."""
    async with HamiCoreNode.running() as (it, _):
        await it.run_pod("a", Ask(memory=1_000))
        put_region(it.cache("a") / NAME, gpus_of(it, "a")[0], f"1:{2**64 - 1}:2:3:5:101")
        ((count,),) = (each.counts for each in (await files_of(it).read()).containers)

        assert (5, None, 2, 3, None, None) == (
            count.memory,
            count.context,
            count.modules,
            count.buffers,
            count.utilization,
            count.last_kernel,
        )


def write_at(at: int, content: bytes) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(content)

    return write


def instead(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


def bound(path: Path) -> None:
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


def crowd(path: Path) -> None:
    for number in range(64):
        (path.parent / f"{number}").touch()


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a link": (instead(lambda path: path.symlink_to("/etc/hostname")), "no regular file"),
    "a pipe": (instead(os.mkfifo), "no regular file"),
    "a socket": (instead(bound), "no regular file"),
    "a directory": (instead(os.mkdir), "no regular file"),
    "cut off": (lambda path: os.truncate(path, 2_000_000), "2000000 bytes"),
    "of HAMi v2.4.0": (lambda path: os.truncate(path, 1_197_897), "1197897 bytes, and those of HAMi v2.4.1 and later"),
    "longer": (lambda path: os.truncate(path, 1 << 40), f"{1 << 40} bytes"),
    "another magic": (write_at(0, b"\1"), "in place of 19920718"),
    "another version": (write_at(8, struct.pack("<I", 3)), "version 1.3"),
    "1.2 as long as v2.8.1": (lambda path: os.truncate(path, 2_008_985), "version 1.2, and of this size 1.1 is read"),
    "too many gpus": (write_at(56, struct.pack("<Q", 2**63)), "GPUs"),
    "a gpu twice": (write_at(56, struct.pack("<Q", 2) + b"GPU-\x1b".ljust(96, b"\0") + b"GPU-\x1b"), "twice: GPU-?"),
    "too many processes": (write_at(2_008_896, struct.pack("<i", 1_025)), "1025 processes"),
    "a negative number": (write_at(2_008_896, struct.pack("<i", -1)), "-1 processes"),
    "more than there can be": (write_at(1_856 + 8 + 32, struct.pack("<Q", 2**64 - 1)), "it counts"),
    "two files": (lambda path: path.with_name(f"{'0' * 32}.cache").touch(), "2 of them"),
    "many files": (crowd, "more than 64"),
}


@pytest.mark.parametrize(("fault", "reason"), FAULTS.values(), ids=FAULTS)
async def test_a_file_that_lies_costs_its_own_container(fault: Callable[[Path], object], reason: str) -> None:
    """It is logged once, counted each time, and what others say is told."""
    async with HamiCoreNode.running() as (it, _):
        for name in "ab":
            await it.run_pod(name, Ask(memory=1_000))
            put_region(it.cache(name) / NAME, gpus_of(it, name)[0], ONE)
        here = os.getcwd()
        fault(it.cache("a") / NAME)
        os.chdir(here)
        files = files_of(it)
        with capture_logs() as logs:
            for _ in range(2):
                reading = await files.read()
                await it.clock.advance(2)

        bad, good = of(reading, it, "a"), of(reading, it, "b")
        assert bad is not None and good is not None
        assert reason in bad.failure
        assert ((), 6) == (bad.counts, good.counts[0].memory)
        assert [reason in each["reason"] for each in logs] == [True]
        assert 2 == files.refused


async def test_a_file_that_lies_again_is_logged_again() -> None:
    async with HamiCoreNode.running() as (it, _):
        await it.run_pod("a", Ask(memory=1_000))
        files = files_of(it)
        path = put_region(it.cache("a") / NAME, gpus_of(it, "a")[0], ONE)
        failures: list[bool] = []
        with capture_logs() as logs:
            for magic in (1, shared_files.MAGIC, 1):
                write_at(0, struct.pack("<i", magic))(path)
                failures.append(bool((await files.read()).containers[0].failure))
                await it.clock.advance(2)

        assert [True, False, True] == failures
        assert 2 == len(logs)


async def test_a_file_that_is_cut_off_while_it_is_read_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapped, it would end the agent (SIGBUS)."""
    async with HamiCoreNode.running() as (it, _):
        await it.run_pod("a", Ask(memory=1_000))
        path = put_region(it.cache("a") / NAME, gpus_of(it, "a")[0], ONE)
        uuids_of = shared_files.RegionLayout.uuids_of

        def cut(layout: shared_files.RegionLayout, head: bytes) -> list[str]:
            os.truncate(path, 4_096)
            return uuids_of(layout, head)

        monkeypatch.setattr(shared_files.RegionLayout, "uuids_of", cut)
        (use,) = (await files_of(it).read()).containers

        assert "it is cut off" == use.failure


async def test_a_directory_of_another_record_is_not_read() -> None:
    """Until Allocate has made it anew, it is that of the container which had the slots before."""
    async with HamiCoreNode.running() as (it, _):
        await it.run_pod("a", Ask(memory=1_000))
        put_region(it.cache("a") / NAME, gpus_of(it, "a")[0], ONE)
        (it.cache("a").parent / "of").write_text("another\n")

        assert () == (await files_of(it).read()).containers


async def test_files_are_read_once_a_second_at_most() -> None:
    async with HamiCoreNode.running() as (it, _):
        await it.run_pod("a", Ask(memory=1_000))
        files, path = files_of(it), it.cache("a") / NAME
        first = await files.read()
        put_region(path, gpus_of(it, "a")[0], ONE)

        assert first is await files.read()
        await it.clock.advance(1)
        assert 1 == len((await files.read()).containers)


async def test_a_disk_that_does_not_answer_is_told_and_asked_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    async with HamiCoreNode.running() as (it, _):
        await it.run_pod("a", Ask(memory=1_000))
        answers, begun, calls = Event(), Event(), []

        def hangs(*_: object) -> None:
            calls.append(1)
            begun.set()
            answers.wait()

        monkeypatch.setattr(shared_files, "read_library_use", hangs)
        monkeypatch.setattr(shared_files, "READ_SECONDS", 0.2)
        files = files_of(it)
        try:
            readings = []
            for _ in range(2):
                readings.append(await files.read())
                await it.clock.advance(2)
        finally:
            answers.set()

        assert [True, True] == ["does not answer" in each.finding for each in readings]
        assert begun.is_set()
        assert 1 == len(calls)


async def test_what_files_say_is_told_over_the_bus() -> None:
    async with HamiCoreNode.running() as (it, _):
        await it.run_pod("a", Ask(memory=1_000))
        put_region(it.cache("a") / NAME, gpus_of(it, "a")[0], ONE)
        roots, bus = [""], MemoryBus()
        files = SharedFiles(lambda: roots[0], lambda: it.ledger.state, it.clock)
        node, counted = it.ledger.state.node, files.figure()
        subject, question = wire.admission_subject(node, "library-use"), NodeRequest(node=node)

        async def ask(request: NodeRequest) -> LibraryReading:
            return wire.decode_answer(await bus.ask(subject, msgspec.json.encode(request), within=1.0), LibraryReading)

        async with bus.serve("topoalign-allocator", [files.endpoint()]):
            assert LibraryReading(node=node) == await ask(question)
            assert 0 == counted.read()
            roots[0] = str(it.root)
            await it.clock.advance(2)
            assert [6] == [each.counts[0].memory for each in (await ask(question)).containers]
            with pytest.raises(BadRequest, match="is not this node"):
                await ask(NodeRequest(node=NodeName("other")))
            write_at(4, b"\2")(it.cache("a") / NAME)
            await it.clock.advance(2)
            assert ["it has version 2.2, and of this size 1.1 or 1.2 is read"] == [
                each.failure for each in (await ask(question)).containers
            ]
            assert 1 == counted.read()


@given(
    st.sampled_from(shared_files.LAYOUTS),
    st.binary(min_size=1_888, max_size=1_888),
    st.binary(max_size=2 * 1_960),
    st.binary(min_size=24, max_size=24),
)
def test_no_bytes_have_another_end_than_counts_or_a_reason(
    layout: shared_files.RegionLayout, head: bytes, processes: bytes, tail: bytes
) -> None:
    """Whatever a container writes; half of the cases begin as they should."""
    at = 56 + layout.shift
    for start in (
        head[: layout.processes_at],
        (struct.pack("<iII", 19920718, 1, 1) + head[12:at] + bytes([head[at] % 20] + [0] * 7) + head[at + 8 :])[
            : layout.processes_at
        ],
    ):
        for count in (tail[:4], struct.pack("<i", len(processes) // 1_960)):
            try:
                uuids = layout.uuids_of(start)
                found = shared_files.tail_of(count + tail[4:])
                counts = [*layout.counts_of(uuids, processes, found, {*uuids})]  # type: ignore[arg-type]  # as ids
            except shared_files.Unusable as error:
                assert str(error)
            else:
                assert all(0 <= each.memory <= 2**53 for each in counts)
