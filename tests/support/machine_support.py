"""Trees of sysfs as archives and as folders."""

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path


def packed(
    files: Mapping[str, str | bytes], links: Mapping[str, str], mode: str = "w:gz", top: str = "node-7/"
) -> io.BytesIO:
    """An archive; its tree is inside a folder, as hwloc-gather-topology packs it."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode=mode) as archive:  # type: ignore[call-overload]  # the mode is a parameter
        for name, content in files.items():
            raw = content.encode() if isinstance(content, str) else content
            member = tarfile.TarInfo(top + name)
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))
        for name, target_name in links.items():
            member = tarfile.TarInfo(top + name)
            member.type, member.linkname = tarfile.SYMTYPE, target_name
            archive.addfile(member)
    target.seek(0)
    return target


def unpacked(root: Path, files: Mapping[str, str], links: Mapping[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    for name, target in links.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(target)
    return root
