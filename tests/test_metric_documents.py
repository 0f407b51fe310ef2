"""docs/metrics.md has each metric that the services have, with its type, labels, unit and meaning."""

import re
from pathlib import Path

import metric_documents
from event_documents import replace_generated

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "metrics.md").read_text()


def test_the_page_of_metrics_is_the_one_that_the_code_makes() -> None:
    assert replace_generated(PAGE, metric_documents.tables()) == PAGE, "run `make event-documents`"


def test_every_metric_that_the_code_names_is_on_the_page() -> None:
    """Whatever a module of the product quotes as a metric's name, or as the beginning of one, is on the page."""
    modules = [*(ROOT / "services").rglob("*.py"), *(ROOT / "shared").rglob("*.py")]
    quoted = {name for module in modules for name in re.findall(r'f?"(topoalign_[a-z_]+)', module.read_text())}

    assert len(quoted) > 40
    assert [] == sorted(name for name in quoted if f"| `{name}" not in PAGE)


def test_a_metric_is_described_by_type_labels_and_unit() -> None:
    rows = {each.name: each for metrics in metric_documents.documented_metrics().values() for each in metrics}

    assert ("counter", ("outcome",), "") == rows["topoalign_registry_binds_total"][1:4]
    assert ("gauge", (), "0 or 1") == rows["topoalign_gpu_use_measured"][1:4]
    assert ("histogram", (), "seconds") == rows["topoalign_discovery_read_seconds"][1:4]
    assert ("gauge", ("gpu_uuid", "mig_uuid", "where"), "bytes") == rows["topoalign_gpu_other_memory_used_bytes"][1:4]
    assert [] == [each.name for each in rows.values() if not each.meaning.endswith(".")]
