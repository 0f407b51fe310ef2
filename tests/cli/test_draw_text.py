"""Drawings in characters fit the terminal, close their frames and name every device once."""

import re

import pytest
from draw_support import MACHINES, drawn, names

from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.model import Gpu, PciBridge, Topology
from topoalign.machines import catalogue
from topoalign.tools.draw.diagram import diagram_of
from topoalign.tools.draw.text import coloured, render_text


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
