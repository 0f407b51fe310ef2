"""
Positions: sockets side by side, in each its NUMA nodes, in each the tree of PCIe switches with the devices at
the bottom, all GPUs of the machine in line, and NVLinks below them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest

from topoalign.core.model.ids import DeviceID
from topoalign.tools.draw import scene
from topoalign.tools.draw.device import DrawnDevice, holder_letter
from topoalign.tools.draw.device_boxes import NIC_HEIGHT, WIDTH, device_items, draw_cordon, gpu_height, hatching
from topoalign.tools.draw.diagram import Diagram, DrawnNumaNode, Group
from topoalign.tools.draw.nvlinks import arcs_fit, link_items
from topoalign.tools.draw.pci_bridges import MEANINGS, Bridge, Child, levels
from topoalign.tools.draw.scene import (
    FAINT,
    INK,
    Box,
    DrawnLine,
    Item,
    Scene,
    Text,
    break_text,
    fitted,
    text_width,
    wrap_text,
)

# The first half of the layout measures the sizes of all elements of a drawing.
#
# Below a switch the NICs are in a row above the GPUs, so that every GPU's lower edge is free for its NVLinks. NUMA
# nodes are side by side, and sockets too: the more devices a machine has, the wider its drawing is.


MARGIN = 20.0
PAD = 12.0
GAP = 14.0
COLUMN = WIDTH + 18
"""Distance from one device to the next; the line from a NIC to the GPU below it runs between them."""
NIC_ROW = NIC_HEIGHT + 7.0
"""Distance from the upper edge of a NIC to that of the GPU below it."""
LEVEL = 34.0
BAR = 20.0
"""Distance from one bridge to the one below it, and the height of a bridge."""
HEAD = 28.0
FACT = 15.0
"""Heights in a NUMA node: of its name, and of each line about its CPUs and memory."""
SOCKET_HEAD = 26.0


def split_gpus_and_nics(children: Iterable[Child]) -> tuple[list[DrawnDevice], list[DrawnDevice]]:
    """The GPUs and the NICs right below a bridge, or in a NUMA node."""
    devices = [child for child in children if isinstance(child, DrawnDevice)]
    return [one for one in devices if one.gpu], [one for one in devices if not one.gpu]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a diagram, in user units."""

    diagram: Diagram

    @cached_property
    def places(self) -> list[DrawnNumaNode]:
        """All NUMA nodes of the diagram, in the order of drawing."""
        return [place for group in self.diagram.groups for place in group.places]

    @cached_property
    def gpu_height(self) -> float:
        """The height of every GPU's box, in user units."""
        return gpu_height(self.diagram.devices)

    @cached_property
    def levels(self) -> int:
        """The largest number of bridges one below the other."""
        return max((levels(place.children) for place in self.places), default=0)

    @cached_property
    def nic_room(self) -> float:
        """The height of the row of NICs above the GPUs."""
        return 0 if all(device.gpu for device in self.diagram.devices) else NIC_ROW

    @cached_property
    def device_room(self) -> float:
        """The distance from the upper edge of the NICs to the lower edge of the GPUs."""
        return self.nic_room + (self.gpu_height if any(device.gpu for device in self.diagram.devices) else 0)

    def width(self, children: Iterable[Child]) -> float:
        """The width of everything below a bridge, or in a NUMA node."""
        children = tuple(children)
        gpus, nics = split_gpus_and_nics(children)
        return max(len(gpus), len(nics)) * COLUMN + sum(
            self.width(child.children) for child in children if isinstance(child, Bridge)
        )

    def place_width(self, place: DrawnNumaNode) -> float:
        """The width of a NUMA node's box, in user units."""
        facts = max((min(text_width(fact, 11), 190.0) for fact in place.facts), default=0)
        head = max(text_width(place.title, 12, bold=True), facts)
        return max(self.width(place.children), head) + 2 * PAD

    @cached_property
    def head(self) -> float:
        """The height of every NUMA node down to its devices."""
        return HEAD + FACT * max((len(place.facts) for place in self.places), default=0)

    @cached_property
    def full_height(self) -> float:
        """The height of a NUMA node with devices."""
        return self.head + self.levels * LEVEL + self.device_room + PAD

    def height(self, place: DrawnNumaNode) -> float:
        """The height of a NUMA node's box: the full height if it has devices, else only its head."""
        return self.full_height if place.children else self.head

    def group_width(self, group: Group) -> float:
        """The width of a group of sockets: its NUMA nodes, or its title if that is wider."""
        places = sum(map(self.place_width, group.places)) + GAP * (len(group.places) - 1)
        return max(places, text_width(group.title, 13, bold=True)) + 2 * PAD

    @cached_property
    def group_height(self) -> float:
        """The height of a group of sockets; all are equally high."""
        return SOCKET_HEAD + max(map(self.height, self.places), default=0) + PAD

    @cached_property
    def total_width(self) -> float:
        """The width of all groups side by side, gaps included."""
        return sum(map(self.group_width, self.diagram.groups)) + GAP * (len(self.diagram.groups) - 1)


LEAST_WIDTH = 480.0
WIDEST_HEAD = 1100.0
TITLE = 18.0
PLAIN = 12.0
SMALL = 10.5
"""Sizes of text."""


def scene_of(diagram: Diagram) -> Scene:
    """The diagram as boxes, lines and texts."""
    return DiagramLayout(Sizes(diagram)).draw()


@dataclass
class DiagramLayout:
    """Places the elements of a diagram in a scene."""

    sizes: Sizes
    items: list[Item] = field(default_factory=list)
    gpus: dict[DeviceID, Box] = field(default_factory=dict)
    top: float = 0.0
    """The upper edge of the sockets."""

    def add(self, *items: Item) -> None:
        """Append items to the scene, above all earlier ones."""
        self.items += items

    @property
    def racks_top(self) -> float:
        """The y coordinate of the first device."""
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
            Box(x, self.top, width, self.sizes.group_height, "socket", scene.SOCKET, radius=8, tooltip=group.title),
            Text(x + PAD, self.top + 18, group.title, 13, bold=True),
        )
        x += PAD
        for place, own in zip(group.places, widths, strict=True):
            self.place(place, x, self.top + SOCKET_HEAD, own + spare)
            x += own + spare + GAP

    def place(self, place: DrawnNumaNode, x: float, y: float, width: float) -> None:
        """Place a NUMA node with its upper left corner at (x, y), with its facts and its PCIe tree."""
        tooltip = "\n".join((place.title, *place.facts))
        self.add(
            Box(x, y, width, self.sizes.height(place), "numa", scene.PLACE, radius=6, tooltip=tooltip),
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
                    self.add(DrawnLine(((bar.middle, above.bottom), (bar.middle, bar.y))))
                self.children(child.children, x, y + LEVEL, bar)
                x += width
        gpus, nics = split_gpus_and_nics(children)
        if gpus or nics:
            self.rack(gpus, nics, x, above)

    def bar(self, bridge: Bridge, x: float, y: float, width: float) -> Box:
        """Draws a bridge as a bar above all that is below it."""
        role, fill = ("host", scene.HOST) if bridge.host else ("switch", scene.SWITCH)
        tooltip = bridge.labels[0] if bridge.path is None else MEANINGS[bridge.path]
        box = Box(x + 2, y, width - 4, BAR, role, fill, radius=3, tooltip=tooltip)
        label = next((label for label in bridge.labels if text_width(label, SMALL) <= box.w - 8), bridge.labels[-1])
        self.add(box, Text(box.middle, y + 14, fitted(label, box.w - 6, SMALL), SMALL, anchor="middle"))
        return box

    def rack(self, gpus: list[DrawnDevice], nics: list[DrawnDevice], x: float, above: Box | None) -> None:
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

    def device(self, device: DrawnDevice, x: float, y: float, height: float) -> Box:
        """Place a device with its upper left corner at (x, y). Returns its box, for lines that end there."""
        box, rest = device_items(device, x, y, height)
        self.add(box, *rest)
        return box

    def wires(self, column: list[Box], above: Box) -> None:
        """Draws the lines from a bridge to a column of devices: straight to a single one, else along their left edge."""
        if len(column) == 1:
            self.add(DrawnLine(((column[0].middle, above.bottom), (column[0].middle, column[0].y))))
            return
        rail = column[0].x - 5
        self.add(DrawnLine(((rail, above.bottom), (rail, column[-1].y + 12))))
        for box in column:
            self.add(DrawnLine(((rail, box.y + 12), (box.x, box.y + 12))))


# The legend below a drawing: holders, marks, and what is not drawn.


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
    for swatch, letter, label in list_legend_entries(diagram):
        lines = break_text(label, width - SWATCH.w - 8, SIZE)
        wide = SWATCH.w + 8 + text_width(lines[0], SIZE)
        if at > x and at + wide > x + width:
            at = x
            bottom = bottom + ROW
        box = replace(swatch, x=at, y=bottom)
        items.append(box)
        items += hatching(box) if label == "unhealthy" else draw_cordon(box) if label == "cordoned" else ()
        items += [
            Text(box.middle, bottom + 12.5, letter, SIZE, bold=True, anchor="middle"),
            *(Text(box.right + 8, bottom + 12.5 + i * NOTE, line, SIZE) for i, line in enumerate(lines)),
        ]
        at += wide + 24
        bottom += NOTE * (len(lines) - 1)
    bottom += SWATCH.h if at > x else -SWATCH.h / 2
    for note in notes:
        for line in wrap_text(note, width, SIZE):
            bottom += NOTE
            items.append(Text(x, bottom, line, SIZE, fill=FAINT))
    return items, bottom


def list_legend_entries(diagram: Diagram) -> Iterator[tuple[Box, str, str]]:
    """Swatch, letter and text of each entry: only of what is visible in the drawing."""
    for i, entry in enumerate(diagram.legend):
        yield replace(SWATCH, fill=scene.of_holder(i)), holder_letter(i), entry
    devices = diagram.devices
    if diagram.holders:
        yield SWATCH, "", "free"
    if any(device.broken for device in devices):
        yield replace(SWATCH, stroke=scene.UNHEALTHY, stroke_width=2), "", "unhealthy"
    if any(device.cordoned for device in devices):
        yield SWATCH, "", "cordoned"
