"""What a pod asks for that a decision does not cover is named in its explanation."""

import msgspec
import pytest
from decision_support import GIB, container, machine, node, pod

from topoalign.core.admission.admit import admit
from topoalign.core.model.ids import CPU, MEMORY
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, Mode, PodLevelResources, PodRequest

KUBELET = AdmissionRules(mode=Mode.KUBELET)
WHOLE = PodLevelResources(limits={CPU: 16_000, MEMORY: 64 * GIB})


def of(pod: PodRequest, rules: AdmissionRules = KUBELET) -> tuple[str, ...]:
    return admit(node(machine()), pod, rules).explanation.not_covered


def claiming(*claims: str, gpus: int = 0) -> PodRequest:
    return msgspec.structs.replace(pod(container(gpus=gpus)), claims=claims)


def test_devices_of_resource_claims_are_named() -> None:
    """Of a pod that is admitted and of one that is refused, in both modes."""
    for mode in Mode:
        for gpus in (1, 9):
            (said,) = of(claiming("gpus", "nics", gpus=gpus), AdmissionRules(mode=mode))
            assert said.startswith("the devices of resource claims 'gpus', 'nics': their DRA driver gives them")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            pod(container(cpus=8)),
            "'main': the pod is Burstable, so they run in the shared pool; to get them, give each",
        ),
        (pod(container(cpus=2, gib=1), container("side", gpus=1)), "'main': the pod is Burstable"),
        (pod(container(gib=1), init=[container("fetch", cpus=2)]), "'fetch': the pod is Burstable"),
        (msgspec.structs.replace(pod(container(cpus=2, gib=1)), resources=WHOLE), "'main': with spec.resources they"),
    ],
)
def test_exclusive_cpus_that_a_kubelet_does_not_give_are_named(asked: PodRequest, words: str) -> None:
    (said,) = of(asked)

    assert said.startswith(f"exclusive CPUs for {words}")


@pytest.mark.parametrize(
    ("asked", "rules"),
    [
        (pod(container(cpus=8, gib=1)), KUBELET),
        (pod(container(cpus=8)), AdmissionRules(mode=Mode.BEST)),
        (pod(container(cpus=8)), msgspec.structs.replace(KUBELET, cpu_manager="none")),
        (pod(container(cpus=1.5, gpus=1)), KUBELET),
        (pod(ContainerRequest(name=container().name, requests={CPU: 2_000}, limits={CPU: 4_000})), KUBELET),
        (pod(container(gpus=2, gib=1)), KUBELET),
    ],
)
def test_of_a_pod_whose_answer_is_whole_nothing_is_named(asked: PodRequest, rules: AdmissionRules) -> None:
    """It gets its CPUs, or asks for none of its own."""
    assert () == of(asked, rules)
