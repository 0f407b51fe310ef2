"""A pod cannot be meant in a cluster if one of the modes does not take it."""

from collections import Counter
from random import Random

import msgspec
import pytest
from decision_support import container, machine, pod
from faults_support import THOROUGH
from feasibility_support import some_pod

from topoalign.core.demand.field_paths import in_manifest
from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.demand.share_annotations import InvalidShare
from topoalign.core.demand.shares import SlotResources
from topoalign.core.deviceshare.koordinator_names import HINT_ANNOTATION, JOINT_ANNOTATION
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.requests import AdmissionRules, Mode, PodRequest
from topoalign.core.model.topology.device_offers import Slots
from topoalign.core.sharing.pod_checks import Offers, check_pod

SAID = (
    (JOINT_ANNOTATION, '{"deviceTypes": ["gpu", "rdma"]}'),
    (JOINT_ANNOTATION, '{"deviceTypes": ["gpu", "fan"]}'),
    (JOINT_ANNOTATION, "{"),
    (HINT_ANNOTATION, '{"rdma": {"vfSelector": {}}}'),
    ("scheduling.koordinator.sh/device-joint-alocate", "{}"),
    ("topoalign.io/other", ""),
    ("example.com/purpose", "training"),
    ("no key", ""),
)
HARDWARE = machine()


def some_request(chance: Random) -> PodRequest:
    """Mostly one that can be meant."""
    found = msgspec.structs.replace(
        some_pod(chance, HARDWARE), annotations=dict(chance.sample(SAID, chance.choice([0, 1, 1, 2])))
    )
    twice = (*found.containers, found.containers[0]) if chance.random() < 0.05 else found.containers
    return msgspec.structs.replace(found, containers=twice)


def test_a_pod_is_refused_as_by_the_first_mode_that_refuses_it() -> None:
    """Against all modes, one after the other, each with a look at the whole pod."""
    seen = Counter[str]()
    for seed in range(20_000 if THOROUGH else 600):
        asked, expected, found = some_request(Random(seed)), "", ""
        try:
            for mode in Mode:
                read_pod(asked, AdmissionRules(mode=mode))
        except InvalidField as error:
            expected = str(in_manifest(error))
        try:
            check_pod(asked)
        except InvalidField as error:
            found = str(error)
        seen[expected[:40]] += 1

        assert expected == found, seed

    assert 100 < seen[""] < seen.total() - 100
    assert len(seen) > 4


@pytest.mark.parametrize(("model", "most"), [("a100", 40_960), ("h100", 81_920)])
def test_amounts_are_judged_by_the_slots_that_are_asked_for(model: str, most: int) -> None:
    """Nodes have slots under several names, and the amounts of all of them under one."""
    offered = [
        SlotResources(ResourceName(f"nvidia.com/gpu-{name}"), Slots(), size)
        for name, size in (("h100", 81_920), ("a100", 40_960))
    ]
    asked = pod(container(others={ResourceName(f"nvidia.com/gpu-{model}"): 1, Slots().memory: 16 << 30}))

    with pytest.raises(InvalidShare, match=rf"limits\[nvidia.com/gpumem\]: {16 << 30} is above {most}"):
        check_pod(asked, Offers(slots=offered))
