"""A service that may not speak on the bus says so at its start, by the name of the subject."""

import os
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from bus_support import killable

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

TOPOALIGN = str(Path(sys.executable).with_name("topoalign"))
SUBJECT = "topoalign.v1.allocation.node-1.granted"


async def test_an_allocator_without_publish_rights_ends_and_names_the_subject(tmp_path: Path) -> None:
    """C40: a user of a real NATS who may do everything but say what was granted; no bare time-out."""
    rule = f'permissions: {{ publish: {{ deny: ["{SUBJECT}"] }} }}'
    async with killable(
        tmp_path / "nats", f"authorization {{ users: [ {{ user: u, password: p, {rule} }} ] }}\n", administrator="u:p"
    ) as server:
        environment = {
            **os.environ,
            "TOPOALIGN_NODE": "node-1",
            "TOPOALIGN_STATE_DIR": str(tmp_path / "state"),
            "TOPOALIGN_NATS_URL": server.url.replace("nats://", "nats://u:p@"),
            "TOPOALIGN_NATS_WAIT": "5",
        }
        done = await anyio.run_process([TOPOALIGN, "allocator"], env=environment, check=False, stderr=subprocess.PIPE)
    said = done.stderr.decode()

    assert 69 == done.returncode
    assert f"no permission on {SUBJECT}" in said
    assert "permissions violation" in said
    assert "within" not in said, "that is how a time-out reads: there is none of five seconds, nor of any other length"
    assert "code: BusRefused" in said
