"""Two registries bind the pods of one cluster, whatever is lost on the way, and reserve no device twice."""

from collections import Counter

import msgspec
import pytest
from faults_support import THOROUGH
from simulation import registries
from simulation.bus import FaultyBus
from simulation.loop import SimulatedLoop, simulate
from simulation.registries import Cluster
from simulation.registry_shares import division_of
from simulation.scenario import quietly
from simulation.world import Violation

from topoalign.allocator.allocate.co_allocation import JointClaim
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import GPU_COUNT
from topoalign.core.ports import Message
from topoalign.registry.ports import SeenPod
from topoalign.registry.scheduling.binding.binding import PodBinder

MISTAKEN = [seed for seed in range(150, 500) if division_of(seed) == "units"]
"""Seeds of clusters with units of GPUs. In one of twelve a kubelet hears of such pods in another order."""


def run(seed: int) -> Cluster:
    """Raises Violation."""

    async def main(loop: SimulatedLoop) -> Cluster:
        cluster = Cluster(loop, seed)
        await cluster.run()
        return cluster

    with quietly():
        try:
            return simulate(seed, main)
        except BaseExceptionGroup as group:
            raise first_of(group) from None


def violation_of(seed: int) -> str:
    """What a run violates first; empty: nothing."""
    try:
        run(seed)
    except Violation as violation:
        return str(violation)
    return ""


def first_of(error: BaseException) -> BaseException:
    """The first error in a group, and so on."""
    return first_of(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def test_no_seed_reserves_a_device_twice() -> None:
    """
    I14. Every ok is true, no kubelet refuses a pod that need not be, pods that ask for NICs beside their GPUs have them, of
    no GPU more is held and reserved than it has, units that a pod spreads are equal parts of as many GPUs as it says, and
    nothing stays reserved when all is over.
    """
    answers: Counter[str | None] = Counter()
    given: Counter[str] = Counter()
    compats = set[str]()
    conflicts = 0
    for seed in range(2_000 if THOROUGH else 30):
        cluster = run(seed)
        answers.update(cluster.answers)
        conflicts += sum(each.reservations.counts["conflicts"] for each in cluster.replicas)
        names = [name for node in cluster.nodes.values() for name in node.given]
        given[cluster.division] += len(names)
        given["spread"] += sum(GPU_COUNT in cluster.requests[cluster.uids[name]].annotations for name in names)
        compats.add(cluster.rules.compat)

    assert answers[""] > 200
    assert answers["BindUnknown"] > 0 < answers["BusUnavailable"]
    assert conflicts > 0 < min(given[each] for each in ("whole", "slots", "units", "spread"))
    assert {"", "gaia", "hami"} == compats


def test_a_write_without_a_condition_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another registry reserved is lost: a kubelet refuses its pod, or gives it GPUs without the NICs beside them."""
    publish = FaultyBus.publish

    async def blind(self: FaultyBus, message: Message, expected_last: int | None = None) -> int:
        return await publish(self, message)

    monkeypatch.setattr(FaultyBus, "publish", blind)
    with pytest.raises(Violation, match=r"refused|apart"):
        for seed in range(30):
            run(seed)


def test_shares_that_a_kubelet_may_mistake_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A registry binds pods beside one another that ask for as much of one kind and for something else of the other. Some runs
    violate something else before: such pods may differ in their NICs as well.
    """
    monkeypatch.setattr(registries, "are_ambiguous", lambda topology, one, other: False)

    assert any("ShareSplit" in found or "not equal parts" in found for found in map(violation_of, MISTAKEN))


def test_nics_that_do_not_come_with_the_gpus_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JointClaim, "complete", lambda self, asked, allocation: allocation)
    with pytest.raises(Violation, match="apart"):
        for seed in range(30):
            run(seed)


def test_a_reservation_of_what_another_still_has_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """I14: the node has given the other pod something else, and the registry has not received it."""
    monkeypatch.setattr(PodBinder, "_reserved_for_others", lambda self, uid, node: frozenset())
    with pytest.raises(Violation, match="I14"):
        for seed in range(15, 45):
            run(seed)


def test_an_ok_without_reading_the_pod_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    first = PodBinder._read

    async def hopeful(self: PodBinder, namespace: str, name: str, uid: str, node: NodeName) -> SeenPod:
        seen = await first(self, namespace, name, uid, node)
        return msgspec.structs.replace(seen, node=node) if self._reservations.of_pod(uid) else seen

    monkeypatch.setattr(PodBinder, "_read", hopeful)
    with pytest.raises(Violation, match="bind"):
        for seed in range(30):
            run(seed)
