"""
Reads a machine from the output of `nvidia-smi topo -m`.

People paste the matrix with prompts before it and more output after it, as a comment, as a Markdown table, with tabs turned
into spaces, from a web page, with a prefix on every line, from drivers of the past ten years. All of that is read, in time
and memory that are linear in the length of the text. A paste that lost something is refused, because the machine would be a
guess:

- a row of a GPU is missing, or shorter than the header
- some rows of NICs are missing; if all of them are, the cells of the GPUs' rows are used
- the text ends in the middle of a row
- a line begins with cells: the terminal wrapped it
- two outputs are in one text: it is unknown which machine is meant
- two labels or two cells are joined, a row or a column occurs twice, or the matrix is not symmetric

A matrix has less information than a machine. Missing information is derived:

- CPUs are the union of the CPU affinities, with one thread per core. The CPUs of one NUMA node count as one socket and
  one last-level cache, and the output does not show this socket (`sockets_known`). A CPU belongs to the first node of
  the NUMA affinity in the same row; if several GPUs list it, to that of the first GPU.
- If the column NUMA Affinity is missing, GPUs with equal CPU affinities are on one node, because the driver prints the
  CPUs of the GPU's node; the nodes are numbered in the order of their lowest CPU.
- If the column exists but has `N/A` or nothing, the GPU's node is unknown. If no GPU's node is known, CPUs are put on
  nodes as if the column were missing; else CPUs that are listed only with unknown nodes are left out.
- Memory is unknown. The node of a GPU's own memory (GPU NUMA ID) exists and has no CPUs.
- A NIC is near the nodes of the nearest GPU that it reaches without leaving the NUMA node (PIX before PXB, NODE at
  most), of several the first.
- `NV4` states the number of NVLinks of a pair and hides its PCIe path. GPUs have no uuid: their id is `GPU-<index>`.
"""

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations, islice

from topoalign.core.model.errors import InvalidMachine, quoted
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.device_links import PcieClass
from topoalign.core.model.topology.model import Cpu, Gpu, Nic, NumaNode, Topology
from topoalign.machines.nvidia_smi_print import CPU_AFFINITY, GPU_NUMA_ID, NUMA_AFFINITY
from topoalign.machines.reader_rules import check_possible
from topoalign.tools.machine_formats.nvidia_smi_instead import other_matrix
from topoalign.tools.machine_formats.nvidia_smi_lines import (
    CELL,
    COPY_AGAIN,
    SELF,
    Word,
    is_nvlink,
    lines_from,
    locate_line,
    parse_affinity,
    parse_link,
    prepared,
    word_error,
)
from topoalign.tools.machine_formats.nvidia_smi_rows import (
    LEGEND,
    MatrixHeader,
    MatrixRow,
    find_header,
    is_gpu,
    is_header_text,
    read_rows,
)

_NIC_LEGEND = re.compile(r"^[ \t\xa0#>|]{0,256}NIC Legend:", re.MULTILINE)
_NIC_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


@dataclass(frozen=True)
class Matrix:
    """A matrix as the text has it."""

    labels: tuple[str, ...]
    """The labels of the device columns, in their order: `GPU0`, … and `NIC0` or `mlx5_0`."""
    nic_names: Mapping[str, str]
    """Label -> name, for the entries of a NIC legend."""
    cells: Mapping[str, tuple[str, ...]]
    """Label of each printed row -> its cells in column order; "" after a short row's end where symmetry gives no value."""
    cpu_affinity: Mapping[str, str] | None
    """Label of each GPU -> the text of the cell. None: there is no such column."""
    numa_affinity: Mapping[str, str] | None
    gpu_numa_id: Mapping[str, str] | None

    @property
    def gpus(self) -> tuple[str, ...]:
        """The labels of GPUs by index, which need not be the order of the columns."""
        return tuple(sorted((label for label in self.labels if is_gpu(label)), key=lambda label: int(label[3:])))

    @property
    def nics(self) -> tuple[str, ...]:
        """The labels of NICs by index if they have one (`NIC0`), else in column order."""
        nics = [label for label in self.labels if not is_gpu(label)]
        return tuple(sorted(nics, key=lambda label: int(label[3:])) if self.nics_are_numbered else nics)

    @property
    def nics_are_numbered(self) -> bool:
        """Whether NICs are called `NIC0`, as in newer drivers, and not by their RDMA names."""
        return all(is_gpu(label) or label.startswith("NIC") for label in self.labels)

    def name(self, label: str) -> str:
        """The legend's name where there is one, else the label."""
        return self.nic_names.get(label, label)

    def pairs(self) -> Iterator[tuple[str, str, str]]:
        """Each two devices, GPUs first and by number, and the cell of either row about them: "" if there is none."""
        column = {label: i for i, label in enumerate(self.labels)}
        for a, b in combinations([*self.gpus, *self.nics], 2):
            cell = self.cells[a][column[b]] if a in self.cells else ""
            yield a, b, cell or (self.cells[b][column[a]] if b in self.cells else "")


def read_matrix(text: str) -> Matrix:
    """Reads the matrix in the text. Raises InvalidMachine with line and column of the error."""
    try:
        return _checked_matrix(*_find_matrix(prepared(text)))
    except InvalidMachine as error:
        raise other_matrix(text) or error from error


def _find_matrix(text: str) -> tuple[str, MatrixHeader]:
    try:
        return text, find_header(text)
    except InvalidMachine:  # what surrounds the matrix may hide the header
        for form in _other_forms(text):
            with suppress(InvalidMachine):
                return form, find_header(form)
        raise


def _checked_matrix(text: str, header: MatrixHeader) -> Matrix:
    _check_alone(text, header)
    rows, end = read_rows(text, header)
    _check_complete(header.labels, rows, cut=LEGEND.search(text, end) is None)
    _check_symmetric(header.labels, rows)

    cells = {}
    for i, label in enumerate(header.labels):
        if label in rows:  # short rows are filled up from the rows that mirror them
            both = [_cell_word(rows, label, j) or _cell_word(rows, other, i) for j, other in enumerate(header.labels)]
            cells[label] = tuple(word.text if word is not None else "" for word in both)

    def column(title: str) -> Mapping[str, str] | None:
        return {gpu: rows[gpu].affinities[title] for gpu in header.gpus} if title in header.titles else None

    return Matrix(
        labels=header.labels,
        nic_names=_nic_names(text, header.labels),
        cells=cells,
        cpu_affinity=column(CPU_AFFINITY),
        numa_affinity=column(NUMA_AFFINITY),
        gpu_numa_id=column(GPU_NUMA_ID),
    )


def _check_complete(labels: tuple[str, ...], rows: Mapping[str, MatrixRow], cut: bool) -> None:
    # `cut`: no legend below shows that the last row was copied to its end
    missing = [label for label in labels if label not in rows]
    nics = {label for label in labels if not is_gpu(label)}
    if missing and set(missing) != nics:
        line = max((row.label.line for row in rows.values()), default=None)
        after = "" if line is None else "after this line "
        raise InvalidMachine(f"{after}the rows {', '.join(missing)} are missing", COPY_AGAIN, line)
    last = max(rows.values(), key=lambda row: row.label.line)
    if cut and len(last.cells) < len(labels):
        raise word_error(last.cells[-1], f"row {last.label.text} ends after {len(last.cells)} of {len(labels)} cells")
    others = [row.affinities for row in rows.values() if is_gpu(row.label.text) and row is not last]
    behind = max((i for i, text in enumerate(last.affinities.values(), 1) if text), default=0)
    for title in list(last.affinities)[behind:]:
        if cut and is_gpu(last.label.text) and others and all(other[title] for other in others):
            raise word_error(last.cells[-1], f"row {last.label.text} ends before its {title}, which the others have")


def _check_symmetric(labels: tuple[str, ...], rows: Mapping[str, MatrixRow]) -> None:
    for i, a in enumerate(labels):
        for j, cell in enumerate(rows[a].cells if a in rows else ()):
            b = labels[j]
            if (cell.text == SELF) != (a == b):
                raise word_error(
                    cell, f"row {a}, column {b} is {cell.text}: X stands where row and column are the same device"
                )
            if is_nvlink(cell.text) and not (is_gpu(a) and is_gpu(b)):
                raise word_error(cell, f"row {a}, column {b} is {cell.text}, but only GPUs have NVLinks")
            mirrored = _cell_word(rows, b, i)
            if mirrored is not None and cell.text != mirrored.text:
                finding = f"row {a}, column {b} is {cell.text}, but row {b}, column {a} is {mirrored.text}"
                raise word_error(cell, f"the matrix is not symmetric: {finding} (line {mirrored.line})")


def _cell_word(rows: Mapping[str, MatrixRow], label: str, column: int) -> Word | None:
    row = rows.get(label)
    return row.cells[column] if row is not None and column < len(row.cells) else None


def _check_alone(text: str, header: MatrixHeader) -> None:
    # before the rows are read, because neither of two outputs in one text may be whole
    try:
        other = find_header(text, header.after)
    except InvalidMachine:
        return
    finding = f"there are two matrices, one from line {header.line} on and another from line {other.line} on"
    raise InvalidMachine(finding, "give one machine at a time: the lines of one of them alone", other.line)


def _nic_names(text: str, labels: tuple[str, ...]) -> dict[str, str]:
    # the legend may be anywhere in the text; a NIC that it does not contain keeps its label
    legend = _NIC_LEGEND.search(text)
    names: dict[str, str] = {}
    if legend is None:
        return names
    number, start = locate_line(text, legend.start())
    entries = lines_from(text, start, number)
    next(entries)
    for line in entries:
        entry = line.text.strip(" \t|")
        if not entry:
            continue
        label, colon, name = (part.strip() for part in entry.partition(":"))
        if not colon or not label.startswith("NIC"):
            break
        if label not in labels:
            raise word_error(line.words[0], f"the NIC legend names {quoted([label])}, which has no column")
        if name and not _NIC_NAME.fullmatch(name):
            raise word_error(line.words[-1], f"{quoted([name])} is no name of a NIC")
        if label in names or name in names.values():
            raise word_error(line.words[0], f"the NIC legend names {quoted([name or label])} twice")
        if name:
            names[label] = name
    if len({names.get(label, label) for label in labels}) < len(labels):
        raise InvalidMachine("the NIC legend gives a NIC the label of another one", COPY_AGAIN, number)
    return names


# Removes what surrounds the lines of a matrix: markup of a web page, escapes of JSON, and a prefix of every line.
#
# Logs put something in front of each line: a time stamp, the name of a pod or a host, a line number, the mark of a
# diff, a quote. Such a prefix is found by its place, not by a list of formats: it is what stands before the first label
# in the header, and a row has the same, apart from its numbers and blanks. Where a line has the prefix, blanks of the
# same length take its place, so that an error still names the right line and column.
#
#     2026-09-01T10:00:00.1Z     GPU0   GPU1          prefix of the header: `2026-09-01T10:00:00.1Z`
#     2026-09-01T10:00:00.2Z GPU0  X    NV18          the same, apart from a number


LONGEST_PREFIX = 256
"""Characters: a time, and the names of a namespace, a pod and a container."""
LONGEST_HEADER = 8_192
"""Characters: at the limits of `validate` a header has about 3,000."""
MOST_CANDIDATES = 1_000
"""Labels of GPUs that are checked at most."""

MOST_SHAPES = 8
"""Different prefixes of headers that are searched for in the rows at most."""

_LABEL = re.compile(r"(?<!\w)GPU[0-9]{1,4}(?!\w)")
_ROW_START = rf"[ \t]*GPU[0-9]{{1,4}}[ \t]+{CELL}(?!\w)"
_NUMBER = r"(?>0x[0-9a-fA-F]{1,64}|[0-9]{1,64}(?:\.[0-9]{1,64})?)"
"""A number in a prefix: `07`, `02.123Z`, `0x1f`. Atomic, because many numbers with dots would take very long otherwise."""
_ESCAPED = re.compile(r"\\t *GPU[0-9]")
_QUOTE_ENDS = re.compile(r"""["'],?[ \t]*$""", re.MULTILINE)
_QUOTES = ('"', "'")

_MARKUP = re.compile(r"<(?:pre|td|th|br|div|span|p|code|html|body)\b|&(?:nbsp|#160|#xa0|#9|#x9);", re.IGNORECASE)
_BLANKS = r"(?:(?<!\s)\s++)?"
"""Blanks from the first one on: looked for at each of them, they would take quadratic time."""
_CELL_START = re.compile(rf"{_BLANKS}<t[dh]\b[^<>]{{0,1000}}>\s*", re.IGNORECASE)
_CELL_END = re.compile(rf"{_BLANKS}</t[dh]\s*>", re.IGNORECASE)
_LINE_END = re.compile(r"<br\s*/?>\n?|</(?:p|div|tr|li|pre|h[1-6])\s*>", re.IGNORECASE)
_TAG = re.compile(r"<[A-Za-z/!][^<>]{0,1000}>")


def _other_forms(text: str) -> Iterator[str]:
    if _MARKUP.search(text):
        # a tab for each edge of a table's cells and a line for each row
        text = _LINE_END.sub("\n", _CELL_END.sub("\t", _CELL_START.sub("", text)))
        text = html.unescape(_TAG.sub("", text)).replace("\xa0", " ")
        yield text
    if _ESCAPED.search(text):
        text = text.replace("\\t", "\t").replace("\\n", "\n")
    prefixed = _without_prefix(text)
    if prefixed is not None:
        yield prefixed


def _without_prefix(text: str) -> str | None:
    tried: set[str] = set()
    for match in islice(_LABEL.finditer(text), MOST_CANDIDATES):
        start = text.rfind("\n", max(0, match.start() - LONGEST_PREFIX - 1), match.start()) + 1
        prefix = text[start : match.start()].rstrip()
        if not prefix or match.start() - start > LONGEST_PREFIX:
            continue
        end = text.find("\n", match.start(), match.start() + LONGEST_HEADER)
        quoted = prefix.endswith(_QUOTES)
        header = text[match.start() : end if end > 0 else match.start() + LONGEST_HEADER]
        if not is_header_text(_QUOTE_ENDS.sub("", header) if quoted else header):
            continue
        # the prefix with any numbers, and with any blanks in the place of its blanks
        words = re.split(rf"({_NUMBER}|[ \t\xa0]+)", prefix.strip())
        shape = r"[ \t\xa0]{0,64}" + "".join(
            _NUMBER if word[:1].isdigit() else r"[ \t\xa0]{1,64}" if word[:1].isspace() else re.escape(word)
            for word in words
            if word
        )
        if shape in tried:
            continue
        if len(tried) == MOST_SHAPES:
            return None
        tried.add(shape)
        if quoted or re.search(rf"(?m)^{shape}{_ROW_START}", text):
            text = re.sub(rf"(?m)^{shape}", lambda match: " " * len(match[0]), text)
            return _QUOTE_ENDS.sub("", text) if quoted else text
    return None


Nodes = tuple[int, ...]
NEAREST_FIRST = tuple(PcieClass)
WITHIN_A_NODE = frozenset(PcieClass) - {PcieClass.SYS}


def read_pasted_matrix(text: str) -> Topology:
    """Reads the machine from a pasted matrix. Raises InvalidMachine with line and column."""
    return topology_of(read_matrix(text))


def topology_of(matrix: Matrix) -> Topology:
    """Makes a machine from a matrix. Raises InvalidMachine if there can be no such machine."""
    cpu_lists = {gpu: parse_affinity((matrix.cpu_affinity or {}).get(gpu, "")) for gpu in matrix.gpus}
    affinities = (
        _number_nodes(cpu_lists)
        if matrix.numa_affinity is None
        else {gpu: tuple(sorted(parse_affinity(text))) for gpu, text in matrix.numa_affinity.items()}
    )
    memory_nodes = {gpu: min(parse_affinity(text), default=None) for gpu, text in (matrix.gpu_numa_id or {}).items()}
    cpus = _read_cpus(matrix.gpus, cpu_lists, affinities)
    nodes = {cpu.node for cpu in cpus}.union(*affinities.values())
    nodes.update(node for node in memory_nodes.values() if node is not None)
    gpus = tuple(
        Gpu(
            id=DeviceID(f"GPU-{label.removeprefix('GPU')}"),
            index=int(label.removeprefix("GPU")),
            cpu_affinity=tuple(sorted(cpu_lists[label])),
            numa_affinity=affinities[label],
            memory_node=memory_nodes.get(label),
        )
        for label in matrix.gpus
    )
    ids = {label: gpu.id for label, gpu in zip(matrix.gpus, gpus, strict=True)}
    ids |= {label: DeviceID(matrix.name(label)) for label in matrix.nics}
    links = [parse_link(ids[a], ids[b], cell) for a, b, cell in matrix.pairs()]
    topology = Topology(
        cpus=cpus,
        nodes=tuple(NumaNode(id=node) for node in sorted(nodes)),
        gpus=gpus,
        nics=_read_nics(matrix, ids, affinities),
        links=tuple(link for link in links if link is not None),
        sockets_known=False,
        nodes_known=any(map(parse_affinity, (matrix.numa_affinity or {}).values())),
    )
    return check_possible(topology, "the matrix", COPY_AGAIN)


def _number_nodes(cpu_lists: Mapping[str, frozenset[int]]) -> dict[str, Nodes]:
    # equal lists of CPUs are one node, in the order of their lowest CPU
    distinct = sorted({cpus for cpus in cpu_lists.values() if cpus}, key=sorted)
    return {gpu: (distinct.index(cpus),) if cpus else () for gpu, cpus in cpu_lists.items()}


def _read_cpus(
    gpus: Sequence[str], cpu_lists: Mapping[str, frozenset[int]], affinities: Mapping[str, Nodes]
) -> tuple[Cpu, ...]:
    if not any(affinities.values()):
        affinities = _number_nodes(cpu_lists)
    node_of: dict[int, int] = {}
    for gpu in gpus:
        for node in affinities[gpu][:1]:
            node_of |= {cpu: node_of.get(cpu, node) for cpu in cpu_lists[gpu]}
    socket_of = {node: position for position, node in enumerate(sorted(set(node_of.values())))}
    return tuple(
        Cpu(id=cpu, core=cpu, socket=socket_of[node], node=node, uncore=socket_of[node])
        for cpu, node in sorted(node_of.items())
    )


def _read_nics(matrix: Matrix, ids: Mapping[str, DeviceID], affinities: Mapping[str, Nodes]) -> tuple[Nic, ...]:
    near: dict[str, tuple[int, Nodes]] = {}
    for a, b, cell in matrix.pairs():
        if a in affinities and b not in affinities and cell in WITHIN_A_NODE:
            distance = NEAREST_FIRST.index(PcieClass(cell))
            if b not in near or distance < near[b][0]:
                near[b] = distance, affinities[a]
    return tuple(
        Nic(
            id=ids[nic],
            index=int(nic.removeprefix("NIC")) if matrix.nics_are_numbered else position,
            numa_affinity=near[nic][1] if nic in near else (),
        )
        for position, nic in enumerate(matrix.nics)
    )
