"""
Pods with units that nothing is reserved for, over real sockets: a kubelet asks for the two halves one after the other, in
the order of a Go map, and names no container.
"""

from random import Random

import msgspec
import pytest
from faults_support import THOROUGH
from share_support import ShareNode
from unit_support import CORES, MEMORY

from topoalign.core.admission.admit import decide_demand
from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.model.decisions import Admission
from topoalign.core.model.holdings import base_of
from topoalign.core.model.ids import ResourceName
from topoalign.machines import load_machine

pytestmark = pytest.mark.anyio

PLAIN = load_machine("two-socket-8xpcie").topology
MACHINE = msgspec.structs.replace(
    PLAIN, gpus=tuple(msgspec.structs.replace(gpu, memory=60 << 28) for gpu in PLAIN.gpus)
)
"""Eight GPUs of 60 blocks."""


async def refused(it: ShareNode, chance: Random, pods: int) -> tuple[int, int]:
    """How many of so many random pods fit by the prediction, and how many of these are refused. Pods come and go."""
    running, fit, lost = list[str](), 0, 0
    for number in range(pods):
        if running and chance.random() < 0.35:
            await it.remove(running.pop(chance.randrange(len(running))))
        name = f"p{number}"
        pod = it.pod(name, (10 * chance.randint(1, 9), 5 * chance.randint(1, 12)))
        if not isinstance(decide_demand(it.ledger.state, read_pod(pod, it.rules)), Admission):
            continue
        fit += 1
        if isinstance(await it.kubelet.admit(pod, f"uid-{name}"), Admission):
            running.append(name)
            await it.allocations.reconcile()
        else:
            lost += 1
            await it.remove(name)
    return fit, lost


@pytest.mark.timeout(1800 if THOROUGH else 300)
async def test_few_pods_that_fit_are_refused_without_a_reservation() -> None:
    """2 of 34 in the sample. If the first half always went to the GPU with the least left, 22 of 47 would be."""
    async with ShareNode.running(MACHINE, chance=Random(2)) as (it, _):
        fit, lost = await refused(it, Random(2), 500 if THOROUGH else 60)

        assert lost * 7 <= fit, (fit, lost)


@pytest.mark.parametrize(
    ("resource", "size", "gpu"),
    [
        pytest.param(CORES, 40, "GPU-2", id="in use, most memory left, not the fullest"),
        pytest.param(MEMORY, 12, "GPU-1", id="memory first: enough computing time left"),
        pytest.param(CORES, 80, "GPU-3", id="no GPU in use has an equal part left"),
    ],
)
async def test_a_first_half_goes_where_an_equal_part_of_the_other_is_left(
    resource: ResourceName, size: int, gpu: str
) -> None:
    """Left of GPU-0 are 40 and 4 blocks of 16, of GPU-1 80 and 12, of GPU-2 50 and 14; GPU-3 is unused."""
    async with ShareNode.running() as (it, _):
        for number, held in enumerate([(60, 12), (20, 4), (50, 2)]):
            it.forced = it.units(number, *held)
            assert isinstance(await it.admit(f"p{number}", held), Admission)
        it.forced = {}
        free = it.kubelet.state().ownership.free(resource)

        preferred = await it.allocations.prefer(resource, [*free], (), size)

        assert {gpu} == {*map(base_of, preferred)}


async def test_a_pod_that_is_made_anew_after_a_refusal_is_admitted() -> None:
    """GPU-0 has 6 of 16 blocks left, an equal part of 10 units would be 2, and the pod asks for 8. The others are unused."""
    async with ShareNode.running() as (it, _):
        it.forced = it.units(0, 20, 10)
        assert isinstance(await it.admit("first", (20, 10)), Admission)
        it.forced = {}
        decisions = []
        for name in ("large", "large-again"):
            decisions.append(isinstance(await it.admit(name, (10, 8)), Admission))
            await it.settle()

        assert [False, True] == decisions
        await it.check(["first", "large-again"])
