"""Discovery announces the hardware with its offers, and follows its configuration."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import msgspec
import pytest
from serving_support import gpu, listed, machine
from structlog.testing import capture_logs

from topoalign.core import wire
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.events import TopologyDiscovered
from topoalign.core.model.ids import GPU, NIC
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Received, Stream
from topoalign.discovery.main import serve
from topoalign.machines import Machine, document
from topoalign.plugin_config.resource_offers import ResourceOffers
from topoalign.runtime.context import Context
from topoalign.runtime.health_pages import build_application
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.tasks import background
from topoalign.testing.manual_clock import ManualClock

pytestmark = pytest.mark.anyio

SHARED = "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}]}}"
SINGLE = "flags: {migStrategy: single}"
ALIKE = machine([gpu(0, ["1g.10gb"] * 2), gpu(1, ["1g.10gb"] * 2)])
EMPTIED = machine([gpu(0, ["1g.10gb"] * 2), gpu(1, [])])


class World:
    """Discovery of a described machine, with a configuration file."""

    def __init__(self, folder: Path, text: str, topology: Topology | None = None) -> None:
        self.file, self.machine = folder / "topoalign.yaml", folder / "machine.json"
        self.file.write_text(text)
        self.is_now(topology or machine([gpu(0), gpu(1)]))
        self.bus, self.clock = MemoryBus(), ManualClock()
        environment = {
            "TOPOALIGN_NODE": "node-1",
            "TOPOALIGN_MACHINE": str(self.machine),
            "TOPOALIGN_STATE_DIR": str(folder / "state"),
            "TOPOALIGN_CONFIG": str(self.file),
        }
        self.context = Context(bus=self.bus, clock=self.clock, environment=environment)

    def is_now(self, topology: Topology) -> None:
        self.machine.write_bytes(document.encode_machine(Machine(name="machine", topology=topology, source="test")))

    @asynccontextmanager
    async def running(self) -> AsyncIterator["AsyncIterator[Received]"]:
        async with background() as tasks:
            await tasks.start(lambda *, task_status: serve(self.context, task_status=task_status))
            async with self.bus.follow(Stream.NODES, f"{wire.PREFIX}.topology.>") as messages:
                yield messages

    async def reads(self) -> None:
        await self.clock.advance(10)

    def metric(self, name: str) -> float | None:
        return self.context.metrics.get_sample_value(name)


async def said(messages: AsyncIterator[Received]) -> TopologyDiscovered:
    with anyio.fail_after(30):
        event = wire.decode_event((await anext(messages)).message)
    assert isinstance(event, TopologyDiscovered)
    return event


def handed_out(event: TopologyDiscovered) -> dict[str, list[str]]:
    return listed(ResourceOffers(offers=event.topology.offers or (), findings=()))


async def test_what_is_usual_is_announced_without_offers(tmp_path: Path) -> None:
    """So whoever does not know offers reads it as before."""
    async with World(tmp_path, "version: v1").running() as messages:
        assert None is (await said(messages)).topology.offers


async def test_a_topology_is_announced_with_what_the_configuration_makes_of_it(tmp_path: Path) -> None:
    async with World(tmp_path, SHARED).running() as messages:
        event = await said(messages)

    assert {"nvidia.com/gpu": ["GPU-0::0", "GPU-0::1", "GPU-1::0", "GPU-1::1"]} == handed_out(event)
    assert ["GPU-0::0", "GPU-0::1", "GPU-1::0", "GPU-1::1"] == list(event.topology.devices[GPU])


async def test_another_configuration_is_announced_without_another_reading(tmp_path: Path) -> None:
    world = World(tmp_path, "version: v1")
    async with world.running() as messages:
        first = await said(messages)
        world.file.write_text(SHARED)
        world.context.reload.ask()
        second = await said(messages)

    assert (1, 2) == (first.revision, second.revision)
    assert 4 == len(second.topology.devices[GPU])
    assert 1 == world.metric("topoalign_discovery_reads_total")


async def test_a_wrong_file_changes_nothing_and_is_noted_where_an_operator_looks(tmp_path: Path) -> None:
    """C57: said in log, metric and /readyz?verbose; the node stays ready, and the next file that is right is used."""
    world = World(tmp_path, SHARED)
    async with world.running() as messages:
        await said(messages)
        assert 0 == world.metric("topoalign_discovery_configuration_refused")
        world.file.write_text("flags: {migStrategy: both}")
        with capture_logs() as lines:
            world.context.reload.ask()
            with anyio.fail_after(30):
                while not lines:
                    await anyio.to_thread.run_sync(int)  # as long as a look takes
        page = await readiness(world.context)
        refused = world.metric("topoalign_discovery_configuration_refused")
        world.file.write_text("resources: {gpus: [{pattern: A100, name: a100}]}")
        world.context.reload.ask()
        event = await said(messages)

    assert ["flags.migStrategy: Invalid enum value 'both'"] == [line["finding"] for line in lines]
    assert page.startswith("200") and "[!] configuration: " in page
    assert "is not in use: flags.migStrategy: Invalid enum value 'both'" in page
    assert 1 == refused
    assert {"nvidia.com/a100": ["GPU-0", "GPU-1"]} == handed_out(event)
    assert 0 == world.metric("topoalign_discovery_configuration_refused")


async def readiness(context: Context) -> str:
    transport = httpx.ASGITransport(app=build_application(context))
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as http:
        answer = await http.get("/readyz?verbose")
    return f"{answer.status_code} {answer.text}"


async def test_a_wrong_first_file_is_no_start(tmp_path: Path) -> None:
    world = World(tmp_path, "flags: {migStrategy: both}")
    with pytest.raises(InvalidField, match=r"flags\.migStrategy"):
        async with world.running():
            pass

    assert 0 == await world.bus.last_position(Stream.NODES)


async def test_a_gpu_that_lost_its_instances_takes_no_other_along(tmp_path: Path) -> None:
    """Under `single` that is loud, and the instances of the others stay offered; after a restart nothing is."""
    world = World(tmp_path, SINGLE, ALIKE)
    with capture_logs() as lines:
        async with world.running() as messages:
            assert 4 == len((await said(messages)).topology.devices[GPU])
            world.is_now(EMPTIED)
            await world.reads()
            now = await said(messages)
            await world.reads()
            page = await readiness(world.context)
            withheld = world.metric("topoalign_discovery_offers_withheld")

    assert {"nvidia.com/gpu": ["MIG-0-0", "MIG-0-1"]} == handed_out(now)
    assert ["error"] == [line["log_level"] for line in lines if "alike" in line.get("finding", "")], "once"
    assert "200" == page[:3] and "GPU 1 has no MIG instance" in page
    assert 1 == withheld
    restarted = World(tmp_path, SINGLE, EMPTIED)
    async with restarted.running() as messages:
        assert GPU not in (await said(messages)).topology.devices


async def test_a_new_configuration_starts_from_nothing_that_the_old_one_offered(tmp_path: Path) -> None:
    """Whole GPUs were offered under `none`: they must not stay under `single`."""
    world = World(tmp_path, "version: v1", machine([gpu(0, ["1g.10gb"]), gpu(1)]))
    async with world.running() as messages:
        assert None is (await said(messages)).topology.offers
        world.file.write_text(SINGLE)
        world.context.reload.ask()
        assert {} == handed_out(await said(messages))


async def test_nics_are_offered_under_their_usual_name_beside_shared_gpus(tmp_path: Path) -> None:
    world = World(tmp_path, SHARED)
    world.context.environment["TOPOALIGN_MACHINE"] = "dgx-a100"  # type: ignore[index]  # a dict, made above
    async with world.running() as messages:
        topology = (await said(messages)).topology

    assert (16, 10) == (len(topology.devices[GPU]), len(topology.devices[NIC]))


BY_INDEX = """
resources: {gpus: [{indexes: [1], exclude: true}, {indexes: [3], name: three}]}
sharing: {timeSlicing: {resources: [{name: gpu, rename: shared, replicas: 2, devices: [2]}]}}
"""


async def test_an_index_names_the_same_gpu_when_another_one_is_lost(tmp_path: Path) -> None:
    """NVML counts anew then. The GPU that was kept back stays so, and nobody's whole GPU becomes a shared one."""
    world = World(tmp_path, BY_INDEX, machine([gpu(0), gpu(1), gpu(2), gpu(3)]))
    async with world.running() as messages:
        before = handed_out(await said(messages))
        renumbered = [msgspec.structs.replace(gpu(i), index=i - 1) for i in (1, 2, 3)]
        world.is_now(machine(renumbered))
        await world.reads()
        after = await said(messages)

    assert {
        "nvidia.com/gpu": ["GPU-0"],
        "nvidia.com/shared": ["GPU-2::0", "GPU-2::1"],
        "nvidia.com/three": ["GPU-3"],
    } == before
    assert before == handed_out(after)
    assert [("GPU-1", 0), ("GPU-2", 1), ("GPU-3", 2), ("GPU-0", 3)] == [(g.id, g.index) for g in after.topology.gpus]


async def test_a_new_gpu_takes_no_index_by_which_another_is_known(tmp_path: Path) -> None:
    """It comes when one is lost, and NVML gives it the number that GPU-3 had. What is offered is in the order of now."""
    world = World(tmp_path, BY_INDEX, machine([gpu(0), gpu(1), gpu(2), gpu(3)]))
    async with world.running() as messages:
        await said(messages)
        world.is_now(
            machine(msgspec.structs.replace(gpu(i), index=index) for index, i in ((0, 2), (1, 3), (3, 9), (4, 0)))
        )
        await world.reads()
        after = await said(messages)

    assert ["GPU-2", "GPU-3", "GPU-9", "GPU-0", "GPU-1"] == [*after.topology.gpu_by_id]
    assert {
        "nvidia.com/gpu": ["GPU-9", "GPU-0"],
        "nvidia.com/shared": ["GPU-2::0", "GPU-2::1"],
        "nvidia.com/three": ["GPU-3"],
    } == handed_out(after)


async def test_a_card_that_takes_the_place_of_another_takes_its_index(tmp_path: Path) -> None:
    at = "0000:07:00.0"
    old, new = (msgspec.structs.replace(gpu(i), index=1, pci=at) for i in (1, 9))
    world = World(tmp_path, BY_INDEX, machine([gpu(0), old]))
    async with world.running() as messages:
        assert {"nvidia.com/gpu": ["GPU-0"]} == handed_out(await said(messages))
        world.is_now(machine([gpu(0), new]))
        await world.reads()
        after = await said(messages)

    assert {"nvidia.com/gpu": ["GPU-0"]} == handed_out(after), "index 1 is kept back, whichever card it is"
