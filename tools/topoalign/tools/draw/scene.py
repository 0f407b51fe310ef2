"""
A scene: boxes, lines and texts in user units, in the order of painting. SVG and PNG share it.

Widths of texts are estimated here, a little too large: an SVG is shown in a font of the reader's machine, and
a text that fits by these widths fits in Arial, Helvetica and DejaVu Sans.
"""

from dataclasses import dataclass, field
from unicodedata import combining, east_asian_width

INK = "#1b1f24"
FAINT = "#57606a"
PAPER = "#ffffff"


@dataclass(frozen=True)
class Box:
    """A rectangle. `role` names what it stands for: `gpu`, `nic`, `socket`, …"""

    x: float
    y: float
    w: float
    h: float
    role: str
    fill: str = PAPER
    stroke: str = FAINT
    stroke_width: float = 1.0
    radius: float = 3.0
    tooltip: str = ""
    """Shown when someone points at it."""

    @property
    def right(self) -> float:
        """The x coordinate of the right edge."""
        return self.x + self.w

    @property
    def bottom(self) -> float:
        """The y coordinate of the lower edge."""
        return self.y + self.h

    @property
    def middle(self) -> float:
        """The x coordinate of the centre."""
        return self.x + self.w / 2


@dataclass(frozen=True)
class DrawnLine:
    """A line through these points."""

    points: tuple[tuple[float, float], ...]
    stroke: str = FAINT
    width: float = 1.0
    tooltip: str = ""


@dataclass(frozen=True)
class Text:
    """One line of text; `y` is its baseline."""

    x: float
    y: float
    text: str
    size: float = 11.0
    bold: bool = False
    fill: str = INK
    anchor: str = "start"
    """`start`, `middle` or `end`: the point of the text at `x`."""

    @property
    def left(self) -> float:
        """The x coordinate of the left edge, from the estimated width and the anchor."""
        return self.x - text_width(self.text, self.size, self.bold) * {"start": 0, "middle": 0.5, "end": 1}[self.anchor]


Item = Box | DrawnLine | Text


@dataclass
class Scene:
    """A finished drawing."""

    title: str
    width: float = 0
    height: float = 0
    items: list[Item] = field(default_factory=list)


def text_width(text: str, size: float, bold: bool = False) -> float:
    """An upper bound of the width of a text, in the unit of its size."""
    return sum(map(_em, text)) * size * (1.08 if bold else 1.0)


def _em(character: str) -> float:
    if character in " .,:;|!'()[]ijlftI/-·":
        return 0.4
    if character in "mwMW@%…" or character > "\u2e7f" or east_asian_width(character) in "WF":
        return 1.0
    if combining(character):
        return 0.0
    return 0.72 if character.isupper() else 0.64


def fitted(text: str, width: float, size: float, bold: bool = False) -> str:
    """Cuts a text so that it is no wider than this."""
    if text_width(text, size, bold) <= width + 0.01:  # a box may be exactly as wide as its text
        return text
    while text and text_width(text + "…", size, bold) > width:
        text = text[:-1]
    return text + "…"


def break_text(text: str, width: float, size: float) -> list[str]:
    """Breaks a text anywhere into lines no wider than this, without loss."""
    lines = [""]
    for character in text:
        if lines[-1] and text_width(lines[-1] + character, size) > width + 0.01:
            lines.append("")
        lines[-1] += character
    return lines


def wrap_text(text: str, width: float, size: float) -> list[str]:
    """Breaks a text at blanks into lines no wider than this."""
    lines: list[str] = []
    for word in text.split():
        if lines and text_width(f"{lines[-1]} {word}", size) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(fitted(word, width, size))
    return lines


# Colours that people with any colour vision can distinguish, light enough for dark text: Paul Tol's qualitative scheme
# `light`.
#
# A colour is never the only sign: every holder has a letter, and every problem of a device is hatched, framed or
# written.


HOLDERS = ("#77aadd", "#ee8866", "#eedd88", "#ffaabb", "#99ddff", "#44bb99", "#bbcc33", "#aaaa00")
"""Colours of the first holder, the second, …; the ninth has the first colour again, and another letter."""

SOCKET = "#f6f8fa"
PLACE = "#ffffff"
HOST = "#d8dee4"
SWITCH = "#eaeef2"
NVLINK = "#4d7c0f"
NVLINK_BAR = "#e4f2cd"
UNHEALTHY = "#cf222e"


def of_holder(holder: int) -> str:
    """The colour of the holder at this position of the legend; colours repeat after the last one."""
    return HOLDERS[holder % len(HOLDERS)]
