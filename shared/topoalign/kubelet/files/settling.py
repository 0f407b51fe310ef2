"""
Detects that a kubelet has just started. Until it has received its pods from all sources, it drops no entries of pods that
are gone.
"""

import stat
from pathlib import Path

from topoalign.core.admission.prediction import describe_starting_kubelet

SOCKET = Path("device-plugins/kubelet.sock")
"""The kubelet makes it anew at each start (v1.36.3, cm/devicemanager/plugin/v1beta1)."""

SETTLE_SECONDS = 120.0
"""For so long a note is given. Manifests are read at once; how long the API server takes to answer is not known here."""


def started(root: Path) -> float | None:
    """When the kubelet with this root directory began to listen for plugins, in wall seconds; None where it does not run."""
    try:
        status = (root / SOCKET).stat()
    except (OSError, ValueError):
        return None
    return status.st_mtime if stat.S_ISSOCK(status.st_mode) else None


def unsettled_reason(root: Path, now: float, seconds: float = SETTLE_SECONDS) -> str | None:
    """
    What is not known because the kubelet with this root directory started less than `seconds` ago, in words; None where it
    has settled, or does not run. `now`: wall seconds.
    """
    since = started(root)
    return describe_starting_kubelet(now - since) if since is not None and 0 <= now - since < seconds else None
