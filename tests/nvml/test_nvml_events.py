"""What NVML reports between readings, by pynvml over a stand-in library: heard, told apart, and never in anybody's way."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pynvml
import pytest
from nvml_support import (
    DEADLINE,
    GPUS,
    WAIT,
    Node,
    StandIn,
    address,
    built,
    host_tree,
    pci_device,
    script,
    standing_in,
)

from topoalign.core.model.ids import DeviceID
from topoalign.core.ports import HardwareEvent, Occurrence
from topoalign.discovery.drivers.nvml.driver import REOPEN_SECONDS
from topoalign.discovery.drivers.nvml.nvml_events import LONGEST_PAUSE, WAIT_SECONDS
from topoalign.runtime.tasks import background
from topoalign.testing.manual_clock import all_tasks_blocked

pytestmark = pytest.mark.anyio

HURRY = "hurry 100"


class Recorder:
    """Hears everything."""

    def __init__(self) -> None:
        self.events: list[HardwareEvent] = []
        self.subscription_loss: list[tuple[str | None, frozenset[DeviceID]]] = []

    def receive(self, event: HardwareEvent) -> None:
        self.events.append(event)

    def lose_subscription(self, reason: str | None, gpus: frozenset[DeviceID] = frozenset()) -> None:
        self.subscription_loss.append((reason, gpus))


async def until(true: Callable[[], object]) -> None:
    """Gives the threads the turns they need."""
    while not true():
        await anyio.lowlevel.checkpoint()


@asynccontextmanager
async def listening(node: Node, *more: str) -> AsyncIterator[Recorder]:
    """Somebody listens, once the first reading is done and the first wait begun."""
    recorder = Recorder()
    async with background() as tasks:
        tasks.start_soon(node.driver.watch, recorder)
        await node.read(HURRY, *more)
        await until(lambda: node.standin.calls(WAIT))
        yield recorder


async def test_an_xid_is_heard_with_the_gpu_it_happened_to(node: Node) -> None:
    async with listening(node) as heard:
        node.standin.xid(3, 79)
        node.standin.xid(7, 999)
        await until(lambda: len(heard.events) == 2)

    assert [
        HardwareEvent(kind=Occurrence.XID, gpu=GPUS[3], xid=79),
        HardwareEvent(kind=Occurrence.XID, gpu=GPUS[7], xid=999),
    ] == heard.events
    assert [] == heard.subscription_loss


@pytest.mark.parametrize(
    ("kind", "occurrence"),
    [
        (pynvml.nvmlEventTypeSingleBitEccError, Occurrence.SINGLE_BIT_ECC),
        (pynvml.nvmlEventTypeDoubleBitEccError, Occurrence.DOUBLE_BIT_ECC),
        (pynvml.nvmlEventMigConfigChange, Occurrence.CHANGED),
        (pynvml.nvmlEventTypeGpuUnavailableError, Occurrence.UNAVAILABLE),
        (pynvml.nvmlEventTypeGpuRecoveryAction, Occurrence.CHANGED),
    ],
)
async def test_every_kind_of_event_is_asked_for_and_told_apart(node: Node, kind: int, occurrence: Occurrence) -> None:
    async with listening(node) as heard:
        node.standin.report(0, kind, 1)
        await until(lambda: heard.events)

    assert [HardwareEvent(kind=occurrence, gpu=GPUS[0])] == heard.events


async def test_an_event_of_a_mig_instance_names_it_by_its_card(node: Node) -> None:
    """The event names the MIG instance; its card is what was registered."""
    async with listening(node, "mig 0 gi=7 ci=0 uuid=MIG-0 name=MIG_1g.10gb memory=9728 slices=1 compute=1") as heard:
        node.standin.xid(0, 94, gi=7, ci=0)
        await until(lambda: heard.events)

    assert [HardwareEvent(kind=Occurrence.XID, gpu=GPUS[0], xid=94, gpu_instance=7, compute_instance=0)] == heard.events


@pytest.mark.parametrize("call", ["nvmlDeviceGetSupportedEventTypes", "nvmlDeviceRegisterEvents"])
async def test_a_gpu_without_events_is_judged_by_readings_alone(node: Node, call: str) -> None:
    """A GPU without events has the health of its readings, and events of the others are received."""
    async with listening(node, f"fail {call} 3 3") as heard:
        node.standin.xid(3, 79)
        node.standin.xid(4, 79)
        await until(lambda: heard.events)

    assert ([GPUS[4]], []) == ([event.gpu for event in heard.events], heard.subscription_loss)


async def test_a_driver_without_events_is_asked_no_further(tmp_path: Path) -> None:
    (tmp_path / "loaded").mkdir()
    with standing_in(built(tmp_path, "-DOLD_DRIVER"), tmp_path / "loaded", script()) as standin:
        old = Node(host_tree(tmp_path / "host"), standin)
        recorder = Recorder()
        async with background() as tasks:
            tasks.start_soon(old.driver.watch, recorder)
            await old.read()
            await until(lambda: standin.calls("nvmlEventSetFree") and standin.calls("nvmlShutdown"))
            await old.clock.advance(3600)

    assert (1, [], []) == (standin.calls("nvmlEventSetCreate"), recorder.events, recorder.subscription_loss)


async def test_a_gpu_that_cannot_be_registered_is_unknown_until_it_can(node: Node) -> None:
    """A GPU that cannot be registered is unknown alone, and is registered later."""
    async with listening(node, "fail nvmlDeviceRegisterEvents 3 999") as heard:
        await until(lambda: heard.subscription_loss)
        assert [frozenset({GPUS[3]})] == [gpus for _, gpus in heard.subscription_loss]
        node.standin.xid(4, 79)
        await until(lambda: heard.events)

        await node.read(HURRY, gpus=range(7))  # another set of GPUs is registered anew
        await until(lambda: heard.subscription_loss[-1][0] is None)
        node.standin.xid(3, 79)
        await until(lambda: len(heard.events) == 2)

    assert [GPUS[4], GPUS[3]] == [event.gpu for event in heard.events]


async def test_a_gpu_without_identity_for_events_is_unknown_alone(node: Node) -> None:
    """The readings have found it: that nobody listens to it must not pass unnoticed."""
    await node.read()
    node.standin.play(script(more=["fail nvmlDeviceGetUUID 3 999"]))
    recorder = Recorder()
    async with background() as tasks:
        tasks.start_soon(node.driver.watch, recorder)
        await until(lambda: recorder.subscription_loss)
        node.standin.xid(4, 79)
        await until(lambda: recorder.events)

    assert [frozenset({GPUS[3]})] == [gpus for _, gpus in recorder.subscription_loss]


async def test_registration_is_retried_while_events_of_others_are_received(node: Node) -> None:
    """A GPU that could not be registered is tried again while events of the others are received."""
    async with listening(node, "fail nvmlDeviceRegisterEvents 3 999") as heard:
        await until(lambda: heard.subscription_loss)
        node.standin.play(script(more=[HURRY]))
        await until(lambda: len(heard.subscription_loss) == 2)
        node.standin.xid(3, 79)
        await until(lambda: heard.events)

    assert ([GPUS[3]], (None, frozenset())) == ([event.gpu for event in heard.events], heard.subscription_loss[1])


async def test_a_library_that_fails_during_registration_leaves_all_unknown(node: Node) -> None:
    """As when the driver is unloaded: it is no matter of the GPU that was asked first."""
    await node.read()
    node.standin.play(script(more=["fail nvmlDeviceGetSupportedEventTypes 3 1"]))
    recorder = Recorder()
    async with background() as tasks:
        tasks.start_soon(node.driver.watch, recorder)
        await until(lambda: recorder.subscription_loss)

    assert [frozenset(GPUS)] == [gpus for _, gpus in recorder.subscription_loss]


async def test_tries_to_listen_that_fail_leave_no_event_set_behind(node: Node) -> None:
    recorder = Recorder()
    await node.read("fail nvmlDeviceRegisterEvents * 999")
    async with background() as tasks:
        tasks.start_soon(node.driver.watch, recorder)
        while node.standin.calls("nvmlEventSetCreate") < 4:
            await node.clock.advance(LONGEST_PAUSE)

    assert node.standin.calls("nvmlEventSetCreate") - node.standin.calls("nvmlEventSetFree") <= 1


async def test_a_failed_wait_is_retried_at_once_then_at_growing_intervals(node: Node) -> None:
    """A wait that fails is tried again at once and then at growing intervals until it works."""
    async with listening(node) as heard:
        node.standin.play(script(more=[f"fail {WAIT} * 999"]))
        await until(lambda: heard.subscription_loss)
        reason, gpus = heard.subscription_loss[0]
        assert reason is not None and WAIT in reason
        assert frozenset(GPUS) == gpus

        tries = node.standin.calls(WAIT)
        for _ in range(60):
            await node.clock.advance(5.0)
        assert 1 <= node.standin.calls(WAIT) - tries <= 16, "after 1, 2, 4, 8, 16 and then every 30 s"
        assert 1 == len(heard.subscription_loss), "said once"

        node.standin.play(script())
        while len(heard.subscription_loss) < 2:
            await node.clock.advance(LONGEST_PAUSE)
        assert (None, frozenset()) == heard.subscription_loss[1]


async def test_where_events_are_no_more_nobody_stays_unknown_for_them(node: Node) -> None:
    """As after a driver was put in place that has none: the readings are then all there is."""
    async with listening(node) as heard:
        node.standin.play(script(more=[f"fail {WAIT} * 999"]))
        await until(lambda: heard.subscription_loss)
        node.standin.play(script(more=["fail nvmlDeviceGetSupportedEventTypes * 3"]))
        while len(heard.subscription_loss) < 2:
            await node.clock.advance(LONGEST_PAUSE)

    assert (None, frozenset()) == heard.subscription_loss[1]


async def test_a_wait_that_says_a_gpu_is_lost_makes_no_other_unknown(node: Node) -> None:
    """Which one it is the readings tell."""
    async with listening(node) as heard:
        node.standin.play(script(more=[f"fail {WAIT} * 15"]))
        await until(lambda: heard.subscription_loss)

    assert [frozenset()] == [gpus for _, gpus in heard.subscription_loss]


async def test_a_gpu_that_fails_is_listened_to_again_when_it_answers(node: Node) -> None:
    """A lost one in the set would end every wait for the others."""
    async with listening(node) as heard:
        await node.read(HURRY, "fail nvmlDeviceGetMemoryInfo 3 15")
        await until(lambda: not node.standin.listened_to(3))
        assert node.standin.listened_to(4)
        await node.read(HURRY)
        await until(lambda: node.standin.listened_to(3))

    assert [] == heard.subscription_loss


async def test_a_wait_that_hangs_holds_one_thread_and_the_readings_go_on(node: Node) -> None:
    async with listening(node) as heard:
        waits = node.standin.calls(WAIT)
        node.standin.play(script(more=[f"hang {WAIT}"]))
        await until(lambda: node.standin.calls(WAIT) > waits)
        await node.clock.advance(WAIT_SECONDS + DEADLINE)
        await until(lambda: heard.subscription_loss)
        reason, gpus = heard.subscription_loss[0]
        assert reason is not None and WAIT in reason and "within 6 s" in reason
        assert frozenset(GPUS) == gpus

        waits = node.standin.calls(WAIT)
        await node.clock.advance(300.0)
        assert waits == node.standin.calls(WAIT), "no second thread is sent after the first"
        assert 8 == len((await node.driver.read()).topology.gpus)

        node.standin.play(script())
        node.standin.release()
        node.standin.xid(3, 79)
        while not heard.events:
            await node.clock.advance(30.0)


async def test_a_lost_gpu_that_returns_is_seen_because_everybody_closes_nvml(node: Node) -> None:
    """NVML is reference counted: as long as one has it open, nobody sees a GPU that comes back."""
    await node.read()
    await node.clock.advance(REOPEN_SECONDS)
    lost, returned = "fail nvmlDeviceGetMemoryInfo 3 15", "gpu uuid=GPU-new pci=00000000:F9:00.0 late=1"
    async with listening(node, lost, returned) as heard:
        found = await node.driver.read()
        assert "GPU-new" in found.topology.gpu_by_id

        await until(lambda: node.standin.listened_to(8))
        node.standin.report(8, pynvml.nvmlEventTypeXidCriticalError, 79)
        await until(lambda: heard.events)
        assert ["GPU-new"] == [event.gpu for event in heard.events]


async def test_what_was_reported_while_other_gpus_are_registered_is_heard(node: Node) -> None:
    """Events belong to the set that they were reported to, and go with it."""
    async with listening(node) as heard:
        await node.read(HURRY, "hang nvmlEventSetCreate", gpus=range(7))
        await until(lambda: node.standin.calls("nvmlEventSetCreate") == 2)
        for gpu in (0, 3, 5):
            node.standin.xid(gpu, 79)
        node.standin.release()
        await until(lambda: len(heard.events) == 3)

    assert [GPUS[0], GPUS[3], GPUS[5]] == [event.gpu for event in heard.events]


async def test_what_was_reported_before_nvml_is_closed_is_heard(node: Node) -> None:
    async with listening(node) as heard, background() as tasks:
        pci_device(node.root, address(8), 1, "0x030200", "0x10de")
        waits = node.standin.calls(WAIT)
        await node.read(HURRY, f"hang {WAIT}")
        await until(lambda: node.standin.calls(WAIT) > waits)
        for gpu in (0, 3, 5):
            node.standin.xid(gpu, 79)
        tasks.start_soon(node.driver.read)  # which has NVML closed and opened anew
        await all_tasks_blocked()
        node.standin.release()
        await until(lambda: opened(node.standin) == 2)

        assert [GPUS[0], GPUS[3], GPUS[5]] == [event.gpu for event in heard.events]


async def test_a_gpu_that_sys_shows_anew_is_found_without_a_restart(node: Node) -> None:
    """It was added while the service ran: NVML, once open, would never tell."""
    added = f"gpu uuid=GPU-8 pci=0000{address(8).upper()} minor=8 late=1"
    async with listening(node):
        assert 8 == len((await node.read(added)).topology.gpus)
        await node.driver.read()
        assert 1 == opened(node.standin), "nothing has changed"

        pci_device(node.root, address(8), 1, "0x030200", "0x10de")
        await node.driver.read()
        assert 9 == len((await node.driver.read()).topology.gpus)
        await node.driver.read()
        assert 2 == opened(node.standin), "once is enough"


def opened(standin: StandIn) -> int:
    """How often NVML was opened by the readings and by whoever waits, each by itself."""
    return (standin.calls("nvmlInitWithFlags") + 1) // 2
