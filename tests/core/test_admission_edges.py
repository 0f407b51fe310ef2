"""Admissions at the edge of what is known: hardware without NUMA nodes or memory, and NICs that draw a GPU to them."""

import pytest
from decision_support import admitted, asking, container, machine, node, pod

from topoalign.core.admission.admit import admit
from topoalign.core.hints.answers import check_answer
from topoalign.core.hints.providers import answer
from topoalign.core.model.hints import TopologyHint
from topoalign.core.model.ids import CPU, GPU, NIC, ContainerName
from topoalign.core.model.requests import AdmissionRules, Mode, Policy
from topoalign.core.model.topology.model import Cpu, Topology

UNALIGNED = AdmissionRules(policy=Policy.NONE)


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


def test_hints_where_no_numa_node_is_known_are_for_node_0() -> None:
    """A machine whose CPUs alone are known; the answer of another process about it is used."""
    cpus = tuple(Cpu(id=i, core=i, socket=0, node=0, uncore=0) for i in range(4))
    rules = AdmissionRules(memory_manager="None")
    asked = asking(node(Topology(cpus=cpus)), pod(container(cpus=2)), ContainerName("main"), rules)

    answered = answer(asked)

    check_answer(asked, answered)
    assert (TopologyHint(0b1, True),) == answered.providers["cpu"][CPU]
