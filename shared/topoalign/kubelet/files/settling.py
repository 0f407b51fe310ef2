"""
Whether a kubelet has just started: it drops nothing of pods that are gone until it has heard of its pods from all their
sources.
"""

import stat
from pathlib import Path

SOCKET = Path("device-plugins/kubelet.sock")
"""The kubelet makes it anew at each start (v1.36.3, cm/devicemanager/plugin/v1beta1)."""

SETTLE_SECONDS = 120.0
"""For so long a note is given. Manifests are read at once; how long the API server takes to answer is not known here."""


def settling(root: Path, now: float, seconds: float = SETTLE_SECONDS) -> str | None:
    """
    What is not known because the kubelet with this root directory started less than `seconds` ago, in words; None where it
    has settled, or does not run. `now`: wall seconds.
    """
    try:
        status = (root / SOCKET).stat()
    except (OSError, ValueError):
        return None
    age = now - status.st_mtime
    if not stat.S_ISSOCK(status.st_mode) or not 0 <= age < seconds:
        return None
    return (
        f"the kubelet started {age:.0f} s ago: until it has heard of all its pods it drops nothing of pods that are gone, "
        "and may refuse what is predicted to fit"
    )
