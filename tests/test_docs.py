"""The documents say what the code has."""

from pathlib import Path

import msgspec
import pytest

from topoalign.allocator.settings import AllocatorSettings
from topoalign.discovery.settings import DiscoverySettings
from topoalign.registry.settings import RegistrySettings
from topoalign.runtime.settings import PREFIX, RuntimeSettings

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("kind", [RuntimeSettings, DiscoverySettings, AllocatorSettings, RegistrySettings])
def test_every_setting_is_documented_with_its_default(kind: type[msgspec.Struct]) -> None:
    rows = [line.split(" | ") for line in (DOCS / "settings.md").read_text().splitlines() if line.startswith("| `")]
    documented = {row[0].strip("| `"): row[1].strip("` ") for row in rows}
    defaults = {
        PREFIX + field.name.upper(): "" if field.required or field.default in (None, "") else str(field.default)
        for field in msgspec.structs.fields(kind)
    }

    assert {} == {name: default for name, default in defaults.items() if documented.get(name) != default}
