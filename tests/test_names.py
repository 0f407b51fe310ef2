"""Names of tests are short enough to read in a list; the whole claim stands in the docstring."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
LONGEST = 70
TEST = re.compile(r"^\s*(?:async )?def (test_\w+)", re.MULTILINE)


def test_no_name_of_a_test_is_longer_than_seventy_characters() -> None:
    names = [
        (path.relative_to(TESTS).as_posix(), name)
        for path in sorted(TESTS.rglob("*.py"))
        for name in TEST.findall(path.read_text())
    ]

    assert names
    assert [] == [(file, name) for file, name in names if len(name) > LONGEST]
