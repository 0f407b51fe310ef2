"""docs/extending.md is followed literally on a copy of the tree, and the tests that it adds pass there."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "extending.md"
ROOMS = ("shared", "tools", "services/allocator", "services/discovery", "services/hinting", "services/registry")
COPIED = (*ROOMS, "tests", "docs")
KEPT = ("pyproject.toml", "Makefile", "CONTRIBUTING.md", "README.md")
FENCE = re.compile(r'^```(\w+) title="(\S+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"`(tests/[\w/]+\.py)`")


class Block(NamedTuple):
    """What the page says of one file."""

    kind: str
    """`python`: the whole of a new file; `diff`: lines to add to one."""
    path: str
    text: str


def blocks() -> list[Block]:
    return [Block(*found) for found in FENCE.findall(PAGE.read_text())]


def follow(block: Block, tree: Path) -> None:
    """Does what the page says, and fails where the file is not as the page takes it to be."""
    file = tree / block.path
    if block.kind == "python":
        assert not file.exists(), f"{block.path} is there already"
        file.write_text(block.text)
        return
    lines = block.text.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if not line.startswith("+"))
    after = "".join(line[1:] for line in lines if not line.startswith("-"))
    content = file.read_text()
    assert 1 == content.count(before), f"{block.path} has {content.count(before)} times:\n{before}"
    file.write_text(content.replace(before, after))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the tree with everything that the page adds."""
    copy = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__", "recorded", "pictures")
    for folder in COPIED:
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    for file in KEPT:
        shutil.copy(ROOT / file, copy / file)
    for block in blocks():
        follow(block, copy)
    run(copy, "docs/event_documents.py", "docs")
    yield copy
    shutil.rmtree(copy)


def run(tree: Path, *arguments: str) -> None:
    """Runs Python on the copy. Fails with what it printed."""
    path = os.pathsep.join(str(tree / room) for room in ROOMS)
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tree, env=environment, capture_output=True, text=True, timeout=240
    )
    assert 0 == done.returncode, done.stdout[-4000:] + done.stderr[-2000:]


def test_what_the_page_adds_passes_its_own_tests_and_those_it_names(tree: Path) -> None:
    """The new tests, and each existing one by which the page says that an addition is done."""
    added = [block.path for block in blocks() if block.path.startswith("tests/")]
    named = sorted({path for path in NAMED.findall(PAGE.read_text()) if path != "tests/test_extending.py"})
    assert len(added) >= 5

    run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", *added, *named)


def test_what_the_page_adds_keeps_to_the_style(tree: Path) -> None:
    changed = sorted({block.path for block in blocks() if block.path.endswith(".py")})
    run(tree, "-m", "ruff", "check", "--no-cache", "--ignore", "I001", *changed)
    run(tree, "-m", "ruff", "format", "--no-cache", "--check", *changed)


def test_every_file_that_the_page_names_is_there() -> None:
    names = set(NAMED.findall(PAGE.read_text())) - {block.path for block in blocks()}

    assert [] == [name for name in sorted(names) if not (ROOT / name).is_file()]
