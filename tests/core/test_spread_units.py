"""Units that are spread over several GPUs: equal parts of the best set that has enough, by the annotation of the pod."""

from collections.abc import Mapping, Sequence
from itertools import combinations

import msgspec
import pytest
from decision_support import machine, node, pod
from hypothesis import given, settings
from hypothesis import strategies as st
from seam_reference import naive_rank
from unit_support import BEST, CORES, KUBELET, MEMORY, admitted, asks, holds, in_units, refused, spread

from topoalign.core.admission.admit import admit
from topoalign.core.admission.gang_plan import has_its_own, reserved_for
from topoalign.core.demand.shares import Share, enough, read_gpu_count, share_of_units
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.decisions import Admission
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.requests import GPU_COUNT, AdmissionRules, Mode, Policy
from topoalign.core.model.topology.device_offers import MEMORY_BLOCK
from topoalign.core.model.topology.model import Topology
from topoalign.core.placement.gpus.bandwidth import Scores, gpu_scores
from topoalign.core.sharing.choosers import units_on
from topoalign.core.state.fold import NodeState
from topoalign.core.state.share_amounts import NONE_HELD, ShareLeft
from topoalign.machines import load_machine


def parts(state: NodeState, allocation: Allocation) -> dict[int, tuple[int, int]]:
    """GPU's index -> units of computing time and of memory that an allocation has of it."""
    amounts, by_id = allocation.amounts, state.hardware.gpu_by_id
    return {by_id[gpu].index: (each.cores, each.memory // MEMORY_BLOCK) for gpu, each in amounts.items()}


class Reference:
    """The best connected set of GPUs with enough left; of equal sets the one with the least left."""

    def __init__(self, scores: Scores, left: Mapping[int, tuple[int, int]], unused: frozenset[int]) -> None:
        """
        `scores`: of all pairs of GPUs. `left`: GPU in units -> units of computing time and blocks that nobody holds;
        `unused`: those of which nobody holds anything.
        """
        self.scores, self.left, self.unused = scores, left, unused

    def chosen(self, cores: int, blocks: int, cards: int) -> tuple[int, ...] | None:
        """The best set for amounts that divide evenly; None: no set has enough."""
        time, memory = cores // cards, blocks // cards
        enough = [gpu for gpu, (c, m) in sorted(self.left.items()) if c >= max(1, time) and m >= memory]

        def rank(members: tuple[int, ...]) -> tuple[object, ...]:
            least = tuple(sum(self.left[gpu][kind] for gpu in members) for kind in (0, 1))
            sharers = sum(gpu not in self.unused for gpu in members)
            links = naive_rank(self.scores, self.scores, members, self.unused)[:-1]
            return (least, sharers, links, members) if cards == 1 else (links, least, sharers, members)

        return min(combinations(enough, cards), key=rank, default=None)


BLOCKS = 60
BOTH = pytest.mark.parametrize("rules", [BEST, KUBELET], ids=["best", "kubelet"])
Held = Sequence[tuple[int, int, int]]
"""GPU's index, units of computing time and blocks."""


def small(topology: Topology, gpus: int) -> Topology:
    """The machine with its first GPUs in units, of 60 blocks each."""
    sized = tuple(msgspec.structs.replace(gpu, memory=BLOCKS * MEMORY_BLOCK) for gpu in topology.gpus)
    return in_units(msgspec.structs.replace(topology, gpus=sized), gpus)


PAIRS = small(load_machine("8x-nvlink-pairs").topology, 6)
PLAIN = small(machine(gpus=(0, 0, 0, 1, 1, 1)), 6)


def holding(state: NodeState, held: Held) -> NodeState:
    """The node with the last units of these GPUs held by a pod each."""
    for number, (index, cores, blocks) in enumerate(held):
        gpu = state.hardware.gpus[index].id
        last = {CORES: ("c", 100, cores), MEMORY: ("m", BLOCKS, blocks)}
        devices = {
            name: tuple(DeviceID(f"{gpu}::{kind}{n}") for n in range(most - amount, most))
            for name, (kind, most, amount) in last.items()
            if amount
        }
        state = holds(state, f"held-{number}", devices) if devices else state
    return state


def left_by(held: Held, gpus: int = 6) -> dict[int, tuple[int, int]]:
    taken = {index: (cores, blocks) for index, cores, blocks in held}
    return {index: (100 - taken.get(index, (0, 0))[0], BLOCKS - taken.get(index, (0, 0))[1]) for index in range(gpus)}


some_held = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 90), st.integers(0, 50)), max_size=6, unique_by=lambda each: each[0]
)
divided = st.tuples(st.integers(0, 60), st.integers(1, 40), st.integers(1, 4)).map(
    lambda each: (min(each[0], 99 // each[2]) * each[2], each[1] * each[2], each[2])
)
"""Computing time, blocks, and over how many GPUs: parts are equal."""


@settings(max_examples=50)
@given(some_held, divided, st.sampled_from([BEST, KUBELET]))
def test_the_best_set_with_enough_gets_equal_parts(
    held: Held, asked: tuple[int, int, int], rules: AdmissionRules
) -> None:
    """Compared with all sets of GPUs."""
    cores, blocks, cards = asked
    state = holding(node(PAIRS), held)
    unused = frozenset(range(6)) - {index for index, *amounts in held if any(amounts)}
    reference = Reference(gpu_scores(PAIRS), left_by(held), unused)

    decision = admit(state, spread(pod(asks(cores, blocks)), cards), rules)

    expected = reference.chosen(cores, blocks, cards)
    if expected is None:
        assert not isinstance(decision, Admission)
    else:
        assert isinstance(decision, Admission), decision
        assert dict.fromkeys(expected, (cores // cards, blocks // cards)) == parts(state, decision.allocations[0])


@settings(max_examples=40)
@given(some_held, divided, st.sampled_from([Policy.SINGLE_NUMA_NODE, Policy.RESTRICTED, Policy.BEST_EFFORT]))
def test_no_hint_promises_a_numa_node_with_too_few_gpus(
    held: Held, asked: tuple[int, int, int], policy: Policy
) -> None:
    """Three GPUs on each of two NUMA nodes: of a set on one of them all are there, wherever a policy insists on one."""
    cores, blocks, cards = asked
    state, left = holding(node(PLAIN), held), left_by(held)
    enough = [gpu for gpu, (c, m) in left.items() if c >= max(1, cores // cards) and m >= blocks // cards]
    most = max(sum(gpu // 3 == at for gpu in enough) for at in (0, 1))

    decision = admit(state, spread(pod(asks(cores, blocks)), cards), AdmissionRules(mode=Mode.BEST, policy=policy))

    fits = most >= cards or (policy is not Policy.SINGLE_NUMA_NODE and len(enough) >= cards)
    assert fits == isinstance(decision, Admission), decision
    if isinstance(decision, Admission):
        found = parts(state, decision.allocations[0])
        assert {*found} <= {*enough} and cards == len(found)
        assert most < cards or len({gpu // 3 for gpu in found}) == 1


@BOTH
def test_sixty_units_and_forty_blocks_are_half_of_each_of_two(rules: AdmissionRules) -> None:
    """Of GPU-0 nothing is held, of the others 40 and 24 blocks, and 60 and 30."""
    state = holding(node(small(machine(gpus=(0, 0, 0)), 3)), [(1, 40, 24), (2, 60, 30)])

    found = admitted(state, spread(pod(asks(60, 40)), 2), rules)[0]

    assert {1: (30, 20), 2: (30, 20)} == parts(state, found)
    assert "ShareSplit" == refused(state, spread(pod(asks(60, 93)), 3), rules).code  # GPU-2 has 30 blocks left


def test_with_compat_gaia_a_spread_share_goes_where_it_would_without() -> None:
    """gpu-manager knows no parts of several GPUs."""
    state = holding(node(PAIRS), [(0, 50, 10), (1, 50, 10), (2, 10, 10), (3, 10, 10)])
    rules = msgspec.structs.replace(BEST, compat="gaia")

    ours, theirs = (parts(state, admitted(state, spread(pod(asks(60, 40)), 2), each)[0]) for each in (BEST, rules))

    assert {0: (30, 20), 1: (30, 20)} == ours == theirs


@BOTH
def test_each_container_of_the_pod_is_spread(rules: AdmissionRules) -> None:
    asked = spread(pod(asks(60, 40), asks(20, 10, name="other"), asks(blocks=4, name="third")), 2)

    main, other, third = (parts(node(PLAIN), each) for each in admitted(node(PLAIN), asked, rules))

    assert [(30, 20)] * 2 == [*main.values()]
    assert [(10, 5)] * 2 == [*other.values()]
    assert [(0, 2)] * 2 == [*third.values()]


@BOTH
def test_an_app_container_takes_over_parts_of_the_same_gpus(rules: AdmissionRules) -> None:
    state, asked = node(PLAIN), spread(pod(asks(60, 40), init=[asks(20, 10, name="first")]), 2)

    first, main = (parts(state, each) for each in admitted(state, asked, rules))

    assert [(10, 5)] * 2 == [*first.values()]
    assert dict.fromkeys(first, (30, 20)) == main


def test_what_is_taken_over_at_random_of_several_gpus_is_refused() -> None:
    """The kubelet picks 20 of the 60 units that the init container leaves of two GPUs."""
    asked = spread(pod(asks(20, 40), init=[asks(60, 40, name="first")]), 2)

    refusal = refused(node(PLAIN), asked, KUBELET)

    assert "ShareSplit" == refusal.code
    assert "at random" in refusal.finding


def test_units_that_must_be_included_count_for_their_gpu() -> None:
    """20 of GPU-0 are there already: of 60 over two GPUs 10 more of it, and 30 of the other."""
    devices = node(PLAIN).hardware.devices[CORES]
    own = tuple(DeviceID(f"GPU-0::c{n}") for n in range(20))

    found = units_on(devices.everything, own, 60, [DeviceID("GPU-0"), DeviceID("GPU-1")])

    assert own == found[:20]
    assert (30, 30) == tuple(sum(unit.startswith(gpu) for unit in found) for gpu in ("GPU-0::", "GPU-1::"))


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", "", " 2", "2\n", "+2", "02", "1000", "\u0662", '{"main": 2}'])
def test_what_is_no_number_of_gpus_is_refused_with_its_path(text: str) -> None:
    with pytest.raises(InvalidField) as caught:
        read_gpu_count({GPU_COUNT: text})

    assert f"metadata.annotations[{GPU_COUNT}]" == caught.value.field
    assert caught.value.remedy


def test_a_node_refuses_more_gpus_than_it_has() -> None:
    assert "NotEnoughShareGpus" == refused(node(PLAIN), spread(pod(asks(7, 7)), 7), BEST).code
    assert "InvalidShare" == refused(node(machine()), spread(pod(asks()), 2), BEST).code


@BOTH
def test_too_few_gpus_with_enough_left_are_told_of(rules: AdmissionRules) -> None:
    state = holding(node(PLAIN), [(gpu, 80, 10) for gpu in range(5)])

    refusal = refused(state, spread(pod(asks(60, 40)), 2), rules)

    assert "ShareSplit" == refusal.code
    assert refusal.finding.startswith("share: ")


def test_whole_gpus_with_too_little_memory_have_no_room() -> None:
    """A container may ask for whole GPUs by the memory of the largest."""
    empty = [
        ShareLeft(offered=Amount(cores=100, memory=blocks * MEMORY_BLOCK), held=NONE_HELD, sharers=0, usable=True)
        for blocks in (40, 60)
    ]

    assert [False, True] == [enough(each, units(100, 50)) for each in empty]
    assert [True, True] == [enough(each, units(200, 80)) for each in empty]


def units(cores: int, blocks: int) -> Share:
    return share_of_units(Amount(cores=cores, memory=blocks * MEMORY_BLOCK))


def test_what_is_spread_is_to_be_given_as_it_is_reserved() -> None:
    """So the node refuses it elsewhere; and a kubelet that is told of no reservation spreads nothing."""
    both = spread(pod(asks(60, 40)), 2)
    of_two, of_one = (admitted(node(PLAIN), each, KUBELET) for each in (both, pod(asks(60, 40))))

    assert has_its_own(both, of_two)
    assert not has_its_own(pod(asks(60, 40)), of_one)
    assert not has_its_own(pod(asks(200, 0)), admitted(node(PLAIN), pod(asks(200, 0)), KUBELET))
    assert not reserved_for("uid", both, of_two, 1.0).containers[0].may_move


def test_whole_gpus_with_memory_are_to_be_given_as_they_are_reserved() -> None:
    """A kubelet that asks for memory after whole GPUs may ask for another container: only the reservation tells."""
    for cores in (100, 200):
        asking = pod(asks(cores, 10))

        assert has_its_own(asking, admitted(node(PLAIN), asking, KUBELET))


def test_a_prediction_says_that_the_kubelet_spreads_nothing_by_itself() -> None:
    told, unreadable = (
        admit(node(PLAIN), spread(pod(asks(60, 40)), 2), rules).explanation.notes for rules in (KUBELET, BEST)
    )

    assert any("the kubelet reads no annotations" in each for each in told)
    assert () == unreadable
