"""GPUs that fail, flap, vanish and hang, from the driver's library to what the kubelet hands out."""

import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pynvml
import pytest
from faults_support import THOROUGH
from kubelet_support import learn_owners, pod
from node_support import FOREVER, HURRY, NODE, READ_SECONDS, WholeNode, whole_node
from nvml_support import host_tree, script, standing_in, switch_links, turns

from topoalign.core import wire
from topoalign.core.model.decisions import Admission
from topoalign.core.model.events import Allocation, DeviceHealth, DeviceHealthChanged, HealthState
from topoalign.core.model.ids import GPU, DeviceID
from topoalign.core.model.maintenance import DevicesRequest, Override
from topoalign.core.ports import Stream
from topoalign.plugin_config.configuration import Health

pytestmark = pytest.mark.anyio

SHARED = """\
version: v1
sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}
"""
MIG = "mig 2 gi=1 ci=0 uuid=MIG-2-1 name=MIG_1g.10gb memory=9728 slices=1 compute=1"
GPUS = frozenset(f"GPU-{i}" for i in range(8))
QUIET_SECONDS = Health().quiet_seconds


class Lab:
    """Where nodes are set up, one after the other, on the same host and state directory."""

    def __init__(self, library: Path, folder: Path) -> None:
        self.library, self.folder = library, folder
        self.host, self.state = host_tree(folder / "host"), folder / "state"

    @asynccontextmanager
    async def node(
        self, *more: str, driver_seconds: str = FOREVER, config: str = "", offered: int = 8
    ) -> AsyncIterator[WholeNode]:
        machine = script(more=[HURRY, *switch_links(8, 18), *more])
        loaded = Path(tempfile.mkdtemp(dir=self.folder))  # a copy of its own: threads may still be in the one before
        with standing_in(self.library, loaded, machine) as standin:
            async with whole_node(
                self.host, standin, self.state, driver_seconds=driver_seconds, config=config, offered=offered
            ) as node:
                yield node


async def override(node: WholeNode, how: Override, *devices: str, reason: str = "") -> dict[DeviceID, DeviceHealth]:
    request = msgspec.json.encode(DevicesRequest(node=NODE, devices=devices, reason=reason))
    answer = await node.bus.ask(wire.devices_subject(NODE, how), request, 10.0)
    return wire.decode_answer(answer, dict[DeviceID, DeviceHealth])


def not_ready(node: WholeNode) -> dict[str, str]:
    """Check -> why it is not content."""
    results = {name: check() for name, check in node.context.checks.items()}
    return {name: reason for name, reason in results.items() if reason is not None}


@pytest.fixture
def lab(nvml_library: Path, tmp_path: Path) -> Lab:
    return Lab(nvml_library, tmp_path)


async def used_by(node: WholeNode, name: str = "train", gpus: int = 2) -> Allocation:
    """What the kubelet gave a new pod."""
    assert isinstance(await node.kubelet.admit(pod(name, gpus=gpus)), Admission)
    await learn_owners(node.kubelet)
    (held,) = (await node.explain(f"default/{name}")).allocations
    return held


def index(gpu: DeviceID) -> int:
    return int(gpu.removeprefix("GPU-"))


async def heard(node: WholeNode, gpu: int, xid: int, **part: int) -> None:
    """This XID happens, and discovery has received it."""
    labels = {"xid": str(xid)}
    before = node.counted("topoalign_discovery_xids_total", labels)
    node.standin.xid(gpu, xid, **part)
    await node.until(lambda: node.counted("topoalign_discovery_xids_total", labels) > before)


def announced(node: WholeNode) -> list[DeviceHealthChanged]:
    """All that was said of the health, oldest first."""
    events = [wire.decode_event(received.message) for received in node.bus._logs[Stream.NODES].kept]
    return [event for event in events if isinstance(event, DeviceHealthChanged)]


async def test_c18_a_gpu_that_fails_while_it_is_used(lab: Lab) -> None:
    """
    It is Unhealthy within a second, its pod keeps it, whoever asks is told, and new pods get the others and never it.
    """
    async with lab.node() as node:
        held = await used_by(node)
        first, second = held.devices[GPU]

        await heard(node, index(first), 79)
        await node.clock.advance(1.0)
        await node.until(lambda: len(node.healthy()) == 7)

        assert GPUS - {first} == node.healthy()
        explained = await node.explain("default/train")
        assert (held,) == explained.allocations, "kept"
        assert [first] == list(explained.ailing), "and flagged"
        assert "XID 79 (the GPU has fallen off the bus: reboot the node)" in explained.ailing[first].reason
        (shown,) = (await node.get("/v1/allocations"))["items"]
        assert {first: "unhealthy"} == {device: health["state"] for device, health in shown["ailing"].items()}

        others = await used_by(node, "others", gpus=6)
        assert GPUS - {first, second} == set(others.devices[GPU]), "no other GPU is the worse for it"
        refused = await node.kubelet.admit(pod("more", gpus=1))
        assert not isinstance(refused, Admission), "not offered"


async def test_c18_errors_of_programs_cost_no_gpu(lab: Lab) -> None:
    async with lab.node() as node:
        said = len(announced(node))
        for xid in (13, 31, 43, 45, 68, 94):
            await heard(node, 0, xid)
        node.standin.report(1, pynvml.nvmlEventTypeSingleBitEccError, 1)
        await node.until(lambda: node.counted("topoalign_discovery_events_total", {"kind": "single-bit-ecc"}))
        await node.clock.advance(2.0)

        assert (GPUS, said) == (node.healthy(), len(announced(node)))


async def test_c18_all_shares_of_a_gpu_fail_with_it(lab: Lab) -> None:
    """NVIDIA's plugin takes one share of four out of use (k8s-device-plugin 1929)."""
    config = lab.folder / "config.yaml"
    config.write_text(SHARED)
    async with lab.node(config=str(config), offered=32) as node:
        await heard(node, 0, 79)
        await node.clock.advance(1.0)
        await node.until(lambda: len(node.healthy()) < 32)

        assert {f"GPU-{i}::{n}" for i in range(1, 8) for n in range(4)} == node.healthy()


async def test_c19_a_gpu_that_flaps_ten_times_a_second_for_a_minute(lab: Lab) -> None:
    """
    The kubelet hears of it at most once a second; it comes back by itself once it has been quiet, and at once at the word of
    an operator. Between XIDs the driver is content: each reading finds the GPU all right.
    """
    seconds = 60 if THOROUGH else 15
    async with lab.node() as node:
        await node.clock.advance(1.0)
        endpoint = node.kubelet.plugins.endpoints[GPU]
        updates = [0] * seconds
        listed = endpoint.devices
        for tick in range(10 * seconds):
            if tick % 2 == 0:
                await heard(node, 3, 999)
            await node.clock.advance(0.1)
            if endpoint.devices is not listed:
                listed, updates[tick // 10] = endpoint.devices, updates[tick // 10] + 1
        assert [1, 0] == [max(updates), min(updates[1:])]
        assert 1 == sum(updates), "it is out of use, and stays so"

        await node.clock.advance(QUIET_SECONDS - 1.0)
        assert GPUS - {"GPU-3"} == node.healthy(), "quiet counts from the last XID on"
        while len(node.healthy()) < 8:
            await node.clock.advance(READ_SECONDS)
        last = (announced(node))[-1]
        assert HealthState.HEALTHY == last.devices[DeviceID("GPU-3")].state

        await heard(node, 3, 999)
        await node.clock.advance(1.0)
        await node.until(lambda: len(node.healthy()) == 7)
        await node.clock.advance(1.0)
        answer = await override(node, "heal", "3")
        assert HealthState.HEALTHY == answer[DeviceID("GPU-3")].state
        await node.clock.advance(1.0)
        await node.until(lambda: len(node.healthy()) == 8)


async def test_c20_a_gpu_that_goes_and_comes_back_under_another_index(lab: Lab) -> None:
    """It is the same one by its uuid: its pod has it all along, and its index is shown as it is now."""
    async with lab.node() as node:
        held = await used_by(node)
        first, second = held.devices[GPU]
        rest = [i for i in range(8) if i != index(first)]

        await node.play(*switch_links(7, 18), gpus=rest)
        await node.reading()
        await node.until(lambda: len(node.healthy()) == 7)
        gone = await node.explain("default/train")
        assert ((held,), [first]) == (gone.allocations, list(gone.ailing))
        assert "lost" in gone.ailing[first].reason

        await node.play(*switch_links(8, 18), gpus=[*rest, index(first)])
        await node.reading()
        shown = (await node.get(f"/v1/nodes/{NODE}"))["topology"]["gpus"]
        assert {first: 7, second: rest.index(index(second))} == {
            gpu["id"]: gpu["index"] for gpu in shown if gpu["id"] in (first, second)
        }
        await node.clock.advance(QUIET_SECONDS)
        await node.reading()
        await node.until(lambda: len(node.healthy()) == 8)
        back = await node.explain("default/train")
        assert ((held,), {}) == (back.allocations, back.ailing), "the allocation has survived"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("hang nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo within 60 s"),
        ("hang nvmlDeviceGetCount_v2", "nvmlDeviceGetCount within 60 s"),
        ("fail nvmlDeviceGetCount_v2 * 9", "nvmlDeviceGetCount"),
    ],
)
async def test_c21_a_driver_that_hangs_or_dies(lab: Lab, fault: str, reason: str) -> None:
    """
    The kubelet sees every GPU as Unhealthy and forgets none, everybody is told why, and the other services go on; it is over
    when the driver answers again.
    """
    async with lab.node(driver_seconds="60") as node:
        held = await used_by(node)
        await node.play(*switch_links(8, 18), fault)
        while node.healthy() or "discovery" not in not_ready(node):
            await node.clock.advance(1.0)

        assert 8 == node.kubelet.capacity(GPU), "listed"
        assert reason in not_ready(node)["discovery"]
        assert {HealthState.UNKNOWN} == {
            health.state for device, health in (announced(node))[-1].devices.items() if device in GPUS
        }
        explained = await node.explain("default/train")
        assert ((held,), set(held.devices[GPU])) == (explained.allocations, set(explained.ailing))
        (shown,) = (await node.get("/v1/allocations"))["items"]
        assert set(held.devices[GPU]) == set(shown["ailing"]), "the registry tells of it"
        assert not isinstance(await node.kubelet.admit(pod("more", gpus=1)), Admission)

        await node.play(*switch_links(8, 18))
        node.standin.release()
        while len(node.healthy()) < 8:
            await node.clock.advance(1.0)


async def test_c21_a_driver_whose_calls_are_slow_costs_nothing(lab: Lab) -> None:
    """However long they take on a busy machine: by a deadline of a second, only what hangs is late."""
    async with lab.node("delay 100", driver_seconds="1") as node:
        await node.reading()
        await node.until(lambda: node.healthy() == GPUS)  # the list comes over a socket, in its own time
        assert {} == not_ready(node)
        assert 0 == node.counted("topoalign_discovery_read_failures_total")


@pytest.mark.parametrize("missing", ["the driver", "the module"])
async def test_c21_a_missing_driver_or_module_lists_nothing_and_ends_nothing(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """No device is listed that was never read. The tries come ever more rarely, and the first that works is enough."""
    if missing == "the module":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    async with lab.node("fail nvmlInitWithFlags * 9", offered=0) as node:
        await node.until(lambda: node.counted("topoalign_discovery_read_failures_total"))
        for _ in range(300):
            await node.clock.advance(1.0)
        assert 0 == node.kubelet.capacity(GPU)
        assert 5 <= node.counted("topoalign_discovery_reads_total") <= 15
        wanted = "nvmlInit" if missing == "the driver" else "pynvml is not installed"
        assert wanted in not_ready(node)["discovery"]

        monkeypatch.undo()
        pynvml.nvmlLib, pynvml._nvmlGetFunctionPointer_cache = node.standin.loaded, {}
        await node.play(*switch_links(8, 18))
        while len(node.healthy()) < 8:
            await node.clock.advance(1.0)


async def test_c21_events_that_hang_make_gpus_unknown_and_readings_go_on(lab: Lab) -> None:
    async with lab.node(driver_seconds="60") as node:
        await node.play(*switch_links(8, 18), "hang nvmlEventSetWait_v2")
        while node.healthy():
            await node.clock.advance(1.0)
        assert 8 == node.kubelet.capacity(GPU)
        assert "nvmlEventSetWait_v2 within 61 s" in not_ready(node)["hardware events"]
        assert "discovery" not in not_ready(node)

        await node.play(*switch_links(8, 18))
        node.standin.release()
        while len(node.healthy()) < 8:
            await node.clock.advance(1.0)
        assert "hardware events" not in not_ready(node)


async def test_c21_a_lost_gpu_affects_neither_health_nor_choice_of_others(lab: Lab) -> None:
    """With GPU 3 lost, preferred allocation among the others works as before (k8s-device-plugin 2038)."""
    async with lab.node() as node:
        await node.play(*switch_links(8, 18), "fail nvmlDeviceGetMemoryInfo 3 15", "fail nvmlEventSetWait_v2 * 15")
        await node.reading()
        await node.until(lambda: len(node.healthy()) == 7)

        held = await used_by(node, gpus=4)
        assert {"GPU-4", "GPU-5", "GPU-6", "GPU-7"} == set(held.devices[GPU]), "the four of one NUMA node"
        assert GPUS - {"GPU-3"} == node.healthy()


async def test_mig_set_up_while_the_node_runs_is_announced_without_restart(lab: Lab) -> None:
    """MIG that is set up while the node runs is published without a restart."""
    config = lab.folder / "config.yaml"
    config.write_text("flags: {migStrategy: mixed}\n")
    async with lab.node(config=str(config)) as node:
        machine = script(more=[HURRY, *switch_links(8, 18), MIG])
        await node.play_machine(machine.replace("uuid=GPU-2 ", "uuid=GPU-2 mig=1 "))
        node.standin.report(2, pynvml.nvmlEventMigConfigChange)
        await node.until(lambda: node.counted("topoalign_discovery_events_total", {"kind": "changed"}))
        reads = node.counted("topoalign_discovery_read_seconds_count")
        await node.clock.advance(1.0)
        await node.until(lambda: node.counted("topoalign_discovery_read_seconds_count") > reads)
        await turns()

        shown = (await node.get(f"/v1/nodes/{NODE}"))["topology"]["gpus"][2]
        assert ["MIG-2-1"] == [part["uuid"] for part in shown["mig"]]

        await heard(node, 2, 999, gi=1, ci=0)
        await node.clock.advance(1.0)
        last = (announced(node))[-1].devices
        assert (HealthState.UNHEALTHY, HealthState.HEALTHY) == (
            last[DeviceID("MIG-2-1")].state,
            last[DeviceID("GPU-2")].state,
        )


async def test_cordons_outlive_restarts_and_what_holds_the_device_keeps_it(lab: Lab) -> None:
    async with lab.node() as node:
        held = await used_by(node)
        first = held.devices[GPU][0]
        await node.clock.advance(1.0)
        answer = await override(node, "cordon", str(index(first)), reason="fan")
        assert (HealthState.HEALTHY, True, "cordoned: fan") == (
            answer[first].state,
            answer[first].cordoned,
            answer[first].reason,
        )
        await node.until(lambda: len(node.healthy()) == 7)
        explained = await node.explain("default/train")
        assert ((held,), [first]) == (explained.allocations, list(explained.ailing))

    async with lab.node(offered=7) as node:
        assert GPUS - {first} == node.healthy()
        await node.clock.advance(1.0)
        await override(node, "uncordon", first)
        await node.until(lambda: len(node.healthy()) == 8)


async def test_a_gpu_waiting_for_a_reset_still_waits_after_a_restart(lab: Lab) -> None:
    """A GPU that waits for a reset still does after a restart of the service."""
    async with lab.node() as node:
        await heard(node, 5, 48)

    async with lab.node(offered=7) as node:
        await node.clock.advance(2 * QUIET_SECONDS)
        assert GPUS - {"GPU-5"} == node.healthy()
