"""
Reads descriptions of machines that other programs write: the output of `nvidia-smi topo -m`, lstopo's XML, and an archive
of a captured sysfs tree. `topoalign.machines.load_machine` finds `read_topology` by entry point.

The first bytes decide the format: those of a compressed file or of a tar file are an archive; `<` begins XML unless it is a
web page or the output of `nvidia-smi -q -x`; everything else is text in which a matrix is looked for.
"""

import io
import re

from topoalign.core.model.errors import InvalidMachine
from topoalign.core.model.topology.model import Topology

_ARCHIVE_STARTS = (b"BZh", b"\x1f\x8b", b"\xfd7zXZ")

_TEXT_IN_MARKUP = re.compile(
    rb"(?:<\?xml[^>]{0,100}>\s*)?(?:<!DOCTYPE (?:html|nvidia_smi_log)|"
    rb"<(?:html|head|body|pre|code|div|span|p|br|table|tr|td|details|blockquote|nvidia_smi_log)\b)",
    re.IGNORECASE,
)
"""The start of a web page, or of `nvidia-smi -q -x`: the text in them is read, or refused."""

_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def read_topology(raw: bytes) -> Topology:
    """The machine that these bytes describe. Raises InvalidMachine."""
    if raw.startswith(_ARCHIVE_STARTS) or raw[257:262] == b"ustar":
        from topoalign.tools.machine_formats.sysfs_archive import read_archive

        return read_archive(io.BytesIO(raw))
    start = raw[:1024].removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"<") and not _TEXT_IN_MARKUP.match(start):
        from topoalign.tools.machine_formats.lstopo import (
            read_lstopo,  # loads an XML parser, which a matrix does not need
        )

        return read_lstopo(io.BytesIO(raw))
    from topoalign.tools.machine_formats.nvidia_smi import read_pasted_matrix

    return read_pasted_matrix(_decoded(raw))


def _decoded(raw: bytes) -> str:
    try:  # PowerShell writes UTF-16
        return raw.decode("utf-16" if raw.startswith(_UTF16) else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - raw.rfind(b"\n", 0, error.start)
        remedy = "give the output of `nvidia-smi topo -m`, lstopo's XML, a sysfs tree or topoalign's own JSON"
        raise InvalidMachine(f"byte 0x{raw[error.start]:02X} is no text", remedy, line, column) from error
