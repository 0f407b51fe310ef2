"""
Sizes of all parts of a drawing: the first half of the layout, which only measures.

Below a switch the NICs are in a row above the GPUs, so that every GPU's lower edge is free for its NVLinks. NUMA nodes are
side by side, and sockets too: the more devices a machine has, the wider its drawing is.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from topoalign.cli.draw.device import Device
from topoalign.cli.draw.devices import NIC_HEIGHT, WIDTH, gpu_height
from topoalign.cli.draw.diagram import Diagram, Group, Place
from topoalign.cli.draw.scene import text_width
from topoalign.cli.draw.tree import Bridge, Child, levels

MARGIN = 20.0
PAD = 12.0
GAP = 14.0
COLUMN = WIDTH + 18
"""From one device to the next: between them runs what connects a NIC and the GPU below it."""
NIC_ROW = NIC_HEIGHT + 7.0
"""From the upper edge of a NIC to that of the GPU below it."""
LEVEL = 34.0
BAR = 20.0
"""From one bridge to the one below it, and the height of a bridge."""
HEAD = 28.0
FACT = 15.0
"""Of a NUMA node: its name, and each line about its CPUs and memory."""
SOCKET_HEAD = 26.0


def apart(children: Iterable[Child]) -> tuple[list[Device], list[Device]]:
    """The GPUs and the NICs right below a bridge, or in a NUMA node."""
    devices = [child for child in children if isinstance(child, Device)]
    return [one for one in devices if one.gpu], [one for one in devices if not one.gpu]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a diagram, in user units."""

    diagram: Diagram

    @cached_property
    def places(self) -> list[Place]:
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
        """From the upper edge of the NICs to the lower edge of the GPUs."""
        return self.nic_room + (self.gpu_height if any(device.gpu for device in self.diagram.devices) else 0)

    def width(self, children: Iterable[Child]) -> float:
        """Of what stands side by side below a bridge, or in a NUMA node."""
        children = tuple(children)
        gpus, nics = apart(children)
        return max(len(gpus), len(nics)) * COLUMN + sum(
            self.width(child.children) for child in children if isinstance(child, Bridge)
        )

    def place_width(self, place: Place) -> float:
        """The width of a NUMA node's box, in user units."""
        facts = max((min(text_width(fact, 11), 190.0) for fact in place.facts), default=0)
        head = max(text_width(place.title, 12, bold=True), facts)
        return max(self.width(place.children), head) + 2 * PAD

    @cached_property
    def head(self) -> float:
        """Of every NUMA node, down to where its devices begin."""
        return HEAD + FACT * max((len(place.facts) for place in self.places), default=0)

    @cached_property
    def full_height(self) -> float:
        """Of a NUMA node with devices."""
        return self.head + self.levels * LEVEL + self.device_room + PAD

    def height(self, place: Place) -> float:
        """The height of a NUMA node's box: the full height if it has devices, else only its head."""
        return self.full_height if place.children else self.head

    def group_width(self, group: Group) -> float:
        """The width of a group of sockets: its NUMA nodes, or its title if that is wider."""
        places = sum(map(self.place_width, group.places)) + GAP * (len(group.places) - 1)
        return max(places, text_width(group.title, 13, bold=True)) + 2 * PAD

    @cached_property
    def group_height(self) -> float:
        """All are equally high."""
        return SOCKET_HEAD + max(map(self.height, self.places), default=0) + PAD

    @cached_property
    def total_width(self) -> float:
        """The width of all groups side by side, gaps included."""
        return sum(map(self.group_width, self.diagram.groups)) + GAP * (len(self.diagram.groups) - 1)
