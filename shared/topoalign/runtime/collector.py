"""
Keeps the garbage collector away from objects that live until the process ends.

Modules and what they define stay until the process ends. A node agent imports some hundred thousand such objects before its
first list of devices, for which pods wait, and the collector would look through them again and again.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Switches the collector off for imports; what is there afterwards is not looked at any more."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
