"""What we are told in confidence is told to nobody: real commands, wrong credentials, and everything they print searched."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import anyio
import httpx
import nkeys
import pytest
from bus_support import killable
from faults_support import THOROUGH, sample

from topoalign.cli import root
from topoalign.core.model.errors import InvalidField
from topoalign.runtime.nats_bus.access import hide_credentials, split_addresses

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

CANARY = "cAnArY-sings"
"""Our password. It is wrong, so that every command has something to complain of."""
TOPOALIGN = str(Path(sys.executable).with_name("topoalign"))
CONFIG_SHOW = ("config", "show", "--origin")


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[str]:
    """The address of a NATS that knows another password, with ours in it."""
    users = 'authorization { users: [ { user: alice, password: "another" } ] }\n'
    async with killable(tmp_path / "nats", users, administrator=None) as server:
        yield server.url.replace("nats://", f"nats://alice:{CANARY}@")


@pytest.fixture
def seed(tmp_path: Path) -> tuple[str, Path]:
    """The seed of an nkey that nobody knows, and the file it is in."""
    secret = bytes(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER))
    file = tmp_path / "user.nk"
    file.write_bytes(secret)
    return secret.decode(), file


@pytest.fixture
def creds(tmp_path: Path, seed: tuple[str, Path]) -> Path:
    """A credentials file with a JWT and the same seed."""
    file = tmp_path / "user.creds"
    file.write_text(
        f"-----BEGIN NATS USER JWT-----\n{CANARY}.{CANARY}.{CANARY}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed[0]}\n------END USER NKEY SEED------\n"
    )
    return file


async def run(arguments: tuple[str, ...], environment: Mapping[str, str]) -> bytes:
    """All that a command prints, and that it failed with a word of ours."""
    done = await anyio.run_process(
        [TOPOALIGN, *arguments], env={**os.environ, **environment}, check=False, stderr=subprocess.STDOUT
    )
    assert b"Traceback" not in done.stdout
    return done.stdout


def commands() -> list[tuple[str, ...]]:
    found = [
        ("registry", "--log-level", "debug"),
        ("allocator", "--log-level", "debug", "--log-format", "json"),
        ("doctor",),
        ("watch", "--json"),
    ]
    found += [CONFIG_SHOW] if "config" in root.COMMANDS else []
    return [*found, ("doctor", "--json"), ("allocate", "--gpus", "1"), ("topo",)] if THOROUGH else found


async def test_no_command_prints_the_password_of_a_refused_address(hub: str, tmp_path: Path) -> None:
    """C58: services and questions, as text and as JSON, with all that can be logged."""
    environment = {
        "TOPOALIGN_NATS_URL": hub,
        "TOPOALIGN_NATS_WAIT": "5",
        "TOPOALIGN_STATE_DIR": str(tmp_path / "state"),
    }
    printed: dict[tuple[str, ...], bytes] = {}
    limiter = anyio.CapacityLimiter(3)

    async def one(arguments: tuple[str, ...]) -> None:
        async with limiter:
            printed[arguments] = await run(arguments, environment)

    async with anyio.create_task_group() as tasks:
        for arguments in commands():
            tasks.start_soon(one, arguments)

    for arguments, output in printed.items():
        assert CANARY.encode() not in output, arguments
        assert output, arguments
    assert b"refuses our credentials" in printed["registry", "--log-level", "debug"]
    assert b"refuses our credentials" in printed["watch", "--json"]


async def test_no_page_no_log_and_no_crash_tells_what_a_running_service_was_told(
    hub: str, tmp_path: Path, seed: tuple[str, Path], creds: Path
) -> None:
    """
    C58: node agents with each kind of credentials, none of which the server takes, run on without it; their pages are
    read, and they end by a crash (SIGABRT with Python's fault handler on).
    """
    cases = {
        "url": {"TOPOALIGN_NATS_URL": hub},
        "nkey": {"TOPOALIGN_NATS_URL": without_user(hub), "TOPOALIGN_NATS_NKEY": str(seed[1])},
        "creds": {"TOPOALIGN_NATS_URL": without_user(hub), "TOPOALIGN_NATS_CREDS": str(creds)},
    }
    told: dict[str, str] = {}

    async def one(name: str, access: dict[str, str]) -> None:
        told[name] = await life(tmp_path / name, access)

    async with anyio.create_task_group() as tasks:
        for name, access in cases.items():
            tasks.start_soon(one, name, access)

    for name, text in told.items():
        assert "bus: " in text, name
        assert "Fatal Python error: Aborted" in text, name
        assert CANARY not in text, name
        assert seed[0] not in text, name
        assert seed[0][2:] not in text, name


def without_user(url: str) -> str:
    return "nats://" + url.rpartition("@")[2]


async def life(folder: Path, access: dict[str, str]) -> str:
    """Everything that a node agent says in its life: its log, its pages, its last words."""
    process, log = started(folder, access)
    try:
        pages = ""
        async with httpx.AsyncClient(base_url=await http_of(process, log)) as http:
            while "bus: " not in pages or "not connected yet" in pages:
                pages = (await http.get("/readyz?verbose")).text
            for path in ("/metrics", "/livez?verbose", "/readyz", "/nothing"):
                pages += (await http.get(path)).text
    finally:
        process.send_signal(signal.SIGABRT)
        await anyio.to_thread.run_sync(process.wait)
    return pages + await anyio.Path(log).read_text()


def started(folder: Path, access: Mapping[str, str]) -> "tuple[subprocess.Popen[bytes], Path]":
    """A node agent, and its log."""
    folder.mkdir()
    environment = {
        **os.environ,
        **access,
        "PYTHONFAULTHANDLER": "1",
        "TOPOALIGN_MACHINE": "dgx-a100",
        "TOPOALIGN_STATE_DIR": str(folder / "state"),
        "TOPOALIGN_LOG_LEVEL": "debug",
        "TOPOALIGN_LOG_FORMAT": "json",
    }
    log = folder / "log"
    arguments = [TOPOALIGN, "node", "--kubelet-dir", "", "--http", "127.0.0.1:0"]
    with log.open("wb") as output:
        return subprocess.Popen(arguments, env=environment, stdout=output, stderr=output), log


async def http_of(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """Where the pages are, as the log says once they are there."""
    while True:
        said = await anyio.Path(log).read_text()
        for line in said.splitlines():
            if line.startswith("{") and (http := json.loads(line).get("http")):
                return str(http)
        assert process.poll() is None, said


DEFECT = """
import anyio, os, sys
from topoalign.runtime import installed
from topoalign.runtime.settings import RuntimeSettings, from_environment
async def serve(context, *, task_status):
    environment = dict(context.environment)
    settings = from_environment(RuntimeSettings, environment)
    raise RuntimeError("a defect")
installed.load_services = lambda names: {"registry": serve}
from topoalign.cli.root import run_command_line
sys.exit(run_command_line(["registry", "--log-level", "debug", "--log-format", sys.argv[1]]))
"""


@pytest.mark.parametrize("form", ["json", "console"] if THOROUGH else ["json"])
def test_the_traceback_of_a_defect_shows_no_values(form: str) -> None:
    """C58: a service fails with settings and environment in its hands."""
    environment = {**os.environ, "TOPOALIGN_NATS_URL": f"nats://alice:{CANARY}@127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", DEFECT, form], env=environment, capture_output=True, text=True, timeout=60
    )

    assert "a defect" in done.stderr
    assert CANARY not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "url",
    [
        f"nats://alice:{CANARY}@hub:99999",
        f"nats://alice:{CANARY}@",
        f"nats://alice:{CANARY}",
        f"alice:{CANARY}",
        f"http://alice:{CANARY}@hub",
        f"nats://alice:{CANARY}/{CANARY}@hub:x",
        f"nats://alice:{CANARY},{CANARY}@hub:x",
        f"nats://a@b:{CANARY}@hub:x",
        f"nats//alice:{CANARY}@hub:4222:1",
        f"nats://alice:{CANARY}%20@hub:x",
    ],
)
def test_an_address_that_is_wrong_is_told_without_its_password(url: str) -> None:
    """C58: however it was mistyped."""
    with pytest.raises(InvalidField) as refused:
        split_addresses(url)

    assert CANARY not in f"{refused.value} {refused.value.remedy} {hide_credentials(url)}"


def test_a_file_that_holds_no_credentials_is_told_without_what_it_holds(tmp_path: Path) -> None:
    """C58: somebody put the secret where its file belongs, or into a file of another form."""
    file = tmp_path / "secret"
    file.write_text(CANARY)
    for name in sample(("CREDS", "TLS_CA", "TLS_CERT", "TLS_KEY", "NKEY"), 2):
        more = {"TOPOALIGN_NATS_TLS_CERT": str(file)} if name == "TLS_KEY" else {}
        environment = {
            **os.environ,
            "TOPOALIGN_NATS_URL": "nats://127.0.0.1:9",
            f"TOPOALIGN_NATS_{name}": str(file),
            **more,
        }
        done = subprocess.run([TOPOALIGN, "registry"], env=environment, capture_output=True, text=True, timeout=60)

        assert 5 == done.returncode
        assert f"TOPOALIGN_NATS_{name}" in done.stderr or name == "TLS_KEY"
        assert CANARY not in done.stdout + done.stderr
