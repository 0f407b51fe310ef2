"""What is announced of a kubelet where not all of it can be said, or is known."""

import msgspec
import pytest
from decision_support import container, pod
from device_allocations_support import NODE, Node
from fact_support import owner
from prediction_support import FPGA

from topoalign.allocator.reconciliation.usage_publisher import UsagePublisher
from topoalign.client import Client
from topoalign.core.admission.prediction import INSTEAD, predict, to_kubelet_rules
from topoalign.core.model.events import ContainerUsage, UsageObserved
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.kubelet import KubeletObserved, ListedDevices
from topoalign.core.model.requests import AdmissionRules
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.tasks import background

pytestmark = pytest.mark.anyio
USED = (ContainerUsage(owner=owner("a"), cpus="0-3"),)


def newest(node: Node) -> UsageObserved:
    assert node.ledger.state.usage is not None
    return node.ledger.state.usage


async def test_what_is_too_large_for_a_message_is_left_out_and_said() -> None:
    """A listener hears the rules and that it cannot know the rest; the node itself knows all of it."""
    it, bus = Node(), MemoryBus()
    ids = tuple(DeviceID(f"{number:040}") for number in range(25_000))
    rules = to_kubelet_rules(AdmissionRules())
    whole = KubeletObserved(rules=rules, devices={FPGA: (ListedDevices(nodes=(0,), ids=ids),)})
    it.ledger.observe(containers=USED, kubelet=whole)
    async with background() as tasks:
        tasks.start_soon(UsagePublisher(it.ledger, bus, it.clock, bus).run)
        events = Client(bus).nodes(node=NODE)
        delivery = (await anext(events)).event
        await events.aclose()
    assert isinstance(delivery, UsageObserved) and delivery.kubelet is not None
    asked = pod(container("main", others={FPGA: 1}))
    notes = predict(it.ledger.state.apply(msgspec.structs.replace(delivery, revision=9)), asked, 0).explanation.notes

    assert (rules, None) == (delivery.kubelet.rules, delivery.kubelet.devices)
    assert "too large for one message" in delivery.kubelet.unknown
    assert f"{delivery.kubelet.unknown}; {INSTEAD}" == notes[0]
    assert "whether a plugin lists example.com/fpga is not known" in notes[1]
    assert USED == delivery.containers
    assert whole is newest(it).kubelet


async def test_containers_are_not_known_before_podresources_has_answered() -> None:
    """A reading of the files comes first: it does not say that nobody has anything."""
    it = Node()
    it.ledger.observe(kubelet=KubeletObserved(rules=to_kubelet_rules(AdmissionRules())))
    before = newest(it)
    await it.device_allocations.reconcile()
    after = newest(it)

    assert ((), False, 1) == (before.containers, before.containers_known, before.revision)
    assert ((), True, 2) == (after.containers, after.containers_known, after.revision)
    assert before.kubelet is after.kubelet is not None
