"""Requests with damaged bytes: refused or understood, and never anything else."""

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from hypothesis import example, given
from hypothesis import strategies as st

from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.decoding import ServerCodec

REQUESTS = [
    v1beta1.AllocateRequest(
        container_requests=[
            v1beta1.ContainerAllocateRequest(devices_ids=["GPU-12345678", "GPU-2"]),
            v1beta1.ContainerAllocateRequest(devices_ids=["GPU-3"]),
        ]
    ),
    v1beta1.PreferredAllocationRequest(
        container_requests=[
            v1beta1.ContainerPreferredAllocationRequest(
                available_deviceIDs=["GPU-1", "GPU-2"], must_include_deviceIDs=["GPU-1"], allocation_size=2
            )
        ]
    ),
    v1beta1.PreStartContainerRequest(devices_ids=["GPU-1", "GPU-2"]),
]


def texts_and_sizes(request: object) -> tuple[list[object], list[object]]:
    """Everything that the front would read of it."""
    match request:
        case v1beta1.AllocateRequest():
            return [i for c in request.container_requests for i in c.devices_ids], []
        case v1beta1.PreferredAllocationRequest():
            containers = request.container_requests
            ids = [i for c in containers for i in (*c.available_deviceIDs, *c.must_include_deviceIDs)]
            return list(ids), [c.allocation_size for c in containers]
        case v1beta1.PreStartContainerRequest():
            return list(request.devices_ids), []
    raise TypeError(request)


@given(
    st.sampled_from(REQUESTS),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255) | st.integers(0, 31)), max_size=5),
    st.integers(0, 200),
)
@example(REQUESTS[0], [(2, 0x08)], 0)
@example(REQUESTS[1], [(2, 0x10)], 0)
@example(REQUESTS[1], [(-2, 0x1F)], 0)
def test_damaged_bytes_are_refused_or_give_texts_and_numbers(
    request: v1beta1.AllocateRequest, changes: list[tuple[int, int]], cut: int
) -> None:
    damaged = bytearray(bytes(request))
    for position, byte in changes:
        damaged[position % len(damaged)] = byte
    try:
        got = ServerCodec().decode(bytes(damaged[: cut or len(damaged)]), type(request))
    except GRPCError as error:
        assert Status.INVALID_ARGUMENT is error.status
        return

    ids, sizes = texts_and_sizes(got)
    assert all(type(i) is str for i in ids)
    assert all(type(size) is int for size in sizes)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: type(request).__name__)
def test_whole_requests_are_understood(request_: v1beta1.AllocateRequest) -> None:
    assert request_ == ServerCodec().decode(bytes(request_), type(request_))
