"""With `compat: gaia` units are of the GPUs that gpu-manager would choose, by a reading of its rules over plain sets."""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import msgspec
import pytest
from decision_support import GIB, machine, node, pod
from hami_support import Levels, hierarchies
from hypothesis import given, settings
from hypothesis import strategies as st
from unit_support import BEST, CORES, KUBELET, MEMORY, admitted, asks, gpus_of, holds, in_units

from topoalign.core.admission.admit import admit
from topoalign.core.model.allocations import amounts_of
from topoalign.core.model.decisions import Admission
from topoalign.core.model.ids import CPU, DeviceID
from topoalign.core.model.ids import MEMORY as HOST_MEMORY
from topoalign.core.model.requests import AdmissionRules, Policy
from topoalign.core.model.topology.device_links import Link, PcieClass
from topoalign.core.model.topology.device_offers import MEMORY_BLOCK
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState

BLOCKS = 8
"""Of memory that a GPU has."""
CLASSES = {10: PcieClass.PIX, 20: PcieClass.PXB, 30: PcieClass.PHB, 40: PcieClass.NODE, 50: PcieClass.SYS}
PAIRS = [[10 if a // 2 == b // 2 else 30 for b in range(6)] for a in range(6)]
"""Three pairs behind a switch each, below one host bridge."""


class Left(NamedTuple):
    """What is left of a GPU, and how many pods have some of it."""

    cores: int
    blocks: int
    pods: int


UNUSED = Left(100, BLOCKS, 0)


def as_gaia(rules: AdmissionRules) -> AdmissionRules:
    return msgspec.structs.replace(rules, compat="gaia")


def hardware(levels: Levels, minors: Sequence[int] = (), blocks: Sequence[int] = (), nodes: int = 1) -> Topology:
    """GPUs with these levels between them, in units. `nodes`: NUMA nodes over which they are divided in order."""
    count = len(levels)
    bare = machine(nodes=nodes, gpus=[at * nodes // count for at in range(count)], nics=())
    gpus = tuple(
        msgspec.structs.replace(
            gpu,
            minor=minors[gpu.index] if minors else gpu.index,
            memory=(blocks[gpu.index] if blocks else BLOCKS) * MEMORY_BLOCK,
        )
        for gpu in bare.gpus
    )
    links = tuple(
        Link(a=gpus[a].id, b=gpus[b].id, pcie=CLASSES[levels[a][b]]) for a in range(count) for b in range(a + 1, count)
    )
    return in_units(msgspec.structs.replace(bare, gpus=gpus, links=links), count)


def expected(
    levels: Levels, minors: Sequence[int], left: Sequence[Left], cores: int, blocks: int
) -> tuple[int, ...] | None:
    """The GPUs by gpu-manager's rules, of equal parts of the machine that with the lowest minor; None: it refuses."""
    every, count = frozenset(range(len(levels))), cores // 100
    if not count:
        enough = [at for at in every if left[at].cores >= max(1, cores) and left[at].blocks >= blocks]
        return tuple(sorted(enough, key=lambda at: (*left[at], minors[at]))[:1]) or None
    free = frozenset(at for at in every if left[at] == UNUSED)
    parts = {
        (level, frozenset(b for b, other in enumerate(row) if b == a or other <= level))
        for a, row in enumerate(levels)
        for level in row
        if level
    }

    def rank(members: frozenset[int]) -> tuple[int, int, int]:
        return len(free & members), sum(left[at].pods for at in members), min(minors[at] for at in members)

    if count > 1:
        around = [[part for part in parts if at in part[1] and len(free & part[1]) >= count] for at in every]
        lowest = {min(some, key=lambda part: part[0]) for some in around if some} or {(60, every)}
        chosen = min(lowest, key=lambda part: (part[0], rank(part[1])))[1]
    else:
        level, chosen = 60, every
        while below := [part for part in parts if part[0] < level and part[1] <= chosen]:
            nearest = [one for one in below if not any(one[1] <= two[1] and one[0] < two[0] for two in below)]
            able = [part for part in nearest if free & part[1]]
            if not able:
                break
            level, chosen = min(able, key=lambda part: rank(part[1]))
    found = tuple(sorted(free & chosen)[:count])
    return found if len(found) == count else None


def amounts_left(state: NodeState) -> list[Left]:
    """Counted from who holds what."""
    held = [amounts_of(each.device_ids) for each in state.allocations.values()]
    found = []
    for gpu in state.hardware.gpus:
        some = [each[gpu.id] for each in held if gpu.id in each]
        blocks = BLOCKS - sum(each.memory // MEMORY_BLOCK for each in some)
        found.append(Left(100 - sum(each.cores for each in some), blocks, len(some)))
    return found


shares = st.tuples(st.sampled_from([0, 10, 20, 30, 50, 80]), st.integers(1, 4))
wholes = st.tuples(st.sampled_from([100, 100, 200, 300]), st.sampled_from([0, 0, 6]))
steps = st.lists(st.tuples(shares | wholes, st.integers(0, 9)), min_size=1, max_size=7)


@settings(max_examples=50)
@given(hierarchies(most=7), st.randoms(use_true_random=False), steps, st.sampled_from([BEST, KUBELET]))
def test_admit_gives_the_gpus_that_gpu_manager_would(
    levels: Levels, chance: Random, asked: list[tuple[tuple[int, int], int]], rules: AdmissionRules
) -> None:
    """On any machine of which an alignment leaves nothing out, while pods come and go; of equal ones always the same."""
    minors = list(range(len(levels)))
    chance.shuffle(minors)
    state = node(hardware(levels, minors))
    for number, ((cores, blocks), ending) in enumerate(asked):
        wanted = expected(levels, minors, amounts_left(state), cores, blocks)
        decision = admit(state, pod(asks(cores, blocks)), as_gaia(rules))

        got = None
        if isinstance(decision, Admission):
            devices = decision.allocations[0].devices
            assert {CORES: cores, MEMORY: blocks} == {name: len(devices.get(name, ())) for name in (CORES, MEMORY)}
            got = tuple(gpus_of(state, [each for some in devices.values() for each in some]))
            state = holds(state, f"p{number}", devices)
        assert wanted == got, (number, amounts_left(state))
        if ending < len(state.allocations) - 1:
            state = state.without([*state.allocations][ending])


@settings(max_examples=30)
@given(
    hierarchies(most=6),
    st.lists(st.lists(shares | wholes, min_size=1, max_size=3), min_size=1, max_size=6),
    st.sampled_from([*Policy]),
    st.sampled_from([BEST, KUBELET]),
    st.booleans(),
)
def test_no_gpu_is_held_above_what_it_has(
    levels: Levels, pods: list[list[tuple[int, int]]], policy: Policy, rules: AdmissionRules, init: bool
) -> None:
    """Whatever is asked for, also by several containers, after init containers, and where kubelets align."""
    rules = msgspec.structs.replace(as_gaia(rules), policy=policy)
    state = node(hardware(levels, nodes=2 if len(levels) > 1 else 1))
    for number, amounts in enumerate(pods):
        containers = [asks(*each, name=f"c{at}") for at, each in enumerate(amounts)]
        first = containers[:1] if init and len(containers) > 1 else []
        decision = admit(state, pod(*containers[len(first) :], init=first, name=f"p{number}"), rules)
        if isinstance(decision, Admission):
            for at, each in enumerate(decision.allocations[len(first) :]):
                state = holds(state, f"p{number}-{at}", each.devices)

        for gpu in state.hardware.gpus:
            held = [each.amounts[gpu.id] for each in state.allocations.values() if gpu.id in each.amounts]
            assert sum(each.cores for each in held) <= 100 and sum(each.memory for each in held) <= (gpu.memory or 0)
            assert len(held) <= 1 or all(each.cores < 100 for each in held)


@pytest.mark.parametrize(
    ("cores", "blocks", "ours", "theirs"),
    [
        (20, 2, [1], [1]),
        (100, 0, [0], [0]),
        (200, 0, [2, 3], [2, 3]),
        (400, 0, [2, 3, 4, 5], [0, 2, 3, 4]),
    ],
)
def test_the_example_of_the_documents(cores: int, blocks: int, ours: list[int], theirs: list[int]) -> None:
    """Three pairs with a share on the second GPU: gpu-manager takes the first free ones of the part that it has chosen."""
    state = in_use(hardware(PAIRS), 1, 30, 2)

    asked = pod(asks(cores, blocks))
    by_us, by_them = (admitted(state, asked, rules)[0].devices[CORES] for rules in (KUBELET, as_gaia(KUBELET)))

    assert (ours, theirs) == (gpus_of(state, by_us), gpus_of(state, by_them))


def in_use(topology: Topology, index: int, cores: int, blocks: int) -> NodeState:
    """A node of which a pod has so much of one GPU."""
    gpu = topology.gpus[index].id
    units = {
        CORES: tuple(DeviceID(f"{gpu}::c{n}") for n in range(cores)),
        MEMORY: tuple(DeviceID(f"{gpu}::m{n}") for n in range(blocks)),
    }
    return holds(node(topology), "held", units)


def test_gpus_that_an_alignment_leaves_out_count_as_in_use() -> None:
    """By itself gpu-manager would go to the share on GPU-1; the kubelet aligns the CPUs to NUMA node 1."""
    state = in_use(hardware(PAIRS, nodes=2), 1, 30, 2)
    rules = msgspec.structs.replace(
        as_gaia(KUBELET), policy=Policy.SINGLE_NUMA_NODE, reserved_cpus="0", memory_manager="None"
    )
    share = asks(20, 2)
    limits = {**share.limits, CPU: 8000, HOST_MEMORY: GIB}
    with_cpus = msgspec.structs.replace(share, requests=limits, limits=limits)

    assert [1] == gpus_of(state, admitted(state, pod(share), rules)[0].devices[CORES])
    assert [3] == gpus_of(state, admitted(state, pod(with_cpus), rules)[0].devices[CORES])


def test_whole_gpus_have_the_memory_that_is_asked_for() -> None:
    """gpu-manager looks at no memory of whole cards, and would give the first ones."""
    state = node(hardware(PAIRS, blocks=(4, 4, 8, 8, 4, 8)))

    assert [2, 3] == gpus_of(state, admitted(state, pod(asks(200, 12)), as_gaia(BEST))[0].devices[CORES])
    assert [2, 3, 5] == gpus_of(state, admitted(state, pod(asks(300, 15)), as_gaia(BEST))[0].devices[CORES])


def test_memory_alone_goes_where_a_share_of_one_core_would() -> None:
    """gpu-manager starts such a container without any GPU."""
    state = in_use(hardware(PAIRS, minors=(5, 4, 3, 2, 1, 0)), 2, 30, 2)

    assert [2] == gpus_of(state, admitted(state, pod(asks(0, 6)), as_gaia(BEST))[0].devices[MEMORY])
    assert [5] == gpus_of(state, admitted(state, pod(asks(0, 7)), as_gaia(BEST))[0].devices[MEMORY])


def test_a_container_stays_on_the_gpus_of_its_init_container() -> None:
    """gpu-manager knows no init containers: two whole GPUs, and for a third one what it would choose of the others."""
    state = in_use(hardware(PAIRS), 2, 10, 1)
    found = admitted(state, pod(asks(300), init=[asks(200, name="first")]), as_gaia(BEST))

    assert [0, 1] == gpus_of(state, found[0].devices[CORES])
    assert [0, 1, 3] == gpus_of(state, found[1].devices[CORES])
