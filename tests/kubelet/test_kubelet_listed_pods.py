"""The kubelet's list of pods is read as the generated code reads it, its devices by resource and id."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from grpclib.exceptions import GRPCError
from hypothesis import given
from hypothesis import strategies as st

from topoalign.kubelet.grpc.api import v1
from topoalign.kubelet.grpc.decoding import CODEC, field
from topoalign.kubelet.grpc.pod_resources_codec import read_listed_pods

TEXTS = st.text(max_size=3)
NODES = st.builds(v1.TopologyInfo, nodes=st.lists(st.builds(v1.NumaNode, id=st.integers(0, 300)), max_size=2))
DEVICES = st.builds(
    v1.ContainerDevices,
    resource_name=st.sampled_from(["", "a", "b", "é" * 70]),
    device_ids=st.lists(TEXTS | st.just("u" * 200), max_size=2),
    topology=st.none() | NODES,
)
CONTAINERS = st.builds(
    v1.ContainerResources,
    name=TEXTS,
    devices=st.lists(DEVICES, max_size=5),
    cpu_ids=st.lists(st.integers(0, 300), max_size=2),
    memory=st.lists(
        st.builds(v1.ContainerMemory, memory_type=TEXTS, size=st.integers(0, 9), topology=NODES), max_size=1
    ),
)
PODS = st.builds(v1.PodResources, name=TEXTS, namespace=TEXTS, containers=st.lists(CONTAINERS, max_size=2))
ANSWERS = st.builds(v1.ListPodResourcesResponse, pod_resources=st.lists(PODS, max_size=2))
Read = tuple[Any, Sequence[Mapping[Any, set[Any]]]]
"""The answer without devices, and those of each container."""


def read_slowly(data: bytes) -> Read:
    answer = CODEC.decode(data, v1.ListPodResourcesResponse)
    held: list[Mapping[Any, set[Any]]] = []
    for pod in answer.pod_resources:
        for container in pod.containers:
            names = {part.resource_name for part in container.devices}
            held.append(
                {
                    name: {each for part in container.devices if part.resource_name == name for each in part.device_ids}
                    for name in names
                }
            )
            container.devices.clear()
    return answer, held


@given(ANSWERS)
def test_devices_and_the_rest_are_what_the_generated_code_reads(answer: v1.ListPodResourcesResponse) -> None:
    data = bytes(answer)

    assert read_slowly(data) == read_listed_pods(data)


@given(ANSWERS, st.data())
def test_damaged_answers_are_refused_or_read_alike(answer: v1.ListPodResourcesResponse, data: st.DataObject) -> None:
    """Each of the two may refuse more than the other: NUMA nodes of devices are not looked at here."""
    whole = bytearray(bytes(answer) or b"\0")
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = read_listed_pods(bytes(whole))
        expected = read_slowly(bytes(whole))
    except GRPCError:
        return

    assert expected == found


@pytest.mark.parametrize(
    "wrong",
    [
        field(2, field(1, b"r") + b"\x12\x05a"),
        field(2, field(1, b"r") + field(2, b"\xff")),
        field(2, field(1, b"r") + b"\x10\x01"),
        b"\x10\x01",
    ],
    ids=["an id that ends early", "an id that is no text", "a number for an id", "a number for a device"],
)
@pytest.mark.parametrize("before", [b"", field(2, field(1, b"r") + field(2, b"a"))], ids=["first", "later"])
def test_a_device_that_is_none_is_refused(before: bytes, wrong: bytes) -> None:
    with pytest.raises(GRPCError):
        read_listed_pods(field(1, field(3, before + wrong)))
