"""Names of tests are short enough to read in a list; the whole claim stands in the docstring."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LONGEST = 70
DONE = (
    *("allocator", "cli", "client", "conformance", "contract", "core", "discovery", "e2e", "hinting"),
    *("faults", "kubelet", "machines", "nvml", "plugin_config", "registry", "runtime", "simulation"),
)
"""Folders whose tests have names of at most 70 characters. Add one when it is done."""


@pytest.mark.parametrize("folder", DONE)
def test_no_name_of_a_test_is_longer_than_seventy_characters(folder: str) -> None:
    names = [
        (path.name, node.name)
        for path in sorted((TESTS / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]

    assert names
    assert [] == [(file, name) for file, name in names if len(name) > LONGEST]
