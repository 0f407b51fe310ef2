"""The allocator as it runs in a process: by its settings and the configuration file, beside discovery, below a kubelet."""

import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from kubelet_support import offers, pod, short_directory
from slot_support import in_slots

from topoalign.allocator import main as allocator
from topoalign.allocator.metrics import use_series
from topoalign.allocator.takeover import SUCCESSOR_LOCK
from topoalign.core import wire
from topoalign.core.model.decisions import Admission
from topoalign.core.model.errors import InvalidField, StateFault
from topoalign.core.model.events import KubeletObserved, UsageObserved
from topoalign.core.model.holdings import base_of
from topoalign.core.model.ids import GPU, ContainerName, Namespace, NodeName, PodName
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Bus, Stream
from topoalign.discovery import main as discovery
from topoalign.machines import load_machine
from topoalign.runtime.clock import SystemClock
from topoalign.runtime.context import Context
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet
from topoalign.testing.manual_clock import all_tasks_blocked

pytestmark = pytest.mark.anyio

MACHINE = load_machine("dgx-a100").topology
LIST = "/var/run/nvidia-container-devices"


def configuration(ways: str, ids: str) -> str:
    return f"version: v1\nflags:\n  plugin:\n    deviceListStrategy: {ways}\n    deviceIDStrategy: {ids}\n"


def context(directory: Path, file: Path, compat: str = "gaia") -> Context:
    environment = {
        "NODE": "node-1",
        "MACHINE": "dgx-a100",
        "CONFIG": str(file),
        "STATE_DIR": str(directory / "state"),
        "KUBELET_DIR": str(directory / "device-plugins"),
        "CDI_DIR": str(directory / "cdi"),
        "COMPAT": compat,
    }
    return Context(
        bus=MemoryBus(),
        clock=SystemClock(),
        environment={f"TOPOALIGN_{name}": value for name, value in environment.items()},
    )


@asynccontextmanager
async def node(
    text: str, compat: str = "gaia", offered: Topology = MACHINE
) -> AsyncIterator[tuple[Context, FakeKubelet, Path]]:
    """Runs both services and a kubelet; yields when the kubelet can give out all that is `offered`."""
    with short_directory() as directory:
        (directory / "state").mkdir(mode=0o700)
        file = directory / "config.yaml"
        file.write_text(text)
        it = context(directory, file, compat)
        kubelet = FakeKubelet(directory / "device-plugins", directory / "pod-resources", MACHINE, AdmissionRules())
        async with anyio.create_task_group() as tasks:
            await tasks.start(kubelet.run)
            for service in (discovery, allocator):
                await tasks.start(service.serve, it)
            await kubelet.until(offers(offered))
            yield it, kubelet, file
            tasks.cancel_scope.cancel()


async def test_containers_follow_the_configuration_file_and_its_changes() -> None:
    """Containers are told of their devices by the configuration file, and by the new one after it changed."""
    async with node(configuration("volume-mounts", "uuid")) as (it, kubelet, file):
        await kubelet.admit(pod("before", gpus=2))
        changed = it.configuration.changed
        file.write_text(configuration("[envvar]", "index"))
        it.reload.ask()
        with anyio.fail_after(30):
            await changed.wait()
        await kubelet.admit(pod("after", gpus=2))

        first, second = (
            kubelet.running[Namespace("default"), PodName(name)].responses[ContainerName("main"), GPU]
            for name in ("before", "after")
        )
        uuids = {mount.container_path.removeprefix(f"{LIST}/") for mount in first.mounts}
        assert {"NVIDIA_VISIBLE_DEVICES": LIST} == first.envs
        assert uuids < {gpu.id for gpu in MACHINE.gpus}
        held = {gpu.index for gpu in MACHINE.gpus if gpu.id in uuids}
        assert 2 == len({*map(int, second.envs["NVIDIA_VISIBLE_DEVICES"].split(","))} - held)
        assert [] == second.mounts


async def test_what_the_kubelet_decides_by_is_announced() -> None:
    """By the service as it runs: the rules, why they are its own, and that no other plugin lists devices."""
    async with node("version: v1\n") as (it, _, _):
        with anyio.fail_after(30):
            kubelet = await announced(it.bus)

    assert {} == kubelet.devices, "what discovery announces is not said twice"
    assert ("best-effort", "gaia") == (kubelet.rules.policy, kubelet.rules.compat)
    assert kubelet.rules.unknown.startswith("the node's own settings stand for")


@pytest.mark.parametrize(("compat", "gpus"), [("", 1), ("hami", 2)])
async def test_containers_get_gpus_as_the_setting_compat_says(compat: str, gpus: int) -> None:
    """Two slots that no reservation names: HAMi spreads them, and topoalign takes both of one GPU."""
    async with node("version: v1\nsharing:\n  slots: {}\n", compat, in_slots(MACHINE)) as (_, kubelet, _):
        for name in ("first", "second"):
            assert isinstance(await kubelet.admit(pod(name, gpus=1)), Admission)
        parts = [part for running in kubelet.running.values() for part in running.parts()]

    assert gpus == len({base_of(slot) for _, _, slots in parts for slot in slots})


async def test_use_is_measured_below_a_kubelet_although_nobody_scrapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first slot on: the service asks discovery."""
    monkeypatch.setattr(use_series, "SAMPLE_SECONDS", 0.05)
    asked = anyio.Event()
    async with node("version: v1\nsharing:\n  slots: {}\n", "", in_slots(MACHINE)) as (it, kubelet, _):
        ask = it.bus.ask

        async def delivery(subject: str, question: bytes, within: float) -> bytes:
            if subject == wire.discovery_subject(NodeName("node-1"), "use"):
                asked.set()
            return await ask(subject, question, within)

        monkeypatch.setattr(it.bus, "ask", delivery)
        await all_tasks_blocked()
        before = asked.is_set()
        await kubelet.admit(pod("first", gpus=1))
        with anyio.fail_after(30):
            await asked.wait()

    assert not before, "nobody has an amount yet"


async def announced(bus: Bus) -> KubeletObserved:
    """What is first said of a kubelet that has told which devices plugins list."""
    async with bus.follow(Stream.NODES, "topoalign.v1.usage.node-1") as messages:
        async for received in messages:
            event = wire.decode_event(received.message)
            assert isinstance(event, UsageObserved)
            if event.kubelet is not None and event.kubelet.devices is not None:
                return event.kubelet
    raise AssertionError("the bus never ends")


async def test_cdi_without_a_driver_makes_the_node_unready() -> None:
    """CDI without a driver keeps the node from being ready, and the reason says what to do."""
    async with node(configuration("cdi-cri", "uuid")) as (it, _, _):
        await all_tasks_blocked()
        reason = it.checks["containers"]()

        assert reason is not None
        assert "libcuda.so" in reason
        assert "containerDriverRoot" in reason


async def test_a_former_allocator_goes_on_polling_whether_the_node_is_held() -> None:
    async with node(configuration("envvar", "uuid")) as (it, _, file):
        line = os.open(file.parent / "state" / SUCCESSOR_LOCK, os.O_RDWR | os.O_CREAT)
        fcntl.flock(line, fcntl.LOCK_EX)
        with anyio.fail_after(30):
            await it.superseded.wait()
        os.close(line)

        assert it.life["successor"]() is None


async def test_a_second_allocator_of_a_node_ends_before_it_opens_its_record() -> None:
    """
    An allocator of a node that has one already ends before it opens its record. Its state directory is another one, so no
    lock tells it of the first.
    """
    async with node(configuration("envvar", "uuid")) as (it, _, file):
        state = file.parent / "other"
        environment = {**it.environment, "TOPOALIGN_STATE_DIR": str(state)}
        with anyio.fail_after(30), pytest.raises(StateFault, match="another allocator answers for node 'node-1'"):
            await allocator.serve(Context(bus=it.bus, clock=it.clock, environment=environment))

        assert not (state / "journal").exists()


async def test_an_invalid_first_configuration_prevents_the_start(tmp_path: Path) -> None:
    """If the first configuration is invalid, the allocator does not start, and the error names the field."""
    file = tmp_path / "config.yaml"
    file.write_text(configuration("by-pigeon", "uuid"))

    with pytest.raises(InvalidField, match=r"flags\.plugin\.deviceListStrategy"):
        await allocator.serve(context(tmp_path, file))
