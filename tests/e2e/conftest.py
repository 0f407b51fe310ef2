"""What the tests with whole processes share."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.agents import Agents


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a short path: a unix socket's may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ta-") as name:
        yield Path(name)


@pytest.fixture
def agents() -> Iterator[Agents]:
    running = Agents()
    yield running
    running.close()
