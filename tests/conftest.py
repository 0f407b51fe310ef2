"""What all tests share."""

import os
from pathlib import Path

import nvml_support
import pytest
from hypothesis import settings

VECTORS = Path(os.environ.get("TOPOALIGN_VECTORS") or Path(__file__).parents[2] / "shared" / "vectors")

settings.register_profile("untimed", settings(), deadline=None)
settings.load_profile("untimed")
"""No example is timed: how fast things are is for `topoalign bench`, and other work on the machine is no defect."""


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """grpclib and nats-py stand on asyncio."""
    return "asyncio"


@pytest.fixture(scope="session")
def vectors() -> Path:
    """The folder of published case files; tests that need it skip where it is missing."""
    if not VECTORS.is_dir():
        pytest.skip(f"no case files at {VECTORS}: set TOPOALIGN_VECTORS to their folder")
    return VECTORS


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in NVML library, built; tests that need it skip where there is no C compiler."""
    return nvml_support.built(tmp_path_factory.mktemp("nvml"))
