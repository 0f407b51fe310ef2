"""The documents say what the code has."""

import re
from pathlib import Path

import msgspec
import pytest

from topoalign.allocator.settings import AllocatorSettings
from topoalign.cli import root
from topoalign.discovery.settings import DiscoverySettings
from topoalign.mps.settings import MpsSettings
from topoalign.registry.settings import RegistrySettings
from topoalign.runtime.settings import PREFIX, RuntimeSettings

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("kind", [RuntimeSettings, DiscoverySettings, AllocatorSettings, MpsSettings, RegistrySettings])
def test_every_setting_is_documented_with_its_default(kind: type[msgspec.Struct]) -> None:
    rows = [line.split(" | ") for line in (DOCS / "settings.md").read_text().splitlines() if line.startswith("| `")]
    documented = {row[0].strip("| `"): row[1].strip("` ") for row in rows}
    defaults = {
        PREFIX + field.name.upper(): "" if field.required or field.default in (None, "") else str(field.default)
        for field in msgspec.structs.fields(kind)
    }

    assert {} == {name: default for name, default in defaults.items() if documented.get(name) != default}


@pytest.mark.parametrize(("name", "number"), [("predictions.md", 4), ("joint-allocation.md", 3)])
def test_the_examples_of_a_page_print_what_it_shows(
    name: str, number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(DOCS.parent)
    page = (DOCS / name).read_text()
    examples = [block.split("```")[0] for block in page.split("```console\n$ topoalign ")[1:]]

    printed = []
    for example in examples:
        command = example.partition("\n")[0]
        root.run_command_line(command.split())
        printed.append(f"{command}\n{capsys.readouterr().out}")

    assert examples == printed
    assert number == len(examples)


def test_the_files_that_contributing_names_as_answers_exist() -> None:
    """Each of the twenty questions in CONTRIBUTING.md leads to files that exist."""
    page = (DOCS.parent / "CONTRIBUTING.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and "?" in line]
    named = [path for row in rows for path in re.findall(r"`([\w/]+\.py)`", row)]

    assert 20 == len(rows)
    assert [] == [row for row in rows if not re.search(r"`[\w/]+\.py`", row)]
    assert [] == [path for path in named if not (DOCS.parent / path).is_file()]


def test_the_architecture_page_names_only_modules_that_exist() -> None:
    page = (DOCS / "architecture.md").read_text()
    roots = [*DOCS.parent.glob("services/*"), DOCS.parent / "shared", DOCS.parent / "tools"]
    packages = {package.name for root in roots for package in (root / "topoalign").iterdir() if package.is_dir()}
    named = {name for name in re.findall(r"(?<![\w./])[a-z_]+(?:\.[a-z_]+)+", page) if name.split(".")[0] in packages}

    def exists(name: str) -> bool:
        path = f"topoalign/{name.replace('.', '/')}"
        return any((root / path).is_dir() or (root / f"{path}.py").is_file() for root in roots)

    assert len(named) > 40
    assert [] == sorted(name for name in named if not exists(name))


def test_no_page_shows_a_placeholder_where_a_figure_belongs() -> None:
    cells = [
        (page.name, cell.strip())
        for page in DOCS.rglob("*.md")
        for line in page.read_text().splitlines()
        if line.startswith("|")
        for cell in line.split("|")
    ]

    placeholders = re.compile(
        r"(?!C\d\d$|F\d\d$|S\d\d$|T\d\d$|G\d\d$|I\d\d?$|K\d$)[A-Z]{1,6}\d*_?\d+|PARTITION"
    )  # C05, F12, S03, T05, G05, I4 and K1 name faults and invariants
    assert [] == [(page, cell) for page, cell in cells if placeholders.fullmatch(cell)]
