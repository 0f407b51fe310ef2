"""Files as HAMi-core shares them between the processes of a container, made and read by a program in C."""

import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

SOURCE = Path(__file__).parents[1] / "allocator" / "hami_core_region.c"
NAME = f"{'f' * 32}.cache"


@cache
def built() -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) to write a shared region with")
    program = Path(mkdtemp(prefix="region-")) / "region"
    subprocess.run([compiler, "-O1", "-Wall", "-Werror", "-o", program, SOURCE], check=True)
    return program


def put_region(path: Path, uuids: str, *processes: str, priority: int = 1, last_kernel: int = 0) -> Path:
    """
    The file of a container with these GPUs, separated by commas, and these processes, each
    `<status>:<contexts>:<programs>:<buffers>:<all>:<percent>` on its own GPU.
    """
    subprocess.run([built(), path, uuids, str(priority), str(last_kernel), *processes], check=True)
    return path


def shown_region(path: Path) -> list[int]:
    """What the library would read: recent kernel, whether cores are limited, priority."""
    return [*map(int, subprocess.run([built(), path, "show"], check=True, capture_output=True).stdout.split())]
