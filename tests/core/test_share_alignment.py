"""To which GPUs a kubelet may lead a pod with parts of GPUs once others have ended."""

from collections.abc import Iterable

import msgspec
import pytest
from decision_support import GIB, container, machine, node, pod
from feasibility_support import with_pod
from slot_support import CORES, MEMORY, WITH_NUMA_NODES, in_slots

from topoalign.core.admission import share_alignment
from topoalign.core.admission.admit import admit
from topoalign.core.admission.share_alignment import containers_aligned_to_gpus, finds_gpus, without_all
from topoalign.core.demand.pod_demand import PodDemand, read_pod
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.decisions import Admission, Refusal
from topoalign.core.model.ids import GPU
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, Mode, Policy
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState

RULES = AdmissionRules(mode=Mode.KUBELET, policy=Policy.RESTRICTED, cpu_manager="static", reserved_cpus="0")
"""Seven CPUs are to be had on NUMA node 0, eight on node 1."""
Held = tuple[int, int]
"""CPUs of a pod, and cores of a GPU or 0."""


def shared(places: tuple[int, ...] = (0, 1), slots: int = 4) -> Topology:
    plain = machine(gpus=places)
    sized = tuple(msgspec.structs.replace(gpu, memory=16 * GIB) for gpu in plain.gpus)
    return in_slots(msgspec.structs.replace(plain, gpus=sized), slots, scaling=WITH_NUMA_NODES)


def part(cpus: int, cores: int) -> ContainerRequest:
    others: dict[str, int] = {GPU: 1, CORES: cores, MEMORY: 1000} if cores else {}
    return container(cpus=cpus, gib=1, others=others)


def asking(cpus: int, cores: int, rules: AdmissionRules = RULES, gpus: str = "") -> PodDemand:
    """`gpus`: the only ones that the pod accepts."""
    said = {"nvidia.com/use-gpuuuid": gpus} if gpus else {}
    return read_pod(pod(part(cpus, cores), name="new", annotations=said), rules)


def holding(*held: Held, hardware: Topology | None = None, rules: AdmissionRules = RULES) -> NodeState:
    """Each is aligned to the first NUMA node with room, and gets of a GPU there what it asks for."""
    state = node(shared() if hardware is None else hardware)
    for number, each in enumerate(held):
        after = with_pod(state, read_pod(pod(part(*each), name=f"held-{number}"), rules))
        assert after is not None
        state = after[0]
    return state


@pytest.mark.parametrize(
    ("held", "finds"),
    [
        ([(5, 0), (1, 60)], False),  # CPUs end alone, and node 0 has free slots, and 40 cores left
        ([(6, 60)], True),  # whoever gives back enough CPUs gives back the cores, too
        ([(5, 60), (1, 0)], False),  # there is one more CPU, and the GPU is still held
        ([(3, 30), (3, 30)], True),  # each of the two makes room
        ([(2, 20), (2, 20), (2, 20)], False),  # none of the three does: 60 cores are left after one
        ([(1, 30)], True),  # node 0 has room now
    ],
)
def test_an_earlier_set_is_a_danger_if_it_may_have_all_but_the_cores(held: list[Held], finds: bool) -> None:
    """Against whole decisions: the pod is admitted now, and refused after some end where it does not find GPUs."""
    state, new = holding(*held), asking(2, 70)
    ends = [state] if not held else [state.without(each) for each in state.allocations]

    assert with_pod(state, new) is not None
    assert finds is finds_gpus(state, new)
    assert finds is all(with_pod(each, new) is not None for each in ends)


def test_a_node_is_not_built_anew_for_each_pod_that_may_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 70 pods on eight GPUs that took 20 ms in one turn of the event loop, four times as long as the amounts alone."""
    built = []

    def counting(state: NodeState, gone: Iterable[Allocation]) -> NodeState:
        built.append(state)
        return without_all(state, gone)

    monkeypatch.setattr(share_alignment, "without_all", counting)

    assert not finds_gpus(holding((2, 20), (2, 20), (2, 20)), asking(2, 70))
    assert 2 == len(built)  # without the pods that are elsewhere, and without all that free too little


@pytest.mark.parametrize("policy", [Policy.BEST_EFFORT, Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE])
def test_a_kubelet_counts_the_slots_of_a_gpu_that_its_pod_has_filled(policy: Policy) -> None:
    """They are listed as Unhealthy once the first container has its GPU, and the second one is aligned before that."""
    rules = msgspec.structs.replace(RULES, policy=policy)
    first, second = (container(name, others={GPU: 1, CORES: cores}) for name, cores in (("a", 100), ("b", 30)))

    refusal, taking = admit(node(shared()), pod(first, second), rules), admit(node(shared()), pod(first), rules)

    assert isinstance(refusal, Refusal) and isinstance(taking, Admission)
    assert ("ShareSplit", "b") == (refusal.code, refusal.container)
    after = node(shared()).holding(taking.allocations[0])
    assert isinstance(admit(after, pod(second, name="later"), rules), Admission)


def test_a_pod_finds_gpus_if_others_leave_enough_wherever_they_come() -> None:
    """Each NUMA node has two GPUs: another pod takes one of them, two others both."""
    state = holding((1, 20), hardware=shared((0, 0, 1, 1)))
    new, other = asking(2, 70), asking(2, 60)

    assert finds_gpus(state, new, [other])
    assert not finds_gpus(state, new, [other, other])
    assert finds_gpus(state, new, [asking(2, 0)] * 3)


def test_a_pod_that_limits_its_gpus_has_to_stay_where_they_are_reserved() -> None:
    """Of any GPU there would be enough: those that are reserved for it are of the NUMA node to which it is aligned now."""
    state = holding((6, 0))
    new = [asking(2, 70), asking(2, 70, gpus="GPU-0,GPU-1")]

    assert [True, False] == [finds_gpus(state, each) for each in new]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(Policy.NONE, True), (Policy.BEST_EFFORT, False), (Policy.RESTRICTED, False), (Policy.SINGLE_NUMA_NODE, False)],
)
def test_only_where_a_kubelet_aligns_is_a_pod_led_anywhere(policy: Policy, expected: bool) -> None:
    rules = msgspec.structs.replace(RULES, policy=policy)
    state, new = holding((5, 0), (1, 60)), asking(2, 70, rules)

    assert expected is finds_gpus(state, new)
    assert expected is not bool(containers_aligned_to_gpus(state.hardware, new))
    assert (
        ()
        == containers_aligned_to_gpus(state.hardware, asking(2, 0, rules))
        == containers_aligned_to_gpus(shared(()), new)
    )
