"""Draws NVLinks below the GPUs: bars that connect many GPUs, and arcs from one GPU to another."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import cos, pi, sin

from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.model import Topology
from topoalign.tools.draw import scene
from topoalign.tools.draw.scene import Box, DrawnLine, Item, Text, fitted, text_width

Pair = tuple[DeviceID, DeviceID, int]
"""Two GPUs, the one with the lower index first, and the number of NVLinks between them."""

LEAST_ON_A_BAR = 4
"""GPUs that are all linked to one another; three of them are drawn as a triangle."""


@dataclass(frozen=True)
class Bar:
    """A bar in the drawing that several GPUs are connected to."""

    title: str
    links: dict[DeviceID, int]
    """GPU -> its NVLinks to the bar. On a bar of direct links: those to each of the others."""


@dataclass(frozen=True)
class DrawnNvLinks:
    """The NVLinks of a machine as they are drawn: bars for groups of GPUs, pairs for all other links."""

    bars: tuple[Bar, ...]
    pairs: tuple[Pair, ...]
    """The NVLinks that are on no bar, ordered by the indexes of the GPUs."""

    def pair_lines(self, names: Mapping[DeviceID, str]) -> tuple[str, ...]:
        """The pairs in words, a line for each first GPU: `NVLinks of GPU0: GPU1 NV2, GPU3 NV1`."""
        lines: dict[str, list[str]] = {}
        for a, b, count in self.pairs:
            lines.setdefault(names[a], []).append(f"{names[b]} NV{count}")
        return tuple(f"NVLinks of {first}: {', '.join(others)}" for first, others in lines.items())


def nvlinks_of(topology: Topology) -> DrawnNvLinks:
    """
    Groups the NVLinks of a machine so that the drawing stays readable.

    GPUs on an NVSwitch are connected to one bar. So are four or more GPUs that are all linked to one another with equally
    many links: a pasted matrix shows an NVSwitch, or a small machine without one, like this. Every other link is an arc
    between two GPUs.
    """
    on_switch = {gpu.id: gpu.switch_links for gpu in topology.gpus if gpu.switch_links > 0}
    position = {gpu.id: i for i, gpu in enumerate(topology.gpus)}
    direct = {
        tuple(sorted((link.a, link.b), key=position.__getitem__)): link.fabric_links
        for link in topology.links
        if link.fabric_links > 0
        and link.a in position
        and link.b in position
        and not (link.a in on_switch and link.b in on_switch)
    }
    bars = [Bar(switch_title(on_switch.values()), on_switch)] if on_switch else []
    for members in islands(direct):
        pairs = [tuple(sorted(pair, key=position.__getitem__)) for pair in combinations(members, 2)]
        counts = {direct.get(pair, 0) for pair in pairs}
        if len(members) >= LEAST_ON_A_BAR and len(counts) == 1:
            (count,) = counts
            bars.append(
                Bar(f"NVLink: NV{count} all to all", dict.fromkeys(sorted(members, key=position.__getitem__), count))
            )
            direct = {pair: links for pair, links in direct.items() if pair not in pairs}
    ordered = sorted(direct.items(), key=lambda item: [position[end] for end in item[0]])
    return DrawnNvLinks(tuple(bars), tuple((a, b, count) for (a, b), count in ordered))


def switch_title(counts: Iterable[int]) -> str:
    """The title of a bar with these numbers of NVLinks per GPU: `NVSwitch: 12 NVLinks per GPU`."""
    least = min(counts)
    most = max(counts)
    if least == most:
        return f"NVSwitch: {most} NVLink{'s' if most > 1 else ''} per GPU"
    return f"NVSwitch: {least} to {most} NVLinks per GPU"


def islands(pairs: Iterable[tuple[DeviceID, ...]]) -> list[set[DeviceID]]:
    """The GPUs that reach one another over these links."""
    found: list[set[DeviceID]] = []
    for pair in pairs:
        touched = [island for island in found if not island.isdisjoint(pair)]
        found = [island for island in found if island.isdisjoint(pair)] + [set(pair).union(*touched)]
    return found


BAR_HEIGHT = 26.0
BAR_GAP = 16.0
MOST_ARCS = 48
"""More arcs than that cannot be followed by eye, so they are listed."""
POINTS = 28
"""Number of points of an arc, which is drawn as a line through them."""
LEVEL = 24.0
MOST_LEVELS = 6
"""Distance from one depth of arcs to the next; arcs between GPUs that are farther apart are no deeper."""
LABEL = 46.0
"""Distance from one number to the next on the same level, `NV999` included."""

Boxes = Mapping[DeviceID, Box]


def link_items(links: DrawnNvLinks, gpus: Boxes, top: float, left: float, width: float) -> tuple[list[Item], float]:
    """The items below the sockets, whose lower edge is `top`, and their lower edge."""
    items: list[Item] = []
    bottom = top
    for bar in links.bars:
        more, bottom = bar_items(bar, gpus, bottom + BAR_GAP, left, width)
        items += more
    if links.pairs and arcs_fit(links):
        more, bottom = arc_items(links.pairs, gpus, bottom)
        items += more
    return items, bottom


def arcs_fit(links: DrawnNvLinks) -> bool:
    """Whether there are few enough links to draw each as an arc."""
    return len(links.pairs) <= MOST_ARCS


def bar_items(bar: Bar, gpus: Boxes, y: float, left: float, width: float) -> tuple[list[Item], float]:
    """Yields a bar below all its GPUs, at `y`, and a line from each of them to it."""
    boxes = {gpu: gpus[gpu] for gpu in bar.links}
    title_width = text_width(bar.title, 12, bold=True) + 24
    start = min(box.x for box in boxes.values())
    end = max(box.right for box in boxes.values())
    if end - start < title_width:
        start = max(left, min(start, left + width - title_width))
        end = min(start + title_width, left + width)
    line = Box(start, y, end - start, BAR_HEIGHT, "nvlink", scene.NVLINK_BAR, scene.NVLINK, 1.6, 4, tooltip=bar.title)
    items: list[Item] = [line]
    for gpu, box in boxes.items():
        thick = min(1.5 + bar.links[gpu] / 8, 4.0)
        items.append(DrawnLine(((box.middle, box.bottom), (box.middle, y)), scene.NVLINK, thick))
    items.append(
        Text(line.middle, y + 17, fitted(bar.title, line.w - 8, 12, bold=True), 12, bold=True, anchor="middle")
    )
    return items, line.bottom


def arc_items(pairs: tuple[Pair, ...], gpus: Boxes, top: float) -> tuple[list[Item], float]:
    """
    An arc for each link with the number of NVLinks at its lowest point: the farther apart the GPUs, the deeper, and deep
    enough that no number stands on another.
    """
    ends = ports(pairs, gpus)
    steps = sorted({box.x for box in gpus.values()})
    taken: list[tuple[int, float]] = []
    lines: list[Item] = []
    labels: list[Item] = []
    for a, b, count in pairs:
        left, right = sorted((ends[a, b], ends[b, a]))
        middle = (left + right) / 2
        radius = (right - left) / 2
        level = min(abs(steps.index(gpus[a].x) - steps.index(gpus[b].x)), MOST_LEVELS)
        while any(level == other and abs(middle - at) < LABEL for other, at in taken):
            level += 1
        taken.append((level, middle))
        depth = LEVEL * (level + 0.5)
        arc = [(middle - radius * cos(pi * i / POINTS), top + depth * sin(pi * i / POINTS)) for i in range(POINTS + 1)]
        path = ((left, gpus[a].bottom), *arc, (right, gpus[b].bottom))
        lines.append(DrawnLine(path, scene.NVLINK, min(0.6 + 0.8 * count, 4.0), f"{count} NVLinks"))
        label = f"NV{count}"
        half = text_width(label, 10.5, bold=True) / 2
        labels += [
            Box(middle - half - 2, top + depth - 8, 2 * half + 4, 15, "label", stroke="#ffffff"),
            Text(middle, top + depth + 4, label, 10.5, bold=True, fill=scene.NVLINK, anchor="middle"),
        ]
    return lines + labels, top + LEVEL * (max(level for level, _ in taken) + 0.5) + 8


def ports(pairs: tuple[Pair, ...], gpus: Boxes) -> dict[tuple[DeviceID, DeviceID], float]:
    """
    The x coordinate at which the arc from a GPU to another leaves its lower edge; each arc has its own.

    To the nearest GPU it leaves outermost, and to the farthest in the middle, so that the arcs of one GPU do not cross.
    """
    found: dict[tuple[DeviceID, DeviceID], float] = {}
    for gpu, box in gpus.items():
        others = sorted((b if a == gpu else a for a, b, _ in pairs if gpu in (a, b)), key=lambda one: -gpus[one].x)
        order = [one for one in others if gpus[one].x < box.x] + [one for one in others if gpus[one].x > box.x]
        for i, other in enumerate(order, 1):
            found[gpu, other] = box.x + box.w * i / (len(order) + 1)
    return found
