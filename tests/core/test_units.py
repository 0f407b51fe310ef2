"""GPUs in units of computing time and memory: a share is of one GPU, fits best, and is never of more than a GPU has."""

from collections import Counter

import msgspec
import pytest
from decision_support import node, pod
from hypothesis import given, settings
from hypothesis import strategies as st
from unit_support import BEST, CORES, DGX, KUBELET, MEMORY, admitted, asks, gpus_of, holds, in_units, refused

from topoalign.core.admission.admit import admit
from topoalign.core.admission.pipeline import HALVES_BY_RESERVATION
from topoalign.core.model.decisions import Admission, Refusal
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.device_offers import MEMORY_BLOCK, Offer
from topoalign.core.model.topology.topology_checks import validate
from topoalign.core.state.fold import NodeState


def holding(state: NodeState, *shares: tuple[int, int, int]) -> NodeState:
    """The node with (GPU's index, computing time, blocks) held by a pod each."""
    for number, (index, cores, blocks) in enumerate(shares):
        gpu = state.hardware.gpus[index].id
        devices = {
            CORES: tuple(DeviceID(f"{gpu}::c{n}") for n in range(100))[100 - cores :],
            MEMORY: tuple(DeviceID(f"{gpu}::m{n}") for n in range(160))[160 - blocks :],
        }
        state = holds(state, f"held-{number}", {name: some for name, some in devices.items() if some})
    return state


def test_a_share_is_put_where_least_is_left() -> None:
    state = holding(node(in_units(DGX)), (3, 40, 10), (5, 70, 150))

    small = admitted(state, pod(asks(20, 10)), BEST)[0]
    large = admitted(state, pod(asks(20, 60)), BEST)[0]

    assert [5] == gpus_of(state, [*small.devices[CORES], *small.devices[MEMORY]])
    assert (20, 10) == (len(small.devices[CORES]), len(small.devices[MEMORY]))
    assert [3] == gpus_of(state, [*large.devices[CORES], *large.devices[MEMORY]])


@pytest.mark.parametrize("amounts", [(20, 10), (200, 10)], ids=str)
def test_an_admission_of_both_halves_says_that_it_assumes_a_reservation(amounts: tuple[int, int]) -> None:
    """A kubelet alone asks for one half after the other. One half alone needs none, nor does mode `best`."""
    state, asked = node(in_units(DGX)), pod(asks(*amounts))

    assert (HALVES_BY_RESERVATION,) == admit(state, asked, KUBELET).explanation.notes
    assert () == admit(state, asked, BEST).explanation.notes
    for half in ((0, 10), (100, 0)):
        assert () == admit(state, pod(asks(*half)), KUBELET).explanation.notes
    assert () == admit(state, pod(asks(900, 10)), KUBELET).explanation.notes, "it is refused"


def test_memory_can_be_had_without_computing_time() -> None:
    state = holding(node(in_units(DGX)), (2, 30, 30))

    found = admitted(state, pod(asks(blocks=100)), BEST)[0]

    assert [2] == gpus_of(state, found.devices[MEMORY])
    assert CORES not in found.devices


@pytest.mark.parametrize("rules", [BEST, KUBELET])
@pytest.mark.parametrize(("cores", "blocks"), [(150, 10), (20, 0), (101, 1), (200, 1)])
def test_amounts_that_cannot_be_meant_are_refused(rules: AdmissionRules, cores: int, blocks: int) -> None:
    refusal = refused(node(in_units(DGX)), pod(asks(cores, blocks)), rules)

    assert "InvalidShare" == refusal.code
    assert refusal.remedy


def test_whole_gpus_are_those_that_nobody_uses() -> None:
    state = holding(node(in_units(DGX)), (0, 1, 1), (1, 0, 1))

    found = admitted(state, pod(asks(200, 40)), BEST)[0]

    assert 2 == len(gpus_of(state, found.devices[CORES]))
    assert {0, 1}.isdisjoint(gpus_of(state, found.devices[CORES]))
    assert gpus_of(state, found.devices[CORES]) == gpus_of(state, found.devices[MEMORY])
    assert {20} == {*Counter(state.hardware.parent_of(each) for each in found.devices[MEMORY]).values()}


def test_nothing_is_left_of_a_gpu_whose_time_one_container_has() -> None:
    state = node(in_units(DGX, gpus=1))
    whole = admitted(state, pod(asks(100)), BEST)[0]
    state = holds(state, "whole", whole.devices)

    assert "NoHealthyDevice" == refused(state, pod(asks(blocks=1)), BEST).code
    assert "NoHealthyDevice" == refused(state, pod(asks(blocks=1)), KUBELET).code


def test_a_whole_gpu_of_which_others_have_memory_is_refused() -> None:
    """The kubelet counts units of the NUMA node: there are as many as are asked for."""
    state = holding(node(in_units(DGX, gpus=2)), (1, 0, 6))

    assert "WholeGpuInUse" == refused(state, pod(asks(200)), KUBELET).code
    assert isinstance(admit(state, pod(asks(200)), BEST), Refusal)


def test_a_share_that_several_gpus_have_together_is_refused() -> None:
    """The kubelet counts units of the NUMA node: it would give some of one GPU and some of another."""
    state = holding(node(in_units(DGX)), *((index, 60, 60) for index in range(8)))

    assert "ShareSplit" == refused(state, pod(asks(50, 10)), KUBELET).code
    assert "ShareSplit" == refused(state, pod(asks(50, 10)), BEST).code


def test_a_container_takes_over_the_units_of_an_init_container() -> None:
    state = holding(node(in_units(DGX)), (4, 50, 50))

    found = admitted(state, pod(asks(30, 30), init=[asks(20, 20, name="first")]), BEST)

    assert [4] == gpus_of(state, [*found[1].devices[CORES], *found[1].devices[MEMORY]])
    assert {*found[0].devices[CORES]} < {*found[1].devices[CORES]}


def test_units_that_were_taken_over_are_held_once() -> None:
    """By the app container that took them over, and not by the init containers as well, which have ended."""
    state = node(in_units(DGX, gpus=1))
    inits = [asks(20, 20, name="first"), asks(30, 30, name="second")]
    for each in admitted(state, pod(asks(50, 10), init=inits), BEST):
        state = state.holding(each)

    left = state.ownership.units_left[state.hardware.gpus[0].id]

    assert (50, 160 - 30) == (left.left.cores, left.left.memory // MEMORY_BLOCK)
    assert isinstance(admit(state, pod(asks(50, 130), name="pod-2"), BEST), Admission)
    assert isinstance(admit(state, pod(asks(51, 10), name="pod-2"), BEST), Refusal)


def test_a_gpu_is_offered_whole_or_in_units() -> None:
    topology = in_units(DGX)
    both = msgspec.structs.replace(
        topology, offers=(*(topology.offers or ()), Offer(resource=ResourceName("x/y"), devices=(DGX.gpus[0].id,)))
    )

    with pytest.raises(InvalidField, match="is offered twice"):
        validate(both)


amounts = st.tuples(st.integers(0, 100), st.integers(0, 160))


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(0, 90)), max_size=4, unique_by=lambda x: x[0]
    ),
    amounts,
    st.sampled_from([BEST, KUBELET]),
)
def test_a_share_fits_where_some_gpu_has_enough(
    held: list[tuple[int, int, int]], asked: tuple[int, int], rules: AdmissionRules
) -> None:
    """Compared with a look at each GPU by itself."""
    cores, blocks = asked
    state = holding(node(in_units(DGX, gpus=4)), *(each for each in held if each[1] or each[2]))
    used = {index: (c, m) for index, c, m in held}
    left = {index: (100 - used.get(index, (0, 0))[0], 160 - used.get(index, (0, 0))[1]) for index in range(4)}

    decision = admit(state, pod(asks(cores, blocks)), rules)

    if cores == 100:
        fitting = [index for index, (c, m) in left.items() if (c, m) == (100, 160)]
    elif cores and not blocks:
        fitting = []
    else:
        fitting = [index for index, (c, m) in left.items() if c >= cores and m >= blocks]
    if not isinstance(decision, Admission):
        assert not fitting
        return
    devices = [each for part in decision.allocations for some in part.devices.values() for each in some]
    if cores or blocks:
        assert cores + blocks == len(devices)
        assert {*gpus_of(state, devices)} <= {*fitting}
        best = min(fitting, key=lambda index: (left[index][0], left[index][1], used.get(index, (0, 0)) != (0, 0)))
        assert cores == 100 or left[best] == left[gpus_of(state, devices)[0]]
    assert {*devices}.isdisjoint(each for one in state.allocations.values() for each in one.device_ids)
