"""
Finds the pods in the kubelet's files that the kubelet will have dropped at its next decision.

Their directories show it (`pod_directories`), or it is known from elsewhere that they have ended. If neither shows that a
pod is gone, its entries count: a device that is wrongly taken as free causes a wrong admission. Static pods have an entry
and a directory like others, by their UID of 32 hexadecimal digits.
"""

from collections.abc import Collection
from pathlib import Path

from topoalign.core.model.errors import StateFault, quoted
from topoalign.kubelet.files import pod_directories
from topoalign.kubelet.files.pod_directories import PodDirectories


class ListedPods:
    """
    The pods in one reading of the files. The directories are read once, for the first pod, so that all files are judged by
    the same state.
    """

    def __init__(self, root: Path, ended: Collection[str] = ()) -> None:
        """`root`: the kubelet's root directory. `ended`: UIDs of pods that are known to have ended."""
        self._root = root
        self.ended = frozenset(ended)
        self._directories: PodDirectories | None = None
        self._reason_unknown: str | None = None
        """Why no pod can be judged."""
        self._gone: dict[str, bool] = {}

    def is_gone(self, uid: str) -> bool:
        """Whether the kubelet drops what this pod holds before its next decision. False where that is not known."""
        if not self._gone:
            self._look()
        if uid not in self._gone:
            self._gone[uid] = uid in self.ended or (
                self._directories is not None and self._has_gone(self._directories, uid)
            )
        return self._gone[uid]

    def _has_gone(self, directories: PodDirectories, uid: str) -> bool:
        """A pod that came after the directories were looked at has one now: it is no leftover in the next file."""
        return directories.is_gone(uid) and (
            uid in directories.torn_down or not pod_directories.exists(self._root, uid)
        )

    def is_known_to_run(self, uid: str) -> bool:
        """Whether its directory shows a mounted volume."""
        return not self.is_gone(uid) and self._directories is not None and uid not in self._directories.unreadable

    @property
    def uids(self) -> frozenset[str]:
        """The pods that were asked for, which are those in the files."""
        return frozenset(self._gone)

    def _look(self) -> None:
        try:
            self._directories = pod_directories.read_pod_directories(self._root)
        except StateFault as fault:
            self._reason_unknown = fault.finding
        else:
            self._reason_unknown = (
                None if self._directories is not None else f"there is no {self._root / pod_directories.NAME}"
            )

    @property
    def reason_unknown(self) -> str | None:
        """Why the requested pods could not be judged, as text; None: they were."""
        if self._reason_unknown is None:
            return None
        return f"{self._reason_unknown}: pods that are gone count as holding what the kubelet's files list for them"

    @property
    def findings(self) -> tuple[str, ...]:
        """
        The dropped pods and the uncertain ones among the pods that were asked for, as text; without `reason_unknown`.
        """
        found = []
        if gone := sorted(uid for uid, gone in self._gone.items() if gone):
            found.append(
                f"the kubelet's files list pods that are gone, and it drops them before its next decision: what "
                f"{quoted(gone)} had counts as free"
            )
        unreadable = self._directories.unreadable if self._directories is not None else frozenset()
        if unreadable := unreadable & self._gone.keys():
            found.append(
                f"pods without a mounted volume may have ended, which their directories do not show: what "
                f"{quoted(sorted(unreadable))} have counts as held"
            )
        return tuple(found)
