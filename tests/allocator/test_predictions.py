"""Whoever receives the events of a node predicts what the node predicts, and what its kubelet then does."""

from collections.abc import Mapping
from pathlib import Path
from random import Random

import anyio
import pytest
from faults_support import sample
from kubelet_support import NODE, short_directory, two_nodes
from prediction_support import CONFIG, FPGA, PATIENT_SECONDS, PredictingNode, fpga_plugin

from topoalign.allocator.reconciliation import pod_resources as podresources
from topoalign.allocator.reconciliation.liveness import UNWRITTEN_SECONDS
from topoalign.allocator.requests.kubelet_files import REREAD_SECONDS
from topoalign.core.model.decisions import Admission, Decision
from topoalign.core.model.ids import CPU, GPU, MEMORY, NIC, ContainerName, PodName
from topoalign.core.model.requests import AllocateRequest, ContainerRequest, Placement, PodLevelResources, PodRequest
from topoalign.machines import catalogue

GIB = 1 << 30


pytestmark = pytest.mark.anyio

MACHINES = (two_nodes(gpus=8, nics=4), catalogue.machine("hgx-h100"), catalogue.machine("epyc-nps4-4gpu"))
POLICIES = ("none", "best-effort", "restricted", "single-numa-node")
OPTIONS: tuple[Mapping[str, str], ...] = (
    {},
    {"full-pcpus-only": "true"},
    {"strict-cpu-reservation": "true"},
    {"distribute-cpus-across-numa": "true"},
)


def configured(chance: Random) -> str:
    options = ", ".join(f'{name}: "{value}"' for name, value in chance.choice(OPTIONS).items())
    return CONFIG.format(policy=chance.choice(POLICIES), scope=chance.choice(["container", "pod"]), options=options)


def some_container(chance: Random, name: str, sidecar: bool = False) -> ContainerRequest:
    amounts = {
        resource: chance.choice(sizes)
        for resource, sizes, share in ((GPU, (1, 1, 2, 3, 4), 0.8), (NIC, (1, 2), 0.5), (FPGA, (1, 2, 3), 0.4))
        if chance.random() < share
    }
    if chance.random() < 0.85:
        amounts |= {CPU: chance.choice((1000, 1500, 2000, 4000, 8000)), MEMORY: chance.choice((1, 4, 20, 70)) * GIB}
    return ContainerRequest(name=ContainerName(name), requests=amounts, limits=amounts, sidecar=sidecar)


WHOLE = {CPU: 64_000, MEMORY: 512 * GIB}


def some_pod(chance: Random, name: str, whole: bool) -> PodRequest:
    """`whole`: with pod-level resources, by which it is Guaranteed."""
    return PodRequest(
        name=PodName(name),
        init_containers=tuple(
            some_container(chance, f"init-{i}", chance.random() < 0.4) for i in range(chance.choice((0, 0, 0, 1, 2)))
        ),
        containers=tuple(some_container(chance, f"main-{i}") for i in range(chance.choice((1, 1, 2)))),
        resources=PodLevelResources(requests=WHOLE, limits=WHOLE) if whole else PodLevelResources(),
    )


def told(decision: Decision) -> object:
    """Who gets what, or the kubelet's word for why not."""
    if not isinstance(decision, Admission):
        return decision.reason, decision.container
    return [(got.owner, got.role, got.device_ids, got.cpus, got.memory) for got in decision.allocations]


PODS = 12
"""Asked for, one after another."""
AGENT = PodRequest(name=PodName("agent"), containers=(ContainerRequest(name=ContainerName("agent")),))
"""Runs all the time. Where no pod does, one that is being admitted is listed beside no directory."""
SPOILT = 0.1
"""How often the kubelet's configuration cannot be read for a while."""

Predicted = tuple[Decision, Decision, Decision | None]
"""By the listener, by the node, and what the kubelet did; None where the node says that its prediction is uncertain."""


async def run(seed: int, directory: Path) -> list[Predicted]:
    """Pods come and go by chance on a node with a plugin of FPGAs beside ours."""
    chance = Random(seed)
    machine, placement, config = chance.choice(MACHINES), chance.choice(list(Placement)[:3]), configured(chance)
    it, predicted = PredictingNode(directory, machine, config, placement), list[Predicted]()
    last = machine.node_ids[-1]
    fpgas = {f"f-{at}": (0 if at < 3 else last,) for at in range(6)}
    async with anyio.create_task_group() as tasks:
        await tasks.start(it.kubelet.run)
        async with fpga_plugin(it.plugins, fpgas):
            await it.start_agent(tasks)
            await it.kubelet.until(lambda kubelet: kubelet.allocatable(FPGA) == 6)
            await it.kubelet.admit(AGENT)
            for number in range(PODS):
                others = sorted({*it.kubelet.running} - {(AGENT.namespace, AGENT.name)})
                if others and chance.random() < 0.3:
                    await it.kubelet.remove(*chance.choice(others))
                spoilt = chance.random() < SPOILT
                it.config.write_text("{" if spoilt else config)
                await it.clock.advance(REREAD_SECONDS)
                await it.watch.poll()
                await it.listener.agrees_with(it.ledger)
                asked = some_pod(chance, f"pod-{number}", whole=number % 5 == 3)
                theirs = it.predicted(asked)
                ours = await it.predictions.what_if(AllocateRequest(node=NODE, pod=asked, rules={}))
                done = await it.kubelet.admit(asked)
                uncertain = spoilt or any("lists no container with them" in note for note in ours.explanation.notes)
                predicted.append((theirs, ours, None if uncertain else done))
                if chance.random() < 0.7:
                    await it.allocations.reconcile()
                if chance.random() < 0.7:  # by then it is known which pods were refused
                    await it.clock.advance(UNWRITTEN_SECONDS)
        tasks.cancel_scope.cancel()
    return predicted


@pytest.mark.parametrize("seed", sample(list(range(200)), 8))
async def test_what_node_and_listener_predict_is_what_the_kubelet_then_does(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decision, explanation and notes of node and listener are the same."""
    monkeypatch.setattr(podresources, "READ_SECONDS", PATIENT_SECONDS)
    monkeypatch.setattr(podresources, "LIST_SECONDS", PATIENT_SECONDS)
    with short_directory() as directory:
        predicted = await run(seed, directory)

    assert [ours for _, ours, _ in predicted] == [theirs for theirs, _, _ in predicted]
    certain = [(told(ours), told(done)) for _, ours, done in predicted if done is not None]
    assert [done for _, done in certain] == [ours for ours, _ in certain]
    assert PODS // 2 < len(certain)
