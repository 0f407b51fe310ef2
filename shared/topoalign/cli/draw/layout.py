"""
Positions: sockets side by side, in each its NUMA nodes, in each the tree of PCIe switches with the devices at
the bottom, all GPUs of the machine in line, and NVLinks below them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest

from topoalign.cli.draw import palette
from topoalign.cli.draw.device import Device
from topoalign.cli.draw.devices import NIC_HEIGHT, WIDTH, device_items
from topoalign.cli.draw.diagram import Diagram, Group, Place
from topoalign.cli.draw.legend import legend_items
from topoalign.cli.draw.links import arcs_fit, link_items
from topoalign.cli.draw.scene import FAINT, Box, Item, Line, Scene, Text, fitted, text_width
from topoalign.cli.draw.sizes import (
    BAR,
    COLUMN,
    FACT,
    GAP,
    LEVEL,
    MARGIN,
    PAD,
    SOCKET_HEAD,
    Sizes,
    apart,
)
from topoalign.cli.draw.tree import MEANINGS, Bridge, Child
from topoalign.core.model.ids import DeviceID

LEAST_WIDTH = 480.0
WIDEST_HEAD = 1100.0
TITLE = 18.0
PLAIN = 12.0
SMALL = 10.5
"""Sizes of text."""


def scene_of(diagram: Diagram) -> Scene:
    """The diagram as boxes, lines and texts."""
    return Layout(Sizes(diagram)).draw()


@dataclass
class Layout:
    """A scene on its way."""

    sizes: Sizes
    items: list[Item] = field(default_factory=list)
    gpus: dict[DeviceID, Box] = field(default_factory=dict)
    top: float = 0.0
    """Of the sockets."""

    def add(self, *items: Item) -> None:
        """Append items to the scene, above all earlier ones."""
        self.items += items

    @property
    def racks_top(self) -> float:
        """Where the devices begin."""
        return self.top + SOCKET_HEAD + self.sizes.head + self.sizes.levels * LEVEL

    def draw(self) -> Scene:
        """The whole scene, with its width and height in user units."""
        diagram = self.sizes.diagram
        head = max(text_width(diagram.title, TITLE, bold=True), *(text_width(fact, PLAIN) for fact in diagram.facts))
        inner = max(self.sizes.total_width, LEAST_WIDTH, min(head, WIDEST_HEAD))
        bottom = self.head(inner)
        self.top = bottom
        spare = (inner - self.sizes.total_width) / max(1, len(diagram.groups))
        x = MARGIN
        for group in diagram.groups:
            width = self.sizes.group_width(group) + spare
            self.group(group, x, width)
            x += width + GAP
        bottom += self.sizes.group_height if diagram.groups else 0
        items, bottom = link_items(diagram.nvlinks, self.gpus, bottom, MARGIN, inner)
        self.add(*items)
        listed = () if arcs_fit(diagram.nvlinks) else diagram.nvlinks.pair_lines(diagram.names)
        items, legend = legend_items(diagram, (*listed, *diagram.notes), MARGIN, bottom + GAP, inner)
        legend = legend if items else bottom
        self.add(*items)
        return Scene(diagram.title, inner + 2 * MARGIN, legend + MARGIN, self.items)

    def head(self, width: float) -> float:
        """Draws the title and returns where it ends."""
        title = self.sizes.diagram.title
        facts = self.sizes.diagram.facts
        self.add(Text(MARGIN, MARGIN + 14, fitted(title, width, TITLE, bold=True), TITLE, bold=True))
        for i, fact in enumerate(facts):
            self.add(Text(MARGIN, MARGIN + 34 + 16 * i, fitted(fact, width, PLAIN), PLAIN, fill=FAINT))
        return MARGIN + 30 + 16 * len(facts)

    def group(self, group: Group, x: float, width: float) -> None:
        """Place a group of sockets at `x`, `width` units wide, with its NUMA nodes side by side."""
        widths = list(map(self.sizes.place_width, group.places))
        spare = (width - 2 * PAD - sum(widths) - GAP * (len(widths) - 1)) / len(widths)
        self.add(
            Box(x, self.top, width, self.sizes.group_height, "socket", palette.SOCKET, radius=8, story=group.title),
            Text(x + PAD, self.top + 18, group.title, 13, bold=True),
        )
        x += PAD
        for place, own in zip(group.places, widths, strict=True):
            self.place(place, x, self.top + SOCKET_HEAD, own + spare)
            x += own + spare + GAP

    def place(self, place: Place, x: float, y: float, width: float) -> None:
        """Place a NUMA node with its upper left corner at (x, y), with its facts and its PCIe tree."""
        story = "\n".join((place.title, *place.facts))
        self.add(
            Box(x, y, width, self.sizes.height(place), "numa", palette.PLACE, radius=6, story=story),
            Text(x + PAD, y + 18, fitted(place.title, width - 2 * PAD, 12, bold=True), 12, bold=True),
        )
        for i, fact in enumerate(place.facts, 1):
            self.add(Text(x + PAD, y + 18 + FACT * i, fitted(fact, width - 2 * PAD, 11), 11, fill=FAINT))
        if place.children:
            self.children(place.children, x + (width - self.sizes.width(place.children)) / 2, y + self.sizes.head, None)

    def children(self, children: Iterable[Child], x: float, y: float, above: Box | None) -> None:
        """Draws what is below a bridge, or in a NUMA node: `x` is its left edge, `y` where a bridge goes."""
        children = tuple(children)
        for child in children:
            if isinstance(child, Bridge):
                width = self.sizes.width(child.children)
                bar = self.bar(child, x, y, width)
                if above is not None:
                    self.add(Line(((bar.middle, above.bottom), (bar.middle, bar.y))))
                self.children(child.children, x, y + LEVEL, bar)
                x += width
        gpus, nics = apart(children)
        if gpus or nics:
            self.rack(gpus, nics, x, above)

    def bar(self, bridge: Bridge, x: float, y: float, width: float) -> Box:
        """Draws a bridge as a bar above all that is below it."""
        role, fill = ("host", palette.HOST) if bridge.host else ("switch", palette.SWITCH)
        story = bridge.labels[0] if bridge.path is None else MEANINGS[bridge.path]
        box = Box(x + 2, y, width - 4, BAR, role, fill, radius=3, story=story)
        label = next((label for label in bridge.labels if text_width(label, SMALL) <= box.w - 8), bridge.labels[-1])
        self.add(box, Text(box.middle, y + 14, fitted(label, box.w - 6, SMALL), SMALL, anchor="middle"))
        return box

    def rack(self, gpus: list[Device], nics: list[Device], x: float, above: Box | None) -> None:
        """Draws devices from the left edge `x` on, the GPUs below the NICs."""
        for i, (nic, gpu) in enumerate(zip_longest(nics, gpus)):
            left = x + i * COLUMN + (COLUMN - WIDTH) / 2
            boxes = []
            if nic is not None:
                boxes.append(self.device(nic, left, self.racks_top, NIC_HEIGHT))
            if gpu is not None:
                boxes.append(self.device(gpu, left, self.racks_top + self.sizes.nic_room, self.sizes.gpu_height))
                self.gpus[gpu.id] = boxes[-1]
            if above is not None:
                self.wires(boxes, above)

    def device(self, device: Device, x: float, y: float, height: float) -> Box:
        """Place a device with its upper left corner at (x, y). Returns its box, for lines that end there."""
        box, rest = device_items(device, x, y, height)
        self.add(box, *rest)
        return box

    def wires(self, column: list[Box], above: Box) -> None:
        """Draws the way from a bridge to a column of devices: straight to a single one, else along their left edge."""
        if len(column) == 1:
            self.add(Line(((column[0].middle, above.bottom), (column[0].middle, column[0].y))))
            return
        rail = column[0].x - 5
        self.add(Line(((rail, above.bottom), (rail, column[-1].y + 12))))
        for box in column:
            self.add(Line(((rail, box.y + 12), (box.x, box.y + 12))))
