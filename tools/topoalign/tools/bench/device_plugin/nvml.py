"""
An NVML whose every query takes 0.1 ms: the fake library of the tests, compiled when it is needed.

It replaces the C library (libnvidia-ml.so.1), so the agent runs its own NVML driver. This needs a C compiler
and the sources; if one of them is missing, the case is skipped with a message.
"""

import shutil
import subprocess
from pathlib import Path

from topoalign.core.model.errors import Unavailable, clean

SOURCE = Path(__file__).parents[5] / "tests" / "nvml" / "nvml_standin.c"
SONAME = "libnvidia-ml.so.1"
QUERY_MICROSECONDS = 100
NVLINKS = 12
"""Of each GPU, all to NVSwitches, as in a DGX A100."""


class NoStandIn(Unavailable):
    """The stand-in for NVML cannot be built here."""

    code = "NoStandIn"


def build(folder: Path) -> None:
    """Puts the library into the folder. Raises NoStandIn."""
    compiler = shutil.which("cc")
    if compiler is None or not SOURCE.is_file():
        missing = "a C compiler" if compiler is None else "the sources of topoalign"
        raise NoStandIn(f"a stand-in for NVML needs {missing}", "install a compiler, and run it from a checkout")
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(folder / SONAME), str(SOURCE), "-lpthread"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode:
        raise NoStandIn(f"the stand-in for NVML was not built: {clean(built.stderr, 300)}", "see the compiler's words")


def script(gpus: int) -> str:
    """A machine with so many GPUs, in the words of the stand-in."""
    lines = [f"delay {QUERY_MICROSECONDS}"]
    for gpu in range(gpus):
        lines.append(
            f"gpu uuid=GPU-{gpu} pci=00000000:{16 * gpu + 7:02X}:00.0 minor={gpu} name=NVIDIA_A100 memory=1024"
        )
        lines += [f"link {gpu} {link} switch" for link in range(NVLINKS)]
    return "\n".join(lines)


def settings(folder: Path, gpus: int) -> dict[str, str]:
    """What an agent is told so that it reads this machine, once a second."""
    (folder / "machine").write_text(script(gpus))
    return {"DRIVER": "nvml", "READ_SECONDS": "1"}


def environment(folder: Path) -> dict[str, str]:
    """What the dynamic linker and the stand-in are told."""
    return {"LD_LIBRARY_PATH": str(folder), "NVML_STANDIN": str(folder / "machine")}
