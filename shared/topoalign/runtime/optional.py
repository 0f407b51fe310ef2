"""Imports a library without what it uses only where it is installed."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without(module: str) -> Iterator[None]:
    """
    What is imported in this block finds a module not installed, unless it is imported already. Afterwards anybody may import
    the module.
    """
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]  # as the import system has it for what shall not be found
    try:
        yield
    finally:
        del sys.modules[module]
