"""`topoalign bench filter` asks a real registry, with nodes that are half full and all different."""

from contextlib import AbstractContextManager

import msgspec
import pytest

from topoalign.core.admission.admit import admit
from topoalign.core.admission.free_amounts import count_free
from topoalign.core.admission.prediction import prediction_basis
from topoalign.core.model.decisions import Admission
from topoalign.core.model.ids import GPU, NIC
from topoalign.core.model.requests import PodRequest
from topoalign.core.model.topology.topology_checks import validate
from topoalign.core.state.fold import NodeState, replay
from topoalign.kubelet.files.manifest import PodManifest, request_from_pod
from topoalign.tools.bench import filter as bench_filter
from topoalign.tools.bench.device_plugin import agent
from topoalign.tools.bench.device_plugin.agent import Agent
from topoalign.tools.bench.filter.cluster import FACTS, BusyNode
from topoalign.tools.bench.filter.measure import asking
from topoalign.tools.bench.filter.scheduler import Amounts, pod_json


def test_each_case_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few nodes all pass where they are half full, and none where they are full. A real agent confirms a bind."""

    def running(command: str, settings: dict[str, str], *, observed: bool) -> AbstractContextManager[Agent]:
        return agent.running(command, settings | {"REGISTRY_ANSWER_SECONDS": "60"}, observed=observed)

    monkeypatch.setitem(asking.__wrapped__.__globals__, "running", running)  # type: ignore[attr-defined]  # of contextmanager
    rows = {row["case"]: row for row in bench_filter.cases(small=6, sizes=(8,), calls=2)}
    bound = rows.pop("bind")

    assert 0 < float(str(bound["p50_ms"]))
    assert {"6-cold": 6, "6-full": 0, "6-shares": 6, "6": 6, "8": 8, "8-new": 8} == {
        case: row["passed"] for case, row in rows.items()
    }
    for row in rows.values():
        assert {"case", "n", "p50_ms", "p99_ms", "passed", "longest_block_ms", "rss_mb"} == row.keys()
        assert all(float(str(row[key])) > 0 for key in row.keys() - {"case", "passed"})


def test_nodes_differ_and_their_facts_agree_with_one_another() -> None:
    frees = set()
    for number in range(20):
        busy = BusyNode(number, 4)
        events = list(busy.said())
        state = replay(busy.node, events)
        basis = prediction_basis(state, 0.0)
        free = count_free(basis.state, basis.rules)
        frees.add(msgspec.json.encode(msgspec.to_builtins(free, str_keys=True, order="deterministic")))

        validate(state.hardware)
        assert FACTS == len(events)
        assert (state.digest, state.seq) == (busy.state.digest, busy.state.seq)
        assert ((), ()) == (basis.notes, basis.doubts)
        assert [4, 10] == [free.devices[GPU], free.devices[NIC]]
    assert 20 == len(frees)


@pytest.mark.parametrize("number", range(4))
def test_the_pod_of_the_benchmark_fits_on_half_full_nodes_alone(number: int) -> None:
    """And more fits where a container has ended."""
    request = request_from_pod(msgspec.json.decode(pod_json(0, Amounts(gpus=1)), type=PodManifest))
    for held, fits in ((4, True), (8, False)):
        busy = BusyNode(number, held)
        state = replay(busy.node, list(busy.said()))
        assert fits is is_admitted(state, request)
    for event in busy.ended():
        state = state.apply(event)
    assert is_admitted(state, request)
    assert (state.digest, state.seq) == (busy.state.digest, busy.state.seq)


def is_admitted(state: NodeState, request: PodRequest) -> bool:
    basis = prediction_basis(state, 0.0)
    return isinstance(admit(basis.state, request, basis.rules), Admission)


def test_without_a_client_of_kubernetes_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_filter, "find_spec", lambda name: None)

    with pytest.raises(bench_filter.NoKubernetesClient, match="lightkube"):
        next(bench_filter.cases())
