"""What the kubelet decides by is announced within a second of a change, and what cannot be read is said."""

from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest
from device_allocations_support import ledger_of
from kubelet_support import NODE, pod, two_nodes
from prediction_support import FPGA, CountedWatch, FpgaPlugin, PredictingNode, fpga_plugin

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.reconciliation.pod_resources import Listed
from topoalign.allocator.requests.kubelet_files import POLL_SECONDS, REREAD_SECONDS, KubeletFiles, KubeletWatch
from topoalign.core.model.ids import GPU, ContainerName, DeviceID, PodName, ResourceName
from topoalign.core.model.kubelet import ListedDevices
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, PodRequest
from topoalign.kubelet.grpc.kubelet_client import KubeletAway
from topoalign.runtime.directory_changes import DirectoryChanges
from topoalign.testing.manual_clock import ManualClock, all_tasks_blocked
from topoalign.testing.memory_journal import MemoryJournal

pytestmark = pytest.mark.anyio
MACHINE = two_nodes(gpus=2, nics=0)
CONFIG = """
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
topologyManagerPolicy: restricted
cpuManagerPolicy: static
reservedSystemCPUs: "0"
"""
OWN = AdmissionRules()
TWO = {"f-0": (0,), "f-1": (1,)}


class Node(PredictingNode):
    plugin: FpgaPlugin

    async def lists(self, devices: Mapping[str, tuple[int, ...]]) -> None:
        """The plugin of somebody else lists these, and the kubelet has received it."""
        self.plugin.change(devices)
        await self.kubelet.until(lambda kubelet: kubelet.capacity(FPGA) == len(devices))


@asynccontextmanager
async def node() -> AsyncIterator[Node]:
    """A node that has polled once, its kubelet with a plugin of two FPGAs."""
    async with Node.running(MACHINE, CONFIG) as (it, tasks), fpga_plugin(it.plugins, TWO) as it.plugin:
        await it.kubelet.until(lambda kubelet: kubelet.capacity(FPGA) == 2)
        tasks.start_soon(it.watch.run)
        await it.next_poll()
        yield it


def asking_for_fpgas(count: int) -> PodRequest:
    limits = {FPGA: count}
    return PodRequest(
        name=PodName("next"),
        containers=(ContainerRequest(name=ContainerName("main"), requests=limits, limits=limits),),
    )


async def test_a_changed_configuration_is_heard_within_a_second() -> None:
    async with node() as it:
        before = it.known.rules
        it.config.write_text(CONFIG.replace("restricted", "single-numa-node"))
        after = (await it.next_poll()).rules

        assert ("restricted", "single-numa-node", "") == (before.policy, after.policy, after.unknown)
        assert "0" == after.reserved_cpus


async def test_a_configuration_that_cannot_be_read_is_said() -> None:
    """The node's own settings stand for it, and the listener's prediction says so."""
    async with node() as it:
        it.config.write_text("kind: [")
        rules = (await it.next_poll()).rules
        notes = it.predicted(pod("next", cpus=1)).explanation.notes

        assert (OWN.policy, True) == (rules.policy, bool(rules.unknown))
        assert rules.unknown.startswith("the node's own settings stand for the kubelet's configuration")
        assert rules.unknown in notes


async def test_what_another_plugin_lists_is_heard_within_a_second() -> None:
    async with node() as it:
        before = it.known.devices
        await it.lists({**TWO, "f-2": (0, 1)})
        after = (await it.next_poll()).devices

        def devices(*found: tuple[tuple[int, ...], str]) -> object:
            return {FPGA: tuple(ListedDevices(nodes=nodes, ids=(DeviceID(name),)) for nodes, name in found)}

        assert devices(((0,), "f-0"), ((1,), "f-1")) == before
        assert devices(((0,), "f-0"), ((0, 1), "f-2"), ((1,), "f-1")) == after


async def test_a_plugin_that_has_ended_is_heard_within_a_second() -> None:
    """Its devices are not healthy any more, and the kubelet writes nothing down."""
    async with node() as it:
        it.kubelet.plugins.endpoints[FPGA].stop(0.0)

        assert {} == (await it.next_poll()).devices


async def test_cpus_that_a_container_got_are_heard_within_a_second() -> None:
    async with node() as it:
        await it.kubelet.admit(pod("db", cpus=3))
        (entry,) = (await it.next_poll()).entries

        assert ("main", "1-3", True) == (entry.container, entry.cpus, entry.mounted)


async def test_an_unconfirmed_record_is_published_until_it_is_confirmed() -> None:
    """A journal that was damaged is no event of its own."""
    async with node() as it:
        it.journal.unconfirmed = "line 3 is not whole"
        during = (await it.next_poll()).record_doubt
        notes = it.predicted(pod("next", gpus=1)).explanation.notes
        it.ledger.confirm("an operator")
        after = (await it.next_poll()).record_doubt

        assert ("line 3 is not whole", "") == (during, after)
        assert "line 3 is not whole" in notes[0]


async def test_nothing_is_said_while_nothing_changes() -> None:
    async with node() as it:
        before = it.ledger.state.usage
        for _ in range(30):
            await it.next_poll()

        assert before is it.ledger.state.usage


async def test_devices_that_cannot_be_asked_for_are_not_known() -> None:
    """They are not taken to be gone: whoever asks for one is told."""
    async with node() as it:
        (it.resources / "kubelet.sock").unlink()
        known = await it.next_poll()

        assert known.devices is None
        assert "its socket is not there" in known.devices_unknown
        assert () == it.predicted(pod("next", gpus=1)).explanation.notes


async def test_the_topology_of_other_devices_counts_in_a_prediction() -> None:
    """One FPGA of each NUMA node: two are aligned to both, and one that is in use leaves one."""
    async with node() as it:
        both = it.predicted(asking_for_fpgas(2))
        await it.kubelet.admit(asking_for_fpgas(1))
        await it.next_poll()
        one, two = it.predicted(asking_for_fpgas(1)), it.predicted(asking_for_fpgas(2))

        assert [(0, 1)] == [got.affinity for got in getattr(both, "allocations", ())]
        assert [{"f-1"}] == [got.device_ids for got in getattr(one, "allocations", ())]
        assert "TopologyAffinityError" == getattr(two, "reason", None)


async def test_devices_that_are_offered_here_are_not_announced_again(tmp_path: Path) -> None:
    """The topology has them; 17,500 shares would make every message 0.9 MB."""
    theirs = (ListedDevices(nodes=(0,), ids=(DeviceID("f-0"),)),)
    ours = (ListedDevices(nodes=(0,), ids=tuple(gpu.id for gpu in MACHINE.gpus)),)

    async def devices(others_than: Collection[ResourceName]) -> Listed:
        return {GPU: ours, FPGA: theirs}

    ledger = ledger_of(MACHINE)
    await KubeletWatch(ledger, KubeletFiles(tmp_path, tmp_path, OWN, 60.0), ledger.clock, devices).poll()

    assert ledger.state.usage is not None and ledger.state.usage.kubelet is not None
    assert {FPGA: theirs} == ledger.state.usage.kubelet.devices


async def test_without_other_plugins_devices_are_asked_for_when_the_files_change(tmp_path: Path) -> None:
    """Nothing that goes without a trace is shown then. An answer that is not known is asked for at every poll."""
    answers: list[Listed | None] = []
    ours: Listed = {GPU: (ListedDevices(nodes=(0,), ids=tuple(gpu.id for gpu in MACHINE.gpus)),)}
    theirs: Listed = {FPGA: (ListedDevices(nodes=(0,), ids=(DeviceID("f-0"),)),)}
    now: Listed | None = ours

    async def devices(others_than: Collection[ResourceName]) -> Listed:
        answers.append(now)
        if now is None:
            raise KubeletAway("nobody serves its socket")
        return now

    clock = ManualClock()
    ledger = ledger_of(MACHINE, clock)
    watch = KubeletWatch(ledger, KubeletFiles(tmp_path / "none", tmp_path, OWN, 60.0), clock, devices)

    async def asked(polls: int) -> list[Listed | None]:
        """What was answered in so many polls."""
        answers.clear()
        for _ in range(polls):
            await watch.poll()
            await clock.advance(POLL_SECONDS)
        return list(answers)

    (tmp_path / "device-plugins").mkdir()
    first, idle = await asked(2), await asked(2)
    (tmp_path / "device-plugins" / "kubelet_internal_checkpoint").write_text("{}")
    now = ours | theirs
    written, shown = await asked(2), await asked(4)
    now = None
    (tmp_path / "device-plugins" / "kubelet_internal_checkpoint").write_text("{ }")
    away = await asked(4)
    now = ours
    back = await asked(2)
    assert ledger.state.topology is not None
    ledger.take_reading(msgspec.structs.replace(ledger.state.topology, revision=2))
    discovered = await asked(1)

    assert ([ours], []) == (first, idle)
    assert ([ours], [ours]) == (back, discovered), "other devices may be ours now"
    assert [ours | theirs] * 6 == written + shown
    assert [None] * 4 == away


async def test_where_changes_are_told_files_are_polled_after_them(tmp_path: Path) -> None:
    """
    The directory of pods is not there at first: the one above it tells. A change during a poll is followed by another poll.
    """
    ours: Listed = {GPU: (ListedDevices(nodes=(0,), ids=tuple(gpu.id for gpu in MACHINE.gpus)),)}
    readings = 0

    async def devices(others_than: Collection[ResourceName]) -> Listed:
        nonlocal readings
        readings += 1
        if readings == 4:
            changes.wake()
        return ours

    clock, changes = ManualClock(1_700_000_000.2), DirectoryChanges()
    ledger = ledger_of(MACHINE, clock)
    (tmp_path / "device-plugins").mkdir()
    watch = CountedWatch(ledger, KubeletFiles(tmp_path / "none", tmp_path, OWN, 60.0), clock, devices, changes=changes)

    async def next_poll(seconds: float) -> tuple[int, int]:
        """The polls so far, and the readings of the last of them."""
        before, polls = readings, watch.polls
        await clock.advance(seconds)
        while watch.polls == polls:
            await watch.polled.wait()
        await all_tasks_blocked()
        return watch.polls, readings - before

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(changes.run)
        tasks.start_soon(watch.run)
        first = await next_poll(0)
        second = await next_poll(POLL_SECONDS)
        idle = await next_poll(REREAD_SECONDS)
        change = changes.next_change
        (tmp_path / "pods").mkdir()
        await change.wait()
        made = await next_poll(POLL_SECONDS)
        change = changes.next_change
        (tmp_path / "pods" / "uid").mkdir()
        await change.wait()
        added = await next_poll(POLL_SECONDS)
        await clock.advance(POLL_SECONDS)
        after_that = watch.polls, readings
        tasks.cancel_scope.cancel()

    assert [(1, 1), (2, 0), (3, 1), (4, 1), (5, 1)] == [first, second, idle, made, added]
    assert (6, 4) == after_that


async def test_many_questions_at_once_ask_the_kubelet_once_or_twice() -> None:
    """It answers at most a hundred calls a second, whoever asks."""
    async with node() as it:
        asked = 0
        listed = it.watch._devices
        assert listed is not None

        async def counted(ours: Collection[ResourceName]) -> object:
            nonlocal asked
            asked += 1
            return await listed(ours)

        it.watch._devices = counted  # type: ignore[assignment]  # a method is replaced by a counter
        async with anyio.create_task_group() as tasks:
            for _ in range(50):
                tasks.start_soon(it.watch.read_all)

        assert asked in (1, 2)


async def test_before_the_hardware_is_known_nothing_is_read() -> None:
    """The files would be judged by a machine without CPUs."""
    ledger = Ledger(NODE, MemoryJournal(), ManualClock())
    watch = KubeletWatch(ledger, KubeletFiles(Path("/none"), Path("/none"), OWN), ledger.clock)
    await watch.poll()

    assert ledger.state.usage is None
