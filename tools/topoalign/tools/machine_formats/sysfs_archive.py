"""
Reads a captured sysfs tree in an archive of hwloc-gather-topology: `.tar.bz2`, `.tar.gz`, `.tar.xz` or `.tar`.

It is read in memory and never unpacked: no file can be written outside a folder, no link can leave the tree, and
entries that are neither a file nor a link are ignored. The unpacked bytes are counted while they are read, so that no
archive can fill the memory.
"""

import bz2
import gzip
import io
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import PurePosixPath

from topoalign.core.model.errors import InvalidMachine, clean
from topoalign.core.model.topology.model import Topology
from topoalign.machines.sysfs_cpus import CPUS
from topoalign.machines.sysfs_files import LONGEST_FILE, Tree
from topoalign.machines.sysfs_machine import read_sysfs

MOST_BYTES = 128 << 20
"""Bytes in total, unpacked. A machine with 512 CPUs has about half of it, most of it the blocks of tar."""
MOST_MEMBERS = 200_000
MOST_HOPS = 40
"""Links on one path, as for Linux."""

_PACK_AGAIN = "pack the tree again with hwloc-gather-topology, or give an unpacked folder"


def read_archive(source: io.BytesIO) -> Topology:
    """The machine of the tree in the archive. Raises InvalidMachine."""
    try:
        return read_sysfs(Archive(source))
    except (tarfile.TarError, EOFError, OSError, ValueError, lzma.LZMAError, zlib.error) as error:
        raise InvalidMachine(f"the archive cannot be unpacked: {clean(str(error), 200)}", _PACK_AGAIN) from error


class Archive(Tree):
    """A tree in an archive, in memory. What stands around the folder that holds `sys` is left out."""

    def __init__(self, source: io.BytesIO) -> None:
        """Raises InvalidMachine if it is too large or holds no such folder, and what its packing raises if it is broken."""
        self._files: dict[str, bytes] = {}
        self._links: dict[str, str] = {}
        self._folders: dict[str, set[str]] = {"": set()}
        members = dict(_members(source))
        top = next((name.partition(CPUS)[0] for name in members if f"/{CPUS}/" in f"/{name}"), None)
        if top is None:
            raise InvalidMachine(f"no folder in it holds {CPUS}", _PACK_AGAIN)
        for name, content in members.items():
            if name.startswith(top):
                self._add(name.removeprefix(top), content)

    def content(self, path: str) -> bytes | None:
        """The bytes of a file; None if it does not exist in the archive."""
        place = self.real(path)
        return self._files.get(str(place)) if place is not None else None

    def names(self, path: str) -> list[str]:
        """The names in a folder, sorted; none if it does not exist."""
        place = self.real(path)
        return sorted(self._folders.get(str(place), ())) if place is not None else []

    def real(self, path: str) -> PurePosixPath | None:
        """The path without links and `..`; None if it leaves the tree or has too many links."""
        ahead = path.split("/")[::-1]
        behind: list[str] = []
        hops = 0
        while ahead:
            part = ahead.pop()
            if part in ("", "."):
                continue
            if part == "..":
                if not behind:
                    return None
                behind.pop()
                continue
            behind.append(part)
            target = self._links.get("/".join(behind))
            if target is not None:
                hops += 1
                if hops > MOST_HOPS or target.startswith("/"):
                    return None
                behind.pop()
                ahead.extend(target.split("/")[::-1])
        place = "/".join(behind)
        return PurePosixPath(place) if place in self._files or place in self._folders else None

    def _add(self, name: str, content: bytes | str | None) -> None:
        if isinstance(content, bytes):
            self._files[name] = content
        elif isinstance(content, str):
            self._links[name] = content
        else:
            self._folders.setdefault(name, set())
        while name:
            above, _, last = name.rpartition("/")
            inside = self._folders.setdefault(above, set())
            if last in inside:
                break
            inside.add(last)
            name = above


class _Counted(io.BufferedIOBase):
    """Passes bytes on until there are too many."""

    def __init__(self, source: io.BufferedIOBase) -> None:
        self._source = source
        self._left = MOST_BYTES

    def read(self, size: int | None = -1, /) -> bytes:
        size = self._left + 1 if size is None or size < 0 else size
        raw = self._source.read(size)
        self._left -= len(raw)
        if self._left < 0:
            raise InvalidMachine(f"the archive holds more than {MOST_BYTES >> 20} MiB", _PACK_AGAIN)
        return raw


def _plain(source: io.BytesIO) -> io.BufferedIOBase:
    start = bytes(source.getbuffer()[:6])
    if start.startswith(b"BZh"):
        return bz2.BZ2File(source)
    if start.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=source)
    if start.startswith(b"\xfd7zXZ"):
        return lzma.open(source)
    return source


def _members(source: io.BytesIO) -> Iterator[tuple[str, bytes | str | None]]:
    """Name -> the content of a file, the target of a link, or None for a folder."""
    with tarfile.open(fileobj=_Counted(_plain(source)), mode="r|") as archive:
        for count, member in enumerate(archive):
            if count >= MOST_MEMBERS:
                raise InvalidMachine(f"the archive holds more than {MOST_MEMBERS} members", _PACK_AGAIN)
            name = member.name.removeprefix("./")
            if ".." in name.split("/") or name.startswith("/"):
                continue
            if member.isdir():
                yield name, None
            elif member.issym():
                yield name, member.linkname
            elif member.isreg() and member.size <= LONGEST_FILE:
                file = archive.extractfile(member)
                yield name, file.read() if file is not None else b""
