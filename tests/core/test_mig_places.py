"""MIG profiles of a GPU: which instance is made, and where, and which facts no GPU can have."""

import hami_reference as reference
import msgspec
import pytest
from hami_support import A100
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core import wire
from topoalign.core.model.byte_sizes import MIB
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.events import TopologyDiscovered
from topoalign.core.model.ids import DeviceID, NodeName
from topoalign.core.model.topology.mig import (
    MigDevice,
    MigPlacement,
    MigProfile,
    find_place,
    free_mig_placement,
    free_placements,
    occupied_placements,
)
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.core.model.topology.topology_checks import validate


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


some_profiles = st.permutations(A100).flatmap(lambda all_: st.integers(0, len(all_)).map(lambda n: tuple(all_[:n])))
runs = st.builds(place, st.integers(0, 7), st.integers(1, 4))
amounts = st.tuples(st.sampled_from([0, 1, 128, 200, 256, 512, 600, 1024, 1025]), st.sampled_from([-1, 0, 1]))


@given(some_profiles, st.sets(runs, max_size=3), amounts)
def test_the_smallest_instance_with_a_place_is_made(
    some: tuple[MigProfile, ...], taken: set[MigPlacement], amount: tuple[int, int]
) -> None:
    """Compared with sets of slices. Memory is a byte less than so many MiB, as many, and a byte more."""
    memory = max(0, amount[0] * MIB + amount[1])
    slices = frozenset(each for at in taken for each in range(at.start, at.start + at.size))

    expected = reference.place_instance(some, slices, -(-memory // MIB))
    found = find_place(some, taken, memory)

    assert (None if expected is None else (expected[0].name, *expected[1:])) == (
        None if found is None else (found[0].name, found[1].start, found[1].size)
    )


def test_an_a100_fills_from_both_ends() -> None:
    by_name = {each.name: each for each in A100}
    taken: list[MigPlacement] = []
    for name in ("3g.20gb", "2g.10gb", "1g.5gb", "1g.5gb"):
        placement = free_mig_placement(by_name[name], taken)
        assert placement is not None
        taken.append(placement)

    assert [4, 0, 3, 2] == [each.start for each in taken]


@pytest.mark.parametrize(("mib", "name"), [(100, "1g.5gb"), (129, "2g.10gb"), (300, "3g.20gb"), (1000, "7g.40gb")])
def test_memory_decides_on_the_profile(mib: int, name: str) -> None:
    found = find_place(A100, (), mib * MIB)

    assert found is not None
    assert name == found[0].name


def test_of_profiles_with_equal_memory_the_one_with_fewer_slices_is_made() -> None:
    found = find_place(tuple(reversed(A100)), {place(4, 4)}, 512 * MIB)

    assert found is not None
    assert ("3g.20gb", 0) == (found[0].name, found[1].start)


def test_where_one_place_is_not_known_none_is_known_to_be_taken() -> None:
    assert frozenset({place(6, 1)}) == occupied_placements(GPU_0.mig or ())
    assert None is occupied_placements([instance(1, place(6, 1)), instance(2, None)])


def test_profiles_are_in_events_and_older_readers_pass_them_over() -> None:
    event = TopologyDiscovered(node=NodeName("n"), epoch=1, revision=1, boot_id="b", source="nvml", topology=MACHINE)

    class OlderGpu(msgspec.Struct):
        id: str

    class OlderTopology(msgspec.Struct):
        gpus: tuple[OlderGpu, ...]

    again = wire.decode_event(wire.encode_event(event, 0.0))
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
        ({"mig": (instance(1, None), instance(1, None))}, "devices and their parts"),
    ],
)
def test_facts_that_no_gpu_can_have_are_refused(wrong: dict[str, object], field: str) -> None:
    gpu = msgspec.structs.replace(GPU_0, **wrong)

    with pytest.raises(InvalidField) as refusal:
        validate(Topology(gpus=(gpu,)))

    assert field == refusal.value.field
