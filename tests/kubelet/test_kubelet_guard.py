"""A kubelet that listens and has nothing of ours is noticed, said aloud, and told again."""

import anyio
import pytest
import structlog
from kubelet_support import Node, node, two_nodes

from topoalign.allocator.device_plugin.front import Guard
from topoalign.allocator.device_plugin.plugin import Plugin
from topoalign.allocator.device_plugin.registration import FIRST_LOSS_SECONDS, FIRST_RETRY_SECONDS, POLL_SECONDS
from topoalign.core.model.events import DeviceHealth, HealthState
from topoalign.core.model.ids import GPU, NIC
from topoalign.runtime.clock import SystemClock
from topoalign.testing.manual_clock import ManualClock

pytestmark = pytest.mark.anyio

MACHINE = two_nodes(nics=0)


async def test_a_kubelet_that_lost_our_devices_is_called_less_and_less_often() -> None:
    """A kubelet that has lost our devices is registered with again, at growing intervals."""
    clock = ManualClock()
    async with node(MACHINE, clock=clock) as it:
        guard = Guard(it.channel, SystemClock(), it.front.plugins.values)
        plugins = it.kubelet.plugins
        plugins.fault = "lose_subscription"
        plugins.endpoints[GPU].devices.clear()
        with structlog.testing.capture_logs() as logs:
            await guard.poll()
            await clock.advance(POLL_SECONDS)
            assert it.front.reason() is None  # once may be the moment before it has read a list
            await guard.poll()
            await clock.advance(POLL_SECONDS)
            assert "shows none of its healthy devices" in (it.front.reason() or "")
            await it.kubelet.until(lambda kubelet: kubelet.plugins.registrations == 2)
            await listening(it.front.plugins[GPU].service.watch)
            for _ in range(4):
                await guard.poll()
            await clock.advance(POLL_SECONDS)
            assert 2 == plugins.registrations

            plugins.fault = None
            await clock.advance(FIRST_LOSS_SECONDS)
            await guard.poll()
            await clock.advance(POLL_SECONDS)
            await it.kubelet.until(lambda kubelet: kubelet.allocatable(GPU) == 8)
            await guard.poll()
            await clock.advance(POLL_SECONDS)

        assert it.front.reason() is None
        assert 2 == len([line for line in logs if line["log_level"] == "error"])


async def test_missing_devices_of_an_ended_stream_do_not_count_for_the_next() -> None:
    """What a kubelet did not show before its stream ended does not count after it."""
    clock = ManualClock()
    async with node(MACHINE, clock=clock) as it:
        plugin = it.front.plugins[GPU]
        plugin.compare(set())
        it.kubelet.plugins.endpoints[GPU].stop(clock.monotonic())
        await plugin.service.watch.ended.wait()
        plugin.compare(set())
        await clock.advance(FIRST_RETRY_SECONDS + 2 * POLL_SECONDS)
        await heard(it, plugin, 2)
        plugin.compare(set())
        await clock.advance(2 * POLL_SECONDS)

        assert it.front.reason() is None
        assert 2 == it.kubelet.plugins.registrations


async def test_a_loss_of_one_resource_is_none_of_another() -> None:
    """The kubelet shows the NICs, and is registered with anew for the GPUs alone."""
    clock = ManualClock()
    async with node(two_nodes(), clock=clock) as it:
        await it.kubelet.until(lambda kubelet: (kubelet.allocatable(GPU), kubelet.allocatable(NIC)) == (8, 2))
        guard = Guard(it.channel, SystemClock(), it.front.plugins.values)
        it.kubelet.plugins.endpoints[GPU].devices.clear()
        for _ in range(2):
            await guard.poll()
        lost = [name for name, plugin in it.front.plugins.items() if plugin.missing_devices() is not None]

        assert [GPU] == lost


async def test_a_node_with_only_unhealthy_devices_is_not_taken_for_forgotten() -> None:
    """A node whose devices are all unhealthy is not taken for one that the kubelet has forgotten."""
    async with node(MACHINE, clock=ManualClock()) as it:
        it.allocator.judge(dict.fromkeys(MACHINE.gpu_by_id, DeviceHealth(state=HealthState.UNHEALTHY)))
        await it.kubelet.until(lambda kubelet: kubelet.allocatable(GPU) == 0)
        guard = Guard(it.channel, SystemClock(), it.front.plugins.values)
        for _ in range(3):
            await guard.poll()

        assert it.front.reason() is None
        assert 1 == it.kubelet.plugins.registrations


async def heard(it: Node, plugin: Plugin, registrations: int) -> None:
    """Waits until the kubelet was registered with so often, and listens."""
    await it.kubelet.until(lambda kubelet: kubelet.plugins.registrations >= registrations)
    while not plugin.service.watch.open:
        await anyio.lowlevel.checkpoint()


async def listening(watch: object) -> None:
    while not getattr(watch, "open", True):
        await anyio.lowlevel.checkpoint()
