"""Where the kernel tells of changes in the directory, a plugin polls after them at once, and else seldom."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from kubelet_support import Node, node, offers, two_nodes

from topoalign.allocator.device_plugin.plugin import Plugin
from topoalign.allocator.device_plugin.registration import (
    POLL_SECONDS,
    QUIET_SECONDS,
    SETTLE_SECONDS,
    RegistrationState,
)
from topoalign.core.model.ids import GPU, NIC
from topoalign.kubelet.grpc.transport import GrpcServer
from topoalign.runtime.clock import until_tick
from topoalign.runtime.directory_changes import DirectoryChanges
from topoalign.testing.manual_clock import ManualClock, all_tasks_blocked

pytestmark = pytest.mark.anyio
MACHINE = two_nodes()


@asynccontextmanager
async def told_node(clock: ManualClock, polls: list[str], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    """A node whose plugins are listened to, know that, and wait; from then on `polls` has the resource of each poll."""
    poll = Plugin.poll

    async def noted(plugin: Plugin) -> str | None:
        polls.append(plugin.resource)
        return await poll(plugin)

    monkeypatch.setattr(Plugin, "poll", noted)
    async with node(MACHINE, clock=clock, changes=DirectoryChanges()) as it:
        while any(
            plugin._registration.state is not RegistrationState.LISTENING for plugin in it.front.plugins.values()
        ):
            await clock.advance(POLL_SECONDS)
        await clock.advance(POLL_SECONDS)
        polls.clear()
        monkeypatch.setattr(
            it.kubelet.plugins, "_changed", lambda: None
        )  # which writes a checkpoint into the directory
        yield it


async def told(clock: ManualClock, changes: DirectoryChanges) -> None:
    """Returns after the next change, and after the plugins have waited for what belongs to it."""
    await changes.next_change.wait()
    await clock.advance(SETTLE_SECONDS)


async def test_a_kubelet_that_restarts_has_its_devices_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far less than `POLL_SECONDS` pass: what the kernel tells is all that is waited for."""
    clock = ManualClock()
    async with told_node(clock, [], monkeypatch) as it:
        began = clock.monotonic()
        await it.kubelet.restart()
        while not offers(MACHINE)(it.kubelet):
            await clock.advance(SETTLE_SECONDS)
            if clock.monotonic() - began > POLL_SECONDS / 2:
                break

        assert offers(MACHINE)(it.kubelet)


async def test_a_kubelet_that_was_away_has_its_devices_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream has ended, and polls have found that it is away: the kernel tells of its new socket all the same."""
    clock, polls = ManualClock(), list[str]()
    async with told_node(clock, polls, monkeypatch) as it:
        await it.kubelet.stop()
        while any(plugin._registration.is_registered for plugin in it.front.plugins.values()):
            await clock.advance(SETTLE_SECONDS)
        await clock.advance(until_tick(clock, POLL_SECONDS))
        began = clock.monotonic()
        await it.kubelet.start()
        while not offers(MACHINE)(it.kubelet):
            await clock.advance(SETTLE_SECONDS)
            if clock.monotonic() - began > POLL_SECONDS / 2:
                break

        assert offers(MACHINE)(it.kubelet)


async def test_a_stream_cut_off_ends_at_the_kubelet_before_a_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own socket is removed with it, of which the kernel tells: that is no reason to be registered sooner."""

    async def stuck() -> None:
        pass

    clock, polls = ManualClock(), list[str]()
    async with told_node(clock, polls, monkeypatch) as it:
        monkeypatch.setattr(it.front.plugins[GPU].service.watches, "end", stuck)
        path = it.directory / "device-plugins" / "kubelet.sock"
        path.unlink()
        fresh = GrpcServer(it.kubelet.plugins, path, "directory")
        await fresh.listen()
        cut = clock.monotonic()
        while it.kubelet.allocatable(GPU):
            await clock.advance(SETTLE_SECONDS)
        while not it.kubelet.allocatable(GPU):
            await clock.advance(SETTLE_SECONDS)

        assert POLL_SECONDS <= clock.monotonic() - cut <= 3 * POLL_SECONDS
        await fresh.stop(0)


async def test_a_kubelet_that_is_away_is_looked_for_without_being_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system may tell nothing: the poll twice a second goes on."""
    clock, polls = ManualClock(), list[str]()
    async with told_node(clock, polls, monkeypatch) as it:
        await it.kubelet.stop()
        while any(plugin._registration.is_registered for plugin in it.front.plugins.values()):
            await clock.advance(SETTLE_SECONDS)
        await clock.advance(until_tick(clock, POLL_SECONDS))
        monkeypatch.setattr(it.front._changes, "wake", lambda: None)
        polls.clear()
        for _ in range(3):
            await clock.advance(POLL_SECONDS)

        assert sorted([GPU, NIC] * 3) == sorted(polls)


async def test_a_plugin_that_is_told_of_changes_polls_seldom_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, polls = ManualClock(), list[str]()
    async with told_node(clock, polls, monkeypatch):
        for _ in range(4):
            await clock.advance(QUIET_SECONDS)

        assert sorted([GPU, NIC] * 4) == sorted(polls)


async def test_an_entry_of_the_directory_that_changes_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, polls = ManualClock(), list[str]()
    async with told_node(clock, polls, monkeypatch) as it:
        (it.directory / "device-plugins" / "other.sock").touch()
        await told(clock, it.front._changes)
        await all_tasks_blocked()

        assert {GPU, NIC} == {*polls}


async def test_a_change_during_a_poll_is_followed_by_another_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """The poll may have looked before the change."""
    clock = ManualClock()
    polls: list[str] = []
    async with told_node(clock, polls, monkeypatch) as it:
        poll = Plugin.poll

        async def with_a_change(plugin: Plugin) -> str | None:
            reason = await poll(plugin)
            if [GPU] == [each for each in polls if each == plugin.resource]:
                it.front._changes.wake()
            return reason

        monkeypatch.setattr(Plugin, "poll", with_a_change)
        await clock.advance(until_tick(clock, QUIET_SECONDS))
        await clock.advance(SETTLE_SECONDS)

        assert 2 == polls.count(GPU)


async def test_a_stream_that_ends_is_noticed_without_a_poll(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No entry of the directory changes then."""
    clock = ManualClock()
    async with told_node(clock, [], monkeypatch) as it:
        plugin = it.front.plugins[GPU]
        change = it.front._changes.next_change
        plugin.service.watch.end()
        await change.wait()
        await clock.advance(SETTLE_SECONDS)

        assert f"the kubelet does not listen to {GPU}" == it.front.reason()


async def test_a_loss_of_devices_is_registered_again_without_a_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    async with told_node(clock, [], monkeypatch) as it:
        before = it.kubelet.plugins.registrations
        for _ in range(2):
            it.front.plugins[GPU].compare(())
        await clock.advance(SETTLE_SECONDS)
        await it.kubelet.until(lambda kubelet: kubelet.plugins.registrations == before + 1)


async def test_a_resource_that_is_offered_no_more_ends_without_a_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    async with told_node(clock, [], monkeypatch) as it:
        it.allocator.discover(two_nodes(nics=0))
        await all_tasks_blocked()
        await clock.advance(SETTLE_SECONDS)
        await all_tasks_blocked()

        assert {GPU} == it.front.plugins.keys()
