"""Random pods with shares of GPUs, over real sockets, while the kubelet and the agent come and go."""

from random import Random
from typing import Any

import pytest
from faults_support import THOROUGH
from share_support import NAMES, OTHER_ORDER, ShareNode
from unit_support import spread

from topoalign.core.model.decisions import Admission, Refusal
from topoalign.core.model.errors import Unavailable
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.requests import PodRequest, Policy

pytestmark = pytest.mark.anyio

ADMISSIONS = 25
"""Of each seed."""
EACH_POLICY = (0, 1, 2, 5)
"""Seeds of nodes with the four policies, whose kubelets ask for cores first or for memory first."""


def share(chance: Random) -> tuple[int, int]:
    if chance.random() < 0.25:
        return 100 * chance.randint(1, 2), chance.choice([0, 0, 4, 8])
    return chance.choice([0, 5, 30, 60]), chance.randint(1, 8)


def some_pod(it: ShareNode, name: str, chance: Random) -> PodRequest:
    """One or two containers, now and then after an init container; of some pods all units are spread over two GPUs."""
    is_spread = chance.random() < 0.2
    shares = [
        (chance.choice([0, 10, 30, 60]), 2 * chance.randint(1, 4)) if is_spread else share(chance)
        for _ in range(chance.choice([1, 1, 1, 2]) + chance.choice([0, 0, 0, 1]))
    ]
    apps = min(len(shares), chance.choice([1, 2, 2]))
    pod = it.pod(name, *shares[-apps:], init=tuple(shares[:-apps]))
    return spread(pod, 2) if is_spread else pod


def fail_between(it: ShareNode, chance: Random) -> None:
    """Now and then the kubelet fails between the two halves of a container."""
    prefer, asked = it.allocations.prefer, [0]

    async def failing(resource: ResourceName, *question: Any) -> Any:
        asked[0] += 1
        if asked[0] % 2 == 0 and chance.random() < 0.05:
            raise Unavailable("the plugin has gone", "try again")
        return await prefer(resource, *question)

    it.allocations.prefer = failing  # type: ignore[assignment,method-assign]  # the plugin is gone at times


@pytest.mark.parametrize("seed", range(400) if THOROUGH else EACH_POLICY)
async def test_no_container_has_the_gpu_of_another(seed: int) -> None:
    """
    0 containers have another's GPU, 0 GPUs are above 100, and PodResources, the record and what containers are told agree;
    whatever is refused has a reason.
    """
    chance = Random(seed)
    policy = chance.choice([Policy.NONE, Policy.BEST_EFFORT, Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE])
    names = chance.choice([NAMES, OTHER_ORDER])
    async with ShareNode.running(names=names, policy=policy, chance=Random(seed)) as (it, tasks):
        fail_between(it, chance)
        running: list[str] = []
        admitted = 0
        for number in range(ADMISSIONS):
            if running and chance.random() < 0.45:
                gone = running.pop(chance.randrange(len(running)))
                await (it.remove(gone) if chance.random() < 0.6 else it.drop(gone))
            match chance.random():
                case low if low < 0.04:
                    await it.restart_kubelet()
                case low if low < 0.08:
                    await it.start_agent(tasks)
                    fail_between(it, chance)
            name = f"p{number}"
            pod, is_reserved = some_pod(it, name, chance), False
            if chance.random() < 0.5:
                (predicted,) = it.reserve(pod)
                is_reserved = isinstance(predicted, Admission) and it.is_whole(running)
            decision = await it.kubelet.admit(pod, f"uid-{name}")
            if isinstance(decision, Admission):
                running.append(name)
                admitted += 1
            else:
                assert isinstance(decision, Refusal) and decision.code and decision.finding and decision.remedy
                assert not is_reserved or "gone" in decision.finding, (number, pod, decision.finding)
                await it.remove(name)
            await it.check(running)
        assert admitted
