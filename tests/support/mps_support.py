"""
`topoalign mps` on a node of stand-ins: NVML, and a program in the place of nvidia-cuda-mps-control.

The program runs as real processes. Of the daemon it keeps the pid in the pipe directory; a command finds the daemon by it,
and fails where it is gone. What is done to GPUs and daemons is written to one file, in order.
"""

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import pytest
from nvml_support import script, standing_in

from topoalign.core.model.ids import GPU, ResourceName
from topoalign.mps.daemon import Daemon
from topoalign.mps.daemons import Daemons
from topoalign.plugin_config.file_watch import ConfigurationFile
from topoalign.plugin_config.mps_files import Serves, read_served
from topoalign.runtime.context import Reload
from topoalign.testing.manual_clock import ManualClock

TICK = 0.002
"""Virtual seconds for each 5 ms of real ones: a slow machine does not let the deadlines of commands pass."""

PROGRAM = """\
#!/bin/sh
pipe=$CUDA_MPS_PIPE_DIRECTORY
pid=$pipe/nvidia-cuda-mps-control.pid
behaves() { [ -e "{folder}/$1" ]; }
if [ "$1" = -f ]; then
    if behaves fails; then exit 7; fi
    echo "start $pipe $CUDA_MPS_LOG_DIRECTORY $CUDA_VISIBLE_DEVICES" >> "{folder}/events"
    rm -f "$pipe/percentage"
    echo 100.0 > "$pipe/percentage"
    echo $$ > "$pid.new"
    mv "$pid.new" "$pid"
    if behaves stubborn; then trap '' TERM; fi
    if behaves noisy; then
        trap 'echo TERM >> "{folder}/events"; kill $!; exit 0' TERM
        sleep 100000 &
        wait
    fi
    exec sleep 100000
fi
grep -q '^State:.[^Z]' "/proc/$(cat "$pid" 2>/dev/null)/status" 2>/dev/null || exit 1
if behaves unresponsive; then exit 1; fi
while read -r command device limit; do
    case $command in
    get_default_active_thread_percentage) cat "$pipe/percentage" ;;
    set_default_active_thread_percentage)
        echo "$command $device" >> "{folder}/events"
        if ! behaves refuses; then echo "$device.0" > "$pipe/percentage"; fi
        cat "$pipe/percentage" ;;
    quit)
        echo quit >> "{folder}/events"
        if ! behaves stubborn && ! behaves noisy; then kill "$(cat "$pid")"; fi ;;
    *) echo "$command $device $limit" >> "{folder}/events" ;;
    esac
done
"""


class MpsNode:
    """One node: its configuration, its root of MPS, and what has been done on it."""

    daemons: Daemons

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, ManualClock()
        self.root = folder / "mps"
        self.config = folder / "config.yaml"
        self.program = folder / "nvidia-cuda-mps-control"
        self.program.write_text(PROGRAM.replace("{folder}", str(folder)))
        self.program.chmod(0o755)

    def share(self, *resources: str, more: str = "") -> None:
        """Writes the configuration: these entries of `sharing.mps.resources`."""
        listed = ", ".join(f"{{{each}}}" for each in resources)
        sharing = f"sharing: {{mps: {{resources: [{listed}]}}}}\n" if resources else ""
        draft = self.config.with_suffix(".new")
        draft.write_text(f"flags: {{mpsRoot: {self.root}}}\n{sharing}{more}")
        draft.replace(self.config)

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "TOPOALIGN_CONFIG": str(self.config),
            "TOPOALIGN_MPS_CONTROL": str(self.program),
            "NVML_STANDIN_EVENTS": str(self.folder / "events"),
        }

    @property
    def events(self) -> list[str]:
        """Compute modes that were set, starts and commands, in order."""
        file = self.folder / "events"
        return file.read_text().splitlines() if file.exists() else []

    def count(self, event: str) -> int:
        return sum(each.startswith(event) for each in self.events)

    def serving(self, resource: ResourceName = GPU) -> Serves | None:
        return read_served(self.root, resource)

    def pid(self, resource: ResourceName = GPU) -> int:
        return int((self.root / resource / "pipe" / "nvidia-cuda-mps-control.pid").read_text())

    def daemon(self, resource: ResourceName = GPU) -> Daemon:
        return self.daemons.daemons[resource]

    def reason(self) -> str:
        return self.daemons.reason() or ""

    async def until(self, true: Callable[[], object]) -> None:
        """Lets the daemons' clock go on, slowly, until this holds."""
        with anyio.fail_after(120):
            while not true():
                await self.clock.advance(TICK)
                await anyio.sleep(0.005)

    @asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        """Runs what `topoalign mps` runs; all has been ended at the end."""
        file = ConfigurationFile(self.environment)
        self.daemons = Daemons(file, str(self.program), self.environment, self.clock)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(file.keep_up, self.clock, Reload().wait)
            tasks.start_soon(self.daemons.run)
            yield
            tasks.cancel_scope.cancel()


@contextmanager
def mps_node(library: Path, folder: Path, *gpus: str) -> Iterator[MpsNode]:
    """A node with these GPUs, as the stand-in's statements; two H100 where none is named."""
    with standing_in(library, folder, "\n".join(gpus) or script(gpus=range(2))), pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVML_STANDIN_EVENTS", str(folder / "events"))
        yield MpsNode(folder)
