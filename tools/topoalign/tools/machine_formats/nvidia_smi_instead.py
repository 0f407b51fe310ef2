"""
Recognises texts that people paste instead of a matrix: other output of `nvidia-smi`, and that of other tools.

Output without a line of labels is looked at when no header is found. Output that looks like a matrix and is another one
(rocm-smi, `nvidia-smi topo -p2p`) is looked at when the matrix cannot be read.
"""

import re
from collections.abc import Sequence

from topoalign.core.model.errors import InvalidMachine
from topoalign.tools.machine_formats.nvidia_smi_lines import COPY_AGAIN, locate_line

MOST_CHARACTERS = 100_000
"""Characters at the start of the text that are searched for signs of another output."""

_TOPO = "paste the output of `nvidia-smi topo -m`"
_TOPO_OR_XML = f"{_TOPO}, or give lstopo's XML: `lstopo --of xml FILE`"
_DEVICES_ALONE = "which has the devices and not how they are connected"

_INSTEAD = (
    (
        re.compile(r"\btopo\b.{0,3} is not a recognized command"),
        "this nvidia-smi has no `topo`: NVIDIA's driver for Windows does not support it",
        "paste the output of `nvidia-smi topo -m` of the machine under Linux, or name a machine of the catalogue",
    ),
    (
        re.compile(r"NVIDIA-SMI has failed|Failed to initialize NVML|No devices were found"),
        "nvidia-smi found no GPU that it could ask",
        "run `nvidia-smi topo -m` where `nvidia-smi` alone lists the GPUs",
    ),
    (
        re.compile(r"nvidia-smi: (?:command )?not found"),
        "there was no nvidia-smi",
        "run `nvidia-smi topo -m` on the machine itself, or give lstopo's XML of it",
    ),
    (
        re.compile(r"<nvidia_smi_log\b|NVSMI LOG"),
        f"this is the output of `nvidia-smi -q`, {_DEVICES_ALONE}",
        _TOPO,
    ),
    (
        re.compile(r"\bLink [0-9]{1,2}: (?:[0-9.]{1,9} GB/s|<inactive>)|\bLink [0-9]{1,2}, P2P is supported"),
        "this is the output of `nvidia-smi nvlink`, which has the NVLinks of each GPU and not where they lead",
        _TOPO,
    ),
    (
        re.compile(r"\bGPU [0-9]{1,4}: .{1,200}\(UUID: GPU-"),
        f"this is the output of `nvidia-smi -L`, {_DEVICES_ALONE}",
        _TOPO,
    ),
    (
        re.compile(r"^(?:index|name|uuid|gpu_[a-z.]{1,40}|pci\.[a-z_]{1,40}), ", re.MULTILINE),
        f"this is the output of `nvidia-smi --query-gpu`, {_DEVICES_ALONE}",
        _TOPO,
    ),
    (
        re.compile(
            r"\b[0-9a-f]{2}:[0-9a-f]{2}\.[0-7] (?:VGA|3D|Display|Infiniband|Ethernet|PCI)|^-(?:\+-)?\[[0-9a-f]{4}:",
            re.M,
        ),
        f"this is the output of lspci, {_DEVICES_ALONE}",
        _TOPO_OR_XML,
    ),
    (
        re.compile(
            r"^Architecture: {2,40}|^NUMA node(?:0 CPU|\()s?\)?.{0,20}: {2,40}|^available: [0-9]{1,4} nodes? \(", re.M
        ),
        "this is the output of lscpu or numactl, which has CPUs and no GPUs",
        _TOPO_OR_XML,
    ),
    (
        re.compile(r"^ {0,40}(?:Machine \(|Package L#0|NUMANode L#0)", re.MULTILINE),
        "this is lstopo's output as text",
        "give its XML: `lstopo --of xml FILE`",
    ),
    (
        re.compile(r"\bmlx[0-9]_\w{1,40} port [0-9] ==> |^CA 'mlx", re.MULTILINE),
        "this is the output of ibdev2netdev or ibstat, which has NICs and no GPUs",
        _TOPO_OR_XML,
    ),
    (re.compile(r"\| Topology Information {2,}"), "this is the output of `dcgmi topo`", _TOPO),
    (
        re.compile(r"^[ \t>#]{0,64}\|.{0,200}?\bGPU[0-9]", re.MULTILINE),
        "the table has something in front of the labels of its columns",
        "paste the raw output of `nvidia-smi topo -m`, or leave the first cell of the table's header empty",
    ),
    (
        re.compile(r"\| NVIDIA-SMI [0-9]"),
        "this is the output of `nvidia-smi` alone, which does not show how GPUs are connected",
        "paste the output of `nvidia-smi topo -m`",
    ),
)
"""Pattern, finding and remedy: the first that matches."""


_ALIKE = (
    (
        re.compile(
            r"ROCm System Management Interface|ROCm SMI Log|^(?:ACCESS|WEIGHT|HOPS|LINK TYPE) TABLE", re.MULTILINE
        ),
        "this is the output of rocm-smi or amd-smi, and AMD GPUs are not supported",
        f"{_TOPO} of a machine with NVIDIA GPUs; lstopo's XML describes the CPUs and NICs of any machine",
    ),
    (
        re.compile(r"\b(?:CNS|GNS|TNS) {1,8}= "),
        "this is the output of `nvidia-smi topo -p2p`, which has peer-to-peer states and not connections",
        _TOPO,
    ),
)
"""Output that looks like a matrix."""


def other_matrix(text: str) -> InvalidMachine | None:
    """The error for a matrix that is another one than that of `nvidia-smi topo -m`; None where it is not recognised."""
    return _recognised(text, _ALIKE)


def no_matrix(text: str) -> InvalidMachine:
    """The error for a text in which no line is the header of a matrix."""
    nothing = InvalidMachine("no line holds the labels of the columns, such as `GPU0 GPU1`", COPY_AGAIN)
    return _recognised(text, _INSTEAD) or nothing


def _recognised(text: str, patterns: Sequence[tuple[re.Pattern[str], str, str]]) -> InvalidMachine | None:
    for pattern, finding, remedy in patterns:
        match = pattern.search(text, 0, MOST_CHARACTERS)
        if match is not None:
            number, _ = locate_line(text, match.start())
            return InvalidMachine(f"it holds no matrix: {finding}", remedy, number)
    return None
