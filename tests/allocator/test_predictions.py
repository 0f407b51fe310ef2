"""What a node predicts of a pod is what its kubelet does with it next: pods come and go by chance, over real sockets."""

from pathlib import Path
from random import Random

import anyio
import pytest
from device_allocations_support import start_allocations
from faults_support import sample
from kubelet_support import NODE, MemoryAllocator, offers, short_directory
from prediction_support import MACHINES, PATIENT_SECONDS, configured, some_pod, told

from topoalign.allocator.allocate import service
from topoalign.allocator.device_plugin.front import KubeletFront
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.reconciliation import pod_resources as podresources
from topoalign.allocator.reconciliation.liveness import UNWRITTEN_SECONDS
from topoalign.allocator.reconciliation.pod_resources import PodResourcesClient
from topoalign.allocator.requests.admissions import Admissions, Predictions
from topoalign.allocator.requests.kubelet_files import KubeletFiles, KubeletWatch
from topoalign.core.model.ids import ContainerName, PodName
from topoalign.core.model.requests import AdmissionRules, AllocateRequest, ContainerRequest, Placement, PodRequest
from topoalign.kubelet.files import kubelet_configuration
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet
from topoalign.testing.manual_clock import ManualClock
from topoalign.testing.memory_journal import MemoryJournal

pytestmark = pytest.mark.anyio

PODS = 12
"""Asked for, one after another; about half are admitted."""
AGENT = PodRequest(name=PodName("agent"), containers=(ContainerRequest(name=ContainerName("agent")),))
"""Runs all the time. Where no pod does, one that is being admitted is listed beside no directory."""


async def predicted_and_done(seed: int, directory: Path) -> list[tuple[object, object]]:
    chance = Random(seed)
    plugins, resources = directory / "device-plugins", directory / "pod-resources"
    for each in (plugins, resources):
        each.mkdir()
    machine, placement = chance.choice(MACHINES), chance.choice(list(Placement)[:3])
    own, config = AdmissionRules(placement=placement), directory / "config.yaml"
    config.write_text(configured(chance))
    rules = kubelet_configuration.load_configuration(config, placement)
    clock, known = ManualClock(), MemoryAllocator(machine).state
    ledger = Ledger(NODE, MemoryJournal(), clock)
    assert known.topology is not None and known.health is not None
    ledger.take_reading(known.topology)
    ledger.take_reading(known.health)
    pod_resources = PodResourcesClient(resources / "kubelet.sock", plugins, clock)
    kubelets_desk = start_allocations(ledger, pod_resources, placement=placement, settle_seconds=0)
    files = KubeletFiles(config, directory, own, PATIENT_SECONDS)
    watch = KubeletWatch(ledger, files, clock, pod_resources.devices, kubelets_desk.ended)
    admissions = Admissions(
        ledger,
        MemoryBus(),
        own,
        kubelet_owns_devices=True,
        predictions=Predictions(ledger, own, watch, kubelet_owns_devices=True),
    )
    kubelet = FakeKubelet(plugins, resources, machine, rules)
    pairs, uncertain = [], 0
    async with pod_resources, anyio.create_task_group() as tasks:
        await tasks.start(kubelet.run)
        await tasks.start(KubeletFront(kubelets_desk, plugins, clock).run)
        await kubelet.until(offers(machine))
        await kubelet.admit(AGENT)
        for number in range(PODS):
            others = sorted({*kubelet.running} - {(AGENT.namespace, AGENT.name)})
            if others and chance.random() < 0.3:
                await kubelet.remove(*chance.choice(others))
            asked = some_pod(chance, f"pod-{number}", whole=number % 5 == 3)
            predicted = await admissions.predictions.what_if(AllocateRequest(node=NODE, pod=asked, rules={}))
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
    monkeypatch.setattr(service, "PREFER_SECONDS", PATIENT_SECONDS)
    monkeypatch.setattr(podresources, "READ_SECONDS", PATIENT_SECONDS)
    with short_directory() as directory:
        pairs = await predicted_and_done(seed, directory)

    assert [done for _, done in pairs] == [predicted for predicted, _ in pairs]
    assert PODS // 2 < len(pairs)
