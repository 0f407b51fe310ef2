"""An allocator that was stopped (SIGSTOP) grants nothing to those who gave up meanwhile."""

import signal
from contextlib import aclosing
from pathlib import Path

import anyio
import msgspec
import pytest
from e2e_support import allocate, answering, as_process, pod

from topoalign.cli import link, root
from topoalign.client import Client
from topoalign.core import wire
from topoalign.core.model.decisions import Admission
from topoalign.core.model.errors import BusUnavailable
from topoalign.core.model.ids import NodeName, PodName
from topoalign.core.model.requests import AllocateRequest, ClockReading, Deadline, NodeRequest
from topoalign.core.ports import Bus
from topoalign.core.state.fold import NodeState
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_server import local_nats

pytestmark = pytest.mark.anyio

NODE = NodeName("node-1")
WAIT_SECONDS = 0.3


async def reading(bus: Bus) -> ClockReading:
    body = await bus.ask(wire.admission_subject(NODE, "clock"), msgspec.json.encode(NodeRequest(node=NODE)), 10)
    return wire.decode_answer(body, ClockReading)


async def give_up(bus: Bus, name: str, deadline: Deadline) -> None:
    request = AllocateRequest(node=NODE, pod=pod(name, gpus=1), deadline=deadline)
    with pytest.raises(BusUnavailable):
        await bus.ask(wire.admission_subject(NODE, "allocate"), msgspec.json.encode(request), 2 * WAIT_SECONDS)


async def holders_until(bus: Bus, last: str) -> list[PodName]:
    """The pods that hold something once this one does, by what the stream tells: the fact follows the answer."""
    state = NodeState(node=NODE)
    async with aclosing(Client(bus).allocations(node=NODE)) as events:
        async for delivery in events:
            state = state.apply(delivery.event)
            pods = [each.owner.pod for each in state.allocations.values() if each.owner is not None]
            if last in pods:
                return pods
    raise AssertionError("the stream ended")


async def test_requests_given_up_while_it_was_stopped_are_refused_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """F04. The command line, which cannot read the clock, asks for nothing, and names the pod."""
    monkeypatch.setattr(link, "ANSWER_SECONDS", WAIT_SECONDS)
    async with local_nats(tmp_path / "nats") as url, connect_bus(url, name="test", wait=10) as bus:
        settings = {
            "TOPOALIGN_NODE": NODE,
            "TOPOALIGN_NATS_URL": url,
            "TOPOALIGN_MACHINE": "dgx-a100",
            "TOPOALIGN_STATE_DIR": str(tmp_path / "state"),
        }
        async with as_process("node", settings, tmp_path / "log") as process:
            with anyio.fail_after(60):
                await answering(bus, NODE)
            now = await reading(bus)
            process.send_signal(signal.SIGSTOP)
            try:
                async with anyio.create_task_group() as tasks:
                    for i in range(5):
                        deadline = Deadline(clock=now.clock, at=now.now + WAIT_SECONDS)
                        tasks.start_soon(give_up, bus, f"late-{i}", deadline)
                line = ["allocate", "--gpus", "1", "--pod", "q/x", "--node", NODE, "--nats", url]
                status = await anyio.to_thread.run_sync(root.run_command_line, line)
            finally:
                process.send_signal(signal.SIGCONT)
            decision = await allocate(bus, NODE, pod("after", gpus=1))

            assert isinstance(decision, Admission)
            with anyio.fail_after(60):
                assert ["after"] == await holders_until(bus, "after")
    told = capsys.readouterr().err
    assert 69 == status
    assert "the allocation for pod q/x was not requested" in told
