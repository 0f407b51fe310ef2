"""The garbage collector is off while modules are imported, and never looks at them afterwards."""

import gc

import pytest

from topoalign.runtime.collector import importing


@pytest.mark.parametrize("fails", [False, True])
def test_the_collector_is_off_for_imports_and_on_after_them(fails: bool) -> None:
    error = ImportError() if fails else None
    frozen = gc.get_freeze_count()
    try:
        with importing():
            off, made = not gc.isenabled(), [[number] for number in range(1000)]
            if error is not None:
                raise error
    except ImportError as raised:
        assert error is raised
    after, more = gc.isenabled(), gc.get_freeze_count() - frozen
    gc.unfreeze()

    assert (True, True) == (off, after)
    assert len(made) < more
