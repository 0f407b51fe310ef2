"""
The directories of pods in the root directory of the fake kubelet.

A running pod has `pods/UID` with its volumes; a pod without volumes has an empty `volumes`. A pod that has ended keeps
its directory until it is deleted, with its volumes torn down: the volume plugin's directory exists and is empty. A
pod that was refused has no directory, except one with a volume that was refused while the kubelet started. (Seen on a
kubelet v1.36.2; spec/kubelet.md 12.)
"""

import shutil
from pathlib import Path

VOLUME = Path("kubernetes.io~projected", "kube-api-access")


class PodDirectories:
    """`pods` in the root directory."""

    def __init__(self, root: Path) -> None:
        self._root = root / "pods"
        self._root.mkdir(exist_ok=True)

    def make(self, uid: str, volumes: bool) -> None:
        """Of a pod that starts."""
        for part in ("volumes", "plugins", "containers"):
            (self._root / uid / part).mkdir(parents=True, exist_ok=True)
        if volumes:
            (self._root / uid / "volumes" / VOLUME).mkdir(parents=True, exist_ok=True)

    def tear_down(self, uid: str) -> None:
        """Of a pod that has ended and is not deleted."""
        volume = self._root / uid / "volumes" / VOLUME
        if volume.exists():
            shutil.rmtree(volume)

    def remove(self, uid: str) -> None:
        """Of a pod that is deleted."""
        if (self._root / uid).exists():
            shutil.rmtree(self._root / uid)

    def active(self) -> frozenset[str]:
        """The pods that have a directory whose volumes are not torn down."""
        return frozenset(pod.name for pod in self._root.iterdir() if self._is_active(pod))

    def _is_active(self, pod: Path) -> bool:
        plugins = list((pod / "volumes").iterdir())
        return not plugins or any(any(plugin.iterdir()) for plugin in plugins)
