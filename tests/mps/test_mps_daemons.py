"""MPS daemons as real processes: started with their limits, killed, unresponsive, stubborn, and started again."""

import os
import signal
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import anyio
import pytest
from mps_support import MpsNode, mps_node
from nvml_support import script, standing_in
from structlog.testing import capture_logs

from topoalign.core.model.ids import GPU, DeviceID, ResourceName
from topoalign.mps.compute_mode import CALL_SECONDS
from topoalign.mps.daemon import END_SECONDS, HEALTH_SECONDS, START_SECONDS, STEADY_SECONDS
from topoalign.plugin_config.file_watch import POLL_SECONDS
from topoalign.plugin_config.mps_files import Serves, lock_resource_directory, read_served


def statement(gpu: int, **values: str | int) -> str:
    """A GPU of 80 GiB."""
    told = {"uuid": f"GPU-{gpu}", "pci": f"00000000:{gpu:02X}:00.0", "minor": gpu, "memory": 80 << 30, **values}
    return "gpu " + " ".join(f"{key}={value}" for key, value in told.items())


def modes(events: Sequence[str]) -> list[str]:
    return [event for event in events if event.startswith("GPU-")]


pytestmark = pytest.mark.anyio

BOTH = frozenset({DeviceID("GPU-0"), DeviceID("GPU-1")})
QUARTER = "name: nvidia.com/gpu, replicas: 4"
FEW = ResourceName("nvidia.com/few")


def behave(node: MpsNode, how: str, so: bool = True) -> None:
    """The program `fails` to start, is `unresponsive`, `refuses` limits, is `noisy` at SIGTERM, or `stubborn`."""
    if so:
        (node.folder / how).touch()
    else:
        (node.folder / how).unlink()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_daemon_serves_after_modes_and_limits_are_set(node: MpsNode) -> None:
    """Compute mode, daemon, limits, announcement, in this order; at the end `quit` and the mode of before."""
    node.share(QUARTER)
    async with node.up():
        await node.until(node.serving)
        pipe, log = node.root / GPU / "pipe", node.root / GPU / "log"
        expected = [
            "GPU-0 3",
            "GPU-1 3",
            f"start {pipe} {log} GPU-0,GPU-1",
            "set_default_device_pinned_mem_limit GPU-0 20480M",
            "set_default_device_pinned_mem_limit GPU-1 20480M",
            "set_default_active_thread_percentage 25",
        ]

        assert expected == node.events
        assert Serves(devices=BOTH, replicas=4) == node.serving()
        assert "" == node.reason()
        assert 0o1777 == (node.root / "shm").stat().st_mode & 0o7777
        pid = node.pid()
    assert not is_alive(pid)
    assert ["quit", "GPU-0 0", "GPU-1 0"] == node.events[-3:]
    assert node.serving() is None
    assert not (node.root / GPU / "serves").exists()


async def test_a_killed_daemon_is_started_again_with_its_limits(node: MpsNode) -> None:
    """Nothing is announced from the moment it ends until its successor has the limits; the mode stays meanwhile."""
    node.share(QUARTER)
    async with node.up():
        await node.until(node.serving)
        os.kill(node.pid(), signal.SIGKILL)
        await node.until(lambda: node.reason())

        assert node.serving() is None
        assert "status -9" in node.reason()
        assert 1 == node.count("start"), "it waits a second"
        await node.clock.advance(1)
        await node.until(node.serving)
        assert 2 == node.count("start") == node.daemon().starts
        assert 2 == node.count("set_default_active_thread_percentage 25")
        assert {"GPU-0 3", "GPU-1 3"} == {*modes(node.events)}


async def test_pauses_grow_until_a_daemon_has_served_for_a_minute(node: MpsNode) -> None:
    node.share(QUARTER)
    behave(node, "fails")
    with capture_logs() as logs:
        async with node.up():
            for failures, pause in enumerate((1.0, 2.0, 4.0), start=1):
                await node.until(partial(has_failed, node, failures))
                await node.clock.advance(pause)
            await node.until(partial(has_failed, node, 4))
            behave(node, "fails", so=False)
            await node.clock.advance(8)
            await node.until(node.serving)
            await node.clock.advance(STEADY_SECONDS)
            os.kill(node.pid(), signal.SIGKILL)
            await node.until(lambda: node.serving() is None)
            await node.until(lambda: "status -9" in node.reason())

    assert [1.0, 2.0, 4.0, 8.0, 1.0] == [each["pause"] for each in logs if "pause" in each]


def has_failed(node: MpsNode, times: int) -> bool:
    """Whether the daemon was started so often, and the last one has ended."""
    return "status 7" in node.reason() and times == node.daemon().starts


async def test_a_daemon_that_does_not_take_its_limits_is_not_announced(node: MpsNode) -> None:
    node.share(QUARTER)
    behave(node, "refuses")
    async with node.up():
        await node.until(lambda: "did not take the limit of 25 per cent" in node.reason())

        assert node.serving() is None


async def test_a_daemon_that_takes_no_commands_is_ended_in_time(node: MpsNode) -> None:
    node.share(QUARTER)
    behave(node, "unresponsive")
    async with node.up():
        await node.until((node.root / GPU / "pipe" / "nvidia-cuda-mps-control.pid").exists)
        pid = node.pid()
        await node.clock.advance(START_SECONDS)
        await node.until(lambda: "takes no commands" in node.reason())
        await node.clock.advance(END_SECONDS)
        await node.until(lambda: not is_alive(pid))


async def test_a_daemon_that_stops_answering_is_withdrawn_until_it_answers(node: MpsNode) -> None:
    node.share(QUARTER)
    async with node.up():
        await node.until(node.serving)
        pid = node.pid()
        behave(node, "unresponsive")
        await node.clock.advance(HEALTH_SECONDS)
        await node.until(lambda: node.serving() is None)
        assert "does not answer" in node.reason()

        behave(node, "unresponsive", so=False)
        await node.clock.advance(HEALTH_SECONDS)
        await node.until(node.serving)
        assert pid == node.pid(), "it is the same daemon: its clients go on"


async def test_limits_that_somebody_else_has_changed_are_set_again(node: MpsNode) -> None:
    """Root in a container may command the daemon by its pipes. The clients that are there go on."""
    node.share(QUARTER)
    async with node.up():
        await node.until(node.serving)
        pid, percentage = node.pid(), node.root / GPU / "pipe" / "percentage"
        percentage.write_text("100.0\n")
        await node.clock.advance(HEALTH_SECONDS)
        await node.until(lambda: "25.0\n" == percentage.read_text())

        assert 4 == node.count("set_default_device_pinned_mem_limit"), "of both GPUs, twice"
        assert node.serving() and pid == node.pid()


async def test_a_daemon_whose_limits_were_changed_is_withdrawn_without_them(node: MpsNode) -> None:
    node.share(QUARTER)
    async with node.up():
        await node.until(node.serving)
        pid = node.pid()
        behave(node, "refuses")
        (node.root / GPU / "pipe" / "percentage").write_text("100.0\n")
        await node.clock.advance(HEALTH_SECONDS)
        await node.until(lambda: node.serving() is None)
        assert "did not take the limit of 25 per cent" in node.reason()
        behave(node, "refuses", so=False)
        await node.clock.advance(HEALTH_SECONDS)
        await node.until(node.serving)
        assert pid == node.pid()


@pytest.mark.parametrize("how", ["noisy", "stubborn"])
async def test_a_daemon_that_does_not_quit_is_ended_by_signals(node: MpsNode, how: str) -> None:
    node.share(QUARTER)
    behave(node, how)
    async with node.up():
        await node.until(node.serving)
        pid = node.pid()
        node.share()
        await node.clock.advance(POLL_SECONDS)
        await node.until(lambda: node.count("quit"))
        assert is_alive(pid)
        await node.clock.advance(END_SECONDS)
        if how == "noisy":
            await node.until(lambda: "TERM" in node.events)
        else:
            await node.clock.advance(END_SECONDS)
        await node.until(lambda: not is_alive(pid))
        await node.until(lambda: "GPU-1 0" in node.events)


async def test_a_daemon_that_a_killed_process_left_is_told_to_quit(node: MpsNode) -> None:
    """Its limits may be others, and nobody would notice its end."""
    node.share(QUARTER)
    pipe = node.root / GPU / "pipe"
    pipe.mkdir(parents=True)
    environment = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(pipe)}
    former = await anyio.open_process([node.program, "-f"], env=environment, stdin=subprocess.DEVNULL, stdout=None)
    await node.until((pipe / "nvidia-cuda-mps-control.pid").exists)
    async with node.up():
        await node.until(node.serving)

        assert -signal.SIGTERM == await former.wait()
        assert former.pid != node.pid()
        assert ["start", "GPU-0", "GPU-1", "quit", "start"] == [event.split()[0] for event in node.events[:5]]


async def test_a_changed_configuration_restarts_only_what_it_changes(node: MpsNode) -> None:
    other = "resources: {gpus: [{uuids: [GPU-1], name: few}]}\n"
    node.share(QUARTER, "name: few, replicas: 2", more=other)
    async with node.up():
        await node.until(lambda: node.serving() and node.serving(FEW))
        kept, ended = node.pid(FEW), node.pid()
        node.share("name: gpu, replicas: 8", "name: few, replicas: 2", more=other)
        await node.clock.advance(POLL_SECONDS)
        await node.until(lambda: node.serving() == Serves(devices=frozenset({DeviceID("GPU-0")}), replicas=8))

        assert kept == node.pid(FEW) and is_alive(kept)
        assert not is_alive(ended)
        node.share("name: few, replicas: 2", more=other)
        await node.clock.advance(POLL_SECONDS)
        await node.until(lambda: node.events[-1] == "GPU-0 0")
        assert node.serving() is None and node.serving(FEW)
        assert "" == node.reason()


async def test_a_changed_root_moves_the_daemons(node: MpsNode) -> None:
    """Allocate mounts the pipes below the root that is configured now."""
    other = "resources: {gpus: [{uuids: [GPU-1], name: few}]}\n"
    node.share(QUARTER, more=other)
    async with node.up():
        await node.until(node.serving)
        former = node.root
        ended = node.pid()
        node.root = node.folder / "elsewhere"
        node.share(QUARTER, "name: few, replicas: 2", more=other)
        await node.clock.advance(POLL_SECONDS)
        await node.until(lambda: node.serving(FEW))

        assert not is_alive(ended)
        assert read_served(former, GPU) is None
        await node.until(node.serving)


async def test_without_sharing_by_mps_nothing_is_read_and_nothing_is_started(node: MpsNode) -> None:
    node.share(more="sharing: {timeSlicing: {resources: [{name: gpu, replicas: 4}]}}\n")
    async with node.up():
        await node.until(lambda: not node.reason())

        assert [] == node.events
        assert not node.root.exists()


async def test_a_program_that_is_missing_is_named_with_a_remedy(node: MpsNode) -> None:
    node.share(QUARTER)
    node.program.rename(node.folder / "later")
    async with node.up():
        await node.until(lambda: "cannot run" in node.reason())
        assert "TOPOALIGN_MPS_CONTROL" in node.reason()

        (node.folder / "later").rename(node.program)
        await node.clock.advance(1)
        await node.until(node.serving)


async def test_a_daemon_that_cannot_be_announced_is_ended_and_tried_again(node: MpsNode) -> None:
    node.share(QUARTER)
    obstacle = node.root / GPU / "serves"
    obstacle.mkdir(parents=True)
    async with node.up():
        await node.until(lambda: "Is a directory" in node.reason() and node.count("quit"))

        obstacle.rmdir()
        await node.clock.advance(1)
        await node.until(node.serving)


async def test_gpus_are_set_back_although_the_mode_of_another_was_refused(nvml_library: Path, tmp_path: Path) -> None:
    with mps_node(nvml_library, tmp_path, script(gpus=range(2), more=["fail nvmlDeviceSetComputeMode 1 4"])) as node:
        node.share(QUARTER)
        async with node.up():
            await node.until(lambda: "NVML" in node.reason())
            assert ["GPU-0 3"] == node.events

        assert ["GPU-0 3", "GPU-0 0"] == node.events


async def test_a_driver_that_comes_late_is_waited_for(nvml_library: Path, tmp_path: Path) -> None:
    with mps_node(nvml_library, tmp_path, "fail nvmlDeviceGetCount_v2 * 9") as node:
        node.share(QUARTER)
        async with node.up():
            await node.until(lambda: "NVML" in node.reason())

            assert [] == node.events


async def test_pauses_begin_anew_once_the_gpus_were_read(nvml_library: Path, tmp_path: Path) -> None:
    failing = script(gpus=range(2), more=["fail nvmlDeviceGetCount_v2 * 9"])
    with standing_in(nvml_library, tmp_path, failing) as driver, capture_logs() as logs:
        node = MpsNode(tmp_path)
        node.share(QUARTER)

        def pauses() -> list[float]:
            return [each["pause"] for each in logs if each["event"] == "no MPS daemon can be started"]

        async with node.up():
            await node.until(lambda: len(pauses()) >= 2)
            driver.play(script(gpus=range(2)))
            await node.clock.advance(2)
            await node.until(node.serving)
            before = pauses()
            driver.play(failing)
            node.share("name: gpu, replicas: 8")
            await node.clock.advance(POLL_SECONDS)
            await node.until(lambda: len(pauses()) > len(before))

        assert [1.0, 2.0] == before[:2]
        assert 1.0 == pauses()[len(before)]


async def test_a_driver_that_hangs_is_named_and_waited_for(nvml_library: Path, tmp_path: Path) -> None:
    with standing_in(nvml_library, tmp_path, script(gpus=range(2), more=["hang nvmlDeviceGetName"])) as driver:
        node = MpsNode(tmp_path)
        node.share(QUARTER)
        async with node.up():
            await node.until(driver.hanging)
            await node.clock.advance(CALL_SECONDS)
            await node.until(lambda: f"not answered nvmlDeviceGetName within {CALL_SECONDS:g} s" in node.reason())

            driver.play(script(gpus=range(2)))
            driver.release()
            await node.clock.advance(1)
            await node.until(node.serving)


async def test_a_driver_that_hangs_at_an_end_keeps_no_other_daemon(nvml_library: Path, tmp_path: Path) -> None:
    """The mode that could not be set back is logged; what the configuration says now is followed."""
    other = "resources: {gpus: [{uuids: [GPU-1], name: few}]}\n"
    with standing_in(nvml_library, tmp_path, script(gpus=range(2))) as driver, capture_logs() as logs:
        node = MpsNode(tmp_path)
        node.share(QUARTER, more=other)
        async with node.up():
            await node.until(node.serving)
            driver.play(script(gpus=range(2), more=["hang nvmlDeviceSetComputeMode"]))
            node.share("name: few, replicas: 2", more=other)
            await node.clock.advance(POLL_SECONDS)
            await node.until(driver.hanging)
            await node.clock.advance(CALL_SECONDS)
            await node.until(lambda: [FEW] == [*node.daemons.daemons] if node.daemons else False)
            driver.play(script(gpus=range(2)))
            driver.release()
            await node.until(partial(node.serving, FEW))

    stuck = [each for each in logs if "stay in compute mode" in each["event"]]
    assert [["GPU-0"]] == [each["devices"] for each in stuck]


async def test_one_process_alone_uses_the_directory_of_a_resource(node: MpsNode) -> None:
    node.share(QUARTER)
    lock = lock_resource_directory(node.root / GPU)
    assert lock is not None
    async with node.up():
        await node.until(lambda: "another topoalign mps" in node.reason())
        assert [] == node.events, "the GPUs are the other's"

        os.close(lock)
        await node.clock.advance(1)
        await node.until(node.serving)


async def test_a_gpu_that_is_lost_is_left_out_when_its_daemon_starts_again(nvml_library: Path, tmp_path: Path) -> None:
    both = [statement(0), statement(1)]
    with mps_node(nvml_library, tmp_path, *both, "fail nvmlDeviceGetHandleByIndex_v2 1 15") as node:
        node.share(QUARTER)
        async with node.up():
            await node.until(node.serving)

            assert Serves(devices=frozenset({DeviceID("GPU-0")}), replicas=4) == node.serving()


async def test_more_replicas_than_an_old_gpu_has_clients_are_not_served(nvml_library: Path, tmp_path: Path) -> None:
    with mps_node(nvml_library, tmp_path, statement(0, name="Tesla_V100", capability=70)) as node:
        node.share("name: gpu, replicas: 17")
        async with node.up():
            await node.until(lambda: "17 replicas are more than the clients that Tesla V100" in node.reason())
            assert [] == node.events
            node.share("name: gpu, replicas: 16")
            await node.clock.advance(POLL_SECONDS)
            await node.until(node.serving)


async def test_a_gpu_in_mig_mode_is_left_out(nvml_library: Path, tmp_path: Path) -> None:
    with mps_node(nvml_library, tmp_path, statement(0, mig=1), statement(1)) as node:
        node.share(QUARTER)
        async with node.up():
            await node.until(node.serving)

            assert Serves(devices=frozenset({DeviceID("GPU-1")}), replicas=4) == node.serving()
