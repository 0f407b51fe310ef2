"""What a node predicts of a pod is what its kubelet does with it next: pods come and go by chance, over real sockets."""

from collections.abc import Mapping
from pathlib import Path
from random import Random

import anyio
import pytest
from faults_support import sample
from kubelet_support import NODE, MemoryDesk, offers, short_directory, two_nodes

from topoalign.allocator import device_allocations
from topoalign.allocator.device_allocations import DeviceAllocations
from topoalign.allocator.device_plugin.front import KubeletFront
from topoalign.allocator.ledger.journal import MemoryJournal
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.reconciliation import pod_resources as podresources
from topoalign.allocator.reconciliation.liveness import UNWRITTEN_SECONDS
from topoalign.allocator.reconciliation.pod_resources import PodResourcesClient
from topoalign.allocator.requests.admissions import Admissions
from topoalign.allocator.requests.kubelet_files import KubeletFiles
from topoalign.allocator.requests.kubelet_watch import KubeletWatch
from topoalign.core.model.decisions import Admission, Decision
from topoalign.core.model.ids import CPU, GPU, MEMORY, NIC, ContainerName, PodName
from topoalign.core.model.requests import AdmissionRules, AllocateRequest, ContainerRequest, Placement, PodRequest
from topoalign.kubelet.files import configuration
from topoalign.machines import catalogue
from topoalign.runtime.clock import ManualClock
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet

pytestmark = pytest.mark.anyio

PODS = 12
"""Asked for, one after another; about half are admitted."""
GIB = 1 << 30
PATIENT_SECONDS = 60.0
"""For a kubelet that answers slowly because the machine is busy: what is not answered in time is not predicted."""
MACHINES = (two_nodes(gpus=8, nics=4), catalogue.machine("hgx-h100"), catalogue.machine("epyc-nps4-4gpu"))
POLICIES = ("none", "best-effort", "restricted", "single-numa-node")
OPTIONS: tuple[Mapping[str, str], ...] = (
    {},
    {"full-pcpus-only": "true"},
    {"strict-cpu-reservation": "true"},
    {"distribute-cpus-across-numa": "true"},
)
CONFIG = """
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
topologyManagerPolicy: {policy}
topologyManagerScope: {scope}
cpuManagerPolicy: static
cpuManagerPolicyOptions: {{{options}}}
reservedSystemCPUs: "0"
memoryManagerPolicy: Static
reservedMemory: [{{numaNode: 0, limits: {{memory: 2Gi}}}}]
"""


def configured(chance: Random) -> str:
    options = ", ".join(f'{name}: "{value}"' for name, value in chance.choice(OPTIONS).items())
    return CONFIG.format(policy=chance.choice(POLICIES), scope=chance.choice(["container", "pod"]), options=options)


def some_container(chance: Random, name: str, sidecar: bool = False) -> ContainerRequest:
    amounts = {
        resource: chance.choice(sizes)
        for resource, sizes, share in ((GPU, (1, 1, 2, 3, 4), 0.8), (NIC, (1, 2), 0.5))
        if chance.random() < share
    }
    if chance.random() < 0.85:
        amounts |= {CPU: chance.choice((1000, 1500, 2000, 4000, 8000)), MEMORY: chance.choice((1, 4, 20, 70)) * GIB}
    return ContainerRequest(name=ContainerName(name), requests=amounts, limits=amounts, sidecar=sidecar)


def some_pod(chance: Random, name: str) -> PodRequest:
    return PodRequest(
        name=PodName(name),
        init_containers=tuple(
            some_container(chance, f"init-{i}", chance.random() < 0.4) for i in range(chance.choice((0, 0, 0, 1, 2)))
        ),
        containers=tuple(some_container(chance, f"main-{i}") for i in range(chance.choice((1, 1, 2)))),
    )


def told(decision: Decision) -> object:
    """Who gets what, or the kubelet's word for why not."""
    if not isinstance(decision, Admission):
        return decision.reason, decision.container
    return [(got.owner, got.role, got.device_ids, got.cpus, got.memory) for got in decision.allocations]


async def predicted_and_done(seed: int, directory: Path) -> list[tuple[object, object]]:
    chance = Random(seed)
    plugins, resources = directory / "device-plugins", directory / "pod-resources"
    for each in (plugins, resources):
        each.mkdir()
    machine, placement = chance.choice(MACHINES), chance.choice(list(Placement)[:3])
    own, config = AdmissionRules(placement=placement), directory / "config.yaml"
    config.write_text(configured(chance))
    rules = configuration.load_configuration(config, placement)
    clock, known = ManualClock(), MemoryDesk(machine).state
    ledger = Ledger(NODE, MemoryJournal(), clock)
    assert known.topology is not None and known.health is not None
    ledger.hear(known.topology)
    ledger.hear(known.health)
    pod_resources = PodResourcesClient(resources / "kubelet.sock", plugins, clock)
    kubelets_desk = DeviceAllocations(ledger, clock, pod_resources, placement=placement, settle_seconds=0)
    files = KubeletFiles(config, directory, own, PATIENT_SECONDS)
    admissions = Admissions(
        ledger,
        MemoryBus(),
        own,
        kubelet_owns_devices=True,
        kubelet=KubeletWatch(ledger, files, clock, pod_resources.devices, kubelets_desk.ended),
    )
    kubelet = FakeKubelet(plugins, resources, machine, rules)
    pairs, uncertain = [], 0
    async with anyio.create_task_group() as tasks:
        await tasks.start(kubelet.run)
        await tasks.start(KubeletFront(kubelets_desk, plugins, clock).run)
        await kubelet.until(offers(machine))
        for number in range(PODS):
            if kubelet.running and chance.random() < 0.3:
                await kubelet.remove(*chance.choice(sorted(kubelet.running)))
            asked = some_pod(chance, f"pod-{number}")
            predicted = await admissions.what_if(AllocateRequest(node=NODE, pod=asked, rules={}))
            done = await kubelet.admit(asked)
            if any("lists no container with them" in note for note in predicted.explanation.notes):
                uncertain += 1
            else:
                pairs.append((told(predicted), told(done)))
            if chance.random() < 0.7:
                await kubelets_desk.reconcile()
            if chance.random() < 0.7:  # by then it is known which pods were refused
                await clock.advance(UNWRITTEN_SECONDS)
        tasks.cancel_scope.cancel()
    assert PODS == len(pairs) + uncertain
    return pairs


@pytest.mark.parametrize("seed", sample(list(range(200)), 8))
async def test_what_is_predicted_of_a_pod_is_what_the_kubelet_then_does(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_allocations, "PREFER_SECONDS", PATIENT_SECONDS)
    monkeypatch.setattr(podresources, "READ_SECONDS", PATIENT_SECONDS)
    with short_directory() as directory:
        pairs = await predicted_and_done(seed, directory)

    assert [done for _, done in pairs] == [predicted for predicted, _ in pairs]
    assert PODS // 2 < len(pairs)
