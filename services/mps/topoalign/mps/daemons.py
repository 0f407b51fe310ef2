"""
Runs the MPS daemons of a node, one for each resource that the configuration shares by MPS.

If a changed configuration shares a resource differently, the daemon of the resource is stopped, and its clients lose
their GPUs. The other daemons continue to run.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import anyio
import structlog
from anyio.abc import TaskGroup

from topoalign.core.model.errors import DriverFault
from topoalign.core.model.ids import ResourceName
from topoalign.core.ports import Clock
from topoalign.mps.compute_mode import Nvml
from topoalign.mps.daemon import FIRST_PAUSE, LONGEST_PAUSE, Daemon
from topoalign.mps.daemon_shares import MpsShare, mps_shares
from topoalign.plugin_config.file_watch import ConfigurationFile
from topoalign.plugin_config.mps_files import SHM, root_here
from topoalign.runtime.clock import backoff_seconds
from topoalign.runtime.tasks import wait_for_first

log = structlog.get_logger("topoalign.mps")


class Daemons:
    """Runs the MPS daemons of one node."""

    def __init__(self, file: ConfigurationFile, program: str, environment: Mapping[str, str], clock: Clock) -> None:
        """`program`: NVIDIA's control program. `environment`: of this process."""
        self._file = file
        self._program = program
        self._environment = environment
        self._clock = clock
        self._nvml = Nvml(clock)
        self.daemons: dict[ResourceName, Daemon] = {}
        self._failure: str | None = "the GPUs have not been read yet"

    def reason(self) -> str | None:
        """Returns, for /readyz, why some shares cannot be allocated; None: all can, or nothing is shared by MPS."""
        reasons = (f"{resource}: {each.reason}" for resource, each in self.daemons.items() if each.reason is not None)
        return self._failure or next(reasons, None)

    async def run(self) -> None:
        """Follows the configuration until cancelled, and then ends all daemons."""
        failures = 0
        async with anyio.create_task_group() as tasks:
            while True:
                changed = self._file.changed
                try:
                    wanted = await self.shares()
                    root = root_here(self._file.current.flags.mps_root)
                    if wanted:
                        make_shm(root)
                except (DriverFault, OSError) as error:
                    failures += 1
                    self._failure = str(error)
                    pause = backoff_seconds(failures, FIRST_PAUSE, LONGEST_PAUSE)
                    log.warning("no MPS daemon can be started", reason=self._failure, pause=pause)
                    await wait_for_first(changed.wait, partial(self._clock.sleep, pause))
                    continue
                failures = 0
                self._failure = None
                await self._follow(wanted, root, tasks)
                await changed.wait()

    async def shares(self) -> dict[ResourceName, MpsShare]:
        """Returns resource -> its share by the current configuration. Reads GPUs only for MPS. Raises DriverFault."""
        configuration = self._file.current
        if not configuration.sharing.mps.resources and configuration.sharing.limiter != "mps":
            return {}
        return mps_shares(await self._nvml.read_gpus(), configuration)

    async def _follow(self, wanted: Mapping[ResourceName, MpsShare], root: Path, tasks: TaskGroup) -> None:
        """Ends the daemons that are not `wanted` in this form, and starts the missing ones."""
        former = [each for each in self.daemons.values() if each.wanted != (wanted.get(each.resource), root)]
        async with anyio.create_task_group() as ends:
            for daemon in former:
                del self.daemons[daemon.resource]
                ends.start_soon(daemon.end)
        for resource in wanted.keys() - self.daemons.keys():
            daemon = self.daemons[resource] = Daemon(
                (wanted[resource], root), self.shares, self._program, self._environment, self._nvml, self._clock
            )
            tasks.start_soon(daemon.run)
        if not wanted:
            log.info("nothing is shared by MPS: no daemon is needed")


SHM_MODE = 0o1777
"""The mode of /dev/shm: writable for all users, and only the owner of a file may remove it."""


def make_shm(root: Path) -> None:
    """Creates the directory that containers get as /dev/shm, writable for every user. Raises OSError."""
    shm = root / SHM
    shm.mkdir(parents=True, exist_ok=True)
    mode = shm.stat().st_mode
    if mode & SHM_MODE != SHM_MODE:  # also if an earlier run ended before it set the mode
        shm.chmod(SHM_MODE)
