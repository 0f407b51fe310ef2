"""Responses that are encoded by hand have the bytes that the generated code gives them."""

from hypothesis import assume, given
from hypothesis import strategies as st

from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.codec import ServerCodec

TEXTS = st.text(max_size=20) | st.text(min_size=120, max_size=200)
MAPS = st.dictionaries(TEXTS, TEXTS, max_size=3)
CONTAINERS = st.builds(
    v1beta1.ContainerAllocateResponse,
    envs=MAPS,
    mounts=st.lists(
        st.builds(v1beta1.Mount, container_path=TEXTS, host_path=TEXTS, read_only=st.booleans()), max_size=3
    ),
    devices=st.lists(
        st.builds(v1beta1.DeviceSpec, container_path=TEXTS, host_path=TEXTS, permissions=TEXTS), max_size=3
    ),
    annotations=MAPS,
    cdi_devices=st.lists(st.builds(v1beta1.CdiDevice, name=TEXTS), max_size=3),
)
ALLOCATED = st.builds(v1beta1.AllocateResponse, container_responses=st.lists(CONTAINERS, max_size=3))
PREFERRED = st.builds(
    v1beta1.PreferredAllocationResponse,
    container_responses=st.lists(
        st.builds(v1beta1.ContainerPreferredAllocationResponse, device_i_ds=st.lists(TEXTS, max_size=5)), max_size=3
    ),
)
Response = v1beta1.AllocateResponse | v1beta1.PreferredAllocationResponse | v1beta1.PreStartContainerResponse


@given(ALLOCATED | PREFERRED | st.builds(v1beta1.PreStartContainerResponse))
def test_every_response_is_read_by_the_generated_code_as_it_was(response: Response) -> None:
    assert response == type(response).parse(ServerCodec().encode(response, type(response)))


@given(ALLOCATED)
def test_a_response_to_allocate_has_the_bytes_of_the_generated_code(response: v1beta1.AllocateResponse) -> None:
    """Except where a part has no field: the generated code writes it as a part of field 1, whatever its field is."""
    for told in response.container_responses:
        assume(all(map(bool, [*told.mounts, *told.devices, *told.cdi_devices])))

    assert bytes(response) == ServerCodec().encode(response, v1beta1.AllocateResponse)


@given(PREFERRED)
def test_a_preference_has_the_bytes_of_the_generated_code(response: v1beta1.PreferredAllocationResponse) -> None:
    assert bytes(response) == ServerCodec().encode(response, v1beta1.PreferredAllocationResponse)
