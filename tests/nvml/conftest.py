"""What the tests of the NVML driver share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from nvml_support import Node, host_tree, script, standing_in


@pytest.fixture
def node(nvml_library: Path, tmp_path: Path) -> Iterator[Node]:
    with standing_in(nvml_library, tmp_path, script()) as standin:
        yield Node(host_tree(tmp_path / "host"), standin)
