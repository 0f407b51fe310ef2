"""`topoalign up` is the whole product on a laptop: started once, the other commands find it and do the main job."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import click
import pytest

from topoalign.cli import root, running, serve
from topoalign.cli.up import start_nats


@pytest.fixture(scope="module")
def runtime_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runtime")


@pytest.fixture(scope="module")
def up(runtime_dir: Path) -> Iterator["subprocess.Popen[str]"]:
    """`topoalign up` in a process of its own, once it has said that it serves."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TOPOALIGN_")}
    program = [sys.executable, "-c", "from topoalign.cli import main; main()"]
    process = subprocess.Popen(
        [
            *program,
            "up",
            "--machine",
            "dgx-a100",
            "--node",
            "laptop",
            "--http",
            "127.0.0.1:0",
            "--policy",
            "restricted",
        ],
        env={**environment, "XDG_RUNTIME_DIR": str(runtime_dir)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    with process:
        said = []
        for line in process.stderr:
            said.append(line)
            if "Ctrl-C" in line:
                break
        else:
            pytest.fail("it did not start: " + "".join(said))
        yield process
        process.kill()


@pytest.fixture(autouse=True)
def beside_it(monkeypatch: pytest.MonkeyPatch, runtime_dir: Path) -> None:
    """The environment of another terminal of the same user."""
    for name in list(os.environ):
        if name.startswith("TOPOALIGN_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_dir))


def topoalign(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    """Exit code and the JSON that a command answers."""
    status = root.run_command_line([*arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def http(path: str) -> Any:
    found = running.find_running()
    assert found is not None
    with urlopen(found.http + path, timeout=5) as answer:
        return json.load(answer) if path.startswith("/v1") else answer.read().decode()


@pytest.mark.usefixtures("up")
def test_a_pod_is_admitted_explained_seen_and_released(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--gpus", "2", "--cpus", "8", "--memory", "64Gi", "--nics", "1", "--pod", "ml/train")
    predicted, would = topoalign(capsys, "what-if", *asked)
    status, admitted = topoalign(capsys, "allocate", *asked)
    (allocation,) = admitted["decision"]["allocations"]
    _, explained = topoalign(capsys, "explain", "ml/train")
    _, topology = topoalign(capsys, "topo")
    released, names = topoalign(capsys, "release", "ml/train")
    root.run_command_line(["watch", "--since", "0", "--count", "3", "--json"])
    events = [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()]

    assert (0, 0, 0) == (predicted, status, released)
    assert would["decision"]["allocations"][0]["devices"] == allocation["devices"]
    assert [2, 1] == [len(allocation["devices"][resource]) for resource in ("nvidia.com/gpu", "topoalign.io/nic")]
    assert [allocation] == explained["explained"]["allocations"]
    assert explained["explained"]["decision"]["explanation"]["considered"]
    assert set(allocation["devices"]["nvidia.com/gpu"]) <= {gpu["id"] for gpu in topology["gpus"]}
    assert [allocation["id"]] == names["released"]
    assert ["AllocationsSnapshot", "AllocationGranted", "AllocationReleased"] == [event["type"] for event in events]


@pytest.mark.usefixtures("up")
def test_what_does_not_fit_is_refused_with_4_and_the_kubelets_reason(capsys: pytest.CaptureFixture[str]) -> None:
    status, answer = topoalign(capsys, "allocate", "--gpus", "9")

    assert (4, "Refusal") == (status, answer["decision"]["type"])
    assert answer["decision"]["reason"] in ("TopologyAffinityError", "UnexpectedAdmissionError")


@pytest.mark.usefixtures("up")
def test_the_registry_shows_the_node_over_http(capsys: pytest.CaptureFixture[str]) -> None:
    topoalign(capsys, "allocate", "--gpus", "2", "--pod", "web/serve")
    while not (found := http("/v1/allocations?pod=serve")["items"]):  # the event follows the answer
        continue
    (allocation,) = found
    (node,) = http("/v1/nodes")["items"]

    assert ("laptop", 8, False) == (node["name"], node["gpus"], node["stale"])
    assert {"total": 8, "free": 6, "allocated": 2, "unhealthy": 0} == node["resources"]["nvidia.com/gpu"]
    assert "serve" == allocation["owner"]["pod"]
    assert 'topoalign_gpus{node="laptop",state="allocated"} 2.0' in http("/metrics")
    assert "[+] streams" in http("/readyz?verbose")
    topoalign(capsys, "release", "web/serve")


@pytest.mark.usefixtures("up")
def test_watch_ends_when_its_reader_is_gone(runtime_dir: Path) -> None:
    """`watch --json | head -1`: no further event is needed to end it."""
    command = [str(Path(sys.executable).with_name("topoalign")), "watch", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None and watch.stderr is not None
        first = watch.stdout.readline()
        watch.stdout.close()
        status = watch.wait(60)

        assert "AllocationsSnapshot" == json.loads(first)["event"]["type"]
        assert (0, "") == (status, watch.stderr.read())


@pytest.mark.anyio
async def test_nats_uses_the_wanted_port_or_a_free_one_if_that_is_taken(tmp_path: Path) -> None:
    """NATS listens on the wanted port; if that is in use, on a free one."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with AsyncExitStack() as servers:
            elsewhere = await start_nats(servers, tmp_path / "a", port)
    async with AsyncExitStack() as servers:
        wanted = await start_nats(servers, tmp_path / "b", port)

    assert f"nats://127.0.0.1:{port}" == wanted
    assert wanted != elsewhere


def test_ctrl_c_ends_it_in_order_and_nothing_is_left(up: "subprocess.Popen[str]", runtime_dir: Path) -> None:
    """Last of the file: it ends what the others use."""
    up.send_signal(signal.SIGINT)

    assert 0 == up.wait(60)
    assert [] == [path for path in runtime_dir.rglob("*") if path.is_file()]


def test_flags_are_settings_that_go_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []
    monkeypatch.setenv("TOPOALIGN_POLICY", "none")
    monkeypatch.setenv("TOPOALIGN_SCOPE", "pod")

    @click.command()
    @serve.settings(*serve.ALLOCATING, *serve.EVERYWHERE)
    def command(environment: dict[str, str]) -> None:
        seen.append({name: value for name, value in environment.items() if name.startswith("TOPOALIGN_")})

    command.main(
        ["--node", "n", "--policy", "restricted", "--nats", "nats://h:1", "--http", "[::1]:80", "--kubelet-dir", ""],
        standalone_mode=False,
    )

    assert [
        {
            "TOPOALIGN_NODE": "n",
            "TOPOALIGN_POLICY": "restricted",
            "TOPOALIGN_SCOPE": "pod",
            "TOPOALIGN_NATS_URL": "nats://h:1",
            "TOPOALIGN_HTTP_HOST": "::1",
            "TOPOALIGN_HTTP_PORT": "80",
            "TOPOALIGN_KUBELET_DIR": "",
        }
    ] == seen


@pytest.mark.parametrize("address", ["8470", ":8470", "localhost", "localhost:x", "localhost:99999", "localhost:٣"])
def test_an_address_is_a_host_and_a_port(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = root.run_command_line(["registry", "--http", address])

    assert 2 == status
    assert "'--http'" in capsys.readouterr().err
