"""Draws the boxes of GPUs and NICs: their text, their colours, and the marks for findings."""

from collections.abc import Iterable, Iterator
from itertools import pairwise

from topoalign.tools.draw import scene
from topoalign.tools.draw.device import DrawnDevice, holder_letter
from topoalign.tools.draw.scene import INK, Box, DrawnLine, Item, Text, fitted, text_width

WIDTH = 104.0
NIC_HEIGHT = 34.0
LINE = 13.0
INSET = 6.0
NARROW = 5.0
"""From the edge of a box to its text, and to the text of a holder's row."""
SMALL = 10.5
DASH = 12.0
"""Distance from one dash of a cordon to the next."""
HATCH = 7.0
"""Between two lines of a hatching."""


def gpu_height(devices: Iterable[DrawnDevice]) -> float:
    """The height of the box that needs most lines; at least so much that a GPU does not look like a NIC."""
    lines = (len(device.lines) + len(device.findings) + len(device.parts) for device in devices if device.gpu)
    most = max(lines, default=0)
    return 28 + LINE * max(most, 1)


def device_items(device: DrawnDevice, x: float, y: float, height: float) -> tuple[Box, list[Item]]:
    """Yields the box of a device with its top left corner at (x, y), and its content."""
    holders = () if device.parts else device.holders
    fills = [scene.of_holder(holder) for holder in holders] or [scene.PLACE]
    box = Box(
        x=x,
        y=y,
        w=WIDTH,
        h=height,
        role="gpu" if device.gpu else "nic",
        fill=fills[0],
        stroke=scene.UNHEALTHY if device.broken else INK,
        stroke_width=2.0 if device.broken else 1.4 if device.gpu else 1.0,
        radius=5.0 if device.gpu else 9.0,
        tooltip=device.tooltip,
    )
    items = [*shares(box, fills)]
    items += hatching(box) if device.broken else ()
    items += draw_cordon(box) if device.cordoned else ()
    return box, [*items, *draw_device_texts(device, box)]


def shares(box: Box, fills: list[str]) -> Iterator[Item]:
    """Yields stripes for the other holders of a shared device."""
    if len(fills) > 1:
        width = min(8.0, (box.w - 16) / (len(fills) - 1))
        for i, fill in enumerate(fills[1:], 1):
            yield DrawnLine(
                ((box.right - 4 - width * (i - 0.5), box.y + 1), (box.right - 4 - width * (i - 0.5), box.bottom - 1)),
                fill,
                width,
            )


def draw_device_texts(device: DrawnDevice, box: Box) -> Iterator[Item]:
    """Yields the texts in a device's box, with a plain plate below them on a hatched box."""
    size, first = (13.0, 18.0) if device.gpu else (11.5, 14.5)
    room = WIDTH - 2 * INSET
    lines = device.lines + device.findings if device.gpu else (" ".join(device.findings) or device.lines[0],)
    base = box.y + first + (2 if device.gpu else 0)
    texts = [Text(box.x + INSET, box.y + first, fitted(device.name, room, size, bold=True), size, bold=True)]
    for i, line in enumerate(lines, 1):
        bold = bool(device.findings) and line in (*device.findings, " ".join(device.findings))
        texts.append(Text(box.x + INSET, base + i * LINE, fitted(line, room, SMALL, bold), SMALL, bold))
    if device.broken:  # so that the hatching does not cross the text
        width = max(text_width(text.text, text.size, text.bold) for text in texts) + 4
        height = texts[-1].y - box.y - 1
        yield Box(box.x + 3, box.y + 4, min(width + 2, box.w - 6), height, "plate", box.fill, box.fill, 0, 3)
    yield from texts
    if device.parts:
        yield from draw_holder_rows(device, box, base + len(lines) * LINE)
        return
    badge = fitted(" ".join(holder_letter(holder) for holder in device.holders), 40, size, bold=True)
    if badge:
        yield Text(box.right - INSET, box.y + first, badge, size, bold=True, anchor="end")


def draw_holder_rows(device: DrawnDevice, box: Box, base: float) -> Iterator[Item]:
    """Yields a row for each holder of a part, in its colour: its letter, and its amount. `base`: of the text above them."""
    for place, (holder, amount) in enumerate(device.parts, 1):
        y = base + place * LINE
        fill = scene.of_holder(holder)
        yield Box(box.x + 3, y - SMALL + 0.5, box.w - 6, LINE - 1, "part", fill, fill, 0, 2)
        letter = Text(box.x + NARROW, y, holder_letter(holder), SMALL, bold=True)
        room = box.w - 2 * NARROW - text_width(letter.text, SMALL, bold=True)
        yield letter
        yield Text(box.right - NARROW, y, fitted(amount, room, SMALL), SMALL, anchor="end")


def hatching(box: Box) -> Iterator[DrawnLine]:
    """Yields hatching lines from the lower left to the upper right of a box."""
    inset = 2.0
    left = box.x + inset
    top = box.y + inset
    right = box.right - inset
    bottom = box.bottom - inset
    reach = (right - left) + (bottom - top)
    offset = HATCH
    while offset < reach:
        start = (left + max(0.0, offset - (bottom - top)), top + min(offset, bottom - top))
        end = (left + min(offset, right - left), top + max(0.0, offset - (right - left)))
        yield DrawnLine((start, end), scene.UNHEALTHY, 0.8)
        offset += HATCH


def draw_cordon(box: Box) -> Iterator[DrawnLine]:
    """Yields a dashed frame around the box of a cordoned device."""
    corners = [(box.x, box.y), (box.right, box.y), (box.right, box.bottom), (box.x, box.bottom), (box.x, box.y)]
    for (x0, y0), (x1, y1) in pairwise(corners):
        length = abs(x1 - x0) + abs(y1 - y0)
        steps = max(2, round(length / DASH))
        for i in range(0, 2 * steps - 1, 2):
            a = i / (2 * steps - 1)
            b = (i + 1) / (2 * steps - 1)
            yield DrawnLine(
                ((x0 + (x1 - x0) * a, y0 + (y1 - y0) * a), (x0 + (x1 - x0) * b, y0 + (y1 - y0) * b)), INK, 3.5
            )
