"""
Where the host's files are, as the host names them and as this process sees them.

The driver may be installed on the host itself or by a container of its own, and this process may run in a container, too:
so a path has two roots. What is told to the kubelet is the host's name of a file; whether the file is there is looked up
where it is mounted for us.
"""

import os
from pathlib import Path
from typing import NamedTuple

from topoalign.core.model.errors import Unavailable
from topoalign.plugin_config.configuration import Flags


class ContainerUnready(Unavailable):
    """
    Raised where a container that got devices now would lack device nodes, driver files or hooks: so it gets none.
    """

    code = "ContainerUnready"


class Root(NamedTuple):
    """A root directory on the host, and where this process sees it. Paths below it are given as if it were `/`."""

    host: str
    here: Path

    def on_host(self, path: str) -> str:
        """What the host calls this absolute path below the root."""
        return os.path.join(self.host, path.lstrip("/"))

    def below(self, path: str) -> Path:
        """Where this process sees this absolute path below the root."""
        return self.here / path.lstrip("/")

    def has(self, path: str) -> bool:
        """Whether a file is there that this process can see; a mount that fails has none."""
        return os.path.exists(self.below(path))


def driver_root(flags: Flags) -> Root:
    """The root of the driver's libraries: `nvidiaDriverRoot`, seen at `containerDriverRoot` where that is there."""
    mounted = Path(flags.plugin.container_driver_root)
    return Root(flags.nvidia_driver_root, mounted if os.path.isdir(mounted) else Path(flags.nvidia_driver_root))


def dev_root(flags: Flags) -> Root:
    """
    The root of /dev/nvidia*: `nvidiaDevRoot`, else the driver's.

    Where none of these is mounted for us with a /dev in it our own
    /dev is searched, which is the host's in a privileged container (k8s-device-plugin v0.20.0, root.getDevRoot).
    """
    host = flags.nvidia_dev_root or flags.nvidia_driver_root
    places = [Path(host), Path("/")]
    if host == flags.nvidia_driver_root:
        places.insert(0, Path(flags.plugin.container_driver_root))
    return Root(host, next((place for place in places if os.path.isdir(place / "dev")), Path("/")))
