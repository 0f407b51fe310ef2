"""Units and slots that are limited by MPS: their daemon, what their containers are told, and what is refused."""

import json
import os
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubelet_support import NODE
from mps_support import MpsNode
from share_support import NAMES, OTHER_ORDER, SMALL, ShareNode
from slot_node_support import EACH, MACHINE, MEMORY_LIMIT, SLOTS, THREADS, Announced, Ask, LimitedSlotNode, own
from slot_support import MIB, in_slots
from unit_support import CORES, in_units, limited, spread

from topoalign.allocator.containers.host_files import ContainerUnready
from topoalign.allocator.containers.mps import client_limits
from topoalign.core import wire
from topoalign.core.model.decisions import Admission, Refusal
from topoalign.core.model.events import TopologyDiscovered
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import GPU, DeviceID, ResourceName
from topoalign.core.model.requests import PodRequest, Policy
from topoalign.core.model.topology.model import Topology
from topoalign.mps.daemon import HEALTH_SECONDS
from topoalign.plugin_config.file_watch import POLL_SECONDS
from topoalign.plugin_config.mps_files import Serves

pytestmark = pytest.mark.anyio

BOTH = frozenset({DeviceID("GPU-0"), DeviceID("GPU-1")})
ORDERS = pytest.mark.parametrize("names", [NAMES, OTHER_ORDER], ids=["cores-first", "memory-first"])
Names = tuple[ResourceName, ResourceName]


class UnitNode(ShareNode):
    """As `ShareNode`, limited by MPS."""

    def __init__(self, directory: Path, names: Names = NAMES) -> None:
        super().__init__(directory, SMALL, names, Policy.NONE, None)
        self.mps = Announced(directory / "mps", names[0], SMALL)
        self.containers = self.mps.containers

    def offered(self, machine: Topology) -> Topology:
        return limited(super().offered(machine), sharing="mps", limiter=None)

    async def limits(self, pod: PodRequest) -> list[dict[str, str]]:
        """What each answer says beside GPUs, pipes and mounts, which are in all alike: of computing time first."""
        assert isinstance(await self.kubelet.admit(pod, f"uid-{pod.name}"), Admission)
        answers = {of: each for (_, of), each in self.answers(pod.name).items()}
        assert 1 == len({each.envs["NVIDIA_VISIBLE_DEVICES"] for each in answers.values()})
        return [own(answers[name], self.mps) for name in self.names if name in answers]


@ORDERS
async def test_each_half_of_a_share_says_its_own_limit(names: Names) -> None:
    """The kubelet puts the two answers together; one daemon serves both, so pipes and mounts are equal."""
    async with UnitNode.running(names) as (it, _):
        it.mps.announcement.publish(it.mps.serves)

        assert [{THREADS: "20"}, {MEMORY_LIMIT: "0=1024M"}] == await it.limits(it.pod("p", (20, 4)))
        assert [{MEMORY_LIMIT: "0=512M"}] == await it.limits(it.pod("q", (0, 2))), "memory alone"
        assert [{}] == await it.limits(it.pod("r", (100, 0))), "a whole GPU"
        await it.check(["p", "q", "r"])


@ORDERS
async def test_a_share_of_two_gpus_has_a_limit_of_memory_for_each(names: Names) -> None:
    async with UnitNode.running(names) as (it, _):
        it.mps.announcement.publish(it.mps.serves)
        pod = spread(it.pod("p", (60, 8)), 2)
        it.reserve(pod)

        assert [{THREADS: "30"}, {MEMORY_LIMIT: "0=1024M,1=1024M"}] == await it.limits(pod)


async def test_units_are_refused_while_their_daemon_is_away() -> None:
    """Whichever half is asked for first; a daemon of shares, which has limits for all, is not taken either."""
    for names in (NAMES, OTHER_ORDER):
        async with UnitNode.running(names) as (it, _):
            assert it.containers is not None
            for serves, why in ((None, "is not ready"), (Serves(devices=it.mps.serves.devices, replicas=100), "other")):
                if serves is not None:
                    it.mps.announcement.publish(serves)
                refusal = await it.admit("p", (20, 4))

                assert isinstance(refusal, Refusal)
                assert f"the MPS daemon of {names[0]}" in refusal.finding and why in refusal.finding
                assert {} == dict(it.ledger.state.allocations)
            it.mps.announcement.withdraw()
            assert f"the MPS daemon of {names[0]} is not ready" in (it.containers.poll(it.ledger.state.hardware) or "")
            it.mps.announcement.publish(it.mps.serves)
            assert it.containers.poll(it.ledger.state.hardware) is None


async def test_slots_have_the_limits_of_their_reservation_or_an_equal_part() -> None:
    async with LimitedSlotNode.running() as (it, _):
        assert "is not ready" in str(await it.admit_pod(it.asking("a", Ask())))
        it.mps.announcement.publish(it.mps.serves)
        for name, ask, expected in (
            ("a", Ask(2, memory=6_000, cores=40), {THREADS: "40", MEMORY_LIMIT: "0=6000M,1=6000M"}),
            ("b", Ask(memory=3_000), {MEMORY_LIMIT: "0=3000M"}),
            ("c", Ask(cores=100), {MEMORY_LIMIT: f"0={EACH}M"}),
        ):
            pod = it.asking(name, ask)
            it.reserve(pod)
            assert isinstance(await it.admit_pod(pod), Admission)
            await it.check([str(pod) for _, pod in it.kubelet.running])

            assert expected == it.limits(name)
        assert isinstance(await it.admit_pod(it.asking("d", Ask(memory=15_000, cores=80))), Admission)
        assert {THREADS: f"{100 // SLOTS}", MEMORY_LIMIT: f"0={EACH // SLOTS}M"} == it.limits("d"), "nobody reserved it"


@given(st.lists(st.tuples(st.integers(0, 120), st.integers(0, 3 * MIB)), min_size=1, max_size=4))
def test_limits_of_slots_are_those_of_the_rule(held: Sequence[tuple[int, int]]) -> None:
    """In the order of the slots, rounded down, never 0, which would be no limit; the least of the threads."""
    slots = [DeviceID(f"GPU-{gpu}::7") for gpu in reversed(range(len(held)))]
    amounts = {slot: Amount(*each) for slot, each in zip(slots, held, strict=True)}
    expected: dict[str, str] = {}
    for cores in range(1, 100):
        if THREADS not in expected and any(each == cores for each, _ in held):
            expected[THREADS] = f"{cores}"
    listed = ""
    for place, (_, memory) in enumerate(held):
        whole = next(each for each in (3, 2, 1, 0) if each * MIB <= memory)
        listed += f",{place}={whole or 1}M"
    found: Mapping[str, str] = client_limits(slots, amounts, in_slots(MACHINE, SLOTS))

    assert {**expected, MEMORY_LIMIT: listed[1:]} == found


def test_a_slot_of_a_gpu_that_is_in_slots_no_more_is_refused() -> None:
    slots = [DeviceID("GPU-0::1"), DeviceID("GPU-1::1")]
    with pytest.raises(ContainerUnready, match="GPU-1 is not in slots any more"):
        client_limits(slots, {}, in_slots(MACHINE, SLOTS, gpus=1))


@pytest.mark.parametrize(("sharing", "daemon"), [("units: {}", CORES), ("slots: {replicas: 4}", GPU)])
async def test_a_daemon_of_units_or_slots_sets_no_limits(node: MpsNode, sharing: str, daemon: ResourceName) -> None:
    """Its containers have their own. Both resources of units have one daemon, since a GPU takes one server alone."""
    node.share(more=f"sharing: {{{sharing}, limiter: mps}}\n")
    async with node.up():
        await node.until(partial(node.serving, daemon))
        pipe, log = node.root / daemon / "pipe", node.root / daemon / "log"

        assert ["GPU-0 3", "GPU-1 3", f"start {pipe} {log} GPU-0,GPU-1"] == node.events
        assert Serves(devices=BOTH, replicas=0) == node.serving(daemon)
        assert [daemon] == [*node.daemons.daemons] if node.daemons else False
        for _ in range(2):
            await node.clock.advance(HEALTH_SECONDS)
            await node.until(partial(node.serving, daemon))
        os.kill(node.pid(daemon), signal.SIGKILL)
        await node.until(lambda: node.serving(daemon) is None)
        await node.clock.advance(1)
        await node.until(partial(node.serving, daemon))
        node.share("name: nvidia.com/gpu, replicas: 4")
        await node.clock.advance(POLL_SECONDS)
        await node.until(lambda: node.serving() == Serves(devices=BOTH, replicas=4))
        assert 2 == node.count("set_default_device_pinned_mem_limit"), "shares have the daemon's"
    assert ["quit", "GPU-0 0", "GPU-1 0"] == node.events[-3:]


class FormerOffer(msgspec.Struct):
    """What a reader of the versions before takes of an offer for these words."""

    limiter: Literal["none", "vcuda", "hami-core"] | None = None
    sharing: Literal["time-slicing", "mps"] = "time-slicing"


def test_a_limit_by_mps_is_told_in_words_that_earlier_versions_read() -> None:
    """C46: a new value of `limiter` would have them pass the node's topology over."""
    topology = limited(in_units(SMALL, 2), sharing="mps", limiter=None)
    event = TopologyDiscovered(node=NODE, epoch=1, revision=1, boot_id="b", source="nvml", topology=topology)
    message = wire.encode_event(event, 0)
    read = msgspec.convert(json.loads(message.body)["topology"]["offers"], list[FormerOffer])

    assert event == wire.decode_event(message)
    assert ["mps", "mps", None] == [each.limited_by for each in event.topology.offered]
    assert [(None, "mps"), (None, "mps"), (None, "time-slicing")] == [(each.limiter, each.sharing) for each in read]
