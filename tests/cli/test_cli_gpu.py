"""`topoalign gpu` against the discovery service of a described machine, over a real NATS server."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from anyio.from_thread import start_blocking_portal
from discovery_support import NODE, QUIET_SECONDS, discovery_with
from fact_support import mig_device

from topoalign.cli import root
from topoalign.cli.link import AnnouncedNode
from topoalign.core import wire
from topoalign.core.admission.prediction import to_kubelet_rules
from topoalign.core.model.events import (
    Allocation,
    AllocationGranted,
    AllocationsSnapshot,
    KubeletObserved,
    Owner,
    UsageObserved,
)
from topoalign.core.model.ids import GPU, AllocationID, ContainerName, DeviceID, Namespace, PodName
from topoalign.core.model.kubelet import CheckpointEntry
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.core.ports import HardwareEvent, Occurrence, Stream
from topoalign.discovery.device_record import RecordFile
from topoalign.discovery.drivers.auto import DescribedDriver
from topoalign.discovery.health_keeper import HealthKeeper
from topoalign.discovery.xids import XidRules
from topoalign.runtime.clock import SystemClock
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_server import local_nats
from topoalign.runtime.tasks import background

OWNER = Owner(namespace=Namespace("ml"), pod=PodName("train\x1b[2J"), container=ContainerName("main"))
HELD = Allocation(
    id=AllocationID("a-1"), owner=OWNER, pod_uid="u-1", devices={GPU: (DeviceID("GPU-6"), DeviceID("GPU-7"))}
)
LEFT = Allocation(id=AllocationID("a-2"), devices={GPU: (DeviceID("GPU-2"),)})
"""What an init container of the same pod left."""
USAGE = UsageObserved(
    node=NODE,
    epoch=9,
    revision=1,
    containers=(),
    kubelet=KubeletObserved(
        rules=to_kubelet_rules(AdmissionRules()),
        entries=(CheckpointEntry(pod_uid="u-1", container=ContainerName("fetch"), devices=LEFT.devices),),
    ),
)


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[str]:
    """Yields the URL of NATS once the fault is announced."""
    async with local_nats(folder / "nats") as url, connect_bus(url, name="test", wait=5) as bus, background() as tasks:
        for fact in (
            AllocationsSnapshot(node=NODE, epoch=9, seq=1, allocations=(), digest=""),
            AllocationGranted(node=NODE, epoch=9, seq=2, allocation=HELD),
            AllocationGranted(node=NODE, epoch=9, seq=3, allocation=LEFT),
            USAGE,
        ):
            await bus.publish(wire.encode_event(fact, 1.0))
        clock = SystemClock()
        health_keeper = HealthKeeper(RecordFile(folder / "state", "boot"), XidRules(), QUIET_SECONDS, clock)
        discovery = discovery_with(DescribedDriver("dgx-a100"), bus, clock, health_keeper=health_keeper)
        await tasks.start(lambda *, task_status: discovery.run(task_status=task_status))
        while await bus.last_position(Stream.NODES) < 3:
            await anyio.lowlevel.checkpoint()
        discovery.receive(HardwareEvent(kind=Occurrence.XID, gpu=DeviceID("GPU-7"), xid=79))
        while await bus.last_position(Stream.NODES) < 4:
            await anyio.lowlevel.checkpoint()
        yield url


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serving(tmp_path_factory.mktemp("gpu"))) as url,
    ):
        yield url


@pytest.fixture
def run(node: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setenv("TOPOALIGN_NATS_URL", node)
    monkeypatch.setenv("TOPOALIGN_NODE", NODE)

    def command(*arguments: str) -> tuple[int, str, str]:
        status = root.run_command_line(["gpu", *arguments])
        return status, *capsys.readouterr()

    return command


def test_a_gpu_is_cordoned_and_uncordoned_by_any_of_its_names(run: Any) -> None:
    status, out, _ = run("cordon", "3", "0000:25:00.0", "--reason", "fan\x1b[31m")
    assert 0 == status
    assert ["GPU-3", "GPU-4"] == [line.split()[0] for line in out.splitlines()[1:]]
    assert "healthy, cordoned  cordoned: fan?[31m" in out

    status, out, _ = run("uncordon", "GPU-3", "4", "--json")
    assert (0, {"GPU-3", "GPU-4"}) == (status, set(json.loads(out)["devices"]))
    assert {"state": "healthy", "cordoned": False, "reason": ""} == json.loads(out)["devices"]["GPU-4"]


def test_an_unknown_device_ends_with_exit_code_3_and_the_list(run: Any) -> None:
    status, out, told = run("cordon", "11")

    assert (3, "") == (status, out)
    assert "no device named '11'" in told and "0 GPU-0 0000:05:00.0" in told and "mlx5_9" in told


def test_no_device_at_all_is_a_usage_error(run: Any) -> None:
    assert 2 == run("heal")[0]


def test_a_node_without_discovery_ends_with_exit_code_69(run: Any) -> None:
    status, _, told = run("heal", "0", "--node", "elsewhere")

    assert 69 == status
    assert "the discovery of node elsewhere does not answer" in told


def test_the_list_shows_every_device_how_it_is_and_who_holds_it(run: Any) -> None:
    status, out, _ = run("list")
    rows = {line.split()[1]: line for line in out.splitlines()[1:]}
    assert (0, 18) == (status, len(rows))
    assert "healthy" in rows["GPU-0"] and "ml/train" not in rows["GPU-0"]
    assert "ml/train?[2J" in rows["GPU-6"]
    assert "unhealthy" in rows["GPU-7"] and "ml/train?[2J" in rows["GPU-7"]
    assert "XID 79 (the GPU has fallen off the bus: reboot the node); out of use until it was reset" in rows["GPU-7"]

    document = json.loads(run("list", "--json")[1])
    (ill,) = [device for device in document["devices"] if device["state"] != "healthy"]
    assert ("GPU-7", 7, "0000:38:00.0", ["ml/train\x1b[2J"]) == (ill["id"], ill["index"], ill["pci"], ill["held_by"])


def test_what_an_init_container_left_is_listed_with_its_pod(run: Any) -> None:
    """PodResources does not show it; the checkpoint has it, and another container of its pod has the pod's name."""
    document = json.loads(run("list", "--json")[1])

    assert ["ml/train\x1b[2J"] == next(each["held_by"] for each in document["devices"] if each["id"] == "GPU-2")


def test_holders_of_a_part_are_listed_for_the_part_and_for_its_gpu() -> None:
    """Whoever looks at an instance that is ill wants to know whose it is."""
    part = mig_device("MIG-1", 1, memory=1)
    topology = Topology(gpus=(Gpu(id=DeviceID("GPU-0"), index=0, mig=(part,)), Gpu(id=DeviceID("GPU-1"), index=1)))

    def held(number: int, *devices: str) -> Allocation:
        owner = Owner(namespace=Namespace("ml"), pod=PodName(f"pod-{number}"), container=ContainerName("main"))
        return Allocation(id=AllocationID(f"a-{number}"), owner=owner, devices={GPU: tuple(map(DeviceID, devices))})

    allocations = (held(1, "MIG-1"), held(2, "GPU-1::0", "GPU-1::1"), held(3, "GPU-1::2"))
    status = AnnouncedNode(NODE, topology, allocations, {})

    assert {"MIG-1": ("ml/pod-1",), "GPU-0": ("ml/pod-1",), "GPU-1": ("ml/pod-2", "ml/pod-3")} == status.holders


def test_heal_says_by_its_exit_code_whether_all_of_them_are_in_use_again(run: Any) -> None:
    run("cordon", "5")
    assert 1 == run("heal", "5")[0], "a cordon is not lifted by it"
    run("uncordon", "5")

    assert 0 == run("heal", "5", "7")[0]
    assert msgspec.json.decode(run("heal", "7", "--json")[1])["devices"]["GPU-7"]["state"] == "healthy"
