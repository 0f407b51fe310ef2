"""
Finds pods that are gone from the kubelet's directories of pods: `pods/<uid>` in its root directory.

The kubelet makes a pod's directory before the first of its containers starts, and removes it two or three seconds after
the pod was deleted. A pod that it refused has none. A pod that has ended and is not deleted keeps it, with its volumes
torn down. So the directories show that a pod is gone earlier than the kubelet's checkpoints, which keep its entries
until the kubelet writes them next.

Source: kubelet v1.36.3, kubelet_pods and volumemanager.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from topoalign.core.model.errors import StateFault, clean

NAME = "pods"
MOST_PODS = 4_096
"""Directories that are read at most; a kubelet runs 110 pods by default."""
MOST_PLUGINS = 256
"""Volume plugins of one pod that are looked at; there are about thirty. With more, the pod is not gone."""


class PodDirectories(msgspec.Struct, frozen=True, kw_only=True):
    """The directories at one moment."""

    torn_down: Mapping[str, bool]
    """Pod UID -> whether its volumes were mounted once, and none is now."""
    unreadable: frozenset[str] = frozenset()
    """Pods whose directory does not show whether they have ended: without any volume, or not as a kubelet creates it."""

    def is_gone(self, uid: str) -> bool:
        """
        Whether this pod holds nothing any more: it has no directory, or its volumes are torn down.

        If that is not certain, the pod is not gone: it has an empty `volumes` directory, or a UID that cannot be the name of
        a directory.

        >>> directories = PodDirectories(torn_down={"uid-1": False, "uid-2": True})
        >>> [directories.is_gone(uid) for uid in ("uid-1", "uid-2", "uid-3", "default/train")]
        [False, True, True, False]
        """
        return is_uid(uid) and self.torn_down.get(uid, True)


def read_pod_directories(root: Path) -> PodDirectories | None:
    """
    The directories of a kubelet with this root directory; None where it has no `pods` directory: then nothing is known.

    Raises StateFault where they cannot be read, or are more than `MOST_PODS`.
    """
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
    Whether there are directories of volume plugins and none of them contains a volume; None without such directories
    by. Raises OSError. Only names are read: looking at a volume itself may wait for a file server.

    A directory that goes while it is looked at contains nothing any more.
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
    """Whether a directory is empty; also true if it is removed meanwhile."""
    try:
        with os.scandir(directory) as entries:
            return next(entries, None) is None
    except (FileNotFoundError, NotADirectoryError):
        return True


def is_uid(uid: str) -> bool:
    """Whether a directory can have this name."""
    return bool(uid) and uid not in (".", "..") and "/" not in uid and "\0" not in uid


def unreadable(root: Path, why: str) -> StateFault:
    """The error for directories that cannot be read."""
    return StateFault(
        f"{root / NAME} cannot be read: {clean(why, 200)}",
        "mount the kubelet's root directory whole, and run as a user who may read it, usually root",
    )
