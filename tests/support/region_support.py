"""Files as HAMi-core shares them between the processes of a container, made and read by a program in C."""

import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

SOURCE = Path(__file__).parents[1] / "allocator" / "hami_core_region.c"
NAME = f"{'f' * 32}.cache"
LIBRARIES = {"v2.9.0": ("-DMINOR=2",), "v2.8.0": ("-DMINOR=1",), "v2.8.1": ("-DMINOR=1", "-DV2_8_1")}
"""Version of HAMi -> what its shared region is compiled with. That of v2.8.0 is the one of v2.4.1 to v2.8.0."""


@cache
def built(library: str) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) to write a shared region with")
    program = Path(mkdtemp(prefix="region-")) / "region"
    subprocess.run([compiler, "-O1", "-Wall", "-Werror", *LIBRARIES[library], "-o", program, SOURCE], check=True)
    return program


def put_region(
    path: Path, uuids: str, *processes: str, priority: int = 1, last_kernel: int = 0, library: str = "v2.9.0"
) -> Path:
    """
    The file of a container with these GPUs, separated by commas, and these processes, each
    `<status>:<contexts>:<programs>:<buffers>:<all>:<percent>` on its own GPU, as this version of HAMi writes it.
    """
    subprocess.run([built(library), path, uuids, str(priority), str(last_kernel), *processes], check=True)
    return path
