"""Members of a gang that differ and share a node: each gets what was reserved for it, whichever is bound first."""

import json
from collections.abc import Mapping

import msgspec
import pytest
from api_server_support import shown_pod
from decision_support import GIB, machine
from registry_support import World
from slot_support import in_slots
from view_support import NODE, RULES, Says

from topoalign.allocator.allocate.claims import NodeView
from topoalign.allocator.allocate.co_allocation import JointClaim
from topoalign.allocator.allocate.slots import SlotClaim
from topoalign.allocator.reconciliation.liveness import LivenessCheck
from topoalign.core.deviceshare.koordinator_names import JOINT_ANNOTATION
from topoalign.core.model.ids import GPU, DeviceID
from topoalign.core.model.requests import GANG, GANG_SIZE, Policy
from topoalign.core.placement.reserved_choice import prefer_reserved
from topoalign.core.sharing.reserved_shares import ShareQuestion
from topoalign.core.state.node_reservations import NodeReservations
from topoalign.machines import catalogue
from topoalign.registry.scheduling.binding import binding
from topoalign.registry.scheduling.binding.binding import PodsPending
from topoalign.registry.scheduling.service import SchedulingService
from topoalign.testing.manual_clock import all_tasks_blocked

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bind that waits for others gives up soon."""
    monkeypatch.setattr(binding, "WAIT_SECONDS", 0.5)


OF_GANG = {GANG: "g", GANG_SIZE: "2"}
BESIDE = {JOINT_ANNOTATION: json.dumps({"deviceTypes": ["gpu", "rdma"], "requiredScope": "SamePCIe"})}
CORES = {"a": 60, "b": 20}


def world_of_slots() -> World:
    """Two GPUs in slots, on one NUMA node."""
    base = machine(nodes=2, gpus=(0,))
    small = tuple(msgspec.structs.replace(each, memory=16 * GIB) for each in base.gpus)
    world = World()
    world.says = Says(NODE, in_slots(msgspec.structs.replace(base, gpus=small), slots=4), RULES)
    world.kubernetes.add_node(NODE)
    return world


def add(world: World, name: str, annotations: Mapping[str, str] = {}, cores: int = 0) -> str:
    """A pod with one GPU, or with so many cores of one; its UID."""
    shown = shown_pod(name, gpus=1)
    shown["metadata"].setdefault("annotations", {}).update(annotations)
    if cores:
        asked = {"nvidia.com/gpu": "1", "nvidia.com/gpucores": str(cores), "nvidia.com/gpumem": "4000"}
        shown["spec"]["containers"] = [{"name": "main", "resources": {"limits": asked, "requests": asked}}]
    return str(world.kubernetes.add_pod(shown)["metadata"]["uid"])


def heard_by_node(world: World, scheduling: SchedulingService) -> NodeReservations:
    """The node's reservations as its agent has them."""
    known = scheduling.reservations.of(NODE)
    assert known.newest is not None
    return NodeReservations().apply(known.newest, known.position, world.clock.monotonic())


def cores_given(world: World, reserved: NodeReservations) -> int:
    """What the container holds for which the kubelet asks for one slot now."""
    state = world.says.state
    grants = SlotClaim(NodeView(lambda: state, world.clock, lambda: reserved, LivenessCheck()))
    slots = grants.prefer(state, ShareQuestion(GPU, tuple(state.hardware.devices[GPU]), (), 1), ())
    (amount,) = grants.amounts(GPU, slots).values()
    return amount.cores


@pytest.mark.parametrize("first", [*CORES])
async def test_the_member_that_is_bound_first_gets_its_own_slots(first: str) -> None:
    """The other one waits until it is admitted, as the kubelet asks for one slot for either."""
    world = world_of_slots()
    uids = {name: add(world, name, OF_GANG, cores) for name, cores in CORES.items()}
    await world.say(*world.says.all())
    async with world.allocator(world.says), world.registry() as (scheduling, _):
        await world.rounds()
        await scheduling.bind("ml", first, uids[first], NODE)
        given = cores_given(world, heard_by_node(world, scheduling))
        (second,) = {*CORES} - {first}
        with pytest.raises(PodsPending):
            await scheduling.bind("ml", second, uids[second], NODE)

        assert CORES[first] == given
        assert [first, second] == [each.pod for each in scheduling.reservations.held(NODE)]


async def test_a_pod_gets_its_own_slots_beside_a_member_that_is_not_bound() -> None:
    """Then the member waits until that pod is admitted."""
    world = world_of_slots()
    uids = {name: add(world, name, OF_GANG, 20) for name in ("a", "b")}
    await world.say(*world.says.all())
    async with world.allocator(world.says), world.registry() as (scheduling, _):
        await world.rounds()
        await scheduling.bind("ml", "a", uids["a"], NODE)
        world.kubernetes.delete_pod("ml", "a", grace=0)
        await all_tasks_blocked()
        await scheduling.bind("ml", "q", add(world, "q", cores=60), NODE)
        given = cores_given(world, heard_by_node(world, scheduling))
        with pytest.raises(PodsPending):
            await scheduling.bind("ml", "b", uids["b"], NODE)

        assert 60 == given


@pytest.mark.parametrize("first", ["a", "b"])
@pytest.mark.parametrize("is_aligned_elsewhere", [False, True])
async def test_the_member_with_the_nic_gets_it_and_the_other_one_none(first: str, is_aligned_elsewhere: bool) -> None:
    """Both ask for one GPU. Also where the kubelet offers the first one nothing but the GPU of the other."""
    world = World()
    rules = msgspec.structs.replace(RULES, policy=Policy.NONE)
    world.says = Says(NODE, catalogue.machine("epyc-nps4-4gpu"), rules)
    world.kubernetes.add_node(NODE)
    uids = {name: add(world, name, OF_GANG | (BESIDE if name == "a" else {})) for name in ("a", "b")}
    await world.say(*world.says.all())
    async with world.allocator(world.says), world.registry() as (scheduling, _):
        await world.rounds()
        await scheduling.bind("ml", first, uids[first], NODE)
        reserved, state = heard_by_node(world, scheduling), world.says.state
        own, others = (each.containers[0].devices[GPU] for each in reserved.reservations)
        offered: tuple[DeviceID, ...] = others if is_aligned_elsewhere else tuple(state.hardware.devices[GPU])
        gpus = prefer_reserved(state.hardware, reserved, world.clock.monotonic(), GPU, offered, (), 1)
        co_allocated = JointClaim(NodeView(lambda: state, world.clock, lambda: reserved, LivenessCheck()))
        waiting = co_allocated.waiting(own)
        (second,) = {*uids} - {first}
        with pytest.raises(PodsPending):
            await scheduling.bind("ml", second, uids[second], NODE)

        assert gpus == (() if is_aligned_elsewhere else own)
        assert (first == "a", None) == (waiting is not None, co_allocated.waiting(others))
