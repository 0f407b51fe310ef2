"""
Runs NVIDIA's control program `nvidia-cuda-mps-control`, as the daemon of one resource and as the client that commands it.

The program finds its daemon by the pipe directory in its environment. CUDA_VISIBLE_DEVICES names the GPUs by uuid, so that
a daemon keeps to those of its resource: in compute mode EXCLUSIVE_PROCESS each GPU takes one server alone. With `-f` the
daemon is a child of this process, which notices at once when it ends. Commands name GPUs by uuid, too, because the
indices of CUDA are not those of NVML. NVIDIA's DRA driver for GPUs does both (templates/mps-control-daemon.tmpl.yaml).
"""

import os
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import anyio
from anyio.abc import Process

from topoalign.core.model.errors import DriverFault, clean
from topoalign.core.ports import Clock
from topoalign.plugin_config.mps_files import LOG, PIPE
from topoalign.runtime.settings import PREFIX
from topoalign.runtime.tasks import wait_for_first

CALL_SECONDS = 5.0
"""How long the daemon may take to answer a command."""
LONGEST_ANSWER = 65_536
"""Bytes. An answer is one line. Containers can write to the pipe directory, and their output may have no end."""
GET_PERCENTAGE = "get_default_active_thread_percentage"
"""The command by which NVIDIA's device plugin v0.20.0 judges whether a daemon is well."""


class Control:
    """The control program for the directories of one resource."""

    def __init__(
        self, program: str, directory: Path, devices: tuple[str, ...], environment: Mapping[str, str], clock: Clock
    ) -> None:
        """`directory`: of the resource, below the MPS root. `environment`: of this process; its settings are left out."""
        self._program = program
        self._clock = clock
        self.pipe = directory / PIPE
        self.log = directory / LOG
        self._environment = {
            **{name: value for name, value in environment.items() if not name.startswith((PREFIX, "NATS_"))},
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self.log),
            "CUDA_VISIBLE_DEVICES": ",".join(devices),
        }

    async def start(self) -> Process:
        """Starts the daemon in the foreground. Raises DriverFault."""
        try:
            return await anyio.open_process(
                [self._program, "-f"],
                stdin=subprocess.DEVNULL,
                stdout=None,
                stderr=None,
                env=self._environment,
                start_new_session=True,  # Ctrl-C ends this process, which ends the daemon in order
            )
        except OSError as error:
            raise DriverFault(
                f"cannot run {clean(self._program, 200)}: {error.strerror or error}",
                "it comes with NVIDIA's driver; a container gets it with NVIDIA_DRIVER_CAPABILITIES=compute,utility, and"
                f" {PREFIX}MPS_CONTROL names another place",
            ) from error

    async def command(self, text: str) -> str:
        """Sends a command to the daemon and returns its answer. Raises DriverFault if none answers."""
        answers: list[str] = []
        await wait_for_first(partial(self._ask, text, answers), partial(self._clock.sleep, CALL_SECONDS))
        if not answers:
            raise DriverFault(f"the MPS daemon does not answer {text.split()[0]!r}", "see its log, control.log")
        return answers[0]

    async def answers(self) -> bool:
        """Whether a daemon takes commands."""
        try:
            await self.command(GET_PERCENTAGE)
        except DriverFault:
            return False
        return True

    async def _ask(self, text: str, answers: list[str]) -> None:
        """Adds the answer; nothing where none comes, or it is too long."""
        read, write = os.pipe()
        try:
            # The command is in the pipe before the program starts, which may not read it.
            os.write(write, f"{text}\n".encode())
            os.close(write)
            async with await anyio.open_process(
                [self._program], stdin=read, stderr=subprocess.STDOUT, env=self._environment
            ) as client:
                assert client.stdout is not None, "it is a pipe"
                answer = b""
                async for part in client.stdout:
                    answer += part
                    if len(answer) > LONGEST_ANSWER:
                        return  # its output is closed; if it goes on all the same, it is killed after `CALL_SECONDS`
        except OSError:
            return
        finally:
            os.close(read)
        if client.returncode == 0:
            answers.append(clean(answer.decode(errors="replace").strip(), 500))
