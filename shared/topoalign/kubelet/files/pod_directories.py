"""
Determines which pods are gone by the kubelet's pod directories, which are `pods/<uid>` in its root directory.

The kubelet creates a pod's directory before the pod's first container starts, and removes it two or three seconds after
the pod was deleted. A rejected pod has no directory. A pod that has ended but is not deleted keeps its directory, with
its volumes torn down. So the directories show earlier that a pod is gone than the kubelet's checkpoints, which keep its
entries until the kubelet writes them the next time.

If nothing, including the directories, shows that a pod is gone, its entries count, because a device wrongly considered
free causes a wrong admission. Static pods also have a directory, named by their UID of 32 hexadecimal digits.

Source: kubelet v1.36.3, kubelet_pods and volumemanager.
"""

import os
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from topoalign.core.model.errors import StateFault, clean, quoted

NAME = "pods"
MOST_PODS = 4_096
"""Maximum number of directories that are read. A kubelet runs up to 110 pods by default."""
MOST_PLUGINS = 256
"""Maximum number of volume plugins of a pod; there are about thirty. A pod with more does not count as gone."""


class PodDirectories(msgspec.Struct, frozen=True, kw_only=True):
    """The directories at one moment."""

    torn_down: Mapping[str, bool]
    """Pod UID -> whether it had mounted volumes, and has none now."""
    unreadable: frozenset[str] = frozenset()
    """Pods whose directory does not show whether they have ended: no volumes, or not as the kubelet creates it."""

    def is_gone(self, uid: str) -> bool:
        """
        Whether this pod no longer holds resources: it has no directory, or its volumes are torn down.

        False if this is uncertain: the `volumes` directory is empty, or the UID cannot be the name of a directory.

        >>> directories = PodDirectories(torn_down={"uid-1": False, "uid-2": True})
        >>> [directories.is_gone(uid) for uid in ("uid-1", "uid-2", "uid-3", "default/train")]
        [False, True, True, False]
        """
        can_be_directory = bool(uid) and uid not in (".", "..") and "/" not in uid and "\0" not in uid
        return can_be_directory and self.torn_down.get(uid, True)


def read_pod_directories(root: Path) -> PodDirectories | None:
    """Reads the pod directories of a kubelet; None if there is no `pods` directory. Raises StateFault."""
    found: dict[str, bool | None] = {}
    try:
        with os.scandir(root / NAME) as pods:
            for pod in pods:
                if len(found) == MOST_PODS:
                    raise unreadable(root, f"there are more than {MOST_PODS}")
                is_pod = pod.is_dir(follow_symlinks=False)
                found[pod.name] = is_torn_down(Path(pod.path, "volumes")) if is_pod else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unreadable(root, error.strerror or clean(str(error))) from error
    return PodDirectories(
        torn_down={uid: bool(torn_down) for uid, torn_down in found.items()},
        unreadable=frozenset(uid for uid, torn_down in found.items() if torn_down is None),
    )


def exists(root: Path, uid: str) -> bool:
    """Whether this pod has a directory now, or there may be one that cannot be seen."""
    try:
        os.lstat(root / NAME / uid)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError:
        return True
    return True


def is_torn_down(volumes: Path) -> bool | None:
    """
    Whether there are directories of volume plugins and none of them contains a volume; None without such directories.
    Raises OSError. Only names are read, because access to a volume can block on a file server.
    """
    plugins: list[str] = []
    try:
        with os.scandir(volumes) as entries:
            for entry in entries:
                if len(plugins) == MOST_PLUGINS or not entry.is_dir(follow_symlinks=False):
                    return None
                plugins.append(entry.path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return all(map(is_empty, plugins)) if plugins else None


def is_empty(directory: str) -> bool:
    """Whether a directory is empty or gone."""
    try:
        with os.scandir(directory) as entries:
            return next(entries, None) is None
    except (FileNotFoundError, NotADirectoryError):  # it was removed meanwhile
        return True


def unreadable(root: Path, why: str) -> StateFault:
    """The error for directories that cannot be read."""
    return StateFault(
        f"{root / NAME} cannot be read: {clean(why, 200)}",
        "mount the kubelet's root directory whole, and run as a user who may read it, usually root",
    )


class ListedPods:
    """
    Finds the pods in the kubelet's files that the kubelet will drop before its next decision. The directories are read
    once, for the first pod, so that all files are compared with the same state.
    """

    def __init__(self, root: Path, ended: Collection[str] = ()) -> None:
        """`root`: the kubelet's root directory. `ended`: UIDs of pods that are known to have ended."""
        self._root = root
        self.ended = frozenset(ended)
        self._directories: PodDirectories | None = None
        self._reason_unknown: str | None = None
        """Why it is unknown which pods are gone."""
        self._gone: dict[str, bool] = {}

    def is_gone(self, uid: str) -> bool:
        """Whether the kubelet drops the entries of this pod before its next decision. False if that is unknown."""
        if not self._gone:
            self._look()
        if uid not in self._gone:
            directories = self._directories
            # a pod that was created after the directories were read has one now: its entry is not stale
            self._gone[uid] = uid in self.ended or (
                directories is not None
                and directories.is_gone(uid)
                and (uid in directories.torn_down or not exists(self._root, uid))
            )
        return self._gone[uid]

    def is_known_to_run(self, uid: str) -> bool:
        """Whether its directory shows a mounted volume."""
        return not self.is_gone(uid) and self._directories is not None and uid not in self._directories.unreadable

    @property
    def uids(self) -> frozenset[str]:
        """The pods for which `is_gone` was called, which are those in the files."""
        return frozenset(self._gone)

    def _look(self) -> None:
        try:
            self._directories = read_pod_directories(self._root)
        except StateFault as fault:
            self._reason_unknown = fault.finding
        else:
            self._reason_unknown = None if self._directories is not None else f"there is no {self._root / NAME}"

    @property
    def reason_unknown(self) -> str | None:
        """Why it is unknown which pods are gone, as text; None if it is known."""
        if self._reason_unknown is None:
            return None
        return f"{self._reason_unknown}: pods that are gone count as holding what the kubelet's files list for them"

    @property
    def findings(self) -> tuple[str, ...]:
        """The dropped and the uncertain pods among `uids`, as texts; without `reason_unknown`."""
        found = []
        if gone := sorted(uid for uid, gone in self._gone.items() if gone):
            found.append(
                f"the kubelet's files list pods that are gone, and it drops them before its next decision: what "
                f"{quoted(gone)} had counts as free"
            )
        uncertain = self._directories.unreadable if self._directories is not None else frozenset()
        if uncertain := uncertain & self._gone.keys():
            found.append(
                f"pods without a mounted volume may have ended, which their directories do not show: what "
                f"{quoted(sorted(uncertain))} have counts as held"
            )
        return tuple(found)
