"""
The display of gpu-manager (Gaia), for its clients and dashboards: the tree of GPUs, their use, and the version.

It is served as gRPC `display.GPUDisplay` on its own socket, and as pages beside /metrics: /graph, /usage and /version
in the JSON of Gaia's gateway, and /metric with its metrics. Each call except Version measures the use of the GPUs. A
removed socket is created again.

Source: gpu-manager 8cd842ed, api/runtime/display, server.
"""

from collections.abc import Awaitable, Callable, Mapping
from importlib import metadata
from pathlib import Path

import anyio
import msgspec
import structlog

from topoalign.allocator.metrics import use_families
from topoalign.core.model.errors import StateFault
from topoalign.core.ports import Clock
from topoalign.core.state.fold import NodeState
from topoalign.core.usage import gaia_display
from topoalign.core.usage.attribution import NodeShares
from topoalign.kubelet.grpc.api import display
from topoalign.kubelet.grpc.transport import GrpcServer, Servicer
from topoalign.runtime.context import JSON, PROMETHEUS, Page

FIELD = "TOPOALIGN_DISPLAY"
LOOK_SECONDS = 2.0
"""Seconds between two checks of the socket."""
DRAIN_SECONDS = 1.0
VERSION = metadata.version("topoalign")

log = structlog.get_logger("topoalign.allocator.metrics.display")


class Display(Servicer, display.GpuDisplayBase):
    """Answers display requests from the node's state and the use of its GPUs."""

    def __init__(self, state: Callable[[], NodeState], shares: Callable[[], Awaitable[NodeShares]]) -> None:
        """`shares`: the use of the GPUs now; raises a TopoalignError if they cannot be measured."""
        self._state = state
        self._shares = shares

    async def print_graph(self, message: display.Empty) -> display.GraphResponse:
        """Answers PrintGraph."""
        return display.GraphResponse(graph=await self._graph())

    async def print_usages(self, message: display.Empty) -> display.UsageResponse:
        """Answers PrintUsages."""
        return display.UsageResponse.from_dict(await self._usages())

    async def version(self, message: display.Empty) -> display.VersionResponse:
        """Answers Version."""
        return display.VersionResponse(version=VERSION)

    def pages(self) -> Mapping[str, Page]:
        """Path -> its handler."""

        async def graph() -> tuple[bytes, str]:
            return msgspec.json.encode({"graph": await self._graph()}), JSON

        async def usage() -> tuple[bytes, str]:
            return msgspec.json.encode(await self._usages()), JSON

        async def version() -> tuple[bytes, str]:
            return msgspec.json.encode({"version": VERSION}), JSON

        async def metric() -> tuple[bytes, str]:
            families = use_families.gaia(await self._shares(), self._state().hardware)
            return use_families.render_families(families), PROMETHEUS

        return {"/graph": graph, "/usage": usage, "/version": version, "/metric": metric}

    async def run(self, path: Path, clock: Clock) -> None:
        """Serves on this socket until cancelled. Raises InvalidField for a path that a socket cannot have."""
        server = None
        finding = ""
        try:
            while True:
                if server is not None and not server.in_place:
                    await server.stop(DRAIN_SECONDS)
                    server = None
                if server is None:
                    new = GrpcServer(self, path, FIELD)
                    try:
                        await new.listen()
                        server = new
                        finding = ""
                    except StateFault as fault:
                        if fault.finding != finding:
                            log.warning("the display is not served", finding=fault.finding, remedy=fault.remedy)
                        finding = fault.finding
                await clock.sleep(LOOK_SECONDS)
        finally:
            if server is not None:
                with anyio.CancelScope(shield=True):
                    await server.stop(DRAIN_SECONDS)

    async def _graph(self) -> str:
        shares = await self._shares()
        return gaia_display.graph_of(self._state(), shares)

    async def _usages(self) -> dict[str, object]:
        shares = await self._shares()
        return {"usage": gaia_display.usages_of(self._state().hardware, shares)}
