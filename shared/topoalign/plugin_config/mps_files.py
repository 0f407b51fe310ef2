"""
The directories and files of MPS on a node, which `topoalign mps` creates and the allocator reads.

For each resource there is a directory below the root, `<root>/nvidia.com/gpu`, with the pipes of its control daemon
(`pipe`), its log (`log`) and, while the daemon serves, the file `serves`: which devices, in how many shares. A
container sees its pipes at `/mps/nvidia.com/gpu/pipe` and the root's `shm` at /dev/shm, as with NVIDIA's device plugin
v0.20.0. The two resources of GPUs in units have one directory, which is named after the resource of computing time.

`topoalign mps` locks the file `serves` (flock) before it gives the file its name. So a reader in another container can
tell whether the writer is alive, without a process id, a clock or a call: the kernel releases the lock of a process
that is killed, and a file without a lock is ignored.
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

import msgspec

from topoalign.core.model.ids import DeviceID, ResourceName

CONTAINER_ROOT = Path("/mps")
"""The mount point of the root in containers with MPS and, by the manifests, in those of the agent and the daemon."""
SHM = "shm"
CONTAINER_SHM = "/dev/shm"  # noqa: S108  # a mount point in a container, no temporary file
PIPE = "pipe"
LOG = "log"
SERVES = "serves"
MOST_BYTES = 65_536
"""Maximum size of the file `serves` in bytes. 32 GPUs need 2,000 bytes."""


class Serves(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file `serves` of one resource's daemon."""

    devices: frozenset[DeviceID]
    """Uuids of GPUs."""
    replicas: int
    """
    Shares of each GPU: a client is limited to the GPU's memory and threads divided by this number. 0: the daemon sets
    no limits, because the containers have their own.
    """


def root_here(root: str) -> Path:
    """The path of the host's MPS root (`flags.mpsRoot`) in this process: below /mps if that is mounted."""
    return CONTAINER_ROOT if os.path.isdir(CONTAINER_ROOT) else Path(root)


def read_served(root: Path, resource: ResourceName) -> Serves | None:
    """Reads what the daemon of a resource serves now; None: it is not ready, or its `topoalign mps` has died."""
    try:
        file = os.open(root / resource / SERVES, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        with suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(os.read(file, MOST_BYTES), type=Serves)
    except OSError:
        return None
    finally:
        os.close(file)
    return None


def lock_resource_directory(directory: Path) -> int | None:
    """The open lock file of a resource's directory; None: another `topoalign mps` has it. Raises OSError."""
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    file = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file


class Announcement:
    """The file `serves` of one resource, while this process holds its lock."""

    def __init__(self, root: Path, resource: ResourceName) -> None:
        self._path = root / resource / SERVES
        self._file: int | None = None

    def publish(self, serves: Serves) -> None:
        """Writes what the daemon serves. Raises OSError."""
        self.withdraw()
        draft = self._path.with_name(f".{SERVES}.{os.getpid()}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(draft, flags, 0o644)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._file, msgspec.json.encode(serves))
        os.replace(draft, self._path)

    def withdraw(self) -> None:
        """Removes the file and releases its lock."""
        file = self._file
        self._file = None
        if file is not None:
            with suppress(OSError):
                os.unlink(self._path)
            os.close(file)
