"""Discovery publishes, logs and counts NVLinks that go down and come up, over the real pynvml and a stand-in library."""

from pathlib import Path

import pytest
from discovery_support import HEALTHY, World
from nvml_support import DEADLINE, GPUS, StandIn, host_tree, script, standing_in, switch_links
from structlog.testing import capture_logs

from topoalign.core.model.topology.degraded import degraded_gpus
from topoalign.discovery.drivers.nvml.driver import CONNECTIONS_SECONDS, NvmlDriver

pytestmark = pytest.mark.anyio

UP = script(more=switch_links(8, 18))
HALF = script(more=[*switch_links(8, 18), *(f"link 0 {link} down" for link in range(9))])


class NvmlWorld(World):
    """A discovery service whose NVML is a stand-in."""

    def __init__(self, folder: Path, standin: StandIn) -> None:
        super().__init__()
        self.standin = standin
        self.driver = NvmlDriver(host_tree(folder / "host"), self.clock, DEADLINE)

    async def reads(self, script: str) -> None:
        """A reading of this machine, a minute after the one before."""
        self.standin.play(script)
        await self.clock.advance(CONNECTIONS_SECONDS)
        self.hardware.now = await self.driver.read()
        await self.discovery.read()
        await self.clock.advance(0)

    def gauge(self, name: str, gpu: str) -> float | None:
        return self.registry.get_sample_value(f"topoalign_discovery_gpu_{name}", {"gpu": gpu})


async def test_links_that_go_down_and_come_up_are_published_and_logged(nvml_library: Path, tmp_path: Path) -> None:
    """Each change is a new revision of the topology and one entry in the log; the GPU stays healthy."""
    with standing_in(nvml_library, tmp_path, UP) as standin, capture_logs() as entries:
        world = NvmlWorld(tmp_path, standin)
        async with world.running():
            await world.reads(UP)
            before = await world.topology()
            await world.reads(HALF)
            await world.reads(HALF)
            down = await world.topology()
            gauges = [world.gauge("links_down", "GPU-0"), world.gauge("degraded", "GPU-0")]
            health = await world.health()
            await world.reads(UP)
            after = await world.topology()

        assert [before.revision + 1, before.revision + 2] == [down.revision, after.revision]
        assert (9, 9) == (down.topology.gpus[0].switch_links, down.topology.gpus[0].links_down)
        assert {GPUS[0]: "9 of 18 NVLinks are up"} == degraded_gpus(down.topology)
        assert before.topology == after.topology
        assert {HEALTHY} == {health.devices[gpu] for gpu in GPUS}
        assert [9, 1] == gauges
        assert [0, None] == [world.gauge("links_down", "GPU-0"), world.gauge("degraded", "GPU-0")]
        degraded = [entry for entry in entries if "degraded" in entry["event"]]
        assert [("warning", "GPU-0", "9 of 18 NVLinks are up"), ("info", "GPU-0", None)] == [
            (entry["log_level"], entry["gpu"], entry.get("finding")) for entry in degraded
        ]
