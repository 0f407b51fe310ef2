"""`topoalign why` and `what-if --cluster`: the same answer from a file anywhere, and errors for what cannot be meant."""

import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from anyio.from_thread import start_blocking_portal
from decision_support import container, machine, pod
from diagnosis_support import cluster, node_with

from topoalign.cli import root
from topoalign.core import wire
from topoalign.core.diagnosis.node_records import ClusterRecord, decode_lines, encode_lines
from topoalign.core.model.ids import DeviceID, NodeName, ResourceName
from topoalign.core.model.kubelet import ListedDevices
from topoalign.core.model.requests import WriterPosition
from topoalign.core.ports import Endpoint
from topoalign.machines import catalogue
from topoalign.runtime.logging import configure_logging
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_server import local_nats

SEARCHED = os.environ["PATH"]
MANIFEST = {"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "train", "namespace": "ml"}}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without a cluster: neither NATS nor kubectl."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("TOPOALIGN_NATS_URL", "TOPOALIGN_NODE"):
        monkeypatch.delenv(name, raising=False)
    write("cluster.ndjson", some_cluster())


def some_cluster() -> ClusterRecord:
    """`full` has no free GPU, `half` two on one NUMA node, `bare` has none at all."""
    two = [pod(container(gpus=2), name=name) for name in ("x", "y")]
    bare = machine(gpus=(), nics=())
    return cluster(node_with("full", *two), node_with("half", two[0]), node_with("bare", topology=bare))


def write(name: str, record: ClusterRecord) -> None:
    with Path(name).open("wb") as file:
        file.writelines(encode_lines(record))


def run(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = root.run_command_line(line.split())
    said = capsys.readouterr()
    return status, said.out, said.err


def test_why_names_the_main_reason_and_the_cheapest_change(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run("why --gpus 3 --from cluster.ndjson", capsys)

    lines = out.splitlines()
    assert 4 == status
    assert "no node of 3 admits the pod: NotEnoughDevices on 2 nodes" == lines[0]
    assert "finding  3 of nvidia.com/gpu needed, 0 free and healthy (full)" == lines[1]
    assert lines[2].startswith("remedy   ")
    assert ["WHAT", "WOULD", "MAKE", "IT", "FIT", "COST", "NODES", "FOR", "EXAMPLE"] == lines[4].split()
    assert lines[5].split() == ["ask", "for", "2", "instead", "of", "3", "nvidia.com/gpu", "33%", "1", "half"]
    assert ["NotEnoughDevices", "in", "use", "2", "full", "half"] in [line.split() for line in lines]
    assert ["UnknownResource", "has", "none", "1", "bare"] in [line.split() for line in lines]


def test_why_says_where_a_pod_fits(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run("why --gpus 2 --from cluster.ndjson", capsys)

    assert 0 == status
    assert out.startswith("1 of 3 nodes would admit the pod; the best is half\n")


@pytest.mark.parametrize("command", ["why", "what-if --cluster"])
def test_what_the_answer_of_a_cluster_does_not_cover_comes_first(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {**MANIFEST, "spec": {**pod_with(2)["spec"], "resourceClaims": [{"name": "nics"}]}}
    Path("pod.json").write_text(json.dumps(shown))

    _, out, _ = run(f"{command} --pod-file pod.json --from cluster.ndjson", capsys)
    _, whole, _ = run(f"{command} --pod-file pod.json --from cluster.ndjson --json", capsys)

    first, second, *_ = out.splitlines()
    assert first.startswith("not covered: the devices of resource claims 'nics': their DRA driver gives them")
    assert second.startswith("1 of 3 nodes would admit the pod")
    assert [first.removeprefix("not covered: ")] == json.loads(whole)["not_covered"]


def test_what_if_of_a_cluster_ranks_the_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run("what-if --cluster --gpus 1 --pods 2 --from cluster.ndjson", capsys)

    assert 0 == status
    assert out.startswith("2 of 2 pods fit, on 1 node of 3\nNODE  SCORE  PODS\nhalf  ")
    assert (4, "2 of 3 pods fit, on 1 node of 3: FullWithThese on 1 node") == (
        run("what-if --cluster --gpus 1 --pods 3 --from cluster.ndjson", capsys)[0],
        run("why --gpus 1 --pods 3 --from cluster.ndjson", capsys)[1].splitlines()[0],
    )


def listing(record: ClusterRecord, *names: str) -> ClusterRecord:
    """The cluster, where it is known that other plugins list these resources on each node."""
    nodes = []
    for each in record.nodes:
        assert each.usage is not None and each.usage.kubelet is not None
        devices = {ResourceName(name): (ListedDevices(ids=(DeviceID("d"),)),) for name in names}
        kubelet = msgspec.structs.replace(each.usage.kubelet, devices=devices)
        nodes.append(msgspec.structs.replace(each, usage=msgspec.structs.replace(each.usage, kubelet=kubelet)))
    return msgspec.structs.replace(record, nodes=tuple(nodes))


@pytest.mark.parametrize("command", ["why", "what-if --cluster"])
def test_a_name_that_no_node_serves_is_a_finding(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of what another plugin lists, or where it is not known what they list, the answer is about the rest of the pod."""
    limits = {"nvidia.com/gpus": 1}
    spec = {"containers": [{"name": "main", "resources": {"limits": limits}}]}
    Path("pod.json").write_text(json.dumps({**MANIFEST, "spec": spec}))
    write("known.ndjson", listing(some_cluster()))
    write("listed.ndjson", listing(some_cluster(), "nvidia.com/gpus"))

    status, out, err = run(f"{command} --pod-file pod.json --from known.ndjson", capsys)

    assert (6, "") == (status, out)
    assert "nobody serves 'nvidia.com/gpus' here" in err and "did you mean nvidia.com/gpu?" in err
    for file in ("listed.ndjson", "cluster.ndjson"):
        assert 6 != run(f"{command} --pod-file pod.json --from {file}", capsys)[0]


def test_what_if_of_a_cluster_shows_the_seam_of_several_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """A pod of one GPU has no column SEAM; the JSON has the seam of every node, and `why` the same JSON."""
    boards = ("hgx-b200", "hgx-b200-gpu0-off")
    write("b200.ndjson", cluster(*(node_with(name, topology=catalogue.machine(name)) for name in boards)))
    eight, one = "--gpus 8 --policy none --from b200.ndjson", "--gpus 1 --policy none --from b200.ndjson"

    rows = [line.split(maxsplit=2) for line in run(f"what-if --cluster {eight}", capsys)[1].splitlines()[1:]]
    answers = [run(f"{command} {eight} --json", capsys)[1] for command in ("what-if --cluster", "why")]

    seams = ["18 NVLinks, 722 GB/s", "PCIe within a NUMA node"]
    assert ["NODE", "SCORE", "SEAM"] == rows[0]
    assert [*zip(boards, seams, strict=True)] == [(row[0], row[2]) for row in rows[1:]]
    assert [seams, seams] == [[each["seam"] for each in json.loads(answer)["admitting"]] for answer in answers]
    assert "SEAM" not in run(f"what-if --cluster {one}", capsys)[1]


@pytest.mark.parametrize("command", ["why", "what-if --cluster"])
def test_a_snapshot_gives_the_same_answer_to_the_letter(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    first = run(f"{command} --gpus 3 --cpus 1 --json --from cluster.ndjson --snapshot again.ndjson", capsys)
    second = run(f"{command} --gpus 3 --cpus 1 --json --from again.ndjson", capsys)

    assert first[:2] == second[:2]
    answer: dict[str, Any] = json.loads(first[1])
    fields = ["time", "not_covered", "pods", "fit", "nodes", "admitting", "reason", "reasons", "changes", "placed"]
    assert fields == [*answer]
    assert Path("cluster.ndjson").read_bytes() == Path("again.ndjson").read_bytes()
    assert some_cluster() == decode_lines(Path("again.ndjson").read_bytes().splitlines())


def test_a_pod_of_kubernetes_is_read_by_kubectl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A kubectl that prints the arguments it got on stderr, and the pod on stdout."""
    spec = {"containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": 2}}}]}
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text(f"#!/bin/sh\necho \"$@\" > asked\nprintf '%s' '{json.dumps({**MANIFEST, 'spec': spec})}'\n")
    kubectl.chmod(0o755)

    status, out, _ = run("why ml/train --from cluster.ndjson", capsys)

    assert 0 == status and out.startswith("1 of 3 nodes")
    assert "get pod --namespace=ml --output=json -- train\n" == Path("asked").read_text()
    kubectl.write_text("#!/bin/sh\necho 'E1122 log' >&2\necho 'pods \"train\" not found' >&2\nexit 1\n")
    status, _, err = run("why ml/train --from cluster.ndjson", capsys)
    assert 69 == status and 'pods "train" not found\n' in err


def test_a_pod_of_kubernetes_that_no_node_takes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the words of the filter: it was created past the webhook, and waits."""
    words = {"topoalign.io/gang": "g", "topoalign.io/gang-size": "some"}
    spec = {"containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": 2}}}]}
    shown = {"kind": "Pod", "metadata": {"name": "train", "annotations": words}, "spec": spec}
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text(f"#!/bin/sh\nprintf '%s' '{json.dumps(shown)}'\n")
    kubectl.chmod(0o755)

    status, out, err = run("why ml/train --from cluster.ndjson", capsys)

    assert 0 != status and "" == out
    assert "metadata.annotations[topoalign.io/gang-size]: 'some' is not a number of pods" in err


NODES = {
    "full": {"labels": {"pool": "a"}},
    "half": {"labels": {"pool": "b"}},
    "bare": {"labels": {"pool": "a"}, "spec": {"taints": [{"key": "cpu", "effect": "NoSchedule"}]}},
}
"""Name -> labels and spec of the nodes of `some_cluster` in Kubernetes."""
AFFINITY = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [{"key": "pool", "operator": "In", "values": ["a"]}]}]
        }
    }
}


def install_kubectl(folder: Path, pod: dict[str, Any], nodes: dict[str, Any]) -> None:
    """A kubectl that prints this pod for `get pod`, and these nodes for `get nodes`."""
    items = [
        {"kind": "Node", "metadata": {"name": name, "labels": each.get("labels")}, "spec": each.get("spec", {})}
        for name, each in nodes.items()
    ]
    (folder / "pod").write_text(json.dumps(pod))
    (folder / "nodes").write_text(json.dumps({"kind": "List", "items": items}))
    (folder / "bin").mkdir(exist_ok=True)
    kubectl = folder / "bin" / "kubectl"
    kubectl.write_text(f'#!/bin/sh\nexec /bin/cat "{folder}/$2"\n')
    kubectl.chmod(0o755)


def pod_with(gpus: int, **spec: Any) -> dict[str, Any]:
    containers = [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": gpus}}}]
    return {**MANIFEST, "spec": {"containers": containers, **spec}}


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A running cluster whose streams have the nodes of `some_cluster`."""
    monkeypatch.setattr("topoalign.cli.whole_cluster.from_streams", lambda nats: some_cluster())


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("line", ["why ml/train", "why --pod-file pod", "what-if --cluster --pod-file pod"])
def test_a_pod_is_admitted_by_no_node_that_kubernetes_keeps_it_off(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault S04: the affinity of the pod excludes `half`, the only node with room. Without it the pod fits there."""
    install_kubectl(tmp_path, pod_with(2, affinity=AFFINITY), NODES)
    status, out, err = run(line, capsys)
    install_kubectl(tmp_path, pod_with(2), NODES)

    assert (4, "") == (status, err)
    assert out.startswith("no node of 3 admits the pod: ")
    assert (0, "1 of 3 nodes would admit the pod; the best is half") == (
        run(line, capsys)[0],
        run(line, capsys)[1].splitlines()[0],
    )


@pytest.mark.usefixtures("streams")
def test_why_names_what_excludes_each_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install_kubectl(tmp_path, pod_with(2, nodeSelector={"pool": "a"}), NODES)

    rows = [line.split("  ") for line in run("why ml/train", capsys)[1].splitlines()]

    assert ["NodeNotAllowed: excluded by nodeSelector pool=a", "kept off", "half"] in [
        [row[0], row[1].strip(), row[-1].strip()] for row in rows if len(row) > 2
    ]
    assert ["NodeNotAllowed: excluded by taint cpu:NoSchedule", "has none"] in [
        [row[0], row[1].strip()] for row in rows if len(row) > 2
    ]


@pytest.mark.usefixtures("streams")
def test_a_snapshot_keeps_what_kubernetes_has_of_the_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--from` asks no cluster: the nodes are those of the file, whatever kubectl shows now."""
    install_kubectl(tmp_path, pod_with(2, affinity=AFFINITY), NODES)
    first = run("why --pod-file pod --json --snapshot taken.ndjson", capsys)
    install_kubectl(tmp_path, pod_with(2, affinity=AFFINITY), {})

    assert 4 == first[0]
    assert first[:2] == run("why --pod-file pod --json --from taken.ndjson", capsys)[:2]


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize(
    ("line", "nodes", "reason"),
    [
        ("why --gpus 2", NODES, "the pod comes from options"),
        ("why --pod-file pod --from cluster.ndjson", NODES, "the file does not have them"),
        ("why --pod-file pod", {"other": {}}, "kubectl shows none of these nodes"),
        ("why --pod-file pod", {"half": {"labels": {"pool": 7}}}, "kubectl printed no list of nodes"),
        ("why --pod-file pod", None, "there is no kubectl here"),
    ],
)
def test_why_judges_by_topology_alone_without_nodes_of_kubernetes(
    line: str, nodes: dict[str, Any] | None, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line names that, and the reason. The pod fits on `half`, off which its affinity would keep it."""
    install_kubectl(tmp_path, pod_with(2, affinity=AFFINITY), nodes or {})
    if nodes is None:
        (tmp_path / "bin" / "kubectl").unlink()

    status, out, err = run(line, capsys)

    assert (0, 1) == (status, len(err.splitlines()))
    assert out.startswith("1 of 3 nodes would admit the pod; the best is half")
    assert err.startswith(f"labels, taints and cordons of the nodes were ignored: {reason}")


@pytest.mark.usefixtures("streams")
def test_an_answer_of_kubectl_about_the_nodes_is_bounded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_kubectl(tmp_path, pod_with(2), NODES)
    monkeypatch.setattr("topoalign.cli.whole_cluster.LARGEST_NODES", 100)

    assert "were ignored: kubectl printed more than" in run("why --pod-file pod", capsys)[2]


@pytest.mark.usefixtures("streams")
def test_a_kubectl_that_does_not_answer_in_time_is_given_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never_ends(command: list[str], *, timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    install_kubectl(tmp_path, pod_with(2), NODES)
    monkeypatch.setattr("subprocess.run", never_ends)

    assert "were ignored: kubectl did not answer within 15 s" in run("why --pod-file pod", capsys)[2]
    assert (69, True) == (
        run("why ml/train", capsys)[0],
        "kubectl did not answer within 15 s" in run("why ml/train", capsys)[2],
    )


async def alive(body: bytes) -> bytes:
    return wire.encode_answer(WriterPosition())


def test_a_running_cluster_is_read_from_its_streams(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a real NATS server; its snapshot gives the same answer when the server is gone."""

    @asynccontextmanager
    async def serve() -> AsyncIterator[str]:
        async with local_nats(tmp_path / "nats") as url, connect_bus(url) as bus:
            for node in some_cluster().nodes:
                for event in (node.topology, node.health, node.usage, node.allocations):
                    assert event is not None
                    await bus.publish(wire.encode_event(event, 1.0))
            subject = wire.admission_subject(NodeName("node"), "alive").replace(".node.", ".*.")
            async with bus.serve("topoalign-allocator", [Endpoint(name="alive", subject=subject, answer=alive)]):
                yield url

    configure_logging(level="critical")
    monkeypatch.setenv("PATH", SEARCHED)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(serve()) as url:
        first = run(f"why --gpus 3 --json --nats {url} --snapshot taken.ndjson", capsys)

    assert (4, 3) == (first[0], json.loads(first[1])["nodes"])
    assert first[1] == run("why --gpus 3 --json --from taken.ndjson", capsys)[1]
    assert some_cluster().nodes == decode_lines(Path("taken.ndjson").read_bytes().splitlines()).nodes


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        ("why", 2, "nothing is requested"),
        ("why --gpus 1", 69, "no NATS is known"),
        ("why ml/train --from cluster.ndjson", 69, "there is no kubectl here"),
        ("why ml/train --gpus 1 --from cluster.ndjson", 2, "describes the whole pod"),
        ("why ml/train --pod-file x --from cluster.ndjson", 2, "not both"),
        ("why a/b/c --from cluster.ndjson", 2, "NAMESPACE/NAME"),
        ("why --gpus -1 --from cluster.ndjson", 2, "not in the range 0<=x<=1000000"),
        ("why --gpus 1e3 --from cluster.ndjson", 2, "not a valid integer"),
        ("why --gpus 1 --pods 0 --from cluster.ndjson", 2, "not in the range 1<=x<=100000"),
        ("why --gpus 1 --pods 1000001 --from cluster.ndjson", 2, "not in the range 1<=x<=100000"),
        ("why --gpus 1 --scoring best --from cluster.ndjson", 2, "--scoring"),
        ("why --gpus 1 --from missing.ndjson", 3, "no such file"),
        ("why --gpus 1 --from .", 1, "Is a directory"),
        ("why --gpus 1 --from cluster.ndjson --snapshot nowhere/x", 3, "No such file"),
        ("why --pod-file missing.yaml --from cluster.ndjson", 3, "no file named"),
        ("what-if --gpus 1 --pods 2", 2, "go with --cluster"),
        ("what-if --cluster --gpus 1 --machine dgx-a100", 2, "leave out --node"),
        ("what-if --cluster --gpus 1 --node full", 2, "leave out --node"),
    ],
)
def test_what_cannot_be_meant_is_told(line: str, status: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    found, out, err = run(line, capsys)

    assert (status, "") == (found, out)
    assert said.lower() in err.lower()


LINES = [*encode_lines(some_cluster())]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "line 1"),
        ([b"\n"], "line 1"),
        ([b"\xff\xfe\n"], "line 1"),
        ([b"[" * 100_000 + b"\n"], "line 1"),
        ([LINES[0].replace(b"topoalign.cluster", b"other")], "line 1: 'other' of version 1"),
        ([LINES[0].replace(b'"version":1', b'"version":2')], "of version 2"),
        (LINES[:-1], "2 nodes, and the first line announces 3"),
        ([*LINES, LINES[-1]], "line 5: node 'half' stands twice"),
        ([*LINES[:2], LINES[2].replace(b'"node":"full"', b'"node":"else"', 1), LINES[3]], "line 3"),
        ([*LINES[:3], LINES[3][:-20] + b"\n"], "line 4"),
        ([*LINES[:3], b'{"node":"half","unknown":1}\n'], "line 4"),
        ([*LINES[:3], LINES[3].replace(b'"node":0,', b'"node":100000000,', 1)], "line 4"),
        ([*LINES[:3], b'{"node":"' + b"x" * (9 << 20) + b'"}\n'], "line 4: more than"),
    ],
)
def test_a_damaged_file_is_refused_with_its_line(
    lines: list[bytes], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.ndjson").write_bytes(b"".join(lines))

    status, out, err = run("why --gpus 1 --from bad.ndjson", capsys)

    assert (5, "") == (status, out)
    assert said in err


def test_a_cluster_without_nodes_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    write("none.ndjson", cluster())

    assert 3 == run("why --gpus 1 --from none.ndjson", capsys)[0]
