"""
Writes a scene as SVG, in one file without external style sheets, fonts or scripts, or as PNG with Pillow, in Pillow's own
font, so that it looks the same on every machine.
"""

from collections.abc import Iterator
from functools import lru_cache
from html import escape
from io import BytesIO

from PIL import Image, ImageDraw, ImageFont

from topoalign.tools.draw.scene import PAPER, Box, DrawnLine, Item, Scene, Text

FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"


def svg(scene: Scene) -> str:
    """The SVG document. Texts from outside have been cleaned before, and are escaped here."""
    width = format_number(scene.width)
    height = format_number(scene.height)
    head = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' font-family="{FONT}">',
        f"<title>{escape(scene.title)}</title>",
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
    ]
    return "\n".join([*head, *(line for item in scene.items for line in render_item(item)), "</svg>", ""])


def render_item(item: Item) -> Iterator[str]:
    """The SVG elements of one item; none for an empty text."""
    match item:
        case Box():
            shape = (
                f'<rect class="{item.role}" x="{format_number(item.x)}" y="{format_number(item.y)}"'
                f' width="{format_number(item.w)}" height="{format_number(item.h)}" rx="{format_number(item.radius)}"'
                f' fill="{item.fill}" stroke="{item.stroke}" stroke-width="{format_number(item.stroke_width)}"'
            )
            yield f"{shape}><title>{escape(item.tooltip)}</title></rect>" if item.tooltip else f"{shape}/>"
        case DrawnLine():
            points = " ".join(f"{format_number(x)},{format_number(y)}" for x, y in item.points)
            title = f"<title>{escape(item.tooltip)}</title>" if item.tooltip else ""
            yield (
                f'<polyline points="{points}" fill="none" stroke="{item.stroke}" stroke-width="{format_number(item.width)}"'
                + (f">{title}</polyline>" if title else "/>")
            )
        case Text() if item.text:
            weight = ' font-weight="bold"' if item.bold else ""
            anchor = f' text-anchor="{item.anchor}"' if item.anchor != "start" else ""
            yield (
                f'<text x="{format_number(item.x)}" y="{format_number(item.y)}" font-size="{format_number(item.size)}"'
                f' fill="{item.fill}"{weight}{anchor} pointer-events="none">{escape(item.text)}</text>'
            )


def format_number(value: float) -> str:
    """Formats a number in its shortest form, with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


SCALE = 2
"""Pixels per user unit, so that it is sharp on today's screens."""
MOST_PIXELS = 60_000_000
"""A larger drawing has one pixel per unit."""
KNOWN = frozenset(map(chr, range(0x20, 0x7F))) | {"…", "·"}
"""Characters that the font has; others are painted as `?`."""


def png(scene: Scene) -> bytes:
    """The picture."""
    scale = SCALE if scene.width * scene.height * SCALE**2 <= MOST_PIXELS else 1
    size = (round(scene.width * scale), round(scene.height * scale))
    image = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(image)
    for item in scene.items:
        match item:
            case Box():
                corners = (item.x * scale, item.y * scale, item.right * scale, item.bottom * scale)
                width = max(1, round(item.stroke_width * scale))
                draw.rounded_rectangle(corners, item.radius * scale, item.fill, item.stroke, width)
            case DrawnLine():
                points = [(x * scale, y * scale) for x, y in item.points]
                draw.line(points, item.stroke, max(1, round(item.width * scale)), joint="curve")
            case Text():
                known = "".join(c if c in KNOWN else "?" for c in item.text)
                draw.text(
                    (item.x * scale, item.y * scale),
                    known,
                    item.fill,
                    font(item.size * scale),
                    {"start": "ls", "middle": "ms", "end": "rs"}[item.anchor],  # at the baseline
                    # The font has no bold face: an outline of its own colour makes one.
                    stroke_width=0.25 * scale if item.bold else 0,
                    stroke_fill=item.fill,
                )
    file = BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


@lru_cache
def font(size: float) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own font at this size in pixels."""
    return ImageFont.load_default(size)
