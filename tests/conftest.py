"""What all tests share."""

import gc
import os
import signal
from functools import cache
from pathlib import Path
from types import ModuleType

import nvml_support
import pytest
from faults_support import THOROUGH
from hypothesis import HealthCheck, settings

from topoalign.testing.manual_clock import ManualClock

VECTORS = Path(os.environ.get("TOPOALIGN_VECTORS") or Path(__file__).parents[2] / "shared" / "vectors")

settings.register_profile(
    "untimed",
    max_examples=1_000 if THOROUGH else 100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("untimed")
"""No example is timed: how fast things are is for `topoalign bench`, and other work on the machine is no defect."""


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # so it is in the background of a shell, and so would be every program that a test starts and ends by Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Keeps the collected tests out of garbage collections, which took a tenth of the time of all tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_000, 10, 200)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """
    Tests that live by a clock of their own have no limit of wall time: how long a busy machine takes to get through an hour
    of theirs says nothing. All others have the one of pyproject.toml, which only ends what hangs.
    """
    for item in items:
        if isinstance(item, pytest.Function) and lives_by_virtual_time(item):
            item.add_marker(pytest.mark.timeout(0), append=False)


def lives_by_virtual_time(item: pytest.Function) -> bool:
    """Whether the module of a test knows a clock that tests advance, or belongs to the simulation."""
    return item.path.parent.name == "simulation" or knows_a_manual_clock(item.module)


@cache
def knows_a_manual_clock(module: ModuleType) -> bool:
    """Whether a module of tests knows a clock that tests advance."""
    return any(isinstance(each, type) and issubclass(each, ManualClock) for each in vars(module).values())


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
