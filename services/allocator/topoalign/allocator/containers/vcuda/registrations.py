"""
The socket of one directory, on which the library's client registers a process: gRPC `vcuda.VCUDAService`.

The client does it once for each process that begins to use CUDA, and reads `pids.config` afterwards. Any user of the
container may call. What a call says (bus id, pod UID, name and id of the container) is not looked at: who calls is judged by
`callers`. All sockets together have a bounded number of connections, so that one container takes nothing from another.

Source: gpu-manager 8cd842ed, pkg/services/virtual-manager; vcuda-controller 72e0115, src/register.c.
"""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import cast

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from topoalign.allocator.containers.vcuda.directories import SOCKET
from topoalign.core.model.errors import clean
from topoalign.kubelet.grpc import sockets
from topoalign.kubelet.grpc.api import vcuda
from topoalign.kubelet.grpc.connection import Connection
from topoalign.kubelet.grpc.transport import LONGEST_MESSAGE, Load, Server, Servicer, caller

FIELD = "flags.vcudaRoot"
MOST_TOGETHER = 128
"""Connections of all these sockets. A client needs one for milliseconds."""


class Refused(Exception):
    """Why a caller is not registered."""


class Registrations(Servicer, vcuda.VcudaServiceBase):
    """Answers on one socket."""

    def __init__(self, register: Callable[[int], None]) -> None:
        """`register` takes the caller's process id; raises Refused, and TopoalignError."""
        self._register = register

    async def register_v_device(self, message: vcuda.VDeviceRequest) -> vcuda.VDeviceResponse:
        """Answers RegisterVDevice. Raises GRPCError PERMISSION_DENIED for a process of another container."""
        connection = cast(Connection, caller())
        await connection.server.turns.turn(connection)  # milliseconds each, more where processes are many
        try:
            self._register(connection.peer.pid)
        except Refused as refused:
            connection.server.complain("registration refused", str(refused), pid=connection.peer.pid)
            raise GRPCError(Status.PERMISSION_DENIED, clean(str(refused), LONGEST_MESSAGE)) from refused
        return vcuda.VDeviceResponse()


class RegistrationServer(Server):
    """The socket of one directory."""

    mode = 0o666

    def __init__(
        self, directory: Path, register: Callable[[int], None], load: Load, others: Collection[Server]
    ) -> None:
        """`others`: all sockets with which this one shares the bound on connections."""
        super().__init__(Registrations(register), directory / SOCKET, FIELD, load)
        self._others = others
        self.guard = directory.parent  # a container may lock its own: for that it is enough to read it

    def is_welcome(self, peer: sockets.Peer) -> bool:
        """Every process that reaches the socket: it is mounted into one container."""
        if sum(len(each.connections) for each in self._others) >= MOST_TOGETHER:
            max(self._others, key=lambda each: len(each.connections)).make_room(MOST_TOGETHER)
        return True
