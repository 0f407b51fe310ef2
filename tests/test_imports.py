"""The import picture of docs/architecture.md is a test."""

import configparser
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_import_contract_is_kept() -> None:
    """
    Layers of the core, its purity, services apart from one another, and one door per outside package. In a process of its
    own: import-linter switches off all loggers that there are.
    """
    program = "import sys; from importlinter.cli import lint_imports_command; lint_imports_command(sys.argv[1:])"
    ended = subprocess.run(
        [sys.executable, "-c", program, "--config", ".importlinter", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert 0 == ended.returncode, ended.stdout + ended.stderr


def test_the_page_shows_the_layers_of_the_core_as_they_are_checked() -> None:
    """The line on the core in docs/architecture.md and the contract name the same rooms in the same order."""
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    layers = contracts["importlinter:contract:core-layers"]["layers"].split()
    (shown,) = [line for line in (ROOT / "docs/architecture.md").read_text().splitlines() if line.startswith("core: ")]

    assert layers == shown.removeprefix("core:").replace(">", " ").split()


def test_the_namespace_has_no_root_package_and_its_packages_are_typed() -> None:
    """The namespace has no root package, and every package below it is typed."""
    roots = [*ROOT.glob("services/*/topoalign"), ROOT / "shared" / "topoalign", ROOT / "tools" / "topoalign"]
    packages = [package for root in roots for package in root.iterdir() if package.is_dir()]

    assert [] == [root for root in roots if (root / "__init__.py").exists()]
    assert [] == [package for package in packages if not (package / "py.typed").exists()]
    assert [] == [package for package in packages if not (package / "__init__.py").exists()]
