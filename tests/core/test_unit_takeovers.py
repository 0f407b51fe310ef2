"""Units of GPUs that init containers leave to later containers of their pods, and what is reserved of them."""

import msgspec
import pytest
from decision_support import node, pod
from unit_support import BEST, CORES, DGX, KUBELET, MEMORY, admitted, asks, gpus_of, holds, in_units, refused

from topoalign.core.admission.admit import admit
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.decisions import Refusal
from topoalign.core.model.events import ReservationsChanged
from topoalign.core.model.ids import AllocationID, DeviceID
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.device_offers import MEMORY_BLOCK
from topoalign.core.sharing.reserved_shares import with_reserved_shares
from topoalign.core.state.node_reservations import NodeReservations, reservation_of

RULES = pytest.mark.parametrize("rules", [BEST, KUBELET], ids=["best", "kubelet"])
Amount = tuple[int, int]


@pytest.mark.parametrize(
    ("init", "app"),
    [((200, 0), (100, 0)), ((200, 8), (20, 4)), ((200, 8), (200, 4)), ((200, 8), (200, 6)), ((200, 8), (0, 4))],
    ids=str,
)
def test_units_of_more_gpus_are_not_taken_over_at_random(init: Amount, app: Amount) -> None:
    """The kubelet picks some of what the init container leaves: they might be of two GPUs, or none of one."""
    state = node(in_units(DGX))

    assert "ShareSplit" == refused(state, pod(asks(*app), init=(asks(*init, "init"),)), KUBELET).code


@pytest.mark.parametrize(("init", "app"), [((200, 0), (200, 0)), ((100, 8), (100, 1)), ((100, 0), (20, 4))], ids=str)
def test_units_of_the_same_gpus_are_taken_over(init: Amount, app: Amount) -> None:
    state = node(in_units(DGX))
    first, second = admitted(state, pod(asks(*app), init=(asks(*init, "init"),)), KUBELET)

    of_init = gpus_of(state, first.devices[CORES])
    assert all(of_init == gpus_of(state, units) for units in second.devices.values())


@RULES
def test_whole_gpus_are_added_to_those_that_are_taken_over(rules: AdmissionRules) -> None:
    state = node(in_units(DGX))
    first, second = admitted(state, pod(asks(300, 12), init=(asks(100, 0, "init"),)), rules)

    gpus = gpus_of(state, second.devices[CORES])
    assert 3 == len(gpus) and {*gpus_of(state, first.devices[CORES])} <= {*gpus}
    assert gpus == gpus_of(state, second.devices[MEMORY])


def test_memory_is_refused_of_a_gpu_whose_time_an_init_container_had() -> None:
    """Of all other GPUs no memory is left, and of this one an app container has taken over a part."""
    state = node(in_units(DGX, gpus=2))
    one, two = (gpu.id for gpu in state.hardware.gpus[:2])
    blocks = len(state.hardware.devices[MEMORY].by_base[two])
    state = holds(state, "full", {MEMORY: tuple(DeviceID(f"{two}::m{n}") for n in range(blocks))})
    state = holds(state, "app", {CORES: tuple(DeviceID(f"{one}::c{n}") for n in range(20))})
    rest = Allocation(id=AllocationID("rest"), devices={CORES: tuple(DeviceID(f"{one}::c{n}") for n in range(20, 100))})

    assert "ShareSplit" == refused(state.holding(rest), pod(asks(0, 4)), KUBELET).code


@pytest.mark.parametrize(("role", "code"), [("init", ""), ("sidecar", "WholeGpuInUse"), ("app", "WholeGpuInUse")])
def test_only_an_init_container_has_ended_when_the_next_container_starts(role: str, code: str) -> None:
    """The first container has all computing time of the only GPU, and the next one asks for memory alone."""
    first = msgspec.structs.replace(asks(100, name="first"), sidecar=role == "sidecar")
    asked = pod(first, asks(0, 4)) if role == "app" else pod(asks(0, 4), init=(first,))
    decision = admit(node(in_units(DGX, gpus=1)), asked, KUBELET)

    assert code == (decision.code if isinstance(decision, Refusal) else "")


def test_reserved_units_that_are_taken_over_are_held_once() -> None:
    state, asked = node(in_units(DGX)), pod(asks(60, 8), init=(asks(60, 10, "init"),))
    allocations = admitted(state, asked, KUBELET)
    said = ReservationsChanged(
        node=state.node,
        epoch=1,
        seq=1,
        writer="registry",
        reservations=(reservation_of("uid", asked, allocations, 60.0),),
    )
    held = with_reserved_shares(state, NodeReservations().apply(said, 1, 0.0), 0.0)

    (gpu,) = {state.hardware.parent_of(unit) for unit in allocations[0].device_ids}
    before, left = state.ownership.units_left[gpu].left, held.ownership.units_left[gpu].left
    assert (40, before.memory - 10 * MEMORY_BLOCK) == (left.cores, left.memory)
