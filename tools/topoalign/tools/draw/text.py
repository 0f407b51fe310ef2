"""
A diagram in characters, for terminals: framed sockets and NUMA nodes, side by side as far as the width allows, and in each
the PCIe tree with the devices in brackets.

    ┌─ NUMA 3 ───────────────────────┐
    │ CPUs 48-63,176-191, 128 GiB    │
    │ host bridge pci0000:00         │
    │ └─ PCIe switch 0000:01:00.0    │
    │    └─ [GPU0 A] [GPU1 !] [NIC0] │
    └────────────────────────────────┘
"""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeVar
from unicodedata import combining, east_asian_width

import click

from topoalign.core.model.topology.cpuset import format_cpuset
from topoalign.tools.draw.device import DrawnDevice, holder_letter
from topoalign.tools.draw.diagram import Diagram, DrawnNumaNode, Group
from topoalign.tools.draw.pci_bridges import Bridge, Child

T = TypeVar("T")

NARROWEST = 40
"""Columns. On a narrower terminal lines are longer than it is wide."""
LEAST_BESIDE = 42
"""Columns that a block needs to be drawn next to another one."""
COLOURS = ("bright_blue", "yellow", "green", "magenta", "cyan", "bright_yellow", "bright_green", "bright_magenta")
"""Terminal colours of the first holder, the second, …"""
MARKS = {"unhealthy": "!", "cordoned": "#", "degraded": "*"}
MOST_KEYS = 3
"""Holders of one device that are named; a `+` stands for the others."""

SINGLE = tuple("┌─┐│└┘")
DOUBLE = tuple("╔═╗║╚╝")
"""Frames: upper left corner, horizontal, upper right corner, vertical, lower left corner, lower right corner."""
ASCII = str.maketrans({**dict.fromkeys("┌┐└┘├╔╗╚╝", "+"), "─": "-", "│": "|", "═": "=", "║": "|", "…": "~"})

Block = list[str]
"""Lines of equal length."""


def render_text(diagram: Diagram, width: int, ascii_only: bool = False) -> str:
    """The drawing, no wider than `width` columns, or 40."""
    width = max(width, NARROWEST)
    lines = [cut(diagram.title, width), *(line for fact in diagram.facts for line in wrap_line(fact, width)), ""]
    lines += grid(diagram.groups, width, socket)
    gpus = {device.id: device.index for device in diagram.devices if device.gpu}
    for bar in diagram.nvlinks.bars:
        lines += framed(bar.title, [f"GPUs {format_cpuset(gpus[gpu] for gpu in bar.links)}"], width, DOUBLE)
    for note in (*diagram.nvlinks.pair_lines(diagram.names), *legend(diagram), *diagram.notes):
        lines += wrap_line(note, width)
    drawn = "\n".join(line.rstrip() for line in lines)
    return drawn.translate(ASCII).encode("ascii", "replace").decode() if ascii_only else drawn


def coloured(drawn: str, diagram: Diagram) -> str:
    """The same drawing with the devices and the legend in the colours of their holders, for a terminal that has colours."""
    tokens = {device_token(device): device.holders[0] for device in diagram.devices if device.holders}
    tokens |= {f"[{holder_letter(holder)}]": holder for holder in range(len(diagram.holders))}
    for one, holder in tokens.items():
        drawn = drawn.replace(one, click.style(one, fg="black", bg=COLOURS[holder % len(COLOURS)]))
    return drawn


def socket(group: Group, width: int) -> Block:
    """A group of sockets as lines of `width` columns, its NUMA nodes framed inside."""
    return framed(group.title, grid(group.places, width - 4, render_numa_node), width, SINGLE)


def render_numa_node(place: DrawnNumaNode, width: int) -> Block:
    """A NUMA node as framed lines of `width` columns, its PCIe tree inside."""
    facts = [", ".join(place.facts)] if place.facts else []
    return framed(place.title, [*facts, *render_tree(place.children, width - 4)], width, SINGLE)


def render_tree(children: Sequence[Child], width: int) -> Block:
    """The devices near a NUMA node: host bridges, each with its branches, and devices without a known bridge."""
    parts = [bridge(child, width) for child in children if isinstance(child, Bridge)]
    return [*chain.from_iterable(parts), *brackets(children, width)]


def branches(children: Sequence[Child], width: int) -> Block:
    """The branches of a bridge: switches first, then its own devices."""
    inner = width - 3
    parts = [bridge(child, inner) for child in children if isinstance(child, Bridge)]
    devices = brackets(children, inner)
    parts += [devices] if devices else []
    lines = []
    for part in parts:
        first, rest = ("└─ ", "   ") if part is parts[-1] else ("├─ ", "│  ")
        lines += [first + part[0], *(rest + line for line in part[1:])]
    return lines


def bridge(of: Bridge, width: int) -> Block:
    """The name of a bridge with what is attached to it below; a single device is drawn next to it."""
    name = of.labels[of.host and of.path is None]  # `host bridge …`, `PCIe switch …` or `PIX`
    below = branches(of.children, width)
    if len(of.children) == 1 and len(below) == 1 and len(name) + 1 + len(below[0]) <= width:
        return [f"{name} {below[0].replace('└', '─', 1)}"]
    return [name, *below]


def brackets(children: Iterable[Child], width: int) -> Block:
    """The devices among these, as many on a line as fit."""
    lines: Block = []
    for one in (device_token(child) for child in children if isinstance(child, DrawnDevice)):
        if lines and len(lines[-1]) + 1 + len(one) <= width:
            lines[-1] += f" {one}"
        else:
            lines.append(one)
    return lines


def device_token(device: DrawnDevice) -> str:
    """`[GPU0]` that is free, `[GPU1 A]` of holder A, `[GPU2 AB+!]` unhealthy and of A, B and others."""
    keys = [holder_letter(holder) for holder in device.holders]
    marks = "".join(keys[:MOST_KEYS]) + "+" * (len(keys) > MOST_KEYS) + "".join(map(MARKS.__getitem__, device.findings))
    return f"[{device.name} {marks}]" if marks else f"[{device.name}]"


def legend(diagram: Diagram) -> Iterator[str]:
    """The lines below a drawing: holders, GPUs with memory of their own, and the meaning of the marks."""
    for i, entry in enumerate(diagram.legend):
        yield f"[{holder_letter(i)}] {entry}"
    for one in sorted(diagram.devices, key=lambda device: device.order):
        if one.divided:
            held = "".join(f"; {holder_letter(holder)} {amount}" for holder, amount in one.parts)
            yield f"{one.name} {' '.join(one.divided)}{held}"
    memory = [f"{one.name} is NUMA {one.memory_node}" for one in diagram.devices if one.memory_node is not None]
    if memory:
        yield f"GPU memory: {', '.join(memory)}"
    findings = {finding for device in diagram.devices for finding in device.findings}
    if findings:
        yield "   ".join(f"{mark} {finding}" for finding, mark in MARKS.items() if finding in findings)


def framed(head: str, lines: Iterable[str], width: int, frame: tuple[str, ...]) -> Block:
    """These lines in a frame that has a title."""
    upper_left, line, upper_right, side, lower_left, lower_right = frame
    head = cut(head, width - 6)
    upper = f"{upper_left}{line} {head} "
    return [
        f"{upper}{line * (width - len(upper) - 1)}{upper_right}",
        *(f"{side} {cut(inside, width - 4):<{width - 4}} {side}" for inside in lines),
        lower_left + line * (width - 2) + lower_right,
    ]


def grid(items: Sequence[T], width: int, draw: Callable[[T, int], Block]) -> Block:
    """Frames side by side as far as they fit, in rows of equally high ones."""
    abreast = max(1, min(len(items), (width + 1) // (LEAST_BESIDE + 1)))
    room, rest = divmod(width + 1 - abreast, abreast)
    widths = [room + (i < rest) for i in range(abreast)]
    lines: Block = []
    for i in range(0, len(items), abreast):
        blocks = [draw(item, each) for item, each in zip(items[i : i + abreast], widths, strict=False)]
        high = max(map(len, blocks))
        even = [
            [*block[:-1], *[f"│{' ' * (each - 2)}│"] * (high - len(block)), block[-1]]
            for block, each in zip(blocks, widths, strict=False)
        ]
        lines += [" ".join(row) for row in zip(*even, strict=True)]
    return lines


def wrap_line(line: str, width: int) -> Block:
    """A line wrapped between words to `width` columns, continuation lines indented by two."""
    return [cut(part, width) for part in textwrap.wrap(line, width, subsequent_indent="  ", break_on_hyphens=False)]


def cut(line: str, width: int) -> str:
    """The line in one column per character, and no wider than this."""
    line = "".join("?" if combining(c) or east_asian_width(c) in "WF" else c for c in line)
    return line if len(line) <= width else line[: width - 1] + "…"
