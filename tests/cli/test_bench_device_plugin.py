"""`topoalign bench device-plugin` measures the real agent, and says so where it cannot."""

import shutil
import sys
from pathlib import Path

import pytest

from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.topology_checks import validate
from topoalign.tools.bench import device_plugin
from topoalign.tools.bench.device_plugin import NoClient, agent, measure, nvml, shares

CASES = [
    "bare",
    "preferred-4of8",
    "idle",
    "preferred-4of8-slow-nvml",
    "preferred-1000-shares",
    "preferred-8192-shares",
    "allocate-4",
    "pod-start",
    "pod-start-8",
    "allocate-4-after-20",
    "allocate-64-callers",
    "list-1000",
    "list-17500",
    "preferred-share",
    "allocate-share",
    "preferred-slot",
    "allocate-slot",
    "list-10624",
    "start",
    "stop",
    "reregister",
]


MORE = {
    "allocate-4-after-20": {"after_none_p50_ms"},
    "preferred-share": {"beside_16_p50_ms"},
    "preferred-slot": {"beside_16_p50_ms"},
    "allocate-64-callers": {"per_second", "one_caller_per_second", "fsyncs", "grants"},
}


def test_each_case_is_measured_under_its_name_with_the_memory_of_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent each, as a process, with its kubelet and its NATS; a few calls are enough to see that all of them answer."""
    monkeypatch.setattr(shares, "EARLIER", 20)
    rows = list(device_plugin.cases(calls=5, changes=2, starts=2, idle_seconds=0.1))

    assert CASES == [row["case"] for row in rows]
    assert [5, 5, 1, *[5] * 7, 10, 2, 2, 5, 10, 5, 5, *[2] * 4] == [row["n"] for row in rows if "left_out" not in row]
    idle = rows.pop(CASES.index("idle"))
    for row in rows:
        if "left_out" not in row:
            more = {"longest_block_ms", "cpu_s"} | MORE.get(str(row["case"]), set())
            assert {"case", "n", "p50_ms", "p99_ms", "rss_mb"} == row.keys() - more
            assert all(float(str(row[key])) > 0 for key in row.keys() - {"case"})
    assert {"case", "n", "cpu_s_per_minute", "rss_mb"} == idle.keys()
    callers = next(row for row in rows if row["case"] == "allocate-64-callers")
    assert 10 == callers["grants"] > callers["fsyncs"]  # type: ignore[operator]  # both are numbers
    assert ["list-1000", "list-17500", "list-10624"] == [row["case"] for row in rows if "longest_block_ms" in row]


@pytest.mark.parametrize("case", ["list-1000", "list-17500"])
def test_the_shares_are_as_many_as_the_case_says_and_can_be_announced(case: str) -> None:
    topology = measure.shared(*measure.SHARES[case])

    assert int(case.removeprefix("list-")) == sum(map(len, topology.devices.values()))
    assert topology == validated(topology)


def validated(topology: Topology) -> Topology:
    validate(topology)
    return topology


def test_without_its_client_the_benchmark_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("topoalign.tools.bench.device_plugin.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "grpc", None)

    with pytest.raises(NoClient, match="grpcio") as refused:
        next(device_plugin.cases())
    assert "topoalign-tools[bench]" in refused.value.remedy


def test_without_a_compiler_the_slow_nvml_case_is_skipped_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a C compiler the case with the slow NVML is left out, and the output says why."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    row = measure.slow_nvml({}, 1)

    assert 0 == row["n"]
    assert "C compiler" in str(row["left_out"])


def test_sources_that_do_not_compile_are_told_in_the_compilers_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    broken = tmp_path / "broken.c"
    broken.write_text("int nvmlInit_v2(void) { return missing; }")
    monkeypatch.setattr(nvml, "SOURCE", broken)

    with pytest.raises(nvml.NoStandIn, match="missing"):
        nvml.build(tmp_path)


def test_the_agent_hears_nothing_of_the_settings_around_the_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong one would end it, and a right one would change what is measured."""
    monkeypatch.setenv("TOPOALIGN_POLICY", "no such policy")
    monkeypatch.setattr(agent, "PLAIN", ("-c", "import os, sys; open(sys.argv[1], 'w').write(' '.join(os.environ))"))
    told = tmp_path / "told"
    with agent.running(str(told), {"NODE": "n"}) as it:
        it.wait()

    assert "TOPOALIGN_NODE" in told.read_text().split()
    assert "TOPOALIGN_POLICY" not in told.read_text().split()
