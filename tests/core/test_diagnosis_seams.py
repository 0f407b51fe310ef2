"""Beside each node that would admit a pod stands the weakest seam of the GPUs that the pod would get there."""

from collections.abc import Sequence
from random import Random

import msgspec
from decision_support import container, pod
from diagnosis_support import RULES, TIME, cluster, machines, node_with
from fact_support import mig_device

from topoalign.core.admission.prediction import predict
from topoalign.core.diagnosis.diagnosis import diagnose, gpu_positions_of_allocation
from topoalign.core.diagnosis.node_decisions import Nodes
from topoalign.core.diagnosis.node_records import NodeRecord, fold_record
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.decisions import Admission
from topoalign.core.model.ids import GPU, AllocationID, DeviceID
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, PodRequest, Policy
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.core.placement.preference import seam_of
from topoalign.core.scoring.quality import NodePacking
from topoalign.core.scoring.scorers import Scoring, scorer_by_name
from topoalign.machines import catalogue

BEST_EFFORT, NO_POLICY = (msgspec.structs.replace(RULES, policy=each) for each in (Policy.BEST_EFFORT, Policy.NONE))
BOARDS = ("hgx-b200", "hgx-b200-gpu0-half", "hgx-b200-gpu0-off")


def seams(asked: PodRequest, *nodes: NodeRecord, scoring: Scoring = Scoring.QUALITY, most: int = 99) -> dict[str, str]:
    """Node -> the seam, the best node first."""
    found = diagnose(Nodes(cluster(*nodes)), asked, scorer_by_name(scoring, NodePacking.BINPACK), seams=most)
    return {each.node: each.seam for each in found.admitting}


def some_node(name: str, rules: AdmissionRules = BEST_EFFORT) -> NodeRecord:
    """An empty node with this machine of the catalogue."""
    return node_with(name, topology=catalogue.machine(name), rules=rules)


def on_volta(*containers: ContainerRequest, init: Sequence[ContainerRequest] = ()) -> str:
    """The seam of a pod on an empty dgx1-volta."""
    return seams(pod(*containers, init=init), some_node("dgx1-volta"))["dgx1-volta"]


def test_nodes_show_the_seam_of_the_set_that_the_pod_would_get() -> None:
    """
    Four GPUs include the degraded GPU 0 where the kubelet aligns them to NUMA node 0, and not under policy none. The scoring
    changes the order and not the seam.
    """
    nodes, unaligned = ([some_node(name, rules=rules) for name in BOARDS] for rules in (BEST_EFFORT, NO_POLICY))
    links = "{} NVLinks, {} GB/s".format
    expected = [links(18, 722), links(9, 361), "PCIe within a NUMA node"]

    assert expected == [*seams(pod(container(gpus=4)), *nodes).values()]
    assert [links(18, 722)] * 3 == [*seams(pod(container(gpus=4)), *unaligned).values()]
    assert {*expected} == {*seams(pod(container(gpus=4)), *nodes, scoring=Scoring.LEAST_ALLOCATED).values()}


def test_the_seam_is_that_of_a_prediction_for_the_node_alone() -> None:
    """Random machines, held GPUs and pods: the weakest of the sets that `predict` gives, read from the real topology."""
    chance = Random(7)
    seen = set()
    for _ in range(30):
        hardware = machines(
            catalogue.machine(chance.choice(["dgx1-volta", "hgx-b200-gpu0-half", "8x-nvlink-pairs"])), 5
        )
        held = [pod(container(gpus=1), name=f"p{i}") for i in range(chance.randrange(4))]
        record = node_with("n", *held, topology=hardware, rules=BEST_EFFORT)
        asked = pod(container(gpus=chance.randrange(1, 6)), name="asked")

        decision = predict(fold_record(record), asked, TIME)
        sets = [each.devices[GPU] for each in decision.allocations] if isinstance(decision, Admission) else []
        expected = [seam_of(hardware, ids) if len(ids) > 1 else "" for ids in sets]

        assert expected == [*seams(asked, record).values()]
        seen.update(expected)
    assert len(seen) > 4


def test_of_several_containers_the_weakest_seam_counts() -> None:
    four, pair = container("four", gpus=4), container("pair", gpus=2)

    assert ("4 NVLinks, 80 GB/s", "2 NVLinks, 40 GB/s") == (on_volta(four), on_volta(pair))
    assert ["2 NVLinks, 40 GB/s"] * 2 == [on_volta(four, pair), on_volta(pair, four)]
    assert "" == on_volta(container("one", gpus=1), container("two", gpus=1))


def test_init_containers_count_only_where_no_other_has_gpus() -> None:
    six = container("six", gpus=6)

    assert "" != on_volta(six) == on_volta(container("none", cpus=1), init=[six])
    assert "" == on_volta(container("single", gpus=1), init=[six])


def test_gpus_in_mig_mode_have_no_seam() -> None:
    """Of the GPUs of an allocation those with a share count, and those with an instance do not."""
    mig = [(mig_device(f"MIG-{i}", i, memory=1),) for i in range(2)]
    split = tuple(Gpu(id=DeviceID(f"GPU-{i}"), index=i, mig=each) for i, each in enumerate([*mig, None]))
    ids = tuple(map(DeviceID, ("MIG-0", "MIG-1", "GPU-2::7")))

    assert (2,) == gpu_positions_of_allocation(
        Allocation(id=AllocationID("x"), devices={GPU: ids}), Topology(gpus=split)
    )


def test_seams_are_computed_for_the_best_nodes_alone() -> None:
    nodes = [some_node(name) for name in ("hgx-b200", "hgx-b200-gpu0-off")]

    assert {"hgx-b200": "18 NVLinks, 722 GB/s", "hgx-b200-gpu0-off": ""} == seams(
        pod(container(gpus=8)), *nodes, most=1
    )
