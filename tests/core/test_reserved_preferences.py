"""What is reserved answers the kubelet's question where it fits, as a naive reading of the rule says."""

from itertools import product
from random import Random

import msgspec
from fact_support import NODE, allocated, changed, ids, reservation, reserved_container
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.model.ids import GPU, NIC, ContainerName, DeviceID, ResourceName
from topoalign.core.model.reservations import ReservedContainer
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.model.topology.model import Gpu, Nic, NumaNode, Topology
from topoalign.core.placement.reserved_choice import prefer_reserved, reserved_devices
from topoalign.core.state.fold import NodeState
from topoalign.core.state.node_reservations import NodeReservations

GPUS = ids(*(f"GPU-{n}" for n in range(6)))
MACHINE = Topology(
    nodes=(NumaNode(id=0, memory=1 << 30),),
    gpus=tuple(Gpu(id=name, index=at, numa_affinity=(0,)) for at, name in enumerate(GPUS)),
    nics=(Nic(id=DeviceID("mlx5_0"), index=0), Nic(id=DeviceID("mlx5_1"), index=1)),
    offers=(Offer(resource=GPU, devices=GPUS), Offer(resource=NIC, devices=ids("mlx5_0", "mlx5_1"))),
)


def asked(
    reserved: NodeReservations,
    size: int,
    now: float = 100.0,
    *,
    resource: ResourceName = GPU,
    available: tuple[DeviceID, ...] = GPUS,
    must_include: tuple[DeviceID, ...] = (),
) -> tuple[DeviceID, ...]:
    return prefer_reserved(MACHINE, reserved, now, resource, available, must_include, size)


@given(st.integers(0, 2**32))
def test_the_answer_is_that_of_a_naive_reading(seed: int) -> None:
    """
    The first part that fits, lasts, and of which nothing is given. One that is planned with a gang only where no part of as
    many GPUs is reserved for a pod that is about to be bound.
    """
    chance = Random(seed)
    free = [*GPUS]
    chance.shuffle(free)
    wanted: list[tuple[str, str, list[DeviceID]]] = []
    for pod, _ in product("abc", range(chance.randrange(1, 3))):
        taken = [free.pop() for _ in range(min(len(free), chance.randrange(3)))]
        if taken:
            wanted.append((pod, f"c{len(wanted)}", taken))
    pods = {
        pod: [reserved_container(*gpus, name=name) for of, name, gpus in wanted if of == pod] for pod, _, _ in wanted
    }
    made = [reservation(pod, *each, seconds=chance.choice((0.0, 30.0))) for pod, each in pods.items()]
    message = changed(*(msgspec.structs.replace(each, planned=chance.random() < 0.3) for each in made))
    given_away = chance.sample(GPUS, chance.randrange(3))
    state = NodeState(node=NODE).holding(allocated(*given_away)) if given_away else NodeState(node=NODE)
    reserved = NodeReservations().apply(message, 1, 100.0).observe(state, own=True)
    available = tuple(chance.sample([each for each in GPUS if each not in given_away], chance.randrange(3, 5)))
    size, must_include = chance.randrange(1, 4), tuple(chance.sample(available, chance.randrange(2)))

    lasting = {each.pod for each in message.reservations if each.seconds_left > 0}
    planned = {each.pod for each in message.reservations if each.planned}
    of_size = [
        (pod, set(gpus))
        for pod, _, gpus in sorted(wanted, key=lambda each: [*pods].index(each[0]))
        if pod in lasting and len(gpus) == size and not set(gpus) & set(given_away)
    ]
    comes = {pod for pod, _ in of_size} - planned
    naive = [
        gpus for pod, gpus in of_size if (pod in comes or not comes) and set(must_include) <= gpus <= set(available)
    ]
    expected = tuple(gpu for gpu in GPUS if naive and gpu in naive[0])
    assert expected == asked(reserved, size, available=available, must_include=must_include)


def both(gpu: str, nic: str) -> ReservedContainer:
    return ReservedContainer(container=ContainerName("main"), devices={GPU: ids(gpu), NIC: ids(nic)})


def test_the_nic_of_a_container_follows_its_gpus() -> None:
    reserved = NodeReservations().apply(
        changed(reservation("a", both("GPU-0", "mlx5_0")), reservation("b", both("GPU-4", "mlx5_1"))), 1, 100.0
    )
    after = reserved.observe(NodeState(node=NODE).holding(allocated("GPU-4")), own=True)

    assert ids("mlx5_0") == asked(reserved, 1, resource=NIC, available=ids("mlx5_1", "mlx5_0"))
    assert ids("mlx5_1") == asked(after, 1, resource=NIC, available=ids("mlx5_1", "mlx5_0"))


def test_what_is_given_or_over_is_reserved_no_more() -> None:
    reserved = NodeReservations().apply(
        changed(
            reservation("a", reserved_container("GPU-0", "GPU-1", co_allocated=("mlx5_0",))),
            reservation("b", reserved_container("GPU-2"), seconds=5.0),
        ),
        1,
        100.0,
    )
    after = reserved.observe(NodeState(node=NODE).holding(allocated("GPU-0", "GPU-1")), own=True)

    assert {*ids("GPU-0", "GPU-1", "GPU-2")} == reserved_devices(reserved, 100.0, GPU)
    assert {*ids("mlx5_0")} == reserved_devices(reserved, 100.0, NIC)
    assert {*ids("GPU-2")} == reserved_devices(after, 104.9, GPU)
    assert set() == reserved_devices(after, 105.0, GPU)
