"""
The directories in which a simulated node keeps what limits its containers: real files, on a disk that may be full, below a
root that anybody with rights on the node may remove or fill with something else.

Sockets are left out: the simulated loop waits for no file. The next write may be the last thing that the agent does.
"""

import asyncio
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from random import Random
from tempfile import mkdtemp

from anyio import to_thread
from anyio.lowlevel import checkpoint
from simulation.divisions import Limiter

from topoalign.allocator.containers.hami_core import slot_directories
from topoalign.allocator.containers.hami_core import slot_directories as hami_core
from topoalign.allocator.containers.vcuda import limiter as vcuda_limiter
from topoalign.allocator.containers.vcuda import unit_directories as vcuda
from topoalign.allocator.containers.vcuda.limiter import VcudaLimiter
from topoalign.cli.hook import install_library
from topoalign.kubelet.control_groups import FIRST_NAMESPACE
from topoalign.plugin_config.configuration import Configuration, Flags, GpuSlots, SharingSection, Units
from topoalign.plugin_config.hook_files import LIBRARY, PRELOAD
from topoalign.runtime.whole_files import replace_file

LIBRARY_CONTENT = b"\x7fELF, as far as a simulation cares"
OURS = "units-", "slots-"
MEMORY_DISK = Path("/dev/shm")  # a file system in memory, where there is one


class LimiterFiles:
    """What is below the root of the limiter of one node; outlives its agent. Nothing is there until it is used."""

    def __init__(self, limiter: Limiter) -> None:
        self.limiter = limiter
        self.full = False
        """Whether the disk has no room for another file."""
        self.kill: Callable[[], None] | None = None
        """Called at the next write, which is the last thing that the agent does. None: nobody kills it."""
        self.spoilt_at = -inf
        """The virtual second at which somebody last spoilt something."""
        self._top = ""
        self.configuration = Configuration()

    @property
    def root(self) -> Path:
        return Path(self._top, "limits")

    @property
    def host(self) -> Path:
        """Has `proc` and `cgroup`, as an agent sees them that may see the node's processes."""
        return Path(self._top, "host")

    @property
    def named(self) -> str:
        """The root as the agent's configuration names it; empty where nothing is limited."""
        return str(self.root) if self._top else ""

    def without_root(self, text: str) -> str:
        """Without what is another one in each run."""
        return text.replace(self._top, "") if self._top else text

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The root is there, and the limiters write to this disk."""
        if self.limiter == "none":
            yield
            return
        self._top = mkdtemp(prefix="node-", dir=MEMORY_DISK if MEMORY_DISK.is_dir() else None)
        if self.limiter == "vcuda":
            flags, sharing = Flags(vcuda_root=self.named), SharingSection(units=Units(), limiter="vcuda")
        else:
            flags, sharing = Flags(hami_root=self.named), SharingSection(slots=GpuSlots(), limiter="hami-core")
        self.configuration = Configuration(flags=flags, sharing=sharing)
        (self.host / "proc" / "self" / "ns").mkdir(parents=True)
        (self.host / "proc" / "self" / "ns" / "pid").symlink_to(FIRST_NAMESPACE)
        (self.host / "cgroup").mkdir()
        (self.host / "cgroup" / "cgroup.procs").write_text("1\n")
        self.put_right()
        vcuda.replace_file = hami_core.replace_file = self._replace  # type: ignore[attr-defined,assignment]  # the disk
        slot_directories.to_thread = vcuda_limiter.to_thread = NoThread  # type: ignore[assignment,attr-defined]  # a simulation has one
        try:
            yield
        finally:
            vcuda.replace_file = hami_core.replace_file = replace_file  # type: ignore[attr-defined]
            slot_directories.to_thread = vcuda_limiter.to_thread = to_thread  # type: ignore[attr-defined]
            shutil.rmtree(self._top)

    def put_right(self) -> None:
        """What somebody else has put below the root is gone, and what an installation has put there is there."""
        self.full = False
        self.kill = None
        if self.root.is_symlink() or self.root.is_file():
            self.root.unlink()
        if self.limiter == "hami-core":
            install_library(LIBRARY_CONTENT, self.root)
        for each in self.root.iterdir() if self.root.is_dir() else ():
            if each.name.startswith(OURS) and (each.is_symlink() or not each.is_dir()):
                each.unlink()

    def present(self) -> list[Path]:
        """The directories of containers, whatever they are now."""
        if not self.root.is_dir():
            return []
        return sorted(each for each in self.root.iterdir() if each.name.startswith(OURS))

    def spoil(self, chance: Random) -> str:
        """Somebody removes something below the root, or puts something else there. Returns what was done."""
        present = self.present()
        what = chance.choice(("root", "library", "directory", "directory", "link", "file", "content"))
        if what == "root":
            shutil.rmtree(self.root, ignore_errors=True)
        elif what == "library":
            (self.root / chance.choice((LIBRARY, PRELOAD))).unlink(missing_ok=True)
        elif present:
            self._spoil_directory(chance.choice(present), what)
        return what

    def _spoil_directory(self, at: Path, what: str) -> None:
        if at.is_symlink() or at.is_file():
            return
        if what == "content":
            (at / "deep" / "deeper").mkdir(parents=True, exist_ok=True)
            os.symlink(self.elsewhere, at / "deep" / "link") if not (at / "deep" / "link").is_symlink() else None
            return
        shutil.rmtree(at, ignore_errors=True)
        if what == "link":
            at.symlink_to(self.elsewhere)
        elif what == "file":
            at.write_text("somebody else's")

    @property
    def elsewhere(self) -> Path:
        """A directory that is not the agent's, with a file in it."""
        place = Path(self._top, "elsewhere")
        if not place.is_dir():
            place.mkdir()
            (place / "kept").write_text("kept")
        return place

    def _replace(self, name: str, content: bytes, *, directory: int, durable: bool = False) -> None:
        """As `whole_files.replace_file`, on this disk."""
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        if (kill := self.kill) is not None:
            self.kill = None
            kill()
            raise asyncio.CancelledError
        replace_file(name, content, directory=directory)


class SocketlessLimiter(VcudaLimiter):
    """As the product's, without the sockets on which processes register."""

    async def _serve(self, root: Path, name: str) -> None:
        pass


class NoThread:
    """Stands for `anyio.to_thread`."""

    @staticmethod
    async def run_sync(work: Callable[..., None], *arguments: object) -> None:
        """Others have their turn before the work is done."""
        await checkpoint()
        work(*arguments)
