"""Names of tests are short enough to read in a list; the whole claim stands in the docstring."""

import ast
from pathlib import Path

TESTS = Path(__file__).parent
LONGEST = 70


def test_no_name_of_a_test_is_longer_than_seventy_characters() -> None:
    names = [
        (path.relative_to(TESTS).as_posix(), node.name)
        for path in sorted(TESTS.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]

    assert names
    assert [] == [(file, name) for file, name in names if len(name) > LONGEST]
