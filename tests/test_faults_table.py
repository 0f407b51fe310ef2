"""docs/faults.md is true: every fault of this version has a row, and every test that a row names is there."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"\| (C\d\d|F\d\d|S\d\d|T\d\d|G\d\d|I\d\d?) \| ([^|]+) \| ([^|]+) \|")
LONGEST = 20
"""Words of what is seen."""
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")

FAULTS = [
    *(f"C{n:02}" for n in (*range(1, 24), *range(25, 61))),
    *(f"F{n:02}" for n in (*range(1, 11), *range(12, 37))),
    *(f"G{n:02}" for n in (*range(1, 15), *range(16, 20))),
    *(f"S{n:02}" for n in range(1, 18)),
    *(f"T{n:02}" for n in range(1, 12)),
    *(f"I{n}" for n in (*range(1, 11), 12, 14)),
]


def rows() -> dict[str, tuple[str, str]]:
    matches = (ROW.fullmatch(line) for line in (ROOT / "docs" / "faults.md").read_text().splitlines())
    return {match[1]: (match[2], match[3]) for match in matches if match is not None}


@cache
def defined_in(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text())
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    names = {function.name for function in functions}
    # a stateful test is a class made by hypothesis: `TestLedger = LedgerMachine.TestCase`
    assigned = (target for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets)
    return frozenset(names | {target.id for target in assigned if isinstance(target, ast.Name)})


def test_every_fault_and_invariant_has_a_row() -> None:
    assert [] == [fault for fault in FAULTS if fault not in rows()]


def test_every_row_names_tests_that_are_there() -> None:
    named = {fault: TEST.findall(tests) for fault, (_, tests) in rows().items()}

    assert [] == [fault for fault, tests in named.items() if not tests]
    assert [] == [
        (fault, path, test)
        for fault, tests in named.items()
        for path, test in tests
        if not (ROOT / path).is_file() or (test and test not in defined_in(ROOT / path))
    ]


def test_every_row_is_one_sentence() -> None:
    """What is seen now; the tests tell how it is caused."""
    seen = {fault: seen for fault, (seen, _) in rows().items()}

    assert [] == [fault for fault, text in seen.items() if ". " in text or len(text.split()) > LONGEST]
