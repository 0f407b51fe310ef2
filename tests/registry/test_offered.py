"""What nodes offer is the same for every registry: by the known hardware of all nodes that are there."""

import json

import msgspec
import pytest
from registry_support import World
from scheduling_support import go_json
from slot_support import in_slots
from unit_support import CORES, DGX, in_units
from view_support import NODE, RULES, OneNode, Says

from topoalign.core.model.ids import GPU, NodeName, ResourceName
from topoalign.registry.scheduling.cluster_state.offered import OfferedResources
from topoalign.registry.scheduling.webhook.reviews import Webhook

pytestmark = pytest.mark.anyio
OTHER = NodeName("other")
PART = ResourceName("nvidia.com/gpucores")


def test_a_node_that_is_not_offered_now_counts_until_it_is_gone() -> None:
    """A registry that begins while the node does not answer says what the others say."""
    others, ours = OneNode(hardware=in_slots(DGX)), OneNode(hardware=in_slots(DGX))
    for world in (others, ours):
        world.tell(world.says.all())
    others.view.renew()
    for world in (others, ours):
        world.cluster.answers(NODE, False)
        world.view.renew()
        assert "NodeStale" == world.code()

    assert PART in ours.view.offers.names
    assert others.view.offers.slots == ours.view.offers.slots != frozenset()
    ours.view.forget(NODE)
    ours.view.renew()
    assert (frozenset(), frozenset()) == (ours.view.offers.names, ours.view.offers.slots)


def test_what_no_node_offers_any_more_is_not_offered() -> None:
    """After a node has changed its division, or is gone; what another node offers alike stays."""
    offers, units, slots = OfferedResources(), in_units(DGX), in_slots(DGX)
    for node in (NODE, OTHER):
        offers.note(node, units)
    offers.note(NODE, slots)

    assert {CORES, PART, GPU} <= offers.names and offers.units and offers.slots
    offers.drop(OTHER)
    assert (False, True, frozenset()) == (CORES in offers.names, PART in offers.names, offers.units)
    offers.note(OTHER, DGX)
    assert GPU in offers.not_in_slots
    offers.drop(NODE)
    offers.drop(NODE)
    assert (frozenset(), False, True) == (offers.slots, PART in offers.names, GPU in offers.names)


def test_a_gpu_is_known_until_no_node_says_that_it_has_it() -> None:
    """As a node with a new name has the GPUs of the former one."""
    offers, gpus = OfferedResources(), {gpu.id for gpu in DGX.gpus}
    for node in (NODE, OTHER):
        offers.note(node, DGX)
    offers.note(NODE, msgspec.structs.replace(DGX, gpus=()))

    assert gpus == offers.gpus
    offers.drop(OTHER)
    assert set() == offers.gpus


async def test_the_webhook_lets_nothing_pass_while_nodes_are_not_looked_at() -> None:
    """A resource of theirs is not taken for that of somebody else: each extended resource counts as offered until then."""
    world = World()
    world.says = Says(NODE, in_units(DGX), RULES)
    await world.say(*world.says.all())
    limits = {str(CORES): "20"}
    spec = {"nodeName": NODE, "containers": [{"name": "main", "resources": {"limits": limits, "requests": limits}}]}
    request = {"uid": "r", "operation": "CREATE", "resource": {"resource": "pods"}, "object": {"spec": spec}}
    review = go_json({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request})
    async with world.registry() as (scheduling, _):
        webhook = Webhook("", scheduling.offers, scheduling.check_new)
        scheduling.view._started = False
        early = json.loads(await webhook.mutate(review))["response"]
        scheduling.view._started = True
        await world.rounds()
        scheduling.view.renew()
        later = json.loads(await webhook.mutate(review))["response"]

    assert [403, 403] == [each["status"]["code"] for each in (early, later)]
