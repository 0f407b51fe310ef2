"""The legend below a drawing: holders, marks, and what is not drawn."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from topoalign.cli.draw import palette
from topoalign.cli.draw.device import key
from topoalign.cli.draw.devices import cordon, hatching
from topoalign.cli.draw.diagram import Diagram
from topoalign.cli.draw.scene import FAINT, INK, Box, Item, Text, broken, text_width, wrapped

SWATCH = Box(0, 0, 26, 16, "swatch", stroke=INK)
ROW = 24.0
NOTE = 18.0
SIZE = 11.5


def legend_items(diagram: Diagram, notes: Iterable[str], x: float, y: float, width: float) -> tuple[list[Item], float]:
    """
    The legend from (x, y) on, and where it ends. Entries follow one another like words, in rows. A name is never cut,
    because pods of one controller differ at their end: one that is wider than the drawing has several lines.
    """
    items: list[Item] = []
    at = x
    bottom = y
    for swatch, letter, label in entries(diagram):
        lines = broken(label, width - SWATCH.w - 8, SIZE)
        wide = SWATCH.w + 8 + text_width(lines[0], SIZE)
        if at > x and at + wide > x + width:
            at = x
            bottom = bottom + ROW
        box = replace(swatch, x=at, y=bottom)
        items.append(box)
        items += hatching(box) if label == "unhealthy" else cordon(box) if label == "cordoned" else ()
        items += [
            Text(box.middle, bottom + 12.5, letter, SIZE, bold=True, anchor="middle"),
            *(Text(box.right + 8, bottom + 12.5 + i * NOTE, line, SIZE) for i, line in enumerate(lines)),
        ]
        at += wide + 24
        bottom += NOTE * (len(lines) - 1)
    bottom += SWATCH.h if at > x else -SWATCH.h / 2
    for note in notes:
        for line in wrapped(note, width, SIZE):
            bottom += NOTE
            items.append(Text(x, bottom, line, SIZE, fill=FAINT))
    return items, bottom


def entries(diagram: Diagram) -> Iterator[tuple[Box, str, str]]:
    """Swatch, letter and words of each entry: only of what can be seen in the drawing."""
    for i, entry in enumerate(diagram.legend):
        yield replace(SWATCH, fill=palette.of_holder(i)), key(i), entry
    devices = diagram.devices
    if diagram.holders:
        yield SWATCH, "", "free"
    if any(device.broken for device in devices):
        yield replace(SWATCH, stroke=palette.TROUBLE, stroke_width=2), "", "unhealthy"
    if any(device.cordoned for device in devices):
        yield SWATCH, "", "cordoned"
