"""What people paste, and what becomes of it: one rule of the parser after the other."""

import re

import pytest

from topoalign.core.model.errors import InvalidMachine
from topoalign.machines.nvidia_smi_print import print_matrix
from topoalign.tools.machine_formats.nvidia_smi import read_matrix, read_pasted_matrix

WHOLE = """\
\tGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV4\tPIX\tSYS\t0-7,16-23\t0\t\tN/A
GPU1\tNV4\t X \tSYS\tPXB\t8-15,24-31\t1\t\tN/A
NIC0\tPIX\tSYS\t X \tSYS
NIC1\tSYS\tPXB\tSYS\t X
"""
LEGEND = "\nLegend:\n\n  X    = Self\n"
NIC_LEGEND = "\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_bond_0\n"
CELLS = {
    "GPU0": ("X", "NV4", "PIX", "SYS"),
    "GPU1": ("NV4", "X", "SYS", "PXB"),
    "NIC0": ("PIX", "SYS", "X", "SYS"),
    "NIC1": ("SYS", "PXB", "SYS", "X"),
}

BLANKS = "\n".join(
    line.replace("\t0\t\t", "\t0\t").replace("\t1\t\t", "\t1\t").expandtabs(16) for line in WHOLE.splitlines()
)


def replaced(old: str, new: str) -> str:
    assert old in WHOLE
    return WHOLE.replace(old, new, 1)


@pytest.mark.parametrize(
    "text",
    [
        WHOLE,
        BLANKS,
        WHOLE.replace("\n", "\r\n"),
        WHOLE.replace("\n", "\t \n"),
        WHOLE.replace("\n", "\n\n"),
        WHOLE.replace("\t", "\t\t"),
        WHOLE.replace("\t", " \xa0 "),
        "# " + WHOLE.rstrip().replace("\n", "\n# ") + "\n",
        "#" + WHOLE.rstrip().replace("\n", "\n#"),
        "> " + WHOLE.rstrip().replace("\n", "\n> "),
        "root@node-7:~# nvidia-smi topo -m\n" + WHOLE + "root@node-7:~# \n",
        "$ nvidia-smi topo -m\n" + WHOLE + "$ exit\n",
        "\x1b[4m" + WHOLE.replace("GPU NUMA ID\n", "GPU NUMA ID\x1b[0m\n"),
        "\t\x1b[4mGPU0" + WHOLE[5:].replace("\n", "\x1b[0m\n", 1),
        "WARNING: infoROM is corrupted at gpu 0000:3B:00.0\n" + WHOLE,
        "GPU1 has fallen off the bus\nGPU0: Xid 79\nGPU 1 is lost\n" + WHOLE,
        "GPU0 NIC0 are slow today\n" + WHOLE,
        replaced("\tGPU0\tGPU1", "GPU0\tGPU1"),
        replaced("NIC1\tCPU", "NIC1\nCPU"),
        replaced("CPU Affinity\t", "CPU\nAffinity\t"),
        replaced("CPU Affinity", "CPU\tAffinity"),
        replaced("NUMA Affinity\tGPU NUMA ID", "NUMA\tAffinity\tGPU\tNUMA\tID"),
        replaced("CPU Affinity\tNUMA Affinity\tGPU NUMA ID", "CPU\tNUMA\tGPU NUMA\nAffinity\tAffinity\tID"),
        "\n".join([WHOLE.splitlines()[0], *sorted(WHOLE.splitlines()[1:], reverse=True)]),
        WHOLE + LEGEND,
        WHOLE + LEGEND + "\ncommands that came later\n" * 3,
    ],
)
def test_a_whole_paste_is_read_however_it_is_wrapped_up(text: str) -> None:
    matrix = read_matrix(text)

    assert CELLS == matrix.cells
    assert {"GPU0": "0-7,16-23", "GPU1": "8-15,24-31"} == matrix.cpu_affinity
    assert {"GPU0": "0", "GPU1": "1"} == matrix.numa_affinity
    assert {"GPU0": "N/A", "GPU1": "N/A"} == matrix.gpu_numa_id


@pytest.mark.parametrize(
    ("text", "line", "column", "finding"),
    [
        (replaced("NIC0\tNIC1\tCPU", "NIC0NIC1\tCPU"), 1, 12, "two labels glued together"),
        (replaced("NIC1\tSYS\tPXB", "NIC1NIC2\tSYS\tPXB"), 5, 1, "two labels glued together"),
        (replaced("NIC1\tSYS\tPXB\tSYS\t X", "NIC1\tSYS\tPXBSYS\t X"), 5, 10, "several cells glued together"),
        (replaced("NIC1\tSYS\tPXB\tSYS\t X", "NIC1\tSYS\tPX"), 5, 10, "'PX' is not a cell"),
        (replaced("0-7,16-23", "-7,16-23"), 2, 22, "no list of ids, or a list that was cut"),
        (replaced("0-7,16-23", "0-7,16-"), 2, 22, "no list of ids, or a list that was cut"),
        (replaced("0-7,16-23", "0-7,"), 2, 22, "no list of ids, or a list that was cut"),
        (replaced("0-7,16-23", "7-0"), 2, 22, "not an ascending range"),
        (replaced("0-7,16-23", "0-65535"), 2, 22, "goes beyond 8191"),
        (replaced("\t0\t\tN/A", "\t4096\t\tN/A"), 2, 32, "goes beyond 1023"),
        (replaced("\t0\t\tN/A", "\t0\t\t1-2"), 2, 35, "not one number"),
        (replaced("\t0\t\tN/A", "\t0\t\tN/A\tmore"), 2, 39, "goes on with 'more'"),
        (replaced("NIC1\tSYS\tPXB", "NIC0\tSYS\tPXB"), 5, 1, "row NIC0 is there twice, first in line 4"),
        (replaced("\tNIC0\tNIC1", "\tNIC0\tNIC0"), 1, 17, "two columns NIC0"),
        (
            replaced("GPU1\tNV4\t X ", "GPU1\tNV2\t X "),
            2,
            10,
            "row GPU0, column GPU1 is NV4, but row GPU1, column GPU0 is NV2",
        ),
        (replaced("GPU1\tNV4\t X ", "GPU1\tNV4\tSYS"), 3, 10, "X stands where row and column are the same device"),
        (
            WHOLE.replace("SYS\t X \tSYS", "SYS\t X \tNV2").replace("PXB\tSYS\t X", "PXB\tNV2\t X"),
            4,
            18,
            "only GPUs have NVLinks",
        ),
        (replaced("NIC1\tSYS\tPXB\tSYS\t X", "NIC2\tSYS\tPXB\tSYS\t X"), 5, 1, "row NIC2 has no column"),
        (replaced("CPU Affinity", "CPU Affin"), 1, 26, "'Affin' is not the label or title of a column"),
        (replaced("\tGPU NUMA ID", "\tGPU NUMA"), 1, 53, "is not `CPU Affinity`"),
        (replaced("NUMA Affinity", "NUMA Affinity\tNIC2"), 1, 49, "NIC2 stands behind the affinity columns"),
        ("\n".join(WHOLE.splitlines()[1:]), 1, 1, "row GPU0 has no header"),
        (replaced("GPU0\t X ", "GPU0\t\x00X "), 2, 6, r"control character U\+0000"),
        (replaced("GPU0\t X ", "GPU0\t\x1bX "), 2, 6, "terminal code that is cut short"),
        (WHOLE + "\x07", 6, 1, r"control character U\+0007"),
        (replaced("\t X \tNV4", "\t X \tOK").replace("GPU1\tNV4", "GPU1\tOK"), 2, 10, "peer-to-peer state"),
        (WHOLE + LEGEND + "\n" + WHOLE, 11, None, "two matrices, one from line 1 on and another from line 11 on"),
        (WHOLE + NIC_LEGEND.replace("NIC1", "NIC2"), 10, 3, r"names 'NIC2'\W, which has no column|which has no column"),
        (WHOLE + NIC_LEGEND.replace("mlx5_bond_0", "mlx5_0"), 10, 3, "names 'mlx5_0' twice"),
    ],
)
def test_what_lost_something_is_refused_where_it_did(text: str, line: int, column: int | None, finding: str) -> None:
    with pytest.raises(InvalidMachine) as caught:
        read_pasted_matrix(text)

    assert re.search(finding, caught.value.finding), caught.value.finding
    assert (line, column) == (caught.value.line, caught.value.column)


@pytest.mark.parametrize("keep", range(1, len(WHOLE)))
def test_a_cut_paste_is_refused_unless_only_affinities_are_cut(keep: int) -> None:
    """A paste that is cut anywhere is refused, unless only affinities or the last diagonal cell are missing."""
    text = WHOLE[:keep]
    try:
        matrix = read_matrix(text)
    except InvalidMachine:
        return

    assert {label: cells for label, cells in CELLS.items() if label in matrix.cells} == matrix.cells
    assert {"GPU0", "GPU1"} == set(matrix.cells) or len(CELLS) == len(matrix.cells)


@pytest.mark.parametrize(("lines", "missing"), [(1, "GPU0, GPU1, NIC0, NIC1"), (2, "GPU1, NIC0, NIC1"), (4, "NIC1")])
def test_a_truncated_paste_is_refused_with_the_rows_that_are_missing(lines: int, missing: str) -> None:
    with pytest.raises(InvalidMachine, match=f"rows {missing} are missing"):
        read_pasted_matrix("".join(WHOLE.splitlines(keepends=True)[:lines]))


def test_a_row_cut_in_its_middle_is_refused_with_the_rows_below_it() -> None:
    with pytest.raises(
        InvalidMachine, match="row GPU1 ends after 1 of 4 cells; the rows NIC0, NIC1 are missing below it"
    ):
        read_pasted_matrix(WHOLE[: WHOLE.index("GPU1\tNV4") + 8])


@pytest.mark.parametrize("width", range(12, 60))
def test_a_paste_that_the_terminal_wrapped_is_refused(width: int) -> None:
    lines = [line.expandtabs(8) for line in WHOLE.splitlines()]
    wrapped = [line[i : i + width] for line in lines for i in range(0, len(line), width)]

    with pytest.raises(InvalidMachine) as caught:
        read_pasted_matrix("\n".join(wrapped))
    assert caught.value.line is not None


def test_a_matrix_whose_affinities_were_wrapped_says_so() -> None:
    with pytest.raises(InvalidMachine, match=r"line 3, column 1: the line begins with '0-7,16-23': it is the rest"):
        read_pasted_matrix(replaced("SYS\t0-7", "SYS\n0-7"))


def test_nics_may_be_columns_with_rdma_names() -> None:
    matrix = read_matrix(WHOLE.replace("NIC0", "mlx5_0").replace("NIC1", "rdmap197s0"))

    assert ("GPU0", "GPU1", "mlx5_0", "rdmap197s0") == matrix.labels
    assert ["mlx5_0", "rdmap197s0"] == [
        nic.id for nic in read_pasted_matrix(WHOLE.replace("NIC0", "mlx5_0").replace("NIC1", "rdmap197s0")).nics
    ]


def test_the_legend_names_nics_and_those_it_leaves_out_keep_their_label() -> None:
    whole, partial = read_matrix(WHOLE + NIC_LEGEND), read_matrix(WHOLE + NIC_LEGEND.partition("  NIC1")[0])

    assert ["mlx5_0", "mlx5_bond_0"] == [whole.name(nic) for nic in whole.nics]
    assert ["mlx5_0", "NIC1"] == [partial.name(nic) for nic in partial.nics]


@pytest.mark.parametrize("below", ["", LEGEND])
def test_the_rows_of_nics_may_all_be_left_out(below: str) -> None:
    text = "".join(WHOLE.splitlines(keepends=True)[:3]) + below
    machine = read_pasted_matrix(text)

    assert {"GPU0", "GPU1"} == set(read_matrix(text).cells)
    assert "PXB" == machine.link_by_pair[machine.gpus[1].id, machine.nics[1].id].label
    assert (machine.nics[0].id, machine.nics[1].id) not in machine.link_by_pair
    assert machine == read_pasted_matrix(print_matrix(machine))


@pytest.mark.parametrize("below", ["", LEGEND])
def test_some_rows_of_nics_may_not_be_left_out(below: str) -> None:
    with pytest.raises(InvalidMachine, match="rows NIC1 are missing"):
        read_pasted_matrix("".join(WHOLE.splitlines(keepends=True)[:4]) + below)


@pytest.mark.parametrize(("kept", "title"), [("", "CPU"), ("\t8-15,24-31", "NUMA"), ("\t8-15,24-31\t1", "GPU NUMA")])
def test_a_last_row_without_an_affinity_that_the_others_have_was_cut(kept: str, title: str) -> None:
    rows = "".join(WHOLE.splitlines(keepends=True)[:3])

    with pytest.raises(InvalidMachine, match=f"row GPU1 ends before its {title}"):
        read_pasted_matrix(rows.replace("\t8-15,24-31\t1\t\tN/A\n", kept))
    assert read_pasted_matrix(rows.replace("\t8-15,24-31\t1\t\tN/A\n", kept) + LEGEND).gpus


def test_affinities_between_blanks_that_stand_below_no_title_are_refused() -> None:
    header = "        GPU0    CPU Affinity    NUMA Affinity   GPU NUMA ID\n"

    with pytest.raises(InvalidMachine, match="the column of '3' is not clear"):
        read_matrix(header + "GPU0     X                  3\n")


def test_short_rows_of_nics_are_filled_up_from_the_rows_that_mirror_them() -> None:
    matrix = read_matrix(replaced("NIC0\tPIX\tSYS\t X \tSYS", "NIC0\tPIX\tSYS"))
    unknown = read_matrix(WHOLE.replace("PIX\tSYS\t X \tSYS", "PIX\tSYS").replace("PXB\tSYS\t X", "PXB") + LEGEND)

    assert ("PIX", "SYS", "", "SYS") == matrix.cells["NIC0"]
    assert ("PIX", "SYS", "", "") == unknown.cells["NIC0"]


def test_the_numa_column_may_be_missing_or_say_nothing() -> None:
    missing = re.sub(r"\t[01]\t\tN/A", "", WHOLE).replace("\tNUMA Affinity\tGPU NUMA ID", "")
    silent = re.sub(r"\t[01]\t\tN/A", "\tN/A\t\tN/A", WHOLE)
    empty = re.sub(r"\t[01]\t\tN/A", "\t\t\tN/A", WHOLE)

    assert read_matrix(missing).numa_affinity is None
    assert [(0,), (1,)] == [gpu.numa_affinity for gpu in read_pasted_matrix(missing).gpus]
    assert {"GPU0": "", "GPU1": ""} == read_matrix(empty).numa_affinity
    for text in (silent, empty):
        assert [(), ()] == [gpu.numa_affinity for gpu in read_pasted_matrix(text).gpus]
        assert {
            0: frozenset([*range(8), *range(16, 24)]),
            1: frozenset([*range(8, 16), *range(24, 32)]),
        } == read_pasted_matrix(text).cpus_by_node


def test_lists_of_numa_nodes_all_exist_and_cpus_are_on_the_first() -> None:
    machine = read_pasted_matrix(replaced("0-7,16-23\t0\t\tN/A", "0-7,16-23\t0,3-5\t\t6"))

    assert (0, 3, 4, 5) == machine.gpus[0].numa_affinity
    assert 6 == machine.gpus[0].memory_node
    assert (0, 1, 3, 4, 5, 6) == machine.node_ids
    assert {0, 1} == set(machine.cpus_by_node)


def test_blank_cells_between_blanks_are_told_by_their_column() -> None:
    header = "        GPU0    CPU Affinity    NUMA Affinity   GPU NUMA ID\n"
    matrix = read_matrix(header + "GPU0     X      0-7                             3\n")

    assert ({"GPU0": "0-7"}, {"GPU0": ""}, {"GPU0": "3"}) == (
        matrix.cpu_affinity,
        matrix.numa_affinity,
        matrix.gpu_numa_id,
    )


@pytest.mark.parametrize("cells", ["\t X \t0-3\t0\t\tN/A", "     X      0-3     0               N/A"])
def test_a_single_gpu_is_a_matrix(cells: str) -> None:
    machine = read_pasted_matrix(f"\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0{cells}\n")

    assert 1 == len(machine.gpus)
    assert (0, 1, 2, 3) == machine.gpus[0].cpu_affinity


def test_pcie_paths_alone_and_old_names_are_read() -> None:
    """As `-mp` prints them, and drivers that said SOC for SYS."""
    machine = read_pasted_matrix(WHOLE.replace("NV4", "PSB").replace("SYS", "SOC"))

    assert "PSB" == machine.link_by_pair[machine.gpus[0].id, machine.gpus[1].id].label
    assert "SYS" == machine.link_by_pair[machine.gpus[0].id, machine.nics[1].id].label


def test_a_nic_is_near_the_node_of_a_gpu_within_that_node() -> None:
    """A NIC is near the NUMA node of a GPU that it reaches without leaving the node."""
    machine = read_pasted_matrix(WHOLE.replace("PXB", "SYS"))

    assert [(0,), ()] == [nic.numa_affinity for nic in machine.nics]


def test_the_first_gpu_places_a_shared_cpu_the_nearest_one_a_nic() -> None:
    """If several GPUs list a CPU, the first one decides its node; for a NIC the nearest GPU decides."""
    text = (
        WHOLE.replace("8-15,24-31", "4-15,24-31")
        .replace("PIX\tSYS\t0-7", "PIX\tNODE\t0-7")
        .replace("NIC1\tSYS", "NIC1\tNODE")
    )
    machine = read_pasted_matrix(text)

    assert {
        0: frozenset([*range(8), *range(16, 24)]),
        1: frozenset([*range(8, 16), *range(24, 32)]),
    } == machine.cpus_by_node
    assert [(0,), (1,)] == [nic.numa_affinity for nic in machine.nics], "PXB to GPU1 is nearer than NODE to GPU0"


@pytest.mark.parametrize("text", ["", "\n\n", "hello", "\tGPU\tNIC\n", "CPU Affinity\tNUMA Affinity\n", "GPU" * 1000])
def test_what_holds_no_matrix_is_refused(text: str) -> None:
    with pytest.raises(InvalidMachine):
        read_pasted_matrix(text)


def test_more_devices_than_a_machine_can_have_are_refused() -> None:
    with pytest.raises(InvalidMachine, match="5000 GPUs and 0 NICs: a machine has at most 128 and 256"):
        read_pasted_matrix("\t" + "\t".join(f"GPU{i}" for i in range(5000)) + "\n")


def test_the_finding_shows_no_control_characters_and_is_short() -> None:
    with pytest.raises(InvalidMachine) as caught:
        read_pasted_matrix(replaced("\t X \tNV4", "\t X \t" + "\N{ZERO WIDTH SPACE}" * 3000))

    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300
