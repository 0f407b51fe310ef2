"""
Excludes objects that exist until the process ends from garbage collection.

Modules and their contents exist until the process ends. A node agent imports some hundred thousand such objects before
it first lists its devices, for which pods wait. The collector would scan these objects again and again.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Disables the collector during imports, and excludes all objects that then exist from later collections."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
