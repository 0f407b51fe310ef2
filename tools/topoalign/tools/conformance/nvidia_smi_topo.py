"""
`nvidia_smi_topo FOLDER`: real `nvidia-smi topo -m` outputs, and their expected machines in `expected.json`.

With the outcome `refuse` only the outcome is compared. An accepted file is printed and read again as well: the result
must be the same machine.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from topoalign.core.model.errors import InvalidMachine
from topoalign.machines.nvidia_smi_print import print_matrix
from topoalign.tools.conformance.suite import CaseResult, Outcome, Suite, attempted
from topoalign.tools.machine_formats.nvidia_smi import Matrix, read_matrix, read_pasted_matrix, topology_of

EXPECTED = "expected.json"
FOR_PEOPLE = "why"

REFUSED: dict[str, object] = {"outcome": "refuse"}


def cases(folder: Path) -> Iterator[CaseResult]:
    """One case per file that is expected, in the order of their names. Raises InvalidMachine without expectations."""
    folder = folder.parent if folder.name == EXPECTED else folder
    try:
        expected = json.loads((folder / EXPECTED).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        finding = f"{folder / EXPECTED} cannot be read: {error}"
        raise InvalidMachine(finding, f"give the folder that holds {EXPECTED}") from error
    if not isinstance(expected, dict):
        raise InvalidMachine(f"{folder / EXPECTED} is no object", "give it an object with one field per file")

    def run(name: str) -> Outcome:
        want = expected[name]
        compared = {key: value for key, value in want.items() if key != FOR_PEOPLE}
        return REFUSED if want["outcome"] == "refuse" else compared, _outcome(folder / name)

    for name in sorted(expected):
        yield attempted(name, run, name)


def _outcome(path: Path) -> dict[str, object]:
    try:
        matrix = read_matrix(path.read_text(encoding="utf-8"))
        topology = topology_of(matrix)
    except InvalidMachine:
        return REFUSED
    if read_pasted_matrix(print_matrix(topology)) != topology:
        return {"outcome": "the printed matrix is another machine"}
    return described(matrix)


def described(matrix: Matrix) -> dict[str, object]:
    """The matrix in the form of `expected.json`."""
    affinities = {
        "cpu_affinity": matrix.cpu_affinity,
        "numa_affinity": matrix.numa_affinity,
        "gpu_numa_id": matrix.gpu_numa_id,
    }
    return {
        "outcome": "accept",
        "gpus": len(matrix.gpus),
        "nics": [matrix.name(label) for label in matrix.labels if label in matrix.nics],
        "matrix": {label: list(cells) for label, cells in matrix.cells.items()},
        **{key: dict(texts) for key, texts in affinities.items() if texts is not None},
    }


SUITES: dict[str, Suite] = {"nvidia_smi_topo": cases}
