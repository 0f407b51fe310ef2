"""What people post as the output of `nvidia-smi topo -m`: read where nothing is lost, else refused with what to do."""

from pathlib import Path

import pytest

from topoalign.core.model.errors import InvalidMachine
from topoalign.machines import load_machine
from topoalign.tools.machine_formats import read_topology
from topoalign.tools.machine_formats.nvidia_smi import read_matrix, read_pasted_matrix

ROW = "GPU0     X      NV18    PIX             0               N/A"
EXPANDED = f"""srun: job 7 has been allocated resources
        GPU0    GPU1    NIC0    CPU Affinity    NUMA Affinity   GPU NUMA ID
{ROW}
GPU1    NV18     X      NODE    56      1               N/A
NIC0    PIX     NODE     X

Legend:

NIC Legend:

  NIC0: mlx5_0
```
"""

MARKDOWN = """It has two cards:

| | **GPU0** | **GPU1** | CPU Affinity | NUMA Affinity |
|:---|:---:|---|---|---|
| **GPU0** | X | `NV4` | 0-7 | 0 |
| **GPU1** | `NV4` | X | | 1 |

| NVIDIA-SMI 570.86 | Driver Version: 570.86 |
|   0  N/A  N/A   4242   C   python3   1MiB |
"""

WHOLE = "\tGPU0\tGPU1\nGPU0\t X \tSYS\nGPU1\tSYS\t X \n\nLegend:\n"


def refused(text: str) -> tuple[str, str]:
    with pytest.raises(InvalidMachine) as caught:
        read_pasted_matrix(text)
    assert caught.value.remedy is not None
    return str(caught.value).partition("\n")[0], caught.value.remedy


def test_an_empty_cpu_affinity_between_blanks_is_told_from_the_tab_stops() -> None:
    matrix = read_matrix(EXPANDED)

    assert {"GPU0": "", "GPU1": "56"} == matrix.cpu_affinity
    assert {"GPU0": "0", "GPU1": "1"} == matrix.numa_affinity
    assert {"GPU0": "N/A", "GPU1": "N/A"} == matrix.gpu_numa_id
    assert [(0,), (1,)] == [gpu.numa_affinity for gpu in read_pasted_matrix(EXPANDED).gpus]


@pytest.mark.parametrize("moved", [ROW.replace("  0  ", " 0   "), ROW.replace("NV18  ", "NV18 ", 1)])
def test_spaces_that_no_tabs_left_are_refused_with_the_remedy(moved: str) -> None:
    """If spaces did not come from tabs, cells cannot be assigned to columns; the remedy is to keep the tabs."""
    finding, remedy = refused(EXPANDED.replace(ROW, moved))

    assert "line 3, " in finding and "the column of 'N/A' is not clear" in finding
    assert "keep the tabs" in remedy


def test_a_markdown_table_is_read_without_other_tables_below_it() -> None:
    """A Markdown table is read, and rows of other tables below it are not taken as its rows."""
    matrix = read_matrix(MARKDOWN)

    assert {"GPU0": ("X", "NV4"), "GPU1": ("NV4", "X")} == matrix.cells
    assert ({"GPU0": "0-7", "GPU1": ""}, {"GPU0": "0", "GPU1": "1"}) == (matrix.cpu_affinity, matrix.numa_affinity)


def test_a_fault_in_a_markdown_table_is_told_by_its_line_and_column() -> None:
    finding, _ = refused(MARKDOWN.replace("`NV4` | X |", "NV9 | X |"))

    assert "line 5, column 19: the matrix is not symmetric" in finding


def test_a_table_with_words_in_front_of_its_labels_is_refused_as_a_table() -> None:
    finding, remedy = refused("| Device | GPU0 | GPU1 |\n|---|---|---|\n| GPU0 | X | SYS |\n| GPU1 | SYS | X |\n")

    assert "line 3, column 3: the row GPU0 has no header" in finding
    assert remedy

    finding, remedy = refused("| Device | GPU0 | GPU1 |\n|---|---|---|\n| a GPU0 | X | SYS |\n")

    assert "line 1: it holds no matrix: the table has something in front of the labels" in finding
    assert "raw output" in remedy


@pytest.mark.parametrize("torn", ["", "SYS\t X ", "SYSX"])
def test_two_outputs_in_one_text_are_refused_by_their_lines(torn: str) -> None:
    """Two outputs in one text are refused with their line numbers, whatever else is wrong with either."""
    first = WHOLE.replace("SYS\t X ", torn) if torn else WHOLE
    finding, remedy = refused(f"[a@node-8 ~]$ nvidia-smi topo -m\n{first}[a@node-7 ~]$ nvidia-smi topo -m\n{WHOLE}")

    assert "two matrices, one from line 2 on and another from line 8 on" in finding
    assert "one machine at a time" in remedy


@pytest.mark.parametrize(
    ("text", "finding", "remedy"),
    [
        (
            '"topo" is not a recognized command. Please run "nvidia-smi -h".',
            "Windows does not support it",
            "under Linux",
        ),
        ("ERROR: 'topo' is not a recognized command", "Windows does not support it", "name a machine of the catalogue"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "found no GPU", "where"),
        ("No devices were found", "found no GPU", "where `nvidia-smi` alone lists the GPUs"),
        ("bash: nvidia-smi: command not found", "there was no nvidia-smi", "on the machine itself"),
        (
            "$ nvidia-smi\n| NVIDIA-SMI 570.86  Driver |\n|   0  NVIDIA H100 |",
            "`nvidia-smi` alone",
            "nvidia-smi topo -m",
        ),
        ("hello", "no line holds the labels", "nvidia-smi topo -m"),
    ],
)
def test_what_is_no_matrix_is_refused_with_what_to_paste_instead(text: str, finding: str, remedy: str) -> None:
    found, do = refused(text)

    assert finding in found
    assert remedy in do


def test_pastes_of_people_are_read_or_refused_as_their_list_says(vectors: Path) -> None:
    folder = vectors / "pastes"
    if not folder.is_dir():
        pytest.skip("no pastes in the case files")
    gpus = {
        "3090x6-5060-markdown-table": 7,
        "nano4-h200-empty-cpu-affinity": 8,
        "pcie-8gpu-pix-pairs": 8,
        "rtx4090-8gpu-nps4-tight-column": 8,
    }
    for name, count in gpus.items():
        assert count == len(load_machine(str(folder / f"{name}.txt")).topology.gpus), name
    with pytest.raises(InvalidMachine, match="two matrices, one from line 2 on and another from line 51 on"):
        load_machine(str(folder / "aihub-two-pastes-in-one.txt"))
    with pytest.raises(InvalidMachine, match="NVIDIA's driver for Windows does not support it"):
        load_machine(str(folder / "windows-error.txt"))


@pytest.mark.parametrize(
    ("text", "command", "remedy"),
    [
        ("<nvidia_smi_log>\n<gpu></gpu></nvidia_smi_log>", "`nvidia-smi -q`", "`nvidia-smi topo -m`"),
        ('<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "a.dtd">\n<nvidia_smi_log/>', "-q`", "topo -m`"),
        ("==============NVSMI LOG==============\nTimestamp : x", "`nvidia-smi -q`", "`nvidia-smi topo -m`"),
        ("GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1111)", "`nvidia-smi -L`", "`nvidia-smi topo -m`"),
        ("GPU 0: NVIDIA H100 (UUID: GPU-1)\n\t Link 0: 26.562 GB/s", "`nvidia-smi nvlink`", "`nvidia-smi topo -m`"),
        ("index, name, uuid\n0, NVIDIA H100, GPU-1", "`nvidia-smi --query-gpu`", "`nvidia-smi topo -m`"),
        (
            " \tGPU0\tGPU1\t\n GPU0\tX\tOK\t\n GPU1\tOK\tX\t\n\nLegend:\n\n  X    = Self\n  CNS  = Chipset not supported\n",
            "`nvidia-smi topo -p2p`",
            "`nvidia-smi topo -m`",
        ),
        (
            "=== ROCm System Management Interface ===\n=== Hops ===\n       GPU0   GPU1\nGPU0   0   1\nGPU1   1   0\n",
            "AMD GPUs are not supported",
            "NVIDIA GPUs",
        ),
        ("WEIGHT TABLE:\n             0000:01:00.0 0000:02:00.0", "AMD GPUs are not supported", "NVIDIA GPUs"),
        ("1a:00.0 3D controller: NVIDIA Corporation GH100", "lspci", "lstopo --of xml"),
        ("-+-[0000:c0]-+-00.0  Intel Corporation", "lspci", "lstopo --of xml"),
        ("Architecture:            x86_64\nCPU(s):  96", "lscpu or numactl", "lstopo --of xml"),
        ("available: 2 nodes (0-1)\nnode 0 cpus: 0 1", "lscpu or numactl", "lstopo --of xml"),
        ("Machine (1008GB total)\n  Package L#0", "lstopo's output as text", "lstopo --of xml"),
        ("mlx5_0 port 1 ==> ib0 (Up)", "ibdev2netdev", "`nvidia-smi topo -m`"),
    ],
)
def test_output_of_another_command_is_recognised_and_named(text: str, command: str, remedy: str) -> None:
    with pytest.raises(InvalidMachine) as caught:
        read_topology(text.encode())

    assert command in caught.value.finding
    assert remedy in caught.value.remedy


def test_output_of_another_command_before_a_matrix_hides_no_fault_of_it() -> None:
    finding, _ = refused(f"GPU 0: NVIDIA H100 (UUID: GPU-1)\n{WHOLE.replace('SYS', 'SSY', 1)}")

    assert "'SSY' is not a cell" in finding
