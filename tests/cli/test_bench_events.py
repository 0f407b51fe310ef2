"""`topoalign bench events` hears every grant that it times, from a real agent over a real nats-server."""

from topoalign.tools.bench import events


def test_every_grant_of_both_rates_is_heard_by_the_subscriber() -> None:
    rows = list(events.cases(seconds=0.2))

    assert ["paced", "burst"] == [row["case"] for row in rows]
    assert [10, 30] == [row["n"] for row in rows]
    for row in rows:
        assert {"case", "n", "p50_ms", "p99_ms", "per_second", "rss_mb"} == row.keys()
        # an event that arrives before the answer counts as 0
        assert 0 <= float(str(row["p50_ms"])) <= float(str(row["p99_ms"]))
