"""A container with GPUs of several resources sees all of them, or does not get them."""

from random import Random

import msgspec
import pytest
from decision_support import container
from fact_support import ids, reservation
from kubelet_support import RESTRICTED, two_nodes
from share_support import Node, fits
from slot_support import in_mig_mode, in_slots
from unit_support import in_units

from topoalign.allocator.allocate.visible_gpus import NotVisible
from topoalign.allocator.containers.hami_core.slot_directories import held_in_order, limit_variables
from topoalign.allocator.requests.admissions import Predictions
from topoalign.core.admission.admit import decide_demand
from topoalign.core.admission.gang_plan import reserved_for
from topoalign.core.demand.device_lists import gpu_lists, has_gpus, lists_asked
from topoalign.core.demand.pod_demand import ContainerDemand, read_pod
from topoalign.core.model.decisions import Admission, Decision, Refusal
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import GPU, ContainerName, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.model.requests import AdmissionRules, AllocateRequest, ContainerRequest, PodRequest, Policy
from topoalign.core.model.reservations import ReservedContainer
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.model.topology.model import Topology
from topoalign.plugin_config.configuration import DeviceList

pytestmark = pytest.mark.anyio
ANYWHERE = msgspec.structs.replace(RESTRICTED, policy=Policy.NONE)
MACHINE = two_nodes(nics=4)
"""GPU-0 to GPU-3 with mlx5_0 and mlx5_1 on NUMA node 0, the others on node 1."""
LARGE, SHARED, SMALL = map(ResourceName, ("nvidia.com/large", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.5gb"))
NIC, OTHER_NIC = map(ResourceName, ("topoalign.io/nic", "topoalign.io/other"))
MIG = in_mig_mode(MACHINE, [4_864, 9_856])


def offering(machine: Topology, *offers: Offer) -> Topology:
    return msgspec.structs.replace(machine, offers=offers)


def gpus(first: int, end: int) -> tuple[DeviceID, ...]:
    return ids(*(f"GPU-{index}" for index in range(first, end)))


TWO_MODELS = offering(MACHINE, Offer(resource=GPU, devices=gpus(0, 4)), Offer(resource=LARGE, devices=gpus(4, 8)))
SHARES = offering(
    MACHINE, Offer(resource=GPU, devices=gpus(0, 4)), Offer(resource=SHARED, devices=gpus(4, 8), replicas=2)
)
MIXED = offering(
    MIG,
    Offer(resource=GPU, devices=gpus(1, 8)),
    Offer(resource=SMALL, devices=ids("MIG-0-0")),
    Offer(resource=LARGE, devices=ids("MIG-0-1")),
)
TWO_NICS = offering(
    MACHINE,
    Offer(resource=GPU, devices=gpus(0, 8)),
    Offer(resource=NIC, devices=ids("mlx5_0", "mlx5_1")),
    Offer(resource=OTHER_NIC, devices=ids("mlx5_2", "mlx5_3")),
)


def asking(name: str, *containers: ContainerRequest, init: tuple[ContainerRequest, ...] = ()) -> PodRequest:
    return PodRequest(name=PodName(name), init_containers=init, containers=containers)


def wants(*resources: ResourceName, name: str = "main") -> ContainerRequest:
    return container(name, others={str(resource): 1 for resource in resources})


def demand_of(asked: ContainerRequest) -> ContainerDemand:
    return read_pod(asking("a", asked), AdmissionRules()).containers[0]


def reserve(it: Node, pod: str, **devices: dict[ResourceName, tuple[DeviceID, ...]]) -> None:
    """Container -> what is reserved for it."""
    kept = [ReservedContainer(container=ContainerName(name), devices=each) for name, each in devices.items()]
    it.set_reserved(reservation(pod, *kept))


def told(it: Node, variable: str, pod: str = "a", container: str = "main") -> list[str]:
    """The values of a variable in the answers to a container of this pod."""
    answers = it.kubelet.running[Namespace("default"), PodName(pod)].responses
    return [each.envs[variable] for (of, _), each in answers.items() if of == container and variable in each.envs]


def why(decision: Decision) -> str:
    assert isinstance(decision, Refusal), decision
    return decision.finding


@pytest.mark.parametrize(
    ("machine", "devices", "expected"),
    [
        (TWO_MODELS, {GPU: ids("GPU-2"), LARGE: ids("GPU-6")}, "GPU-2,GPU-6"),
        (SHARES, {GPU: ids("GPU-2"), SHARED: ids("GPU-6::1")}, "GPU-2,GPU-6"),
        (MIXED, {SMALL: ids("MIG-0-0"), LARGE: ids("MIG-0-1")}, "MIG-0-0,MIG-0-1"),
        (
            MIXED,
            {GPU: ids("GPU-1"), SMALL: ids("MIG-0-0"), LARGE: ids("MIG-0-1")},
            "MIG-0-0,MIG-0-1,GPU-1",
        ),
    ],
)
async def test_each_answer_names_the_gpus_of_all_resources_that_are_reserved(
    machine: Topology, devices: dict[ResourceName, tuple[DeviceID, ...]], expected: str
) -> None:
    """The kubelet passes on one value of the variable, whichever it is."""
    async with Node.running(Policy.NONE, machine) as (it, _):
        reserve(it, "a", main=devices)
        fits(await it.kubelet.admit(asking("a", wants(*devices))))

        assert [expected] * len(devices) == told(it, "NVIDIA_VISIBLE_DEVICES")


async def test_each_answer_names_the_nics_of_all_resources_that_are_reserved() -> None:
    async with Node.running(Policy.NONE, TWO_NICS) as (it, _):
        reserve(it, "a", main={GPU: ids("GPU-0"), NIC: ids("mlx5_1"), OTHER_NIC: ids("mlx5_2")})
        fits(await it.kubelet.admit(asking("a", wants(GPU, NIC, OTHER_NIC))))

        assert ["mlx5_1,mlx5_2"] * 2 == told(it, "TOPOALIGN_NICS")
        assert ["GPU-0"] == told(it, "NVIDIA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("machine", "resources"),
    [(TWO_MODELS, (GPU, LARGE)), (SHARES, (GPU, SHARED)), (MIXED, (SMALL, LARGE)), (MIXED, (GPU, SMALL))],
)
async def test_gpus_that_a_container_would_not_see_are_refused(
    machine: Topology, resources: tuple[ResourceName, ...]
) -> None:
    """Nothing is reserved. The next pod, with GPUs of one resource in each container, gets them at once."""
    async with Node.running(Policy.NONE, machine) as (it, _):
        finding = why(await it.kubelet.admit(asking("a", wants(*resources))))
        assert "the container would not see" in finding
        assert "NVIDIA_VISIBLE_DEVICES" in finding
        apart = [wants(each, name=f"c{place}") for place, each in enumerate(resources)]
        fits(await it.kubelet.admit(asking("b", *apart)))


@pytest.mark.parametrize(
    "strategies",
    [
        ("volume-mounts",),
        ("envvar", "volume-mounts"),
    ],
)
async def test_lists_that_add_up_need_no_reservation(strategies: tuple[DeviceList, ...]) -> None:
    async with Node.running(Policy.NONE, TWO_MODELS, strategies) as (it, _):
        fits(await it.kubelet.admit(asking("a", wants(GPU, LARGE))))
        answers = it.kubelet.running[Namespace("default"), PodName("a")].responses.values()
        mounts = {mount.container_path.rpartition("/")[2] for each in answers for mount in each.mounts}

        assert {"/var/run/nvidia-container-devices"} == {*told(it, "NVIDIA_VISIBLE_DEVICES")}
        assert 2 == len(mounts)
        assert mounts == {each for record in it.ledger.state.allocations.values() for each in record.device_ids}


async def test_two_nic_resources_are_given_without_a_reservation() -> None:
    """Each NIC has its device nodes and the variable of its resource."""
    async with Node.running(Policy.NONE, TWO_NICS) as (it, _):
        fits(await it.kubelet.admit(asking("a", wants(NIC, OTHER_NIC))))

        assert {"mlx5_0", "mlx5_2"} == {*told(it, "TOPOALIGN_NICS")}


async def test_gpus_other_than_those_that_are_reserved_are_refused() -> None:
    """The first answer names what is reserved, and the kubelet takes another GPU of the other resource."""
    async with Node.running(Policy.NONE, TWO_MODELS) as (it, _):
        reserve(it, "a", main={GPU: ids("GPU-2"), LARGE: ids("GPU-6")})
        await it.allocations.allocate(GPU, [ids("GPU-2")])
        with pytest.raises(NotVisible, match="would not see 'GPU-5'"):
            await it.allocations.allocate(LARGE, [ids("GPU-5")])


async def test_an_init_container_with_the_same_gpu_is_no_hindrance() -> None:
    """It has GPU-2 alone, and the app container takes that over and has another one beside it."""
    async with Node.running(Policy.NONE, TWO_MODELS) as (it, _):
        reserve(it, "a", warm={GPU: ids("GPU-2")}, main={GPU: ids("GPU-2"), LARGE: ids("GPU-6")})
        fits(await it.kubelet.admit(asking("a", wants(GPU, LARGE), init=(wants(GPU, name="warm"),))))

        assert ["GPU-2,GPU-6"] * 2 == told(it, "NVIDIA_VISIBLE_DEVICES")


async def test_the_answer_is_the_same_when_the_reservation_is_over() -> None:
    """The record has the owner by then, and the kubelet asks again."""
    async with Node.running(Policy.NONE, TWO_MODELS) as (it, _):
        reserve(it, "a", main={GPU: ids("GPU-2"), LARGE: ids("GPU-6")})
        fits(await it.kubelet.admit(asking("a", wants(GPU, LARGE))))
        await it.allocations.reconcile()
        it.set_reserved()
        (again,) = await it.allocations.allocate(GPU, [ids("GPU-2")])

        assert {LARGE: ids("GPU-6"), GPU: ids("GPU-2")} == it.allocations.named(GPU, again)


async def test_a_grant_is_followed_for_a_moment_and_until_the_checkpoint_has_it() -> None:
    async with Node.running(Policy.NONE, TWO_MODELS) as (it, _):
        fits(await it.kubelet.admit(asking("a", wants(GPU))))
        fits(await it.kubelet.admit(asking("b", wants(LARGE))))
        await it.allocations.allocate(GPU, [ids("GPU-3")])
        await it.clock.advance(6)
        await it.allocations.allocate(LARGE, [ids("GPU-7")])


def test_units_of_both_kinds_are_one_list_and_others_are_several() -> None:
    """Computing time and memory name the same GPU."""
    units = in_units(with_memory(MACHINE), 2)
    cores, memory = (each for each in units.offers_of if each != GPU)

    assert {GPU, cores} == {*gpu_lists(units)}
    assert () == lists_asked(units, demand_of(wants(cores, memory)))
    assert (GPU, LARGE) == lists_asked(TWO_MODELS, demand_of(wants(GPU, LARGE, NIC)))
    assert () == lists_asked(TWO_NICS, demand_of(wants(GPU, NIC, OTHER_NIC)))


async def test_units_of_one_gpu_follow_one_another() -> None:
    machine = in_units(with_memory(MACHINE))
    cores, memory = (next(each for each in machine.offered if each.unit == kind) for kind in ("cores", "memory"))
    asks = container("main", others={str(cores.resource): 10, str(memory.resource): 2})
    async with Node.running(Policy.NONE, machine) as (it, _):
        fits(await it.kubelet.admit(asking("a", asks)))

        assert 1 == len({*told(it, "NVIDIA_VISIBLE_DEVICES")})


@pytest.mark.parametrize(("alone", "notes"), [(True, 1), (False, 0)])
async def test_what_if_names_the_resources_of_a_container_that_would_be_refused(alone: bool, notes: int) -> None:
    async with Node.running(Policy.NONE, TWO_MODELS) as (it, _):
        predictions = Predictions(it.ledger, ANYWHERE, None, kubelet_owns_devices=True, by_variable_alone=lambda: alone)
        asked = asking("a", wants(GPU, LARGE), wants(GPU, name="other"))
        decision = await predictions.what_if(AllocateRequest(node=it.ledger.node, pod=asked, rules={}))

        expected = (
            "container main asks for GPUs of nvidia.com/gpu and nvidia.com/large: under deviceListStrategy envvar"
        )
        assert notes == sum(expected in each for each in decision.explanation.notes)


@pytest.mark.parametrize("seed", [0, 1, 2, 27, 35])
async def test_no_container_holds_a_gpu_that_it_does_not_see(seed: int) -> None:
    """Random pods, of which some are reserved as a registry does; all answers to one that runs have the same list."""
    chance = Random(seed)
    machine = chance.choice((TWO_MODELS, SHARES, MIXED))
    resources = sorted(name for name in machine.offers_of if has_gpus(machine, name))
    policy = chance.choice((Policy.NONE, Policy.BEST_EFFORT))
    rules = msgspec.structs.replace(ANYWHERE, policy=policy)
    seen = 0
    async with Node.running(policy, machine) as (it, _):
        for number in range(12):
            name = f"p{number}"
            asked = [wants(*chance.sample(resources, chance.randint(1, 2)), name=f"c{n}") for n in range(2)]
            first = 1 if chance.random() < 0.3 else 0
            pod = asking(name, *asked[first:], init=tuple(asked[:first]))
            decision = decide_demand(it.ledger.state, read_pod(pod, rules))
            is_reserved = chance.random() < 0.6 and isinstance(decision, Admission)
            if is_reserved and isinstance(decision, Admission):
                it.set_reserved(reserved_for(f"uid-{name}", pod, decision.allocations, 30.0))
            done = await it.kubelet.admit(pod, f"uid-{name}")
            if is_reserved:
                assert isinstance(done, Admission), done
            running = it.kubelet.running.get((Namespace("default"), PodName(name)))
            if isinstance(done, Admission) and running is not None:
                for each in (*pod.init_containers, *pod.containers):
                    answers = [answer for (of, _), answer in running.responses.items() if of == each.name]
                    lists = {answer.envs["NVIDIA_VISIBLE_DEVICES"] for answer in answers}
                    assert 1 == len(lists), (seed, number, lists)
                    assert len(answers) <= len(lists.pop().split(",")), (seed, number)
                    seen += len(answers) > 1
            await it.allocations.reconcile()
            if running is not None and chance.random() < 0.7:
                await it.kubelet.remove(Namespace("default"), PodName(name))
                await it.allocations.reconcile()
                await it.clock.advance(6)
                await it.allocations.reconcile()
    assert seen


def with_memory(machine: Topology) -> Topology:
    cards = tuple(msgspec.structs.replace(gpu, memory=16 << 30) for gpu in machine.gpus)
    return msgspec.structs.replace(machine, gpus=cards)


@pytest.mark.parametrize(("others", "expected"), [((), ["_0=6m", "=30"]), (("GPU-0",), ["_1=6m", "_1=30"])])
def test_limits_of_slots_count_the_gpus_of_other_resources(others: tuple[str, ...], expected: list[str]) -> None:
    """HAMi-core numbers the GPUs that the container sees: GPU-2 is the second one beside GPU-0."""
    hardware = in_slots(with_memory(MACHINE), 4)
    amounts = {DeviceID("GPU-2::1"): Amount(cores=30, memory=6 << 20)}
    limits = limit_variables(held_in_order([*amounts], amounts, hardware, ids(*others)))

    names = ["CUDA_DEVICE_MEMORY_LIMIT", "CUDA_DEVICE_SM_LIMIT"]
    assert [f"{name}{rest}" for name, rest in zip(names, expected, strict=True)] == [
        f"{name}={value}" for name, value in limits.items()
    ]
