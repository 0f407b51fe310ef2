"""Whoever hears the events of a node predicts what the node predicts, and what its kubelet then does."""

from pathlib import Path
from random import Random

import anyio
import pytest
from device_allocations_support import start_allocations
from faults_support import sample
from kubelet_support import NODE, MemoryAllocator, offers, short_directory
from prediction_support import (
    FPGA,
    MACHINES,
    PATIENT_SECONDS,
    OtherPlugin,
    configured,
    listening,
    some_pod,
    told,
)

from topoalign.allocator.allocate import service
from topoalign.allocator.device_plugin.front import KubeletFront
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.reconciliation import pod_resources as podresources
from topoalign.allocator.reconciliation.liveness import UNWRITTEN_SECONDS
from topoalign.allocator.reconciliation.pod_resources import PodResourcesClient
from topoalign.allocator.requests.admissions import Admissions, Predictions
from topoalign.allocator.requests.kubelet_files import REREAD_SECONDS, KubeletFiles, KubeletWatch
from topoalign.core.admission.prediction import predict
from topoalign.core.model.decisions import Decision
from topoalign.core.model.requests import AdmissionRules, AllocateRequest, Placement
from topoalign.kubelet.files import kubelet_configuration
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet
from topoalign.testing.manual_clock import ManualClock
from topoalign.testing.memory_journal import MemoryJournal

pytestmark = pytest.mark.anyio

PODS = 12
"""Asked for, one after another."""
SPOILT = 0.1
"""How often the kubelet's configuration cannot be read for a while."""

Predicted = tuple[Decision, Decision, Decision | None]
"""By the listener, by the node, and what the kubelet did; None where the node says that its prediction is uncertain."""


async def run(seed: int, directory: Path) -> list[Predicted]:
    """Pods come and go by chance on a node with a plugin of FPGAs beside ours."""
    chance = Random(seed)
    plugins, resources = directory / "device-plugins", directory / "pod-resources"
    for each in (plugins, resources):
        each.mkdir()
    machine, placement = chance.choice(MACHINES), chance.choice(list(Placement)[:3])
    own, config, content = AdmissionRules(placement=placement), directory / "config.yaml", configured(chance)
    config.write_text(content)
    clock, known = ManualClock(), MemoryAllocator(machine).state
    ledger = Ledger(NODE, MemoryJournal(), clock)
    assert known.topology is not None and known.health is not None
    ledger.take_reading(known.topology)
    ledger.take_reading(known.health)
    pod_resources = PodResourcesClient(resources / "kubelet.sock", plugins, clock)
    allocator = start_allocations(ledger, pod_resources, placement=placement, settle_seconds=0)
    files = KubeletFiles(config, directory, own, PATIENT_SECONDS)
    watch = KubeletWatch(ledger, files, clock, pod_resources.devices, allocator.ended)
    admissions = Admissions(
        ledger,
        MemoryBus(),
        own,
        kubelet_owns_devices=True,
        predictions=Predictions(ledger, own, watch, kubelet_owns_devices=True),
    )
    kubelet = FakeKubelet(plugins, resources, machine, kubelet_configuration.load_configuration(config, placement))
    last = machine.node_ids[-1]
    fpgas = OtherPlugin({f"f-{at}": (0 if at < 3 else last,) for at in range(6)})
    predicted: list[Predicted] = []
    async with pod_resources, anyio.create_task_group() as tasks:
        await tasks.start(kubelet.run)
        async with fpgas.running(plugins):
            await tasks.start(KubeletFront(allocator, plugins, clock).run)
            await kubelet.until(lambda kubelet: offers(machine)(kubelet) and kubelet.allocatable(FPGA) == 6)
            listener = await listening(ledger, clock, tasks)
            for number in range(PODS):
                if kubelet.running and chance.random() < 0.3:
                    await kubelet.remove(*chance.choice(sorted(kubelet.running)))
                spoilt = chance.random() < SPOILT
                config.write_text("{" if spoilt else content)
                await clock.advance(REREAD_SECONDS)
                await watch.poll()
                await listener.caught_up()
                asked = some_pod(chance, f"pod-{number}", fpgas=0.4)
                theirs = predict(listener.state, asked, clock.wall(), explain=True)
                ours = await admissions.predictions.what_if(AllocateRequest(node=NODE, pod=asked, rules={}))
                done = await kubelet.admit(asked)
                uncertain = spoilt or any("lists no container with them" in note for note in ours.explanation.notes)
                predicted.append((theirs, ours, None if uncertain else done))
                if chance.random() < 0.7:
                    await allocator.reconcile()
                if chance.random() < 0.7:  # by then it is known which pods were refused
                    await clock.advance(UNWRITTEN_SECONDS)
        tasks.cancel_scope.cancel()
    return predicted


@pytest.mark.parametrize("seed", sample(list(range(200)), 8))
async def test_a_listener_predicts_what_the_node_predicts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decision, explanation and notes are the same, and the kubelet then does it."""
    monkeypatch.setattr(service, "PREFER_SECONDS", PATIENT_SECONDS)
    monkeypatch.setattr(podresources, "READ_SECONDS", PATIENT_SECONDS)
    monkeypatch.setattr(podresources, "LIST_SECONDS", PATIENT_SECONDS)
    with short_directory() as directory:
        predicted = await run(seed, directory)

    assert [ours for _, ours, _ in predicted] == [theirs for theirs, _, _ in predicted]
    certain = [(told(ours), told(done)) for _, ours, done in predicted if done is not None]
    assert [done for _, done in certain] == [ours for ours, _ in certain]
    assert PODS // 2 < len(certain)
