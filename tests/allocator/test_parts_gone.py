"""A GPU of which a container was given a part is nobody else's when that part is gone, also after a restart."""

import msgspec
import pytest
from device_allocations_support import MACHINE, Node
from fact_support import mig_device

from topoalign.core.model.errors import DeviceUnusable
from topoalign.core.model.ids import GPU, DeviceID, ResourceName
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.model.topology.model import Topology

pytestmark = pytest.mark.anyio

SLICE = ResourceName("nvidia.com/mig-1g.10gb")
INSTANCE = mig_device("MIG-0", 7)
WHOLE = MACHINE.gpus[0].id


def divided() -> Topology:
    first, *others = MACHINE.gpus
    gpus = (msgspec.structs.replace(first, mig=(INSTANCE,)), *others)
    offers = (Offer(resource=SLICE, devices=(INSTANCE.uuid,), replicas=2),)
    return msgspec.structs.replace(MACHINE, gpus=gpus, offers=offers)


@pytest.mark.parametrize("adopted", [False, True], ids=["given", "adopted"])
async def test_a_gpu_that_is_whole_again_waits_for_the_holder_of_an_instance(adopted: bool) -> None:
    """A GPU that is whole again waits for the container that had an instance of it."""
    node = Node()
    node.topology = divided()
    node.restart()
    share = DeviceID(f"{INSTANCE.uuid}::1")
    if not adopted:
        await node.device_allocations.allocate(SLICE, [[share]])
    node.kubelet.show("notebook", share, resource=SLICE)
    await node.device_allocations.reconcile()
    assert [(share,)] == [each.devices[SLICE] for each in node.ledger.state.allocations.values()]

    node.topology = MACHINE
    node.restart()
    with pytest.raises(DeviceUnusable):
        await node.device_allocations.allocate(GPU, [[WHOLE]])

    node.kubelet.shown.clear()
    for _ in range(3):
        await node.device_allocations.reconcile()
        await node.clock.advance(60)
    await node.device_allocations.allocate(GPU, [[WHOLE]])
    assert {WHOLE} == {*node.allocation(WHOLE).device_ids}
