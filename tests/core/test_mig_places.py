"""MIG profiles of a GPU: where another instance can be made, and which facts no GPU can have."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core import wire
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.events import TopologyDiscovered
from topoalign.core.model.ids import DeviceID, NodeName
from topoalign.core.model.topology.mig import MigDevice, MigPlacement, MigProfile, free_placements, occupied
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.core.model.topology.validate import validate


def place(start: int, size: int) -> MigPlacement:
    return MigPlacement(start=start, size=size)


def profile(name: str, *places: MigPlacement) -> MigProfile:
    return MigProfile(name=name, memory=10 << 30, slices=1, cores=15, placements=places)


def instance(number: int, at: MigPlacement | None) -> MigDevice:
    uuid = DeviceID(f"MIG-{number}")
    return MigDevice(uuid=uuid, profile="x", gpu_instance=number, compute_instance=0, memory=1, placement=at)


ONE = profile("1g.10gb", *(place(start, 1) for start in range(7)))
THREE = profile("3g.40gb", place(0, 4), place(4, 4))
GPU_0 = Gpu(id=DeviceID("GPU-0"), index=0, mig=(instance(1, place(6, 1)),), mig_profiles=(ONE, THREE))
MACHINE = Topology(gpus=(GPU_0,))

places = st.builds(place, st.integers(0, 7), st.integers(1, 8))


@given(st.lists(places, max_size=8, unique=True), st.sets(places, max_size=4))
def test_a_place_is_free_where_no_slice_of_it_is_taken(can_be: list[MigPlacement], taken: set[MigPlacement]) -> None:
    """Compared with sets of slices."""

    def slices(at: MigPlacement) -> set[int]:
        return {*range(at.start, at.start + at.size)}

    used = set().union(*map(slices, taken))

    assert [each for each in can_be if not slices(each) & used] == [*free_placements(profile("x", *can_be), taken)]


def test_where_one_place_is_not_known_none_is_known_to_be_taken() -> None:
    assert frozenset({place(6, 1)}) == occupied(GPU_0.mig or ())
    assert None is occupied([instance(1, place(6, 1)), instance(2, None)])


def test_profiles_are_in_events_and_older_readers_pass_them_over() -> None:
    event = TopologyDiscovered(node=NodeName("n"), epoch=1, revision=1, boot_id="b", source="nvml", topology=MACHINE)

    class OlderGpu(msgspec.Struct):
        id: str

    class OlderTopology(msgspec.Struct):
        gpus: tuple[OlderGpu, ...]

    again = wire.decode(wire.encode(event, 0.0))
    older = msgspec.json.decode(msgspec.json.encode(MACHINE), type=OlderTopology)

    assert isinstance(again, TopologyDiscovered) and MACHINE == again.topology
    assert "GPU-0" == older.gpus[0].id
    validate(MACHINE)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"mig_profiles": (ONE, ONE)}, "gpus[0].mig_profiles"),
        ({"mig_profiles": (profile("x", place(0, 0)),)}, "gpus[0].mig_profiles[0].placements[0]"),
        ({"mig_profiles": (profile("x", place(-1, 1)),)}, "gpus[0].mig_profiles[0].placements[0]"),
        ({"mig_profiles": (profile("x", place(60, 5)),)}, "gpus[0].mig_profiles[0].placements[0]"),
        ({"mig_profiles": (profile("x", *(place(0, 1),) * 65),)}, "gpus[0].mig_profiles[0].placements"),
        ({"mig_profiles": (profile("\n"),)}, "gpus[0].mig_profiles[0].name"),
        ({"mig_profiles": tuple(profile(str(number)) for number in range(65))}, "gpus[0].mig_profiles"),
        ({"mig_profiles": (msgspec.structs.replace(ONE, memory=-1),)}, "gpus[0].mig_profiles[0]"),
        ({"mig_profiles": (msgspec.structs.replace(ONE, cores=101),)}, "gpus[0].mig_profiles[0]"),
        ({"mig": (instance(1, place(0, 99)),)}, "gpus[0].mig[0].placement"),
        ({"mig": (instance(1, None), instance(1, None))}, "gpus[0].mig"),
    ],
)
def test_facts_that_no_gpu_can_have_are_refused(wrong: dict[str, object], field: str) -> None:
    gpu = msgspec.structs.replace(GPU_0, **wrong)

    with pytest.raises(InvalidField) as refusal:
        validate(Topology(gpus=(gpu,)))

    assert field == refusal.value.field
