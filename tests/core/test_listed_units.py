"""What has ended is free in the list of the plugins as early as in predictions: a kubelet can give what was foreseen."""

from collections.abc import Sequence

import msgspec
import pytest
from decision_support import NODE, node, pod
from hypothesis import given
from hypothesis import strategies as st
from unit_support import CORES, KUBELET, MEMORY, REVERSED, asks, holds

from topoalign.core.admission.prediction import predict, to_kubelet_rules
from topoalign.core.model.decisions import Admission
from topoalign.core.model.events import AllocationReleased, UsageObserved
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.model.kubelet import KubeletObserved
from topoalign.core.state.fold import NodeState

RULES = to_kubelet_rules(msgspec.structs.replace(KUBELET, cpu_manager="none", memory_manager="None"))
LAST = "GPU-3"
SHARES = ((40, 8), (100, 0), (40, 6))
"""Cores and blocks of a container: all memory of a GPU of 8 blocks, all its computing time, and neither."""


def units(gpu: str, cores: int, blocks: int) -> dict[ResourceName, tuple[DeviceID, ...]]:
    times, memory = (
        tuple(DeviceID(f"{gpu}::{word}{i}") for i in range(count)) for word, count in (("c", cores), ("m", blocks))
    )
    return {name: ids for name, ids in ((CORES, times), (MEMORY, memory)) if ids}


def lagging(cores: int, blocks: int, word: str) -> NodeState:
    """
    Three GPUs are held whole. The container that has this much of the last one has ended, by the kubelet's `word`, if it is
    one.
    """
    state = node(REVERSED)
    for index in range(3):
        state = holds(state, f"whole-{index}", units(f"GPU-{index}", 100, 0))
    held = units(LAST, cores, blocks)
    state = holds(state, "over", held)
    over = AllocationID("over")
    said = KubeletObserved(rules=RULES)
    if word == "ended":
        said = KubeletObserved(rules=RULES, ended=(over,))
    elif word == "dropped":
        said = KubeletObserved(rules=RULES, dropped={over: held})
    usage = UsageObserved(node=state.node, epoch=1, revision=1, containers=(), containers_known=True, kubelet=said)
    return state.apply(usage)


@pytest.mark.parametrize("word", ["ended", "dropped"])
@pytest.mark.parametrize("held", SHARES)
def test_a_full_gpu_is_listed_and_free_as_soon_as_its_container_has_ended(held: tuple[int, int], word: str) -> None:
    """
    The free units of a GPU of which nothing is left are listed as unhealthy. The record keeps what has ended for seconds:
    were they listed so meanwhile, a kubelet to whose node the extender sends the next pod would refuse it.
    """
    lasting, over = lagging(*held, word="no word"), lagging(*held, word)

    assert (held != (40, 6)) is (set() < unhealthy(lasting))
    assert set() == unhealthy(over)
    assert isinstance(predict(over, pod(asks(70, 5)), 0), Admission)


def unhealthy(state: NodeState) -> set[DeviceID]:
    """The units of the last GPU that are listed as unhealthy."""
    every = {unit for name in (CORES, MEMORY) for unit in state.hardware.devices[name] if unit.startswith(LAST)}
    return every - {unit for name in (CORES, MEMORY) for unit in state.healthy(name)}


def said_to_have_ended(state: NodeState, ended: Sequence[AllocationID]) -> NodeState:
    """The node after the agent told that these have ended."""
    revision = state.usage.revision + 1 if state.usage is not None else 1
    said = KubeletObserved(rules=RULES, ended=tuple(ended))
    known = UsageObserved(node=NODE, epoch=1, revision=revision, containers=(), containers_known=True, kubelet=said)
    return state.apply(known)


@given(st.data())
def test_the_units_that_are_listed_are_those_of_the_rule_after_any_facts(data: st.DataObject) -> None:
    """
    Of a GPU of which those that have not ended hold all computing time or all memory, the units that nobody has are listed
    as unhealthy; all others are healthy. Whether somebody asked in between or not.
    """
    state, shares = node(REVERSED), st.sampled_from([(0, 4), (40, 4), (60, 0), (100, 0), (20, 8)])
    for number in range(data.draw(st.integers(1, 8))):
        live = sorted(state.allocations)
        match data.draw(st.sampled_from(["grant", "grant", "end", "release"])):
            case "grant":
                state = holds(state, f"a{number}", units(LAST, *data.draw(shares)))
            case "end":
                state = said_to_have_ended(
                    state, data.draw(st.lists(st.sampled_from(live), unique=True)) if live else ()
                )
            case "release" if live:
                place = {"epoch": state.epoch, "seq": state.seq + 1}
                gone = data.draw(st.sampled_from(live))
                state = state.apply(AllocationReleased(node=NODE, allocation=gone, reason="gone", **place))
        if data.draw(st.booleans()):
            assert listed_by_rule(state) == unhealthy(state)

    assert listed_by_rule(state) == unhealthy(state)


def listed_by_rule(state: NodeState) -> set[DeviceID]:
    """The units of the last GPU that are to be listed as unhealthy, by the rule. It has 100 cores and 8 blocks."""
    ended = state.usage.kubelet.ended if state.usage is not None and state.usage.kubelet is not None else ()
    counts = {
        name: [len(each.devices.get(kind, ())) for kind in (CORES, MEMORY)] for name, each in state.allocations.items()
    }
    cores, blocks = (sum(count[at] for name, count in counts.items() if name not in ended) for at in (0, 1))
    held = {unit for each in state.allocations.values() for unit in each.device_ids}
    every = {unit for name in (CORES, MEMORY) for unit in state.hardware.devices[name] if unit.startswith(LAST)}
    return every - held if cores >= 100 or blocks >= 8 else set()
