"""Hinting answers from the question and the hardware it names, or says that it cannot."""

import msgspec
import pytest

from topoalign.core import wire
from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.hints import providers
from topoalign.core.hints.provider import HintRequest
from topoalign.core.model.errors import BadRequest, RemoteFailure, Unavailable
from topoalign.core.model.events import DeviceHealth, DeviceHealthChanged, HealthState, TopologyDiscovered
from topoalign.core.model.hints import HintAnswer, HintQuestion
from topoalign.core.model.ids import CPU, GPU, ContainerName, NodeName, PodName
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, PodRequest
from topoalign.core.state.fold import NodeState
from topoalign.hinting.main import serve
from topoalign.machines import load_machine
from topoalign.runtime.context import Context
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.tasks import background
from topoalign.testing.manual_clock import ManualClock

pytestmark = pytest.mark.anyio

NODE = NodeName("rack1.node-1")
CLOCK = ManualClock()


def topology(revision: int, node: NodeName = NODE) -> TopologyDiscovered:
    machine = load_machine("dgx-a100").topology
    return TopologyDiscovered(
        node=node, epoch=7, revision=revision, boot_id="b", source="described: dgx-a100", topology=machine
    )


def question(revision: int, gpus: int = 4) -> HintQuestion:
    known = topology(revision)
    healthy = DeviceHealth(state=HealthState.HEALTHY)
    devices = dict.fromkeys((*known.topology.gpu_by_id, *known.topology.nic_by_id), healthy)
    state = NodeState(node=NODE).apply(known)
    state = state.apply(DeviceHealthChanged(node=NODE, epoch=7, revision=1, devices=devices))
    amounts = {GPU: gpus, CPU: 8000}
    container = ContainerRequest(name=ContainerName("train"), requests=amounts, limits=amounts)
    pod = PodRequest(name=PodName("pod"), containers=(container,))
    rules = AdmissionRules()
    asked = HintRequest(state, read_pod(pod, rules).of(container.name), rules)
    return providers.to_hint_question(asked, pod)


class World:
    def __init__(self) -> None:
        self.bus = MemoryBus()
        self.context = Context(bus=self.bus, clock=CLOCK, environment={"TOPOALIGN_NODE": NODE})

    async def say(self, event: TopologyDiscovered) -> None:
        await self.bus.publish(wire.encode_event(event, CLOCK.wall()))
        await CLOCK.advance(0)

    async def ask(self, asked: HintQuestion) -> HintAnswer:
        body = await self.bus.ask(wire.hints_subject(NODE), msgspec.json.encode(asked), within=5.0)
        return wire.decode_answer(body, HintAnswer)


async def test_an_answer_is_of_the_hardware_that_was_announced() -> None:
    """An answer is what the providers say of the hardware that was received."""
    world = World()
    async with background() as tasks:
        await world.say(topology(1))
        await tasks.start(lambda *, task_status: serve(world.context, task_status=task_status))
        await CLOCK.advance(0)
        assert None is world.context.checks["hinting"]()

        answer = await world.ask(question(1))
        assert providers.answer_hint_request(providers.request_of_question(question(1), topology(1))) == answer
        assert answer.providers["device"][GPU]


async def test_a_question_about_unknown_hardware_has_its_own_code() -> None:
    """Whether nothing was received yet, or another revision or epoch, or only another node's: the asker falls back."""
    world = World()
    async with background() as tasks:
        await tasks.start(lambda *, task_status: serve(world.context, task_status=task_status))
        await world.say(topology(1, NodeName("other")))
        await refused(world, question(1))
        assert "not been received" in (world.context.checks["hinting"]() or "")

        await world.say(topology(2))
        await refused(world, question(1))
        await refused(world, question(3))
        for epoch in (6, 8):
            await refused(world, msgspec.structs.replace(question(2), topology=(epoch, 2)))
        await world.ask(question(2))

        await world.say(topology(3))
        await world.ask(question(3))


async def refused(world: World, asked: HintQuestion) -> None:
    with pytest.raises(Unavailable) as caught:
        await world.ask(asked)
    assert isinstance(caught.value, RemoteFailure)
    assert "UnknownTopology" == caught.value.failure.code


async def test_a_question_of_another_node_or_none_at_all_is_refused() -> None:
    world = World()
    async with background() as tasks:
        await tasks.start(lambda *, task_status: serve(world.context, task_status=task_status))
        await world.say(topology(1))

        with pytest.raises(BadRequest, match="node"):
            await world.ask(msgspec.structs.replace(question(1), node=NodeName("other")))
        with pytest.raises(BadRequest):
            wire.decode_answer(await world.bus.ask(wire.hints_subject(NODE), b"{}", within=5.0), HintAnswer)
