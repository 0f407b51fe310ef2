"""GetPreferredAllocation of the real allocator: what cannot be meant gets no preference, and 64 devices are no trouble."""

import sys
from itertools import combinations
from random import Random
from types import FrameType

import pytest
from device_allocations_support import recorded
from faults_support import sample
from kubelet_support import pod, two_nodes

from topoalign.allocator.allocate.service import DeviceAllocations
from topoalign.allocator.device_plugin.plugin_server import DevicePlugin
from topoalign.core.admission.admit import admit, answer_to, iterate_decision_for_request
from topoalign.core.admission.pipeline import Reply
from topoalign.core.model.decisions import Admission, Decision, PreferenceQuestion
from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import GPU, AllocationID, DeviceID
from topoalign.core.model.requests import AdmissionRules, Mode, Placement, PodRequest, Policy
from topoalign.core.model.topology.device_links import Link
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.machines import catalogue

pytestmark = pytest.mark.anyio

MOST_CALLS = 600_000
"""Of functions, within one preference: less than a tenth of a second's work for a core of today."""


def plugin(machine: Topology, placement: str = "topology") -> DevicePlugin:
    device_allocations, _ = recorded(machine, placement)
    return DevicePlugin(GPU, device_allocations)


async def preferred(service: DevicePlugin, available: list[str], must: list[str], size: int) -> list[str]:
    request = v1beta1.ContainerPreferredAllocationRequest(
        available_deviceIDs=available, must_include_deviceIDs=must, allocation_size=size
    )
    answer = await service.get_preferred_allocation(v1beta1.PreferredAllocationRequest(container_requests=[request]))
    (container,) = answer.container_responses
    return container.device_i_ds


@pytest.mark.parametrize(
    ("available", "must", "size"),
    [
        (["GPU-0", "GPU-1"], [], 0),
        (["GPU-0", "GPU-1"], [], -1),
        (["GPU-0", "GPU-1"], [], -(2**31)),
        (["GPU-0", "GPU-1"], [], 3),
        (["GPU-0", "GPU-1"], [], 2**31 - 1),
        (["GPU-0", "GPU-1"], ["GPU-2"], 1),
        (["GPU-0", "GPU-1"], ["GPU-0", "GPU-1"], 1),
        ([], [], 1),
        (["GPU-0", "GPU-99"], [], 1),
        (["GPU-0", "GPU-0"], [], 1),
        (["\x00", "\x1b[2J"], [], 1),
    ],
)
@pytest.mark.parametrize("placement", [Placement.TOPOLOGY, Placement.BEST_EFFORT, Placement.SIMPLE])
async def test_a_question_that_cannot_be_meant_gets_the_empty_answer(
    placement: str, available: list[str], must: list[str], size: int
) -> None:
    """The API's word for no preference: the kubelet then chooses, and the pod is not failed."""
    service = plugin(two_nodes(), placement)

    assert [] == await preferred(service, available, must, size)
    assert 2 == len(await preferred(service, ["GPU-0", "GPU-1", "GPU-2"], ["GPU-2"], 2))


def unstructured(count: int) -> Topology:
    """Links by chance: nothing that a search could use."""
    chance = Random(16)
    ids = [DeviceID(f"GPU-{i:02}") for i in range(count)]
    return Topology(
        gpus=tuple(Gpu(id=gpu, index=i) for i, gpu in enumerate(ids)),
        links=tuple(Link(a=a, b=b, fabric_links=chance.randint(0, 18)) for a, b in combinations(ids, 2)),
    )


@pytest.mark.parametrize("size", sample([1, 2, 4, 8, 16, 31, 32, 48, 63], 3))
@pytest.mark.parametrize("placement", [Placement.TOPOLOGY, Placement.BEST_EFFORT])
async def test_the_work_for_a_preference_among_64_devices_is_bounded(placement: Placement, size: int) -> None:
    """Also for the first question about a machine, and one without any structure."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    machine = unstructured(64)
    service = plugin(machine, placement)
    ids = list(machine.gpu_by_id)
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        chosen = await preferred(service, list(ids), [ids[5]], size)
    finally:
        sys.setprofile(before)

    assert size == len(chosen)
    assert ids[5] in chosen
    assert calls <= MOST_CALLS


async def kubelets(device_allocations: DeviceAllocations, asked: PodRequest, rules: AdmissionRules) -> Decision:
    """What a kubelet decides whose plugin is told what GetPreferredAllocation tells it, and no more."""
    steps = iterate_decision_for_request(device_allocations.state, asked, rules)
    try:
        question = next(steps)
        while True:
            reply: Reply
            if isinstance(question, PreferenceQuestion):
                reply = await device_allocations.prefer(
                    question.resource, [*question.available], question.must_include, question.size
                )
            else:
                reply = answer_to(question, device_allocations.state, rules)
            question = steps.send(reply)
    except StopIteration as decided:
        decision: Decision = decided.value
        return decision


@pytest.mark.parametrize("policy", [Policy.NONE, Policy.BEST_EFFORT])
@pytest.mark.parametrize("placement", [Placement.TOPOLOGY, Placement.BEST_EFFORT, Placement.SIMPLE])
@pytest.mark.parametrize("name", ["epyc-nps4-4gpu", "dgx-a100", "hgx-h100"])
async def test_a_prediction_takes_the_devices_that_the_plugin_prefers(
    name: str, placement: Placement, policy: Policy
) -> None:
    """
    A prediction takes the devices that the plugin prefers when the kubelet asks it. The kubelet asks about one resource
    at a time, and says neither for whom nor what the container has besides.
    """
    machine = catalogue.machine(name)
    device_allocations, ledger = recorded(machine, placement)
    ledger.grant([Allocation(id=AllocationID("a"), devices={GPU: tuple(machine.gpu_by_id)[:2]})])
    rules = AdmissionRules(mode=Mode.KUBELET, policy=policy, placement=placement)
    for gpus in (1, 2):
        for nics in (1, 2):
            asked = pod("train", gpus=gpus, nics=nics)
            got, said = await kubelets(device_allocations, asked, rules), admit(device_allocations.state, asked, rules)
            assert isinstance(got, Admission) and isinstance(said, Admission)
            assert got.allocations == said.allocations
