"""`topoalign nrt export` prints the objects of nodes, from a file that `why --snapshot` wrote."""

import json
from pathlib import Path

import pytest
import yaml
from decision_support import container, pod
from diagnosis_support import cluster, node_with

from topoalign.cli import root
from topoalign.core.diagnosis.node_records import NodeRecord, encode_lines
from topoalign.core.model.ids import NodeName


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes that are known and one that was never received of, and no NATS."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("TOPOALIGN_NATS_URL", raising=False)
    known = cluster(node_with("a", pod(container(gpus=1))), node_with("b"), NodeRecord(node=NodeName("silent\x1b")))
    with Path("c.ndjson").open("wb") as file:
        file.writelines(encode_lines(known))


def run(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = root.run_command_line(line.split())
    said = capsys.readouterr()
    return status, said.out, said.err


def test_the_yaml_of_all_nodes_says_what_the_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    status, text, noted = run("nrt export --from c.ndjson", capsys)
    _, listed, _ = run("nrt export --json --from c.ndjson", capsys)

    objects = [*yaml.safe_load_all(text)]
    assert 0 == status
    assert json.loads(listed) == {"apiVersion": "v1", "kind": "List", "items": objects}
    assert ["a", "b"] == [each["metadata"]["name"] for each in objects]
    gpus = [r["available"] for r in objects[0]["zones"][0]["resources"] if r["name"] == "nvidia.com/gpu"]
    assert ["1"] == gpus
    assert "silent? is left out: not received of the node: hardware" in noted


def test_where_no_node_is_known_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with Path("silent.ndjson").open("wb") as file:
        file.writelines(encode_lines(cluster(NodeRecord(node=NodeName("silent")))))

    status, text, noted = run("nrt export --from silent.ndjson", capsys)

    assert (0, "") == (status, text)
    assert "silent is left out" in noted


def test_one_node_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    status, text, _ = run("nrt export b --from c.ndjson --json", capsys)

    assert (0, "b", "NodeResourceTopology") == (status, json.loads(text)["metadata"]["name"], json.loads(text)["kind"])
    assert yaml.safe_load(run("nrt export b --from c.ndjson", capsys)[1]) == json.loads(text)


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        ("nrt export c --from c.ndjson", 3, "no node named 'c'"),
        ("nrt export silent\x1b --from c.ndjson", 4, "not received of the node"),
        ("nrt export", 69, "no NATS is known"),
        ("nrt export a b", 2, "unexpected extra argument"),
        ("nrt export --from missing", 3, "No such file"),
        ("nrt import", 2, "No such command"),
    ],
)
def test_what_cannot_be_printed_is_told(line: str, status: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    found, out, err = run(line, capsys)

    assert (status, "") == (found, out)
    assert said in err
