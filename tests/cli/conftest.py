"""Commands run in the tests' own process set up logging for it: this puts it back."""

import logging
from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    before = logging.getLogger()
    handlers, level = before.handlers[:], before.level
    yield
    before.handlers[:] = handlers
    before.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()
