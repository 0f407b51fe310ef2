"""What an init container left is named by the kubelet's checkpoint, with the name of its pod."""

from collections.abc import Mapping

import pytest

from topoalign.core.model.allocations import Allocation, Owner
from topoalign.core.model.ids import GPU, AllocationID, ContainerName, DeviceID, Namespace, PodName
from topoalign.core.model.kubelet import CheckpointEntry
from topoalign.core.model.reservations import Reservation
from topoalign.core.state.checkpoint_owners import with_checkpoint_owners

MAIN = Owner(namespace=Namespace("ml"), pod=PodName("train"), container=ContainerName("main"))
FETCH = Owner(namespace=Namespace("ml"), pod=PodName("train"), container=ContainerName("fetch"))
BY_NAME = Reservation(pod_uid="u-1", namespace=Namespace("ml"), pod=PodName("train"), containers=(), seconds_left=60.0)
HAD = {("u-1", "fetch"): ("GPU-0", "GPU-1"), ("u-1", "main"): ("GPU-0",)}


def held(name: str, *devices: str, owner: Owner | None = None, uid: str = "") -> Allocation:
    ids = tuple(map(DeviceID, devices))
    return Allocation(id=AllocationID(name), owner=owner, pod_uid=uid, devices={GPU: ids})


def checkpoint(had: Mapping[tuple[str, str], tuple[str, ...]]) -> list[CheckpointEntry]:
    return [
        CheckpointEntry(pod_uid=uid, container=ContainerName(container), devices={GPU: tuple(map(DeviceID, devices))})
        for (uid, container), devices in had.items()
    ]


def test_what_an_app_container_did_not_take_over_is_the_init_container_s() -> None:
    app = held("a", "GPU-0", owner=MAIN, uid="u-1")

    named = with_checkpoint_owners([app, held("b", "GPU-1")], checkpoint(HAD), ())

    assert (app, held("b", "GPU-1", owner=FETCH)) == named


def test_a_pod_that_is_not_shown_has_the_name_of_its_reservation() -> None:
    named = with_checkpoint_owners([held("b", "GPU-0", "GPU-1")], checkpoint(HAD), [BY_NAME])

    assert (held("b", "GPU-0", "GPU-1", owner=FETCH),) == named


@pytest.mark.parametrize(
    ("devices", "had", "reservations"),
    [
        pytest.param(("GPU-1",), HAD, [], id="the name of the pod is not known"),
        pytest.param(("GPU-0",), HAD, [BY_NAME], id="two containers have it"),
        pytest.param(("GPU-1", "GPU-2"), HAD, [BY_NAME], id="nobody has all of it"),
        pytest.param(("GPU-1",), {}, [BY_NAME], id="the checkpoint does not have it"),
    ],
)
def test_what_cannot_be_named_for_certain_has_no_owner(
    devices: tuple[str, ...], had: dict[tuple[str, str], tuple[str, ...]], reservations: list[Reservation]
) -> None:
    unknown = held("b", *devices)

    assert (unknown,) == with_checkpoint_owners([unknown], checkpoint(had), reservations)
