"""
Sizes of all parts of a drawing: the first half of the layout, which only measures.

Below a switch, devices are in columns, the NICs above the GPUs, so that every GPU's lower edge is free for its NVLinks.
A machine with very many devices stacks them in its columns until the drawing is no wider than a screen.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from topoalign.cli.draw.device import Device
from topoalign.cli.draw.devices import NIC_HEIGHT, WIDTH, gpu_height
from topoalign.cli.draw.diagram import Diagram, Group, Place
from topoalign.cli.draw.scene import text_width
from topoalign.cli.draw.tree import Bridge, Child, levels

MARGIN, PAD, GAP = 20.0, 12.0, 14.0
COLUMN = WIDTH + 18
"""From one column of devices to the next: between them runs what connects a stack."""
STACK = 7.0
"""Between the devices of a column."""
LEVEL, BAR = 34.0, 20.0
"""From one bridge to the one below it, and the height of a bridge."""
HEAD, FACT = 28.0, 15.0
"""Of a NUMA node: its name, and each line about its CPUs and memory."""
SOCKET_HEAD = 26.0
WIDEST = 1700.0
"""Devices are stacked rather than make it wider than this, as long as that helps."""
TALLEST_STACK = 12
MOST_BARE = 8
"""Columns of NUMA nodes without devices."""


def apart(children: Iterable[Child]) -> tuple[list[Device], list[Device]]:
    """The GPUs and the NICs right below a bridge, or in a NUMA node."""
    devices = [child for child in children if isinstance(child, Device)]
    return [one for one in devices if one.gpu], [one for one in devices if not one.gpu]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a diagram whose GPUs are stacked up to `rows` high, and its NICs up to twice that."""

    diagram: Diagram
    rows: int

    @cached_property
    def places(self) -> list[Place]:
        """All NUMA nodes of the diagram, in the order of drawing."""
        return [place for group in self.diagram.groups for place in group.places]

    @cached_property
    def racks(self) -> list[tuple[list[Device], list[Device]]]:
        """For each switch with devices: its NICs and its GPUs."""
        return [rack for place in self.places for rack in racks(place.children)]

    @cached_property
    def gpu_height(self) -> float:
        """The height of every GPU's box, in user units."""
        return gpu_height(self.diagram.devices)

    @cached_property
    def nic_rows(self) -> int:
        """Above GPUs."""
        return max((ceil(len(nics) / self.columns(gpus, nics)) for gpus, nics in self.racks if gpus), default=0)

    @cached_property
    def levels(self) -> int:
        """The largest number of bridges one below the other."""
        return max((levels(place.children) for place in self.places), default=0)

    @cached_property
    def nic_room(self) -> float:
        """The height reserved for the rows of NICs above the GPUs, in user units."""
        return self.nic_rows * (NIC_HEIGHT + STACK)

    @cached_property
    def device_room(self) -> float:
        """From the upper edge of the first devices to the lower edge of the last."""
        gpu_rows = max((ceil(len(gpus) / self.columns(gpus, nics)) for gpus, nics in self.racks), default=0)
        alone = max((ceil(len(nics) / self.columns(gpus, nics)) for gpus, nics in self.racks if not gpus), default=0)
        return max(self.nic_room + gpu_rows * (self.gpu_height + STACK), alone * (NIC_HEIGHT + STACK)) - STACK

    def columns(self, gpus: list[Device], nics: list[Device]) -> int:
        """How many columns these devices take."""
        return max(ceil(len(gpus) / self.rows), ceil(len(nics) / (2 * self.rows + bool(gpus))), 1)

    def width(self, children: Iterable[Child]) -> float:
        """Of what stands side by side below a bridge, or in a NUMA node."""
        children = tuple(children)
        gpus, nics = apart(children)
        own = self.columns(gpus, nics) * COLUMN if gpus or nics else 0
        return own + sum(self.width(child.children) for child in children if isinstance(child, Bridge))

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

    def stacks(self, group: Group) -> list[list[Place]]:
        """The NUMA nodes of a socket in columns: one with devices is a column, those without share some."""
        full = [[place] for place in group.places if place.children]
        bare = [place for place in group.places if not place.children]
        high = int((self.full_height + GAP) // (self.head + GAP)) if self.racks else 1
        high = max(high, ceil(len(bare) / MOST_BARE), 1)
        return full + [bare[i : i + high] for i in range(0, len(bare), high)]

    def stack_height(self, stack: list[Place]) -> float:
        """The height of NUMA nodes that are drawn one below the other, gaps included."""
        return sum(map(self.height, stack)) + GAP * (len(stack) - 1)

    def group_width(self, group: Group) -> float:
        """The width of a group of sockets, in user units: its stacks, or its title if that is wider."""
        stacks = [max(map(self.place_width, stack)) for stack in self.stacks(group)]
        return max(sum(stacks) + GAP * (len(stacks) - 1), text_width(group.title, 13, bold=True)) + 2 * PAD

    @cached_property
    def group_height(self) -> float:
        """All are equally high."""
        stacks = [stack for group in self.diagram.groups for stack in self.stacks(group)]
        return SOCKET_HEAD + max(map(self.stack_height, stacks), default=0) + PAD

    @cached_property
    def total_width(self) -> float:
        """The width of all groups side by side, gaps included."""
        return sum(map(self.group_width, self.diagram.groups)) + GAP * (len(self.diagram.groups) - 1)


def racks(children: Iterable[Child]) -> list[tuple[list[Device], list[Device]]]:
    """The devices of each bridge that has some right below it, as GPUs and NICs."""
    children = tuple(children)
    own = apart(children)
    below = [rack for child in children if isinstance(child, Bridge) for rack in racks(child.children)]
    return below + ([own] if any(own) else [])


def chosen_sizes(diagram: Diagram) -> Sizes:
    """With as low stacks as make it no wider than a screen; where none do, with the lowest that make it narrowest."""
    attempts = [Sizes(diagram, rows) for rows in range(1, TALLEST_STACK + 1)]
    for attempt in attempts:
        if attempt.total_width <= WIDEST:
            return attempt
    return min(attempts, key=lambda attempt: attempt.total_width)
