"""Drawings show every device once, where it belongs, readable, and obey nothing that stands in a name."""

import re
from io import BytesIO
from itertools import combinations, product

import msgspec
import pytest
from defusedxml import ElementTree
from draw_support import ALLOCATIONS, HEALTH, allocation, check_scene, cpus, devices, extent, names, nodes
from fact_support import mig_device
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from topoalign.core.model.events import DeviceHealth, HealthState, Owner
from topoalign.core.model.ids import AllocationID, ContainerName, DeviceID, Namespace, PodName
from topoalign.core.model.topology.device_links import Link
from topoalign.core.model.topology.model import Gpu, Nic, PciBridge, Topology
from topoalign.machines import catalogue
from topoalign.tools.draw import scene as palette
from topoalign.tools.draw.device import holder_letter
from topoalign.tools.draw.diagram import Diagram, diagram_of
from topoalign.tools.draw.layout import scene_of
from topoalign.tools.draw.scene import Box, DrawnLine, Text, fitted, text_width, wrap_text
from topoalign.tools.draw.svg import SCALE, png, svg
from topoalign.tools.draw.text import MARKS, coloured, render_text


def gpus(count: int, per_node: int = 0, switch_links: int = 0) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(
            id=DeviceID(f"GPU-{i}"),
            index=i,
            numa_affinity=(i // per_node,) if per_node else (),
            switch_links=switch_links,
        )
        for i in range(count)
    )


def nics(count: int, per_node: int = 0) -> tuple[Nic, ...]:
    return tuple(
        Nic(id=DeviceID(f"mlx5_{i}"), index=i, numa_affinity=(i // per_node,) if per_node else ()) for i in range(count)
    )


MESH = tuple(
    Link(a=DeviceID(f"GPU-{a}"), b=DeviceID(f"GPU-{b}"), fabric_links=1 + (a + b) % 3)
    for a, b in combinations(range(16), 2)
)
ODD = {
    "nothing": Topology(),
    "no node is known": Topology(gpus=gpus(3), nics=nics(2)),
    "72 GPUs on a switch": Topology(cpus=cpus(2), nodes=nodes(2), gpus=gpus(72, 36, 18), nics=nics(20, 10)),
    "34 NUMA nodes": Topology(cpus=cpus(34), nodes=nodes(34), gpus=gpus(34, 1)),
    "200 bare NUMA nodes": Topology(nodes=nodes(200)),
    "a mesh that is too dense for arcs": Topology(cpus=cpus(2), nodes=nodes(2), gpus=gpus(16, 8), links=MESH),
    "a chain of bridges that bites its tail": Topology(
        bridges=(PciBridge(address="a", parent="b"), PciBridge(address="b", parent="a")),
        gpus=(Gpu(id=DeviceID("GPU-0"), index=0, bridge="a"), Gpu(id=DeviceID("GPU-1"), index=1, bridge="lost")),
    ),
    "switches below switches without end": Topology(
        bridges=tuple(PciBridge(address=str(i), parent=str(i - 1) if i else None) for i in range(128)),
        gpus=tuple(Gpu(id=DeviceID(f"GPU-{i}"), index=i, bridge=str(i)) for i in range(128)),
    ),
}
MACHINES = {name: catalogue.machine(name) for name in catalogue.names()} | ODD


def drawn(name: str) -> Diagram:
    return diagram_of(name, MACHINES[name], ALLOCATIONS, HEALTH)


@pytest.mark.parametrize("width", [40, 80, 100, 160])
@pytest.mark.parametrize("name", MACHINES)
def test_text_fits_the_width_and_names_every_device_once(name: str, width: int) -> None:
    lines = render_text(drawn(name), width).splitlines()

    assert [] == [line for line in lines if len(line) > width]
    found = re.findall(r"\[((?:GPU|NIC)[0-9]+)[ \]]", "\n".join(lines))
    assert names(MACHINES[name]) == sorted(found)


@pytest.mark.parametrize("name", catalogue.names())
def test_ascii_only_is_ascii_in_the_same_places(name: str) -> None:
    plain, lined = (render_text(drawn(name), 100, ascii_only) for ascii_only in (True, False))

    assert plain.isascii()
    assert [len(line) for line in lined.splitlines()] == [len(line) for line in plain.splitlines()]


def test_frames_of_the_text_close() -> None:
    lines = render_text(drawn("dgx-a100"), 100).splitlines()

    drawing = [line for line in lines if line and line[0] in "┌│└╔║╚"]
    assert {100} == {len(line) for line in drawing}
    for upper, lower in ("┐┘", "╔╚", "╗╝"):
        assert 0 < sum(line.count(upper) for line in drawing) == sum(line.count(lower) for line in drawing)


def test_wide_characters_do_not_shift_the_frames_of_the_text() -> None:
    diagram = diagram_of(
        "x", Topology(bridges=(PciBridge(address="中文é"),), gpus=(Gpu(id=DeviceID("g"), index=0, bridge="中文é"),))
    )

    assert "host bridge ??é" in render_text(diagram, 80)


def test_colours_on_a_terminal_change_no_character() -> None:
    diagram = drawn("dgx-a100")
    plain = render_text(diagram, 100)
    painted = coloured(plain, diagram)

    assert plain == re.sub(r"\x1b\[[0-9;]*m", "", painted)
    assert 11 + 3 == painted.count("\x1b[0m"), "devices that are held, and the legend"


HOSTILE = "</text><script>alert(1)</script>\x1b[31m\u202e\x00\ud800\ufffe\"'&]]>" + "long" * 200


def inside(text: Text, box: Box) -> bool:
    left, top, right, bottom = extent(text)
    return box.x <= left and box.y <= top and right <= box.right and bottom <= box.bottom


SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", MACHINES)
def test_every_device_is_drawn_once_without_overlap_or_cut(name: str) -> None:
    """Every device is in the scene once, and nothing overlaps or is cut off."""
    check_scene(scene_of(drawn(name)), MACHINES[name])


@pytest.mark.parametrize("name", MACHINES)
def test_an_svg_is_well_formed_and_every_device_has_its_box_with_its_story(name: str) -> None:
    root = ElementTree.fromstring(svg(scene_of(drawn(name))).encode())

    stories = [
        rect.findtext(f"{SVG}title", "") for rect in root.iter(f"{SVG}rect") if rect.get("class") in ("gpu", "nic")
    ]
    assert names(MACHINES[name]) == sorted(tooltip.split()[0] for tooltip in stories)
    assert ["0", "0", root.get("width"), root.get("height")] == root.get("viewBox").split()
    assert not {"script", "style", "image", "a", "foreignObject"} & {one.tag.removeprefix(SVG) for one in root.iter()}


@pytest.mark.parametrize("name", ["nothing", "dgx-a100", "72 GPUs on a switch"])
def test_a_png_has_the_size_of_the_scene(name: str) -> None:
    scene = scene_of(drawn(name))

    with Image.open(BytesIO(png(scene))) as image:
        assert "PNG" == image.format
        assert (round(scene.width * SCALE), round(scene.height * SCALE)) in (
            image.size,
            tuple(2 * n for n in image.size),
        )


def test_holders_have_a_colour_and_a_letter_and_stand_in_the_legend() -> None:
    scene = scene_of(drawn("dgx-a100"))

    fills = {box.tooltip.split()[0]: box.fill for box in devices(scene)}
    swatches = [item for item in scene.items if isinstance(item, Box) and item.role == "swatch"]
    texts = [item.text for item in scene.items if isinstance(item, Text)]
    assert [*palette.HOLDERS[:3], palette.PLACE] == [swatch.fill for swatch in swatches][:4]
    assert {palette.HOLDERS[0]} == {fills[name] for name in ("GPU0", "GPU3", "NIC0", "NIC3")}
    assert (palette.HOLDERS[1], palette.HOLDERS[2], palette.PLACE) == (fills["GPU6"], fills["GPU7"], fills["GPU5"])
    held = {"ml/train/main: 4 GPUs, 12 NVLinks, 240 GB/s", "ml/tune/main", "research/notebook/main"}
    assert held | {"free", "unhealthy", "cordoned"} <= set(texts)
    assert (9, 3, 2) == tuple(texts.count(letter) for letter in "ABC")


@pytest.mark.parametrize("length", [60, 230, 253])
def test_containers_with_long_names_are_told_apart(length: int) -> None:
    """Pods of one controller differ in the last characters of their names, containers of one pod in those behind."""
    pods = [f"{'serve-' * 50}"[: length - 6] + f"-{number}" for number in (30001, 30002)]
    held = [
        msgspec.structs.replace(
            allocation(pod, [f"GPU-{number}"]),
            id=AllocationID(f"{number}"),
            owner=Owner(namespace=Namespace("n" * 63), pod=PodName(pod), container=ContainerName(name)),
        )
        for number, (pod, name) in enumerate(product(pods, ("c" * 62 + "0", "c" * 62 + "1")))
    ]
    diagram = diagram_of("x", Topology(gpus=gpus(4)), held)
    texts = [item.text for item in scene_of(diagram).items if isinstance(item, Text)]

    check_scene(scene_of(diagram), Topology(gpus=gpus(4)))
    assert 4 == len(diagram.holders)
    assert all(f"{'n' * 63}/{pod}/{'c' * 62}{last}" in "".join(texts) for pod in pods for last in "01")


def test_a_legend_is_only_of_what_can_be_seen() -> None:
    scene = scene_of(diagram_of("dgx2", MACHINES["dgx2"]))

    assert [] == [item for item in scene.items if isinstance(item, Box) and item.role == "swatch"]


@pytest.mark.parametrize(
    ("health", "mark"),
    [
        (DeviceHealth(state=HealthState.UNHEALTHY, reason="lost"), "unhealthy"),
        (DeviceHealth(state=HealthState.HEALTHY, cordoned=True), "cordoned"),
    ],
)
def test_what_is_wrong_with_a_device_is_told_by_more_than_colour(health: DeviceHealth, mark: str) -> None:
    sound, hurt = (
        diagram_of("x", Topology(gpus=gpus(1)), (), {DeviceID("GPU-0"): one})
        for one in (DeviceHealth(state=HealthState.HEALTHY), health)
    )

    lines = [sum(isinstance(item, DrawnLine) for item in scene_of(diagram).items) for diagram in (sound, hurt)]
    assert 0 == lines[0] < lines[1]
    assert mark in [item.text for item in scene_of(hurt).items if isinstance(item, Text)]
    assert f"[GPU0 {MARKS[mark]}]" in render_text(hurt, 100)


@pytest.mark.parametrize("name", ["hgx-b200-gpu0-off", "hgx-b200-gpu0-half"])
def test_the_box_of_a_degraded_gpu_alone_has_the_word(name: str) -> None:
    diagram = diagram_of(name, MACHINES[name])
    scene = scene_of(diagram)
    boxes = {box.tooltip.split()[0]: box for box in devices(scene)}

    words = [item for item in scene.items if isinstance(item, Text) and item.text == "degraded"]
    assert ["GPU0"] == [gpu for gpu, box in boxes.items() for word in words if inside(word, box)]
    assert 1 == len(words) and words[0].bold
    assert (
        "[GPU0 *]" in render_text(diagram, 100)
        and "[GPU1]" in render_text(diagram, 100)
        and "* degraded" in render_text(diagram, 100)
    )


def test_the_legend_names_the_seam_of_whole_gpus_over_all_allocations() -> None:
    """Two allocations of one container are one set; a MIG instance and a share of a GPU are no whole GPUs."""
    mig = (mig_device("MIG-0", 0, memory=1),)
    topology = Topology(gpus=(*gpus(4, switch_links=18), Gpu(id=DeviceID("GPU-4"), index=4, mig=mig)))
    held = [allocation("a", ["GPU-0"]), allocation("a", ["GPU-2"]), allocation("b", ["GPU-1", "GPU-3::0", "MIG-0"])]
    diagram = diagram_of("x", topology, held)

    assert ["ml/a/main: 2 GPUs, 18 NVLinks", "ml/b/main"] == diagram.legend
    assert [f"[{holder_letter(i)}] {entry}" for i, entry in enumerate(diagram.legend)] == render_text(
        diagram, 100
    ).splitlines()[-2:]
    assert {*diagram.legend} <= {item.text for item in scene_of(diagram).items if isinstance(item, Text)}


def test_parts_of_a_device_show_all_their_holders() -> None:
    mig = tuple(mig_device(f"MIG-{i}", i, memory=1) for i in range(2))
    topology = Topology(gpus=(Gpu(id=DeviceID("GPU-0"), index=0, mig=mig),))
    diagram = diagram_of("x", topology, [allocation("a", ["MIG-0"]), allocation("b", ["MIG-1"])])

    (device,) = diagram.devices
    assert ("ml/a/main", "ml/b/main") == tuple(diagram.holders[holder] for holder in device.holders)
    assert "[GPU0 AB]" in render_text(diagram, 100)
    assert {"A B"} <= {item.text for item in scene_of(diagram).items if isinstance(item, Text)}


def test_letters_of_many_holders_differ() -> None:
    assert ["A", "Z", "A1", "Z1", "A2"] == [holder_letter(holder) for holder in (0, 25, 26, 51, 52)]


def test_pcie_is_drawn_without_the_bridges_on_which_nothing_branches() -> None:
    scene = scene_of(diagram_of("x", MACHINES["dgx1-volta"]))

    bars = [item.tooltip for item in scene.items if isinstance(item, Box) and item.role in ("host", "switch")]
    assert [2, 4] == [sum(kind in tooltip for tooltip in bars) for kind in ("PCIe host bridge", "PCIe switch")]


@pytest.mark.parametrize(
    ("name", "bars", "pairs"),
    [
        ("dgx1-volta", [], 16),
        ("dgx2", ["NVSwitch: 6 NVLinks per GPU"], 0),
        ("gb200-tray", ["NVSwitch: 18 NVLinks per GPU"], 0),
        ("8x-nvlink-pairs", [], 4),
        ("two-socket-8xpcie", [], 0),
    ],
)
def test_nvlinks_are_a_bar_where_all_hang_on_it_and_else_one_by_one(name: str, bars: list[str], pairs: int) -> None:
    nvlinks = drawn(name).nvlinks

    assert (bars, pairs) == ([bar.title for bar in nvlinks.bars], len(nvlinks.pairs))


def test_equal_links_between_all_of_a_group_are_one_bar() -> None:
    links = tuple(
        Link(a=DeviceID(f"GPU-{a}"), b=DeviceID(f"GPU-{b}"), fabric_links=18) for a, b in combinations(range(8), 2)
    )
    whole, less_one = (diagram_of("x", Topology(gpus=gpus(8), links=some)).nvlinks for some in (links, links[1:]))

    assert (["NVLink: NV18 all to all"], 0) == ([bar.title for bar in whole.bars], len(whole.pairs))
    assert ([], 27) == ([bar.title for bar in less_one.bars], len(less_one.pairs))


def test_links_that_nobody_could_follow_are_listed_instead() -> None:
    def drawing(count: int) -> tuple[int, list[str]]:
        links = tuple(link for link in MESH if max(int(end.removeprefix("GPU-")) for end in (link.a, link.b)) < count)
        scene = scene_of(diagram_of("x", Topology(gpus=gpus(count), links=links)))
        texts = [item.text for item in scene.items if isinstance(item, Text)]
        return sum(text.startswith("NV") and text[2:].isdigit() for text in texts), [
            t for t in texts if "NVLinks of" in t
        ]

    assert (28, []) == drawing(8)
    assert (0, 11) == (drawing(12)[0], len(drawing(12)[1]))
    assert "NVLinks of GPU10: GPU11 NV1" == drawing(12)[1][-1]


def test_what_is_hostile_in_names_is_text_and_nothing_else() -> None:
    topology = Topology(
        nodes=nodes(1),
        bridges=(PciBridge(address=HOSTILE),),
        gpus=(Gpu(id=DeviceID(HOSTILE), index=0, name=HOSTILE, pci=HOSTILE, bridge=HOSTILE, numa_affinity=(0,)),),
        nics=(Nic(id=DeviceID(HOSTILE + "n"), index=0, bridge=HOSTILE, netdevs=(HOSTILE,), numa_affinity=(0,)),),
    )
    health = {DeviceID(HOSTILE): DeviceHealth(state=HealthState.UNHEALTHY, reason=HOSTILE)}
    diagram = diagram_of(HOSTILE, topology, [allocation(HOSTILE, [HOSTILE])], health)
    scene = scene_of(diagram)

    check_scene(scene, topology)
    written = svg(scene)
    assert not [c for c in written if not c.isprintable() and c != "\n"]
    assert {"svg", "title", "rect", "text", "polyline"} == {
        one.tag.removeprefix(SVG) for one in ElementTree.fromstring(written.encode()).iter()
    }
    assert png(scene).startswith(b"\x89PNG")
    for ascii_only in (True, False):
        lines = render_text(diagram, 80, ascii_only).splitlines()
        assert [] == [line for line in lines if len(line) > 80 or not line.isprintable()]


def test_texts_are_cut_and_wrapped_to_a_width() -> None:
    assert "abc" == fitted("abc", 100, 10)
    assert fitted("a" * 100, 50, 10).endswith("…")
    assert text_width(fitted("a" * 100, 50, 10), 10) <= 50
    assert ["aa aa", "aa"] == wrap_text("aa aa aa", text_width("aa aa", 10) + 1, 10)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Any machine, sensible or not: devices on any bridge, bridges on any other, NUMA nodes known or not."""
    node_count = draw(st.integers(0, 5))
    bridges = [
        PciBridge(address=f"b{i}", parent=draw(st.sampled_from([None, *(f"b{j}" for j in range(i))])))
        for i in range(draw(st.integers(0, 12)))
    ]
    bridge = st.sampled_from([None, *(one.address for one in bridges)])
    affinity = st.sets(st.integers(0, node_count), max_size=3).map(lambda found: tuple(sorted(found)))
    found_gpus = tuple(
        Gpu(
            id=DeviceID(f"GPU-{i}"),
            index=i,
            bridge=draw(bridge),
            numa_affinity=draw(affinity),
            switch_links=draw(st.sampled_from([0, 0, 12, 18])),
            memory=draw(st.sampled_from([None, 2**36])),
        )
        for i in range(draw(st.integers(0, 18)))
    )
    found_nics = tuple(
        Nic(id=DeviceID(f"mlx5_{i}"), index=i, bridge=draw(bridge), numa_affinity=draw(affinity))
        for i in range(draw(st.integers(0, 12)))
    )
    pairs = list(combinations([gpu.id for gpu in found_gpus], 2))
    linked = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=20)) if pairs else []
    links = tuple(Link(a=a, b=b, fabric_links=draw(st.integers(0, 6))) for a, b in linked)
    known = draw(st.integers(0, node_count))
    return Topology(
        cpus=cpus(known), nodes=nodes(node_count), bridges=tuple(bridges), gpus=found_gpus, nics=found_nics, links=links
    )


@settings(max_examples=60)
@given(topologies())
def test_any_machine_is_drawn_whole(topology: Topology) -> None:
    diagram = diagram_of("any", topology, ALLOCATIONS, HEALTH)

    check_scene(scene_of(diagram), topology)
    found = re.findall(r"\[((?:GPU|NIC)[0-9]+)[ \]]", render_text(diagram, 72))
    assert names(topology) == sorted(found)
