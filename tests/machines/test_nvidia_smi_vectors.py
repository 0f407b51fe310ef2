"""The published outputs of real machines are read exactly as expected, and printed so that they read the same again."""

import json
from pathlib import Path

import pytest

from topoalign.core.model.errors import InvalidMachine
from topoalign.machines import load_machine
from topoalign.machines.nvidia_smi_print import print_matrix
from topoalign.tools.conformance.nvidia_smi_topo import cases
from topoalign.tools.machine_formats.nvidia_smi import read_pasted_matrix

STYLE = "rtx4090-8gpu-2nic-all-sys-tabs.txt"


@pytest.fixture
def folder(vectors: Path) -> Path:
    return vectors / "nvidia_smi_topo"


def test_every_file_is_read_as_expected_and_printed_as_the_same_machine(folder: Path) -> None:
    results = list(cases(folder))

    assert 8 <= len(results)
    for result in results:
        assert result.expected == result.got, result.id


def test_a_difference_is_seen(folder: Path, tmp_path: Path) -> None:
    expected = json.loads((folder / "expected.json").read_text())
    expected[STYLE]["matrix"]["GPU0"][1] = "NV4"
    (tmp_path / "expected.json").write_text(json.dumps({STYLE: expected[STYLE], "torn.txt": {"outcome": "refuse"}}))
    (tmp_path / STYLE).write_text((folder / STYLE).read_text())
    (tmp_path / "torn.txt").write_text((folder / STYLE).read_text()[:500])

    assert {STYLE: False, "torn.txt": True} == {result.id: result.passed for result in cases(tmp_path)}


def test_the_matrix_is_printed_byte_for_byte_as_drivers_print_it(folder: Path) -> None:
    text = (folder / STYLE).read_text()

    assert print_matrix(read_pasted_matrix(text)).startswith(text)


@pytest.mark.parametrize("name", ["dgx-a100-8gpu-10nic-epyc-nps4.txt", STYLE])
def test_the_legend_is_printed_as_drivers_print_it(folder: Path, name: str) -> None:
    real = (folder / "dgx-a100-8gpu-10nic-epyc-nps4.txt").read_text()
    legend = real[real.index("\nLegend:") :]
    printed = print_matrix(read_pasted_matrix((folder / name).read_text()))

    assert printed[printed.index("\nLegend:") :] == (legend if name != STYLE else legend.partition("\nNIC Legend")[0])


def test_the_dgx_a100_of_the_catalogue_has_the_matrix_of_a_real_one(folder: Path) -> None:
    real = read_pasted_matrix((folder / "dgx-a100-8gpu-10nic-epyc-nps4.txt").read_text())

    assert print_matrix(real) == print_matrix(load_machine("dgx-a100").topology)


def test_the_gb200_tray_of_the_catalogue_has_the_matrix_of_a_real_one(folder: Path) -> None:
    real = read_pasted_matrix((folder / "gb200-4gpu-8nic-gpu-numa-id.txt").read_text())

    assert print_matrix(real) == print_matrix(load_machine("gb200-tray").topology)


def test_every_file_cut_after_any_line_of_its_matrix_is_refused(folder: Path) -> None:
    """Save after the last row of a GPU: rows of NICs may be left out."""
    for path in sorted(folder.glob("*.txt")):
        rows = path.read_text().partition("\n\n")[0].splitlines()
        for count in range(1, len(rows)):
            if rows[count - 1].startswith("GPU") and not rows[count].startswith("GPU"):
                continue
            with pytest.raises(InvalidMachine, match="missing"):
                read_pasted_matrix("\n".join(rows[:count]))


@pytest.mark.parametrize("width", [40, 80, 100, 120])
def test_every_file_wrapped_by_a_terminal_is_refused(folder: Path, width: int) -> None:
    for path in sorted(folder.glob("*.txt")):
        lines = [line.expandtabs(8) for line in path.read_text().splitlines()]
        if len(lines[1]) > width:
            wrapped = [line[i : i + width] for line in lines for i in range(0, max(len(line), 1), width)]
            with pytest.raises(InvalidMachine):
                read_pasted_matrix("\n".join(wrapped))
