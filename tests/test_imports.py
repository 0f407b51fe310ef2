"""The import picture of docs/architecture.md is a test."""

from pathlib import Path

from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[1]


def test_every_import_contract_is_kept() -> None:
    """Layers of the core, its purity, services apart from one another, and one door per outside package."""
    assert 0 == lint_imports(config_filename=str(ROOT / ".importlinter"), no_cache=True)


def test_the_namespace_has_no_root_package_and_every_package_below_it_is_typed() -> None:
    roots = [*ROOT.glob("services/*/topoalign"), ROOT / "shared" / "topoalign"]
    packages = [package for root in roots for package in root.iterdir() if package.is_dir()]

    assert [] == [root for root in roots if (root / "__init__.py").exists()]
    assert [] == [package for package in packages if not (package / "py.typed").exists()]
    assert [] == [package for package in packages if not (package / "__init__.py").exists()]
