"""
A node under full load while what it stands on is killed: `make soak`, an hour unless told otherwise.

Pods come and go at full speed through a fake kubelet. NATS is killed every ten seconds; every five minutes the agent is
killed, and the kubelet restarted. A registry and a subscriber live on. In the end the load stops, and the kubelet, the
journal, the registry and the subscriber must say the same; the subscriber was told each fact once and in order; memory and
file descriptors of the agent and the registry have not grown.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from time import monotonic
from urllib.request import urlopen

import anyio
from e2e.agents import ended, holders, kill, on_disk
from e2e_support import environment
from kubelet_support import pod

from topoalign.client import Client
from topoalign.core.model.decisions import Admission
from topoalign.core.model.events import AllocationsSnapshot, LedgerFact
from topoalign.core.model.ids import GPU, NIC, Namespace, NodeName
from topoalign.core.model.requests import AdmissionRules, Policy
from topoalign.core.state.fold import NodeState
from topoalign.machines import load_machine
from topoalign.runtime.logging import configure_logging
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_server import find_nats_server
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet

NODE = NodeName("soak.example.com")
DEFAULT = Namespace("default")
NATS_SECONDS, AGENT_SECONDS = 10.0, 300.0
CALLERS = 3
"""Pods that come and go side by side."""
WARM_SECONDS = 600.0
"""Before memory is compared: journals, caches and the interpreter's arenas fill up first. A third of a shorter run."""
SETTLE_SECONDS = 180.0
"""For everybody to agree once the load has stopped and nothing is killed any more."""
GROWTH_MB, GROWTH_FILES = 8.0, 4


class Disagreement(Exception):
    """What must be the same is not, or grows."""


@dataclass
class Tally:
    """What happened so far."""

    began: float = field(default_factory=monotonic)
    admissions: list[float] = field(default_factory=list)
    """Seconds that each admission took."""
    refused: int = 0
    delivery: int = 0
    """Facts that the subscriber was told."""
    kills: dict[str, int] = field(default_factory=lambda: {"nats": 0, "agent": 0, "kubelet": 0})
    samples: dict[str, list[tuple[float, float, int]]] = field(default_factory=dict)
    """Process -> seconds since the beginning, resident MB, open file descriptors."""


class Nats:
    """A server on one port and one store, which is killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        folder.mkdir()
        (folder / "nats.conf").write_text(
            f'listen: "127.0.0.1:{self.port}"\njetstream {{ store_dir: {json.dumps(str(folder))}, sync_interval: always }}\n'
        )

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._server = subprocess.Popen(
            [find_nats_server(), "--config", self._folder / "nats.conf", "--log", self._folder / "log"]
        )

    async def kill(self) -> None:
        assert self._server is not None
        self._server.kill()
        await anyio.to_thread.run_sync(self._server.wait)


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def topoalign(*arguments: str, env: Mapping[str, str], log: Path) -> int:
    """Starts a command of this Python; its pid."""
    own = {**os.environ, **env, "TOPOALIGN_LOG_FORMAT": "json"}
    program = [str(Path(sys.executable).with_name("topoalign")), *arguments]
    with log.open("ab") as stderr:
        return subprocess.Popen(program, env=own, stdin=subprocess.DEVNULL, stderr=stderr).pid


def sampled(pid: int) -> tuple[float, int] | None:
    """Resident MB and open file descriptors; None where the process is just not there."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None


class Soak:
    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds, self.tally = folder, seconds, Tally()
        self.nats = Nats(folder / "nats")
        machine = load_machine("dgx-a100").topology
        rules = AdmissionRules(policy=Policy.BEST_EFFORT)
        self.kubelet = FakeKubelet(folder / "device-plugins", folder / "pod-resources", machine, rules)
        self.http = free_port()
        self.state = NodeState(node=NODE)
        self.pids: dict[str, int] = {}
        self.busy = 0
        """Callers with a pod under way."""
        self.stopping = anyio.Event()

    def start_agent(self) -> None:
        settings = environment(NODE, self.nats.url, self.folder)
        settings |= {"TOPOALIGN_RECONCILE_SECONDS": "0.5", "TOPOALIGN_GONE_SECONDS": "1"}
        self.pids["agent"] = topoalign("node", env=settings, log=self.folder / "agent.log")

    async def run(self) -> None:
        """Raises Disagreement, TimeoutError where nobody agrees in time."""
        self.nats.start()
        async with (
            connect_bus(self.nats.url, wait=10) as bus,
            self.ending_processes(),
            anyio.create_task_group() as tasks,
        ):
            await tasks.start(self.kubelet.run)
            settings = {"TOPOALIGN_NATS_URL": self.nats.url, "TOPOALIGN_HTTP_PORT": str(self.http)}
            self.pids["registry"] = topoalign("registry", env=settings, log=self.folder / "registry.log")
            self.start_agent()
            tasks.start_soon(self.listen, Client(bus, name="soak"))
            await self.listed()
            async with anyio.create_task_group() as load_tasks:
                for caller in range(CALLERS):
                    load_tasks.start_soon(self.come_and_go, caller)
                tasks.start_soon(self.sample)
                with anyio.move_on_after(self.seconds):
                    async with anyio.create_task_group() as faults:
                        faults.start_soon(self.kill_nats)
                        faults.start_soon(self.kill_agent_and_kubelet)
                self.stopping.set()
            await self.agree()
            tasks.cancel_scope.cancel()

    @asynccontextmanager
    async def ending_processes(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            for pid in self.pids.values():
                kill(pid)
            with anyio.CancelScope(shield=True):
                await self.nats.kill()

    async def listed(self) -> None:
        await self.kubelet.until(lambda k: k.allocatable(GPU) == 8 and k.allocatable(NIC) == 10)

    async def come_and_go(self, caller: int) -> None:
        """Each pod stays until the next one of its caller is there, so that the node is never empty."""
        before = None
        for number in count():
            asked = pod(f"soak-{caller}-{number}", gpus=1 + number % 2, nics=number % 2)
            began = monotonic()
            if isinstance(await self.kubelet.admit(asked), Admission):
                self.tally.admissions.append(monotonic() - began)
                if before is not None:
                    await self.kubelet.remove(DEFAULT, before)
                before = asked.name
            else:
                self.tally.refused += 1
                await self.listed()  # no agent: its pods wait until there is one
            if self.stopping.is_set():
                return

    async def kill_nats(self) -> None:
        while True:
            await anyio.sleep(NATS_SECONDS)  # the schedule of the faults: the processes and their clock are real
            with anyio.CancelScope(shield=True):
                await self.nats.kill()
                self.nats.start()
            self.tally.kills["nats"] += 1

    async def kill_agent_and_kubelet(self) -> None:
        while True:
            await anyio.sleep(AGENT_SECONDS / 2)  # as above
            with anyio.CancelScope(shield=True):
                kill(self.pids["agent"])
                await ended(self.pids["agent"])
                self.start_agent()
            self.tally.kills["agent"] += 1
            await anyio.sleep(AGENT_SECONDS / 2)  # as above
            with anyio.CancelScope(shield=True):
                await self.kubelet.restart()
            self.tally.kills["kubelet"] += 1

    async def listen(self, client: Client) -> None:
        async with aclosing(client.allocations(node=NODE)) as events:
            async for delivery in events:
                event = delivery.event
                assert isinstance(event, LedgerFact)
                follows = (event.epoch, event.seq) == (self.state.epoch, self.state.seq + 1)
                if not (follows or isinstance(event, AllocationsSnapshot)):
                    raise Disagreement(f"{event.epoch}/{event.seq} after {self.state.epoch}/{self.state.seq}")
                self.state = self.state.apply(event)
                self.tally.delivery += 1

    async def sample(self) -> None:
        """Once a minute: what the processes take, and a line of progress."""
        while True:
            now = monotonic() - self.tally.began
            for name, pid in self.pids.items():
                known = sampled(pid)
                if known is not None:
                    self.tally.samples.setdefault(name, []).append((now, *known))
            taken = {name: f"{each[-1][1]:.0f} MB {each[-1][2]} files" for name, each in self.tally.samples.items()}
            done = f"{now / 60:.0f} of {self.seconds / 60:.0f} min, {len(self.tally.admissions)} admissions"
            print(
                f"{done}, {self.tally.refused} refused, {self.tally.delivery} heard, {self.tally.kills}, {taken}",
                flush=True,
            )
            await anyio.sleep(60)  # as above: a line of progress a minute

    async def agree(self) -> None:
        """Until the kubelet, the journal, the registry and the subscriber say the same."""
        views: dict[str, object] = {}
        with anyio.move_on_after(SETTLE_SECONDS):
            while True:
                kubelet = {
                    (key, resource, frozenset(devices))
                    for key, running in self.kubelet.running.items()
                    for _, resource, devices in running.parts()
                }
                journal = await anyio.to_thread.run_sync(on_disk, self.folder / "state" / "journal", NODE)
                views = {
                    "kubelet": kubelet,
                    "journal": holders(journal),
                    "registry": await anyio.to_thread.run_sync(self.registry),
                    "subscriber": holders(self.state),
                }
                same = all(view == kubelet for view in views.values())
                if same and (journal.epoch, journal.seq) == (self.state.epoch, self.state.seq):
                    return
                await anyio.sleep(0.5)
        raise Disagreement(json.dumps({name: sorted(map(str, view)) for name, view in views.items()}, indent=1))  # type: ignore[call-overload]  # keys of more types

    def registry(self) -> set[tuple[object, str, frozenset[str]]]:
        try:
            with urlopen(f"http://127.0.0.1:{self.http}/v1/allocations?limit=500", timeout=5) as answer:
                items = json.load(answer)["items"]
        except OSError:
            return set()
        return {
            (
                (each["owner"]["namespace"], each["owner"]["pod"]) if each["owner"] else None,
                resource,
                frozenset(device["id"] for device in each["devices"] if device["resource"] == resource),
            )
            for each in items
            for resource in {device["resource"] for device in each["devices"]}
        }

    def report(self) -> None:
        """Prints the figures. Raises Disagreement where memory or file descriptors have grown."""
        took = sorted(self.tally.admissions)
        print(
            json.dumps(
                {
                    "minutes": round((monotonic() - self.tally.began) / 60, 1),
                    "admissions": len(took),
                    "admit_p50_ms": round(1000 * statistics.median(took), 2),
                    "admit_p99_ms": round(1000 * took[int(0.99 * len(took))], 2),
                    "refused": self.tally.refused,
                    "delivery": self.tally.delivery,
                    "kills": self.tally.kills,
                    "samples": {name: [each[0], each[-1]] for name, each in self.tally.samples.items()},
                }
            )
        )
        for name, samples in self.tally.samples.items():
            warm = [each for each in samples if each[0] >= min(WARM_SECONDS, self.seconds / 3)] or samples
            quarter = max(1, len(warm) // 4)
            mb, files = (
                statistics.median(each[at] for each in warm[-quarter:])
                - statistics.median(each[at] for each in warm[:quarter])
                for at in (1, 2)
            )
            print(f"{name}: {mb:+.1f} MB and {files:+.0f} file descriptors from the first to the last quarter")
            if mb > GROWTH_MB or files > GROWTH_FILES:
                raise Disagreement(f"{name} grows by {mb:.1f} MB and {files:.0f} file descriptors")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    minutes = parser.parse_args().minutes
    configure_logging("console", "error")
    with tempfile.TemporaryDirectory(prefix="ta-") as name:
        soak = Soak(Path(name), 60 * minutes)
        try:
            anyio.run(soak.run)
            soak.report()
        except (Disagreement, BaseExceptionGroup) as error:
            kept = Path(tempfile.mkdtemp(prefix="soak-"))
            for log in Path(name).glob("*.log"):
                log.rename(kept / log.name)
            print(f"FAILED: {error!r}; the logs are in {kept}", file=sys.stderr)
            return 1
    print("kubelet, journal, registry and subscriber agree; nothing has grown")
    return 0


if __name__ == "__main__":
    sys.exit(main())
