"""Writes a scene as SVG: one file without external style sheets, fonts or scripts."""

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
            yield box(item)
        case DrawnLine():
            points = " ".join(f"{format_number(x)},{format_number(y)}" for x, y in item.points)
            title = f"<title>{escape(item.story)}</title>" if item.story else ""
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


def box(item: Box) -> str:
    """A `rect` element; its tooltip is a `title` element inside."""
    shape = (
        f'<rect class="{item.role}" x="{format_number(item.x)}" y="{format_number(item.y)}" width="{format_number(item.w)}"'
        f' height="{format_number(item.h)}" rx="{format_number(item.radius)}" fill="{item.fill}" stroke="{item.stroke}"'
        f' stroke-width="{format_number(item.stroke_width)}"'
    )
    return f"{shape}><title>{escape(item.story)}</title></rect>" if item.story else f"{shape}/>"


def format_number(value: float) -> str:
    """Formats a number in its shortest form, with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


# Writes a scene as PNG with Pillow, in Pillow's own font, so that it looks the same on every machine.


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
    painter = Painter(ImageDraw.Draw(image), scale)
    for item in scene.items:
        match item:
            case Box():
                painter.box(item)
            case DrawnLine():
                painter.line(item)
            case Text():
                painter.text(item)
    file = BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


class Painter:
    """Paints items on a Pillow image; `scale` is pixels per user unit."""

    def __init__(self, draw: ImageDraw.ImageDraw, scale: int) -> None:
        self.draw = draw
        self.scale = scale

    def box(self, box: Box) -> None:
        """Paint a rounded rectangle, its outline at least one pixel wide."""
        s = self.scale
        corners = (box.x * s, box.y * s, box.right * s, box.bottom * s)
        radius = box.radius * s
        width = max(1, round(box.stroke_width * s))
        self.draw.rounded_rectangle(corners, radius, box.fill, box.stroke, width)

    def line(self, line: DrawnLine) -> None:
        """Paint a line through several points."""
        points = [(x * self.scale, y * self.scale) for x, y in line.points]
        self.draw.line(points, line.stroke, max(1, round(line.width * self.scale)), joint="curve")

    def text(self, text: Text) -> None:
        """Paint a text at its baseline. Characters that the font lacks become `?`."""
        shown = "".join(c if c in KNOWN else "?" for c in text.text)
        at = (text.x * self.scale, text.y * self.scale)
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[text.anchor]
        # The font has no bold face: an outline of its own colour makes one.
        outline = 0.25 * self.scale if text.bold else 0
        self.draw.text(
            at, shown, text.fill, font(text.size * self.scale), anchor, stroke_width=outline, stroke_fill=text.fill
        )


@lru_cache
def font(size: float) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own font at this size in pixels."""
    return ImageFont.load_default(size)
