"""Identifies the current boot of the node."""

from pathlib import Path


def boot_id(root: Path = Path("/")) -> str | None:
    """The kernel's id of this boot; None if the tree below `root` has none."""
    try:
        return (root / "proc/sys/kernel/random/boot_id").read_text().strip() or None
    except OSError:
        return None
