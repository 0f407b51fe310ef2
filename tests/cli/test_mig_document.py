"""What `gpu list --json` tells of the MIG profiles of a GPU."""

import msgspec

from topoalign.cli.gpu_partitioning import mig_document
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.mig import MigDevice, MigPlacement, MigProfile, occupied_placements
from topoalign.core.model.topology.model import Gpu


def profile(name: str, size: int, *starts: int) -> MigProfile:
    places = tuple(MigPlacement(start=start, size=size) for start in starts)
    return MigProfile(name=name, memory=10 << 30, slices=1, cores=15, placements=places)


def instance(number: int, at: MigPlacement | None) -> MigDevice:
    uuid = DeviceID(f"MIG-{number}")
    return MigDevice(uuid=uuid, profile="x", gpu_instance=number, compute_instance=0, memory=1, placement=at)


SIXTH = instance(1, MigPlacement(start=6, size=1))
PROFILES = (profile("1g.10gb", 1, *range(7)), profile("3g.40gb", 4, 0, 4))
GPU_0 = Gpu(id=DeviceID("GPU-0"), index=0, mig=(SIXTH,), mig_profiles=PROFILES)


def test_programs_are_told_where_another_instance_can_be_made() -> None:
    document = mig_document(GPU_0)["mig_profiles"]

    assert isinstance(document, list)
    assert [("1g.10gb", [0, 1, 2, 3, 4, 5]), ("3g.40gb", [0])] == [(each["name"], each["free"]) for each in document]
    assert {"name", "memory", "slices", "cores", "placements", "free"} == document[0].keys()


def test_where_the_place_of_an_instance_is_not_known_none_is_free_for_sure() -> None:
    hidden = msgspec.structs.replace(GPU_0, mig=(SIXTH, instance(2, None)))
    document = mig_document(hidden)["mig_profiles"]

    assert None is occupied_placements(hidden.mig or ())
    assert isinstance(document, list)
    assert [None, None] == [each["free"] for each in document]
    assert {} == mig_document(Gpu(id=DeviceID("GPU-1"), index=1)) == mig_document(None)
