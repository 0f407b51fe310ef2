"""Recognises other output of `nvidia-smi` that people paste in place of a matrix."""

import re

from topoalign.core.model.errors import InvalidMachine
from topoalign.machines.nvidia_smi_lines import COPY_AGAIN, place

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
        re.compile(r"^[ \t>#]{0,64}\|.{0,200}?\bGPU[0-9]", re.MULTILINE),
        "the table has something in front of the labels of its columns",
        "paste the raw output of `nvidia-smi topo -m`, or leave the first cell of the table's header empty",
    ),
    (
        re.compile(r"\| NVIDIA-SMI [0-9]"),
        "this is the output of `nvidia-smi` alone, which does not tell how GPUs are connected",
        "paste the output of `nvidia-smi topo -m`",
    ),
)
"""Pattern, finding and remedy: the first that matches."""


def no_matrix(text: str) -> InvalidMachine:
    """The error for a text in which no line is the header of a matrix."""
    for pattern, finding, remedy in _INSTEAD:
        match = pattern.search(text)
        if match is not None:
            number, _ = place(text, match.start())
            return InvalidMachine(f"it holds no matrix: {finding}", remedy, number)
    return InvalidMachine("no line holds the labels of the columns, such as `GPU0 GPU1`", COPY_AGAIN)
