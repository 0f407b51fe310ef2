"""A network that swallows packets between a node and its hub costs no allocation and no event."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from faults_support import THOROUGH

from topoalign.runtime.nats_bus.nats_connection import PING_SECONDS, PINGS_MISSED

pytestmark = pytest.mark.timeout(300)

ENVIRONMENT = {**os.environ, "PATH": os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])}
"""Where `ip` and `nft` are, which not every user has on the way."""
PROGRAM = Path(__file__).with_name("partitioned.py")
DIRECTIONS = ("to-hub", "from-hub", "both")
SECONDS, PINGS = ("10", str(PING_SECONDS)) if THOROUGH else ("0", "0.2")
"""How long it lasts once it is seen, and how often a sign of life is asked for: in a quick run a fifth of the product's."""


def why_not() -> str | None:
    """Why packets cannot be dropped here; None if they can."""
    missing = [tool for tool in ("unshare", "ip", "nft") if shutil.which(tool, path=ENVIRONMENT["PATH"]) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    tried = subprocess.run(
        ["unshare", "-Urn", "sh", "-c", "ip link set lo up && nft list tables"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    return tried.stderr.strip() or "no right to network namespaces" if tried.returncode else None


@pytest.fixture(scope="module")
def happened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What happened in each direction; all at the same time, since each mostly waits."""
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no partition can be made here: {reason}")
    running = {
        direction: subprocess.Popen(
            ["unshare", "-Urn", sys.executable, PROGRAM, tmp_path_factory.mktemp(direction), direction, SECONDS, PINGS],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for direction in DIRECTIONS
    }
    outputs = {direction: program.communicate(timeout=250)[0] for direction, program in running.items()}
    assert dict.fromkeys(DIRECTIONS, 0) == {name: program.returncode for name, program in running.items()}
    return {direction: json.loads(output.splitlines()[-1]) for direction, output in outputs.items()}


def test_the_pings_notice_a_silent_peer_within_five_seconds() -> None:
    """C33: one ping more than may be missing. What is made of that is caused below."""
    assert PING_SECONDS * (PINGS_MISSED + 1) <= 5


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_partition_stops_no_allocation_and_events_arrive_once_after(happened: dict[str, Any], direction: str) -> None:
    """C33: forty facts while no packet comes through one way, or both, beside twenty before."""
    story = happened[direction]

    assert "connection lost" in story["seen"] or "no connection" in story["seen"]
    assert "not connected" in story["asked"]
    assert 40 <= story["waiting"] <= 41
    assert story["expected"] == story["numbers"]
    assert 61 == len(story["numbers"])
    assert 0 == story["gaps"]
