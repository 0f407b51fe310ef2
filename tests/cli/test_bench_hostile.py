"""`topoalign bench hostile` attacks a real registry in every way, and its scheduler is answered."""

import pytest

from topoalign.tools.bench.filter.cluster import HALF
from topoalign.tools.bench.filter.measure import asking, filled
from topoalign.tools.bench.hostile import measure
from topoalign.tools.bench.hostile.attackers import KINDS


def test_all_attacks_at_once_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "WARM_SECONDS", 0.3)
    monkeypatch.setattr(measure, "ENDED_SECONDS", 0)
    with filled(4, HALF) as cluster, asking(cluster) as asked:
        nodes = [each.node for each in cluster.nodes]
        row = measure.measured("all", asked, nodes, 0.5, dict.fromkeys(KINDS, 2), measure.OTHER)

    assert {"case": "all", "failed": 0} == {key: row[key] for key in ("case", "failed")}
    assert all(float(str(row[key])) > 0 for key in ("n", "p50_ms", "p99_ms", "livez_worst_ms", "rss_mb"))
