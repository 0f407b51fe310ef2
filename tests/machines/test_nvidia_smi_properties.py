"""Whatever matrix a machine has, printing and reading are each other's inverse; whatever text comes, nothing else breaks."""

import contextlib
from itertools import combinations
from pathlib import Path

import pytest
from conftest import VECTORS
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from topoalign.core.model.errors import InvalidMachine
from topoalign.core.model.topology.cpuset import format_cpuset
from topoalign.core.model.topology.topology_checks import validate
from topoalign.machines.nvidia_smi_print import print_matrix
from topoalign.tools.machine_formats.nvidia_smi import Matrix, read_matrix, read_pasted_matrix, topology_of

CLASSES = ["PIX", "PXB", "PHB", "NODE", "SYS", "PSB"]

id_lists = st.one_of(
    st.sampled_from(["N/A", ""]),
    st.frozensets(st.integers(0, 300), min_size=1, max_size=12).map(format_cpuset),
)
node_lists = st.one_of(
    st.sampled_from(["N/A", "0", "1", "8", "252"]),
    st.frozensets(st.integers(0, 70), min_size=1, max_size=9).map(format_cpuset),
)


@st.composite
def matrices(draw: st.DrawFn) -> Matrix:
    gpus = [f"GPU{i}" for i in range(draw(st.integers(1, 5)))]
    named = draw(st.booleans())
    nics = [f"mlx5_{i}" if named else f"NIC{i}" for i in range(draw(st.integers(0, 4)))]
    labels = [*gpus, *nics]
    cells = {label: ["X"] * len(labels) for label in labels}
    for (i, a), (j, b) in combinations(enumerate(labels), 2):
        nvlinks = st.integers(1, 18).map("NV{}".format)
        kinds = st.sampled_from(CLASSES) | nvlinks if b in gpus else st.sampled_from(CLASSES)
        cells[a][j] = cells[b][i] = draw(kinds)

    def column(texts: st.SearchStrategy[str]) -> dict[str, str] | None:
        return draw(st.none() | st.fixed_dictionaries(dict.fromkeys(gpus, texts)))

    return Matrix(
        labels=tuple(labels),
        nic_names={} if named else {nic: f"rdma{nic}" for nic in nics if draw(st.booleans())},
        cells={label: tuple(row) for label, row in cells.items()},
        cpu_affinity=column(id_lists),
        numa_affinity=column(node_lists),
        gpu_numa_id=column(st.sampled_from(["N/A", "2", "10", "250"])),
    )


@given(matrices())
def test_a_printed_matrix_read_again_is_the_same_machine(matrix: Matrix) -> None:
    machine = topology_of(matrix)

    validate(machine)
    assert machine == read_pasted_matrix(print_matrix(machine))
    assert machine == read_pasted_matrix(print_matrix(machine).expandtabs(16))


@given(matrices())
@settings(max_examples=60)
def test_a_printed_matrix_holds_the_cells_it_was_made_of(matrix: Matrix) -> None:
    again = read_matrix(print_matrix(topology_of(matrix)))
    rows = list(matrix.cells.values())

    assert rows == list(again.cells.values())


def typed(matrix: Matrix) -> list[list[str]]:
    """The cells of the header and of each row as a driver prints them: one more stands before the last affinity."""
    columns = {
        "CPU Affinity": matrix.cpu_affinity,
        "NUMA Affinity": matrix.numa_affinity,
        "GPU NUMA ID": matrix.gpu_numa_id,
    }
    columns = {title: column for title, column in columns.items() if column is not None}
    rows = [["", *matrix.labels, *columns]]
    for label, cells in matrix.cells.items():
        affinities = [column.get(label, "") for column in columns.values() if column is not None]
        if matrix.gpu_numa_id is not None:
            affinities.insert(-1, "")
        rows.append([label, *(" X " if cell == "X" else cell for cell in cells), *affinities])
    return rows


@given(matrices(), st.sampled_from(["", "  ", "# "]))
def test_a_matrix_with_spaces_for_tabs_reads_the_same(matrix: Matrix, before: str) -> None:
    """A matrix whose tabs have become spaces gives the same machine, also with empty cells."""
    lines = ["\t".join(row).expandtabs(8).rstrip() for row in typed(matrix)]

    assert (matrix.cells, matrix.cpu_affinity, matrix.numa_affinity, matrix.gpu_numa_id) == read_cells(lines, before)


@given(matrices(), st.sampled_from(["", "> "]), st.booleans(), st.booleans())
def test_a_matrix_as_a_markdown_table_is_the_same(matrix: Matrix, before: str, bold: bool, extra: bool) -> None:
    rows = typed(matrix)
    if matrix.gpu_numa_id is not None and not extra:  # without the cell that stands below no title
        rows = [rows[0], *([*row[:-2], row[-1]] for row in rows[1:])]
    if bold:
        rows = [[f"**{cell}**" if i == 0 and cell else cell for i, cell in enumerate(row)] for row in rows]
    lines = ["| " + " | ".join(cell.strip() for cell in row) + " |" for row in rows]
    lines.insert(1, "|" + " --- |" * len(rows[0]))

    assert (matrix.cells, matrix.cpu_affinity, matrix.numa_affinity, matrix.gpu_numa_id) == read_cells(lines, before)


def read_cells(lines: list[str], before: str) -> tuple[object, ...]:
    matrix = read_matrix("\n".join(before + line for line in [*lines, "", "Legend:"]))
    return matrix.cells, matrix.cpu_affinity, matrix.numa_affinity, matrix.gpu_numa_id


def mutations(text: str) -> st.SearchStrategy[str]:
    """The text with a few characters, words or lines taken out, put in twice, changed or swapped."""

    def mutate(steps: list[tuple[int, int, str, int]]) -> str:
        changed = text
        for kind, at, filler, length in steps:
            at %= max(len(changed), 1)
            lines = changed.splitlines(keepends=True)
            line = at % max(len(lines), 1)
            if kind == 0:
                changed = changed[:at] + changed[at + length :]
            elif kind == 1:
                changed = changed[:at] + filler + changed[at:]
            elif kind == 2:
                changed = changed[:at] + filler + changed[at + 1 :]
            elif kind == 3:
                changed = "".join(lines[:line] + lines[line + 1 :])
            elif kind == 4:
                changed = "".join(lines[:line] + lines[line : line + 1] * 2 + lines[line + 1 :])
            elif kind == 5:
                changed = "".join(lines[line:] + lines[:line])
            else:
                changed = changed[:at]
        return changed

    fillers = st.sampled_from(
        [
            "\t",
            " ",
            "\n",
            "X",
            "SYS",
            "NV9",
            "NIC9",
            "GPU0",
            "GPU9",
            "0-",
            ",",
            "9" * 30,
            "N/A",
            "CPU",
            "ID",
            "\x00",
            "\x1b[4m",
            "\x1b",
        ]
    )
    steps = st.tuples(st.integers(0, 6), st.integers(0, 5000), fillers | st.characters(), st.integers(1, 40))
    return st.lists(steps, min_size=1, max_size=4).map(mutate)


def vector_texts() -> list[str]:
    folder: Path = VECTORS / "nvidia_smi_topo"
    rows = [
        "\tGPU0\tGPU1\tNIC0\tCPU Affinity",
        "GPU0\t X \tNV2\tPIX\t0-3",
        "GPU1\tNV2\t X \tSYS\t4-7",
        "NIC0\tPIX\tSYS\t X",
    ]
    made_up = "\n".join([*rows, "", "Legend:"])
    return [made_up, *(path.read_text() for path in sorted(folder.glob("*.txt")))]


@given(st.data())
def test_a_mutilated_paste_is_a_machine_or_is_refused_and_nothing_else(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(vector_texts()).flatmap(mutations))
    try:
        machine = read_pasted_matrix(text)
    except InvalidMachine as error:
        assert str(error).isprintable()
        return

    validate(machine)
    assert machine == read_pasted_matrix(print_matrix(machine))


@given(st.text(alphabet="GPUNICXSY0123 \t\n-,/A#>:Legendmlx5_\x1b[m", max_size=300))
@example("\tGPU0\nGPU0\tX")
@example("GPU0")
@example("\tGPU0\tmlx5_0\tmlx5_0")
def test_noise_is_refused_and_nothing_else(text: str) -> None:
    with contextlib.suppress(InvalidMachine):
        validate(read_pasted_matrix(text))


@given(st.integers(0, 10_000), st.sampled_from(vector_texts()))
def test_a_changed_link_is_noticed(at: int, text: str) -> None:
    """A cell is in two rows: whichever is changed, the other tells."""
    matrix = read_matrix(text)
    labels = list(matrix.cells)
    assume(len(labels) > 1)
    label = labels[at % len(labels)]
    line = next(line for line in text.splitlines() if line.startswith(label))
    words = line.split()
    column = 1 + (at // 7) % len(matrix.labels)
    assume(words[column] != "X")
    words[column] = "PHB" if words[column] != "PHB" else "PIX"

    with pytest.raises(InvalidMachine, match="not symmetric"):
        read_pasted_matrix(text.replace(line, "\t".join(words)))
