"""`topoalign demo` shows the main job and ends well."""

import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from kubelet_support import short_directory

from topoalign.client.stored_records import has_published
from topoalign.core.model.ids import NodeName
from topoalign.machines import load_machine
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_server import local_nats
from topoalign.tools.demo.command import matrix

TOPOALIGN = [sys.executable, "-c", "from topoalign.cli import main; main()"]
DEMO = [sys.executable, "-c", "from topoalign.tools.demo.command import command; command(standalone_mode=False)"]


def demo(*options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*DEMO, *options], capture_output=True, text=True, timeout=60)


def test_two_pods_get_aligned_devices_one_is_refused_and_one_goes() -> None:
    done = demo("--machine", "dgx-a100")

    assert (0, "") == (done.returncode, done.stderr)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[2].startswith("GPU0 GPU1 GPU2 GPU3 GPU4 GPU5 GPU6 GPU7 NIC0")
    story = [line for line in lines if line.startswith(("pod ", "admitted", "refused", "Done"))]
    assert [
        "pod train asks for 4 GPUs",
        "admitted GPU0 GPU1 GPU2 GPU3, NUMA 1,3",
        "pod serve asks for 2 GPUs, 1 NIC, 8 CPUs, 8 GiB",
        "admitted GPU6 GPU7 NIC6 CPUs 80-83,208-211 memory 8 GiB on NUMA 5, NUMA 5",
    ] == story[:4]
    assert story[5].startswith("refused TopologyAffinityError: policy restricted refuses container 'main'")
    words = [line.split()[3:5] for line in lines if " demo " in line and line[0].isdigit()]
    # An owner is announced again once the UID of its pod is known, and may be known of GPUs before the NIC is granted.
    assert [["granted", "not"], ["bound", "default/train/main:"], ["granted", "not"]] == words_of(words)[:3]
    assert [["bound", "default/serve/main:"], ["released", "default/train/main:"]] == words_of(words)[-2:]
    assert story[-1].startswith("Done in")


def words_of(events: list[list[str]]) -> list[list[str]]:
    """Events without repetitions of the one before."""
    return [event for event, _ in groupby(events)]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--machine", "cpu-only"), "InvalidField: --machine: has no GPUs"),
        (("--kubelet-dir", "."), "InvalidField: --kubelet-dir: given without --nats"),
        (("--machine", "no-such-machine"), "no machine or file named 'no-such-machine'"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_a_reason(options: tuple[str, ...], error: str, tmp_path: Path) -> None:
    done = demo(*options)

    assert done.returncode != 0
    assert error in done.stderr


def test_a_narrow_terminal_shows_the_gpus_and_says_what_is_missing() -> None:
    """If the terminal is too narrow for the matrix, the GPUs are shown and a line says what is left out."""
    topology = load_machine("dgx-a100").topology

    assert "NIC9" in matrix(topology, None)
    assert matrix(topology, None) == matrix(topology, 195)
    assert "NIC9" not in matrix(topology, 194)
    assert "10 NICs are left out" in matrix(topology, 194)


@pytest.mark.anyio
async def test_a_demo_on_streams_that_live_on_leaves_no_node_behind(tmp_path: Path) -> None:
    async with local_nats(tmp_path / "nats") as url:
        done = await to_thread.run_sync(demo, "--machine", "dgx-a100", "--nats", url, "--node", "demo-node")
        async with connect_bus(url) as bus:
            left = await has_published(bus, NodeName("demo-node"))

    assert (0, "", False) == (done.returncode, done.stderr, left)


@pytest.mark.anyio
async def test_a_kubelet_is_played_for_services_that_run_elsewhere(tmp_path: Path) -> None:
    """As in a container beside theirs: they share the kubelet's directory and NATS, and nothing else."""
    with short_directory() as directory:
        plugins = directory / "device-plugins"
        plugins.mkdir()
        async with local_nats(tmp_path / "nats") as url:
            settings = {
                "NODE": "elsewhere",
                "MACHINE": "hgx-h100",
                "NATS_URL": url,
                "KUBELET_DIR": str(plugins),
                "STATE_DIR": str(tmp_path / "state"),
                "SETTLE_SECONDS": "0",
                "GONE_SECONDS": "0.4",
                "RECONCILE_SECONDS": "0.2",
            }
            environment = {**os.environ, **{f"TOPOALIGN_{name}": value for name, value in settings.items()}}
            async with await anyio.open_process(
                [*TOPOALIGN, "node"], env=environment, stderr=subprocess.DEVNULL
            ) as node:
                options = ("--nats", url, "--node", "elsewhere", "--kubelet-dir", str(plugins))
                done = await to_thread.run_sync(demo, *options)
                node.terminate()

    assert (0, "") == (done.returncode, done.stderr)
    assert "\npod train goes\n" in done.stdout
