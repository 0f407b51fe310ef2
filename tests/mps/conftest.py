"""What the tests of MPS share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from mps_support import MpsNode, mps_node


@pytest.fixture
def node(nvml_library: Path, tmp_path: Path) -> Iterator[MpsNode]:
    with mps_node(nvml_library, tmp_path) as node:
        yield node
