"""An agent with `compat: gaia` has its kubelet take the units that gpu-manager would give."""

import msgspec
import pytest
from share_support import NAMES, OTHER_ORDER, SMALL, ShareNode

from topoalign.core.model.decisions import Admission
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.topology.device_links import Link, PcieClass

pytestmark = pytest.mark.anyio

PAIRS = msgspec.structs.replace(
    SMALL,
    gpus=tuple(msgspec.structs.replace(gpu, minor=3 - gpu.index) for gpu in SMALL.gpus),
    links=tuple(
        Link(a=SMALL.gpus[a].id, b=SMALL.gpus[b].id, pcie=PcieClass.PIX if a // 2 == b // 2 else PcieClass.SYS)
        for a in range(4)
        for b in range(a + 1, 4)
    ),
)
"""Two pairs of GPUs, each of four with the minor number of the one that lies opposite."""


@pytest.mark.parametrize("names", [NAMES, OTHER_ORDER], ids=["cores-first", "memory-first"])
async def test_a_kubelet_takes_the_units_that_gpu_manager_would_give(names: tuple[ResourceName, ResourceName]) -> None:
    """Of equal GPUs the lowest minor, then beside that share, then the rest of its pair; by reservation the same."""
    async with ShareNode.running(PAIRS, names, compat="gaia") as (it, _):
        pods = {"first": (30, 4), "second": (20, 3), "whole": (100, 0)}
        for name, amounts in pods.items():
            assert isinstance(await it.admit(name, amounts), Admission)
        it.reserve(it.pod("pair", (200, 4)))
        assert isinstance(await it.admit("pair", (200, 4)), Admission)

        given = {name: {gpu for units in it.gpus(name)["c0"].values() for gpu in units} for name in (*pods, "pair")}
        assert {"first": {"GPU-3"}, "second": {"GPU-3"}, "whole": {"GPU-2"}, "pair": {"GPU-0", "GPU-1"}} == given
        await it.check([*pods, "pair"])
