"""Pods with shares that a kubelet could mix up are not bound beside one another."""

import pytest
from decision_support import container, pod
from unit_support import CORES, MEMORY, in_units

from topoalign.core.admission.realignment import PendingPod
from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.model.requests import AdmissionRules
from topoalign.machines import load_machine
from topoalign.registry.scheduling.filter.admission_order import are_ambiguous

MACHINE = in_units(load_machine("dgx-a100").topology)


def pending_pod(cores: int, blocks: int) -> PendingPod:
    amounts = {str(name): amount for name, amount in ((CORES, cores), (MEMORY, blocks)) if amount}
    return PendingPod((cores, blocks), read_pod(pod(container(others=amounts)), AdmissionRules()), True)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((20, 16), (20, 16), False),
        ((20, 16), (20, 8), True),
        ((20, 16), (0, 16), True),
        ((20, 16), (30, 8), False),
        ((100, 0), (100, 8), True),
        ((100, 0), (0, 8), False),
    ],
)
def test_shares_are_mistakable_by_one_half(one: tuple[int, int], other: tuple[int, int], expected: bool) -> None:
    assert expected is are_ambiguous(MACHINE, pending_pod(*one), pending_pod(*other))
