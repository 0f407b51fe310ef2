"""
Answers in place of all allocators of a cluster whether they are alive, in a process of its own.

The process runs `main`. It gets the address of NATS and a file in JSON with the `WriterPosition` of each node. It
prints a line once questions are answered, and another once each allocator has been asked.
"""

import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import anyio
import msgspec

from topoalign.cli.link import connect_to_bus
from topoalign.core import wire
from topoalign.core.model.errors import NotFound, Unavailable
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import NodeRequest, WriterPosition
from topoalign.core.ports import Endpoint
from topoalign.core.state.fold import NodeState
from topoalign.runtime.replies import answer_with

ALL = wire.admission_subject(NodeName("node"), "alive").replace(".node.", ".*.")


class FactPublisher(Protocol):
    """A node for which is answered."""

    @property
    def node(self) -> NodeName:
        """Its name."""

    @property
    def state(self) -> NodeState:
        """After its newest fact."""

    @property
    def newest(self) -> dict[str, tuple[int, int]]:
        """`topology`, `health` and `usage` -> (epoch, revision) of the newest reading."""


class AllocatorsEnded(Unavailable):
    """The process that answers for the allocators has ended."""

    code = "AllocatorsEnded"

    def __init__(self) -> None:
        super().__init__("the process that answers for the allocators has ended", "see what it wrote on stderr")


class Allocators:
    """The process that answers. Made by `allocators`."""

    def __init__(self, process: "subprocess.Popen[str]", file: Path) -> None:
        self._process = process
        self._file = file

    def stand_by(self, publishers: Iterable[FactPublisher]) -> None:
        """What these stand by from now on, and the others as before. Raises AllocatorsEnded."""
        self._file.write_bytes(msgspec.json.encode({each.node: standing(each) for each in publishers}))
        self._process.send_signal(signal.SIGHUP)
        self._until("read")

    def until_serving(self) -> None:
        """Until questions are answered. Raises AllocatorsEnded."""
        self._until("serving")

    def until_all_asked(self) -> None:
        """Until each allocator has been asked once. Raises AllocatorsEnded."""
        self._until("asked")

    def _until(self, line: str) -> None:
        assert self._process.stdout is not None
        if f"{line}\n" not in self._process.stdout:  # reads on up to it, or to the end
            raise AllocatorsEnded


@contextmanager
def allocators(url: str, file: Path, publishers: Iterable[FactPublisher]) -> Iterator[Allocators]:
    """Those of these nodes, while the context is open. `file` is written for them. Raises AllocatorsEnded."""
    file.write_bytes(msgspec.json.encode({each.node: standing(each) for each in publishers}))
    command = [sys.executable, "-c", f"from {__name__} import main; main()", url, str(file)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            everybody = Allocators(process, file)
            everybody.until_serving()
            yield everybody
        finally:
            process.terminate()


def standing(publisher: FactPublisher) -> WriterPosition:
    """What the allocator of a node says when it is asked whether it is alive."""
    state = publisher.state
    return WriterPosition(epoch=state.epoch, seq=state.seq, digest=state.digest, readings=publisher.newest)


async def serve(url: str, file: Path) -> None:
    """Answers until it is cancelled. Reads the file anew at each SIGHUP, and prints a line after that."""
    standings = read(file)
    waited_for = set(standings)

    async def alive(request: NodeRequest) -> WriterPosition:
        if request.node not in standings:
            raise NotFound("node", request.node, "ask for a node of the benchmark")
        if request.node in waited_for:
            waited_for.remove(request.node)
            if not waited_for:
                print("asked", flush=True)
        return standings[request.node]

    async with connect_to_bus(url) as bus:
        endpoint = Endpoint(name="alive", subject=ALL, answer=answer_with(NodeRequest, alive))
        async with bus.serve("topoalign-allocator", [endpoint]):
            with anyio.open_signal_receiver(signal.SIGHUP) as signals:
                print("serving", flush=True)
                async for _ in signals:
                    standings.update(read(file))
                    print("read", flush=True)


def read(file: Path) -> dict[NodeName, WriterPosition]:
    """What each allocator stands by."""
    return msgspec.json.decode(file.read_bytes(), type=dict[NodeName, WriterPosition])


def main() -> None:
    """The process: its arguments are the address of NATS and the file."""
    url, file = sys.argv[1:]
    anyio.run(serve, url, Path(file))
