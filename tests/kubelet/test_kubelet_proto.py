"""The generated code is what `make proto` makes of proto/."""

import filecmp
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import topoalign.kubelet.grpc.api

ROOT = Path(__file__).parents[2]
API = Path(topoalign.kubelet.grpc.api.__file__).parent


def test_generating_anew_makes_no_difference(tmp_path: Path) -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("there is no make here")
    subprocess.run(
        [make, "--old-file=.venv/.ready", "proto", f"API={tmp_path}", f"BIN={Path(sys.executable).parent}"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    kept = sorted(
        path.relative_to(API) for path in API.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )

    assert kept == made
    assert [] == [name for name in made if not filecmp.cmp(tmp_path / name, API / name, shallow=False)]
