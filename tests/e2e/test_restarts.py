"""An agent that is stopped, or killed, again and again under load keeps every assignment, and gives no device twice."""

import os
import signal
from itertools import count, takewhile
from pathlib import Path

import anyio
import pytest
from e2e.agents import Agents, Life, agreeing, assert_said_once, ended, holders, kill
from faults_support import THOROUGH
from kubelet_support import pod

from topoalign.core.model.decisions import Admission, Decision
from topoalign.core.model.ids import Namespace, NodeName, PodName
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_server import local_nats

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]

RESTARTS = 50 if THOROUGH else 6
FREE = 3
"""GPUs of the node that no pod keeps."""
NODE = NodeName("node-1")
DEFAULT = Namespace("default")


async def test_restarts_under_load_lose_no_assignment_and_offer_no_used_device(
    short_folder: Path, agents: Agents
) -> None:
    """Pods come and go all the time. Two stay from the first moment to the last, one of them with half of the GPUs."""
    async with local_nats(short_folder / "nats") as nats, connect_bus(nats) as bus, anyio.create_task_group() as tasks:
        life = Life(short_folder / "node", NODE, nats, bus, agents)
        await tasks.start(life.kubelet.run)
        agent = life.start()
        await life.listed()
        for stays in (pod("half", gpus=4, nics=4), pod("one", gpus=1)):
            assert isinstance(await life.kubelet.admit(stays), Admission)
        kept = {key: list(running.parts()) for key, running in life.kubelet.running.items()}
        admitted: list[str] = []
        over, ended_load = False, anyio.Event()

        async def load() -> None:
            for number in takewhile(lambda _: not over, count()):
                name = f"short-{number}"
                asked = pod(name, gpus=number % FREE + 1)
                if isinstance(await life.kubelet.admit(asked), Admission):
                    admitted.append(name)
                    gpus = [d for r in life.kubelet.running.values() for _, _, ids in r.parts() for d in ids]
                    assert len(set(gpus)) == len(gpus), "a device that is in use was given again"
                    await life.kubelet.remove(DEFAULT, asked.name)
                else:
                    await life.listed()  # no agent: its pods wait until there is one
            ended_load.set()

        tasks.start_soon(load)
        for restart in range(RESTARTS):
            await more(life, admitted)
            if restart % 2:
                kill(agent)
            else:
                os.kill(agent, signal.SIGTERM)
            await ended(agent)
            agent = life.start()
        await life.listed()
        over = True
        with anyio.fail_after(60):
            await ended_load.wait()
        last = pod("last", gpus=FREE)  # has what pods had that went before an agent saw them, which it keeps for long
        assert isinstance(await life.kubelet.admit(last), Admission)
        await agreeing(life.kubelet, bus, NODE)
        await life.kubelet.remove(DEFAULT, last.name)
        state = await agreeing(life.kubelet, bus, NODE)
        kill(agent)
        await life.unlisted()

        assert kept == {key: list(running.parts()) for key, running in life.kubelet.running.items()}
        assert {(key, r, frozenset(d)) for key, parts in kept.items() for _, r, d in parts} == holders(state)
        await assert_said_once(bus, NODE, state)
        tasks.cancel_scope.cancel()


async def more(life: Life, admitted: list[str]) -> None:
    """Waits until two more pods have been admitted: so the node is under load, and not idle."""
    enough = len(admitted) + 2
    with anyio.fail_after(60):
        await life.kubelet.until(lambda _: len(admitted) >= enough)


@pytest.mark.skipif(not THOROUGH, reason="waits a minute; tests/allocator have it in virtual time")
async def test_an_agent_stopped_for_a_minute_answers_with_the_current_state(short_folder: Path, agents: Agents) -> None:
    """A pod ends, another is admitted while the agent is stopped, and a third afterwards; the kubelet waits for answers."""
    async with local_nats(short_folder / "nats") as nats, connect_bus(nats) as bus, anyio.create_task_group() as tasks:
        life = Life(short_folder / "node", NODE, nats, bus, agents)
        await tasks.start(life.kubelet.run)
        agent = life.start()
        await life.listed()
        for name in ("stays", "ends"):
            assert isinstance(await life.kubelet.admit(pod(name, gpus=4, nics=1)), Admission)
        await agreeing(life.kubelet, bus, NODE)
        os.kill(agent, signal.SIGSTOP)
        await life.kubelet.remove(DEFAULT, PodName("ends"))
        decisions: list[Decision] = []
        decided = anyio.Event()

        async def admit() -> None:
            decisions.append(await life.kubelet.admit(pod("meanwhile", gpus=2)))
            decided.set()

        tasks.start_soon(admit)
        # the fault itself: the process and the kernel's clock are real, and this runs in test-faults only
        await anyio.sleep(60)
        os.kill(agent, signal.SIGCONT)
        with anyio.fail_after(60):
            await decided.wait()
        assert isinstance(decisions[0], Admission), decisions
        assert isinstance(await life.kubelet.admit(pod("afterwards", gpus=2)), Admission)
        await agreeing(life.kubelet, bus, NODE)
        kill(agent)
        await life.unlisted()
        tasks.cancel_scope.cancel()
