"""Every public function, class and method of the product has a docstring."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GENERATED = "kubelet/grpc/api"
PRODUCT = ("shared", "services", "tools")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def undocumented(package: Path) -> Iterator[str]:
    """`file:line name` of each public definition without a docstring, as ruff's rules D101, D102 and D103 have it."""
    for path in sorted(package.rglob("*.py")):
        if GENERATED not in path.as_posix():
            for name, line in missing(ast.parse(path.read_text())):
                yield f"{path.relative_to(ROOT)}:{line} {name}"


def missing(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Name and line of what lacks a docstring in a module or class. Private names and what is in them do not count."""
    for each in ast.iter_child_nodes(node):
        if isinstance(each, Definition) and not each.name.startswith("_"):
            if ast.get_docstring(each) is None:
                yield prefix + each.name, each.lineno
            if isinstance(each, ast.ClassDef):
                yield from missing(each, f"{prefix}{each.name}.")


@pytest.mark.parametrize("package", PRODUCT)
def test_no_public_definition_lacks_a_docstring(package: str) -> None:
    assert [] == list(undocumented(ROOT / package))


def test_a_definition_without_docstring_is_found() -> None:
    """Negative control: the count sees a function, a class and a method, and passes over private ones."""
    text = "def f(): ...\nclass C:\n    def m(self): ...\n    def _n(self): ...\ndef _g(): ...\n"

    assert [("f", 1), ("C", 2), ("C.m", 3)] == list(missing(ast.parse(text)))
