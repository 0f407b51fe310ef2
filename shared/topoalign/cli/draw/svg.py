"""Writes a scene as SVG: one file without external style sheets, fonts or scripts."""

from collections.abc import Iterator
from html import escape

from topoalign.cli.draw.scene import PAPER, Box, Item, Line, Scene, Text

FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"


def svg(scene: Scene) -> str:
    """The document. What is foreign in the scene has been cleaned, and is escaped here."""
    width = number(scene.width)
    height = number(scene.height)
    head = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' font-family="{FONT}">',
        f"<title>{escape(scene.title)}</title>",
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
    ]
    return "\n".join([*head, *(line for item in scene.items for line in written(item)), "</svg>", ""])


def written(item: Item) -> Iterator[str]:
    """The SVG elements of one item; none for an empty text."""
    match item:
        case Box():
            yield box(item)
        case Line():
            points = " ".join(f"{number(x)},{number(y)}" for x, y in item.points)
            title = f"<title>{escape(item.story)}</title>" if item.story else ""
            yield (
                f'<polyline points="{points}" fill="none" stroke="{item.stroke}" stroke-width="{number(item.width)}"'
                + (f">{title}</polyline>" if title else "/>")
            )
        case Text() if item.text:
            weight = ' font-weight="bold"' if item.bold else ""
            anchor = f' text-anchor="{item.anchor}"' if item.anchor != "start" else ""
            yield (
                f'<text x="{number(item.x)}" y="{number(item.y)}" font-size="{number(item.size)}" fill="{item.fill}"'
                f'{weight}{anchor} pointer-events="none">{escape(item.text)}</text>'
            )


def box(item: Box) -> str:
    """A `rect` element; its tooltip is a `title` element inside."""
    shape = (
        f'<rect class="{item.role}" x="{number(item.x)}" y="{number(item.y)}" width="{number(item.w)}"'
        f' height="{number(item.h)}" rx="{number(item.radius)}" fill="{item.fill}" stroke="{item.stroke}"'
        f' stroke-width="{number(item.stroke_width)}"'
    )
    return f"{shape}><title>{escape(item.story)}</title></rect>" if item.story else f"{shape}/>"


def number(value: float) -> str:
    """As short as it can be written, to a hundredth."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
