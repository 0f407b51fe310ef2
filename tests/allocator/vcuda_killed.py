"""
Prepares the two directories of a share, in processes that are killed (SIGKILL) one step later each time, until one comes to
its end; prints after each what is there, and what is there once it was prepared again.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from topoalign.allocator.containers import limiter_files
from topoalign.allocator.containers.vcuda import unit_directories
from topoalign.allocator.containers.vcuda.unit_directories import Limits

CALLS = ("mkdir", "rename", "replace", "write", "fsync", "unlink", "rmdir", "open")
FORMER, LIMITS = Limits("uid-former", "c0", 10, 1 << 30), Limits("uid-p", "c0", 20, 4 << 30)


def armed(steps: int) -> None:
    """This process is killed before so many calls that change or open a file are over."""
    left = [steps]
    for name in CALLS:
        call = getattr(os, name)

        def counted(*args: Any, call: Any = call, **kwargs: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        setattr(os, name, counted)


def shown(root: Path, names: list[str]) -> str:
    """Whose each directory is, and what is in the root and in the directories."""
    owners = [(unit_directories.read_config_owner(root, name) or ("",))[0] for name in names]
    sizes = {(root / name / "vcuda.config").stat().st_size for name in names if (root / name / "vcuda.config").exists()}
    return f"{' '.join(owner or '-' for owner in owners)} {sorted(sizes)}"


def main() -> None:
    root, names = Path(sys.argv[1]), [f"units-{digit * 32}" for digit in "ab"]
    for steps in range(1, 1000):
        for name in names:
            unit_directories.prepare_units_directory(root, name, FORMER)
        child = os.fork()
        if not child:
            armed(steps)
            for name in names:
                unit_directories.prepare_units_directory(root, name, LIMITS)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(shown(root, names), end="; ")
        for name in names:
            unit_directories.prepare_units_directory(root, name, LIMITS)
        limiter_files.remove_leftovers(root)
        files = sorted(each for name in names for each in os.listdir(root / name))
        print(shown(root, names), files, sorted(os.listdir(root)) == names)
        if not status:
            return


main()
