"""A new version of the node agent follows the running one: the kubelet hardly notices, and no allocation is lost."""

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import msgspec
import pytest
from anyio.abc import Process
from e2e_support import as_process, environment, pod
from kubelet_support import learn_owners

from topoalign.allocator.ledger.journal import open_journal
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.core.model.decisions import Admission
from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import GPU, AllocationID, NodeName
from topoalign.core.model.requests import AdmissionRules
from topoalign.machines import load_machine
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet
from topoalign.testing.manual_clock import ManualClock

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

NODE = NodeName("node-1")
NOWHERE = "nats://127.0.0.1:9"
"""No hub: an agent that takes over needs nobody else."""

Sight = tuple[int, int, int]
"""What the kubelet has of GPUs at one moment: registrations, capacity, allocatable."""


@dataclass
class Place:
    """A node with a kubelet, and what that kubelet has had of our GPUs."""

    folder: Path
    kubelet: FakeKubelet
    sights: list[Sight] = field(default_factory=list)

    def look(self, kubelet: FakeKubelet) -> bool:
        sight = (kubelet.plugins.registrations, kubelet.capacity(GPU), kubelet.allocatable(GPU))
        if sight not in self.sights[-1:]:
            self.sights.append(sight)
        return False

    async def until(self, allocatable: int, registrations: int) -> None:
        with anyio.fail_after(60):
            await self.kubelet.until(
                lambda kubelet: (
                    kubelet.allocatable(GPU) == allocatable and kubelet.plugins.registrations >= registrations
                )
            )

    def agent(self, log: str, *flags: str) -> AbstractAsyncContextManager[Process]:
        return as_process("node", environment(NODE, NOWHERE, self.folder), self.folder / log, *flags)

    def allocations(self) -> dict[AllocationID, Allocation]:
        """What is in the record, read from a copy."""
        copy = self.folder / "copy"
        shutil.copytree(self.folder / "state", copy)
        try:
            with open_journal(copy, NODE) as journal:
                live = Ledger(NODE, journal, ManualClock()).state.allocations
                # a described machine has no boot of its own: each agent counts as one, and confirms what it finds
                return {name: msgspec.structs.replace(held, boot="") for name, held in live.items()}
        finally:
            shutil.rmtree(copy)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ta-") as name:
        yield Path(name)


@asynccontextmanager
async def place(folder: Path) -> AsyncIterator[Place]:
    kubelet = FakeKubelet(
        folder / "device-plugins", folder / "pod-resources", load_machine("dgx-a100").topology, AdmissionRules()
    )
    async with anyio.create_task_group() as tasks:
        await tasks.start(kubelet.run)
        it = Place(folder, kubelet)
        tasks.start_soon(kubelet.until, it.look)
        yield it
        tasks.cancel_scope.cancel()


async def stopped(process: Process) -> int:
    process.terminate()
    with anyio.fail_after(60):
        return await process.wait()


async def test_a_new_version_takes_over_and_the_kubelet_keeps_its_capacity(folder: Path) -> None:
    """
    The old stream ends before the new version registers, allocations are the same, and the old version is idle until it
    is stopped.
    """
    async with place(folder) as it, it.agent("old.log") as old:
        await it.until(8, registrations=2)
        assert isinstance(await it.kubelet.admit(pod("before", gpus=4)), Admission)
        await learn_owners(it.kubelet)
        before = it.allocations()
        it.sights.clear()
        async with it.agent("new.log", "--take-over") as new:
            await it.until(8, registrations=4)
            after = it.allocations()
            assert isinstance(await it.kubelet.admit(pod("after", gpus=4)), Admission)

            assert old.returncode is None
            assert 0 == await stopped(old)
            assert 8 == it.kubelet.allocatable(GPU)
            assert 0 == await stopped(new)

    taken = it.sights[: it.sights.index((4, 8, 8)) + 1]
    assert {8} == {capacity for _, capacity, _ in taken}
    gap = [registrations for registrations, _, allocatable in taken if allocatable == 0]
    assert 2 == gap[0]  # at the old version's end nobody has registered anew
    assert before == after
    assert 1 == len(before)
    assert b"nothing is served here any more" in (folder / "old.log").read_bytes()


async def test_a_second_agent_without_the_flag_ends_and_names_the_first(folder: Path) -> None:
    """A second agent without --take-over ends and names the first one, which continues."""
    async with place(folder) as it, it.agent("first.log") as first:
        await it.until(8, registrations=2)
        sockets = {path.name: path.stat().st_ino for path in (folder / "device-plugins").glob("topoalign-*")}
        it.sights.clear()
        async with it.agent("second.log") as second:
            with anyio.fail_after(60):
                code = await second.wait()

        assert 69 == code
        assert f"in use by another allocator, pid {first.pid}" in (folder / "second.log").read_text()
        assert {(2, 8, 8)} >= set(it.sights)
        assert sockets == {path.name: path.stat().st_ino for path in (folder / "device-plugins").glob("topoalign-*")}
        assert isinstance(await it.kubelet.admit(pod("one", gpus=8)), Admission)
