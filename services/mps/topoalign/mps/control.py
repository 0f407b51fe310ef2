"""
Runs NVIDIA's control program `nvidia-cuda-mps-control`, as the daemon of one resource and as a client of the daemon.

The program finds its daemon by the pipe directory in its environment. CUDA_VISIBLE_DEVICES lists the GPUs by uuid, so
that a daemon uses only those of its resource: in compute mode EXCLUSIVE_PROCESS, each GPU accepts only one server. With
`-f`, the daemon is a child of this process, which notices at once when the daemon ends. Commands name GPUs by uuid,
too, because the indices of CUDA are not those of NVML. NVIDIA's DRA driver for GPUs does both
(templates/mps-control-daemon.tmpl.yaml).
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
"""Seconds that the daemon may take to answer a command."""
LONGEST_ANSWER = 65_536
"""Bytes. A normal answer is one line, but containers can write to the pipe directory, so an answer may be endless."""
GET_PERCENTAGE = "get_default_active_thread_percentage"
"""The command with which NVIDIA's device plugin v0.20.0 checks whether a daemon is healthy."""


class Control:
    """The control program for the directories of one resource."""

    def __init__(
        self, program: str, directory: Path, devices: tuple[str, ...], environment: Mapping[str, str], clock: Clock
    ) -> None:
        """`directory`: the resource's, below the MPS root. `environment`: this process's; its settings are omitted."""
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
                start_new_session=True,  # Ctrl-C ends only this process, which then ends the daemon
            )
        except OSError as error:
            raise DriverFault(
                f"cannot run {clean(self._program, 200)}: {error.strerror or error}",
                "it comes with NVIDIA's driver; a container gets it with NVIDIA_DRIVER_CAPABILITIES=compute,utility, and"
                f" {PREFIX}MPS_CONTROL names another place",
            ) from error

    async def command(self, text: str) -> str:
        """Sends a command to the daemon and returns its answer. Raises DriverFault if there is no answer."""
        answers: list[str] = []
        await wait_for_first(partial(self._ask, text, answers), partial(self._clock.sleep, CALL_SECONDS))
        if not answers:
            raise DriverFault(f"the MPS daemon does not answer {text.split()[0]!r}", "see its log, control.log")
        return answers[0]

    async def answers(self) -> bool:
        """Whether a daemon accepts commands."""
        try:
            await self.command(GET_PERCENTAGE)
        except DriverFault:
            return False
        return True

    async def _ask(self, text: str, answers: list[str]) -> None:
        """Adds the answer to `answers`; adds nothing if there is no answer, it is too long, or the program fails."""
        read, write = os.pipe()
        try:
            # The command is written before the program starts, because the program may end without reading it.
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
                        return  # its output is closed; if it still continues, it is killed after `CALL_SECONDS`
        except OSError:
            return
        finally:
            os.close(read)
        if client.returncode == 0:
            answers.append(clean(answer.decode(errors="replace").strip(), 500))
