"""`topoalign bench schedule` runs pods of a cluster whose nodes decide as the product does."""

from contextlib import AbstractContextManager
from functools import reduce
from random import Random

import msgspec
import pytest

from topoalign.core import wire
from topoalign.core.model.ids import GPU
from topoalign.core.model.requests import ConfirmRequest
from topoalign.core.ports import Stream
from topoalign.core.state.fold import NodeState, replay
from topoalign.kubelet.files.manifest import PodManifest, request_from_pod
from topoalign.runtime.clock import SystemClock
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.tools.bench import schedule as bench_schedule
from topoalign.tools.bench.device_plugin import agent
from topoalign.tools.bench.device_plugin.agent import Agent
from topoalign.tools.bench.filter.cluster import ALL, FACTS, HALF, BusyNode
from topoalign.tools.bench.filter.scheduler import Amounts, pod_json
from topoalign.tools.bench.schedule.control_plane import control_plane
from topoalign.tools.bench.schedule.node import AT_ONCE, Admitted, Bound, Node
from topoalign.tools.bench.schedule.real_like import burst

POD = msgspec.json.decode(pod_json(0, Amounts(gpus=1)), type=PodManifest)


def spoken(number: int) -> Node:
    """A node that has said its first facts."""
    node = Node(lambda: BusyNode(number, HALF), SystemClock(), AT_ONCE, Random(0))
    assert FACTS == len(list(node.busy.said()))
    return node


def test_all_pods_of_a_small_cluster_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """No node refuses one, and each call of the scheduler is measured."""

    def running(command: str, settings: dict[str, str], *, observed: bool) -> AbstractContextManager[Agent]:
        return agent.running(command, settings | {"REGISTRY_ANSWER_SECONDS": "60"}, observed=observed)

    monkeypatch.setitem(control_plane.__wrapped__.__globals__, "running", running)  # type: ignore[attr-defined]  # of contextmanager
    small = bench_schedule.cases(((8, 6),), waiting=9, seconds=0.5, real_like={"burst": burst(3)}, rounds=1)
    rows = {str(row["case"]): row for row in small}

    expected = ["8x6-filter", "8x6-prioritize", "8x6-bind", "8x6", "bind", "waiting-9"]
    assert [*expected, "real-like-burst"] == list(rows)
    assert (6, {}) == (rows["8x6"]["n"], rows["8x6"]["refused"])
    real_like = rows["real-like-burst"]
    assert (3, 0, 0) == (real_like["n"], real_like["refused"], real_like["failed_scheduling"])
    may_be_none = {"case", "refused", "errors", "failed_scheduling", "refused_alone"}
    for row in rows.values():
        assert all(float(str(row[key])) > 0 for key in row.keys() - may_be_none)


@pytest.mark.anyio
@pytest.mark.parametrize("number", range(2))
async def test_a_node_shows_what_it_gives_a_pod_as_it_confirmed(number: int) -> None:
    """What it publishes is folded without a gap, and is what the next decision stands on."""
    node, bus = spoken(number), MemoryBus()
    request = ConfirmRequest(node=node.busy.node, pod=request_from_pod(POD))
    confirmed, again = node.confirm(request), node.confirm(request)
    assert Admitted("u1", "") == await node.admit(bus, Bound(node.busy.node, "u1", POD))

    first = BusyNode(number, HALF)
    async with bus.follow(Stream.ALLOCATIONS, ">") as facts, bus.follow(Stream.NODES, ">") as readings:
        said = [wire.decode_event((await anext(each)).message) for each in (facts, facts, readings)]
    state = reduce(NodeState.apply, said, replay(first.node, first.said()))
    (given,) = [each for each in state.allocations.values() if each.pod_uid == "u1"]
    assert state.usage is not None and state.usage.kubelet is not None
    (entry,) = [each for each in state.usage.kubelet.entries if each.pod_uid == "u1"]

    assert confirmed == again
    (wanted,) = confirmed.allocations  # type: ignore[union-attr]  # it fits
    assert (wanted.devices[GPU], wanted.cpus) == (given.devices[GPU], entry.cpus)
    assert (state.digest, state.seq) == (node.busy.state.digest, node.busy.state.seq)
    assert given.devices[GPU] != node.confirm(request).allocations[0].devices[GPU]  # type: ignore[union-attr]  # it fits


@pytest.mark.anyio
async def test_a_node_refuses_as_its_decision_says() -> None:
    """A half full node has four GPUs to give, and its policy is restricted."""
    node, bus = spoken(0), MemoryBus()
    answers = [await node.admit(bus, Bound(node.busy.node, f"u{n}", POD)) for n in range(ALL - HALF + 1)]

    assert [""] * (ALL - HALF) == [each.code for each in answers[:-1]]
    assert "NotEnoughDevices" == answers[-1].code
