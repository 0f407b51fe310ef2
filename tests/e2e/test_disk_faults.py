"""A disk that is full, or fails, costs the allocation that needed it, and nothing else."""

import errno
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import anyio
import pytest
from e2e.agents import Agents, Life, agreeing, holders, kill, on_disk
from faults_support import sample
from kubelet_support import learn_owners, pod
from strace_support import injected, needs_strace

from topoalign.core.model.decisions import Admission, Refusal
from topoalign.core.model.ids import Namespace, NodeName, PodName
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_server import local_nats

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]
NODE = NodeName("node-1")
DEFAULT = Namespace("default")


@contextmanager
def small_disk(at: Path) -> Iterator[None]:
    """64 KiB, mounted there."""
    at.mkdir(parents=True)
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs", str(at)], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("mounting needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def fill(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        while True:
            os.write(file, bytes(1024))
    except OSError as error:
        assert errno.ENOSPC == error.errno
    finally:
        os.close(file)


async def page(life: Life, name: str) -> str:
    """A page of the agent that was started last."""
    url = re.findall(r"http=(http://127\.0\.0\.1:\d+)", (life.folder / "agent.log").read_text())[-1]

    def ask() -> str:
        try:
            with urlopen(f"{url}/{name}", timeout=60) as answer:
                return str(answer.read().decode())
        except HTTPError as error:
            with error:
                return error.read().decode()

    return await anyio.to_thread.run_sync(ask)


async def ready(life: Life) -> str:
    """What /readyz says of the journal; nothing if it is content with it."""
    lines = (await page(life, "readyz")).splitlines()
    return next((line for line in lines if line.startswith("[-] journal:")), "")


def node(folder: Path, nats: str, bus: object, agents: Agents) -> Life:
    life = Life(folder, NODE, nats, bus, agents)  # type: ignore[arg-type]  # a NatsBus
    life.environment["TOPOALIGN_HTTP_PORT"] = "0"
    return life


async def test_on_a_full_disk_a_pod_is_refused_and_fits_when_there_is_room(short_folder: Path, agents: Agents) -> None:
    """The refusal on a full disk has the remedy, and the pod fits when there is space again."""
    state = short_folder / "node" / "state"
    async with local_nats(short_folder / "nats") as nats, connect_bus(nats) as bus, anyio.create_task_group() as tasks:
        with small_disk(state):
            life = node(short_folder / "node", nats, bus, agents)
            await tasks.start(life.kubelet.run)
            agent = life.start()
            await life.listed()
            assert isinstance(await life.kubelet.admit(pod("stays", gpus=4)), Admission)
            before = await agreeing(life.kubelet, bus, NODE)
            fill(state / "ballast")
            for number in range(200):  # until the last block of the journal is full, too
                decision = await life.kubelet.admit(pod(f"p-{number}", gpus=1))
                if isinstance(decision, Refusal):
                    break
                await life.kubelet.remove(DEFAULT, PodName(f"p-{number}"))
            assert isinstance(decision, Refusal)
            assert "No space left" in decision.finding
            assert "free some space" in decision.finding
            assert "free some space" in (await ready(life))
            kept = {held for held in holders(on_disk(state / "journal", NODE)) if held[0] == (DEFAULT, "stays")}
            assert holders(before) == kept, "the old record is whole"

            (state / "ballast").unlink()
            assert isinstance(await life.kubelet.admit(pod("fits", gpus=4)), Admission)
            assert "" == await ready(life)
            await agreeing(life.kubelet, bus, NODE)
            kill(agent)
            await life.unlisted()
            assert holders(on_disk(state / "journal", NODE)) >= holders(before)
            tasks.cancel_scope.cancel()


@needs_strace
@pytest.mark.parametrize("when", sample(["1", "1..2", "1..20"], 3))
async def test_a_sync_that_fails_is_a_write_that_did_not_happen(short_folder: Path, agents: Agents, when: str) -> None:
    """
    The kernel may call the next sync of the same file a success although the data are lost: so the entry counts as not
    written, whatever comes later, and the node says that it is not ready.
    """
    async with local_nats(short_folder / "nats") as nats, connect_bus(nats) as bus, anyio.create_task_group() as tasks:
        life = node(short_folder / "node", nats, bus, agents)
        life.environment["TOPOALIGN_RECONCILE_SECONDS"] = "3600"
        journal = life.folder / "state" / "journal"
        await tasks.start(life.kubelet.run)
        agent = life.start()
        await life.listed()
        assert isinstance(await life.kubelet.admit(pod("before", gpus=2)), Admission)
        await learn_owners(life.kubelet)
        async with injected(agent, "fsync", f"error=EIO:when={when}", life.folder / "strace"):
            decision = await life.kubelet.admit(pod("lost", gpus=2))
            said = await ready(life)
            after_the_fault = holders(on_disk(journal, NODE))

        assert isinstance(decision, Refusal)
        assert "Input/output error" in decision.finding
        assert "Input/output error" in said
        assert {"before"} == {owner[1] for owner, _, _ in after_the_fault if isinstance(owner, tuple)}
        assert 1 == len(after_the_fault), "the failed entry is not in the journal"

        assert isinstance(await life.kubelet.admit(pod("after", gpus=2)), Admission)
        assert "" == await ready(life)
        kill(agent)
        await life.unlisted()
        life.environment["TOPOALIGN_RECONCILE_SECONDS"] = "0.05"
        agent = life.start()
        await life.listed()
        state = await agreeing(life.kubelet, bus, NODE)
        assert {"before", "after"} == {held.owner.pod for held in state.allocations.values() if held.owner}
        kill(agent)
        await life.unlisted()
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("damage", [b"", b"\x00" * 100, b"not a journal\n"], ids=["empty", "zeros", "text"])
async def test_an_agent_with_a_damaged_journal_recovers_from_the_kubelet(
    short_folder: Path, agents: Agents, damage: bytes
) -> None:
    """An agent with a damaged journal starts and completes the record from the kubelet."""
    async with local_nats(short_folder / "nats") as nats, connect_bus(nats) as bus, anyio.create_task_group() as tasks:
        life = node(short_folder / "node", nats, bus, agents)
        journal = life.folder / "state" / "journal"
        await tasks.start(life.kubelet.run)
        agent = life.start()
        await life.listed()
        assert isinstance(await life.kubelet.admit(pod("before", gpus=2, nics=1)), Admission)
        await agreeing(life.kubelet, bus, NODE)
        kill(agent)
        await life.unlisted()
        journal.write_bytes(damage)
        agent = life.start()
        await life.listed()
        assert isinstance(await life.kubelet.admit(pod("after", gpus=6)), Admission)
        state = await agreeing(life.kubelet, bus, NODE)
        metrics, log = await page(life, "metrics"), (life.folder / "agent.log").read_text()
        kill(agent)
        await life.unlisted()
        tasks.cancel_scope.cancel()

    assert holders(state) == holders(on_disk(journal, NODE))
    assert damage == journal.with_name("journal.corrupt-1").read_bytes()
    assert "topoalign_allocator_journals_set_aside 1.0" in metrics
    assert "topoalign_allocator_record_unconfirmed 0.0" in metrics
    assert 1 == log.count("the journal is damaged")
    assert 1 == log.count("the record is confirmed")
