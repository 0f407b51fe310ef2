"""No modules import one another in a circle."""

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = (ROOT / "shared", ROOT / "tools", *sorted((ROOT / "services").iterdir()))
GENERATED = "topoalign/kubelet/grpc/api/"


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Dotted name and syntax tree of every module of the product that was written by hand."""
    for room in ROOMS:
        for path in sorted(room.glob("topoalign/**/*.py")):
            short = path.relative_to(room).as_posix()
            if short.startswith(GENERATED):
                continue
            text = path.read_text()
            name = short.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            yield name, ast.parse(text)


def imports(tree: ast.Module, known: Mapping[str, object]) -> set[str]:
    """What a module imports when it is imported itself: imports within functions come later."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                found.add(whole if whole in known else node.module)
    return found & known.keys()


def test_no_modules_import_one_another() -> None:
    trees = dict(modules())
    try:
        TopologicalSorter({name: imports(tree, trees) for name, tree in trees.items()}).prepare()
    except CycleError as error:
        raise AssertionError(f"a circle of imports: {' -> '.join(error.args[1])}") from error
