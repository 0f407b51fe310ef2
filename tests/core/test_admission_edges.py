"""Admissions at the edge of what is known: hardware without NUMA nodes or memory, and NICs that draw a GPU to them."""

import msgspec
import pytest
from decision_support import NODE, admitted, asking, container, machine, node, pod, refused

from topoalign.core.admission.admit import admit
from topoalign.core.hints.answer_checks import check_answer
from topoalign.core.hints.providers import answer_hint_request, to_hint_question
from topoalign.core.model.hints import TopologyHint
from topoalign.core.model.ids import CPU, GPU, NIC, ContainerName
from topoalign.core.model.requests import AdmissionRules, Mode, Policy
from topoalign.core.model.topology.model import Cpu, Topology
from topoalign.core.state.fold import NodeState

BEST, UNALIGNED = AdmissionRules(), AdmissionRules(policy=Policy.NONE)


@pytest.mark.parametrize("mode", Mode)
def test_where_no_memory_is_known_a_pod_without_memory_is_admitted(mode: Mode) -> None:
    got = admitted(admit(node(machine(memory=None)), pod(container(gpus=1)), AdmissionRules(mode=mode)))

    assert {GPU: ("GPU-0",)} == got["main"].devices


def test_a_gpu_is_taken_beside_the_nic_that_is_asked_for() -> None:
    """The only NIC is beside GPU 1; without it the GPU of the lowest index is taken."""
    state = node(machine(gpus=(0, 1), nics=(1,)))

    both = admitted(admit(state, pod(container(gpus=1, nics=1)), UNALIGNED))["main"]
    alone = admitted(admit(state, pod(container(gpus=1)), UNALIGNED))["main"]

    assert {GPU: ("GPU-1",), NIC: ("mlx5_0",)} == both.devices
    assert {GPU: ("GPU-0",)} == alone.devices


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (Policy.RESTRICTED, "the best alignment is NUMA nodes 0-1, and it is not preferred by all"),
        (Policy.SINGLE_NUMA_NODE, "no NUMA nodes suit all that it asks for"),
    ],
)
def test_a_refusal_by_policy_says_what_the_best_alignment_was(policy: Policy, why: str) -> None:
    """All GPUs are on node 0 and all NICs on node 1: no single node has both."""
    state, asked = node(machine(gpus=(0, 0), nics=(1, 1))), pod(container(gpus=1, nics=1))

    finding = refused(admit(state, asked, AdmissionRules(policy=policy))).finding

    assert f"policy {policy.value} refuses container 'main': {why}" == finding


def test_hints_where_no_numa_node_is_known_are_for_node_0() -> None:
    """A machine whose CPUs alone are known; the answer of another process about it is used."""
    cpus = tuple(Cpu(id=i, core=i, socket=0, node=0, uncore=0) for i in range(4))
    rules = AdmissionRules(memory_manager="None")
    asked = asking(node(Topology(cpus=cpus)), pod(container(cpus=2)), ContainerName("main"), rules)

    answered = answer_hint_request(asked)

    check_answer(asked, answered)
    assert (TopologyHint(0b1, True),) == answered.providers["cpu"][CPU]


@pytest.mark.parametrize("rows", [((10,),), ((10, 20), (20,)), ((10, 20), (20, 10), (20, 10))])
@pytest.mark.parametrize("rules", [BEST, AdmissionRules(mode=Mode.KUBELET, prefer_closest_numa_nodes=True)])
def test_a_table_of_distances_that_is_not_square_refuses_the_pod(
    rows: tuple[tuple[int, ...], ...], rules: AdmissionRules
) -> None:
    """Hardware is also heard of on the bus, from whoever may publish there."""
    odd = msgspec.structs.replace(machine(), distances=rows)

    assert "DistancesUnknown" == refused(admit(node(odd), pod(container(gpus=1)), rules)).code


def test_of_the_kubelet_distances_play_no_part_unless_it_is_told_so() -> None:
    odd = msgspec.structs.replace(machine(), distances=((10,),))

    assert admitted(admit(node(odd), pod(container(gpus=1)), AdmissionRules(mode=Mode.KUBELET)))


def test_a_question_about_an_unknown_node_names_no_topology() -> None:
    asked = pod(container(gpus=1))
    known, unknown = node(machine()), NodeState(node=NODE)

    told = [to_hint_question(asking(state, asked, None, BEST), asked).topology for state in (known, unknown)]

    assert [(1, 1), (0, 0)] == told
