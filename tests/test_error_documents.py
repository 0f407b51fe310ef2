"""docs/errors.md has each error code with the cause and the remedy that the code has."""

from pathlib import Path

import error_documents
import pytest
from event_documents import replace_generated

from topoalign.cli import exit_codes
from topoalign.core.model.errors import BadRequest, TopoalignError

PAGE = (Path(__file__).parents[1] / "docs" / "errors.md").read_text()
LONGEST = 25
"""Words of a cause and a remedy together."""


def test_the_page_of_errors_is_the_one_that_the_code_makes() -> None:
    assert replace_generated(PAGE, error_documents.tables()) == PAGE, "run `make event-documents`"


def test_every_error_code_is_described_in_a_few_words() -> None:
    codes = error_documents.error_codes()

    assert {kind.code for kind in error_documents.error_classes()} <= {each.code for each in codes}
    assert [] == [each.code for each in codes if len(f"{each.cause} {each.remedy}".split()) > LONGEST]
    assert [] == [each for each in codes if not each.cause.endswith(".") or not each.remedy.endswith(".")]


def test_every_exit_code_of_its_own_is_on_the_page() -> None:
    assert [] == [code for code, status in exit_codes.BY_CODE.items() if f"`{code}` {status}" not in PAGE]


def test_an_error_without_a_remedy_is_refused() -> None:
    class Undescribed(BadRequest):
        """Raised for nothing."""

        code = "Undescribed"

    with pytest.raises(LookupError, match=r"Undescribed.*Remedy:"):
        error_documents.describe("Undescribed", [Undescribed])


def test_a_cause_is_one_sentence_without_the_word_raised() -> None:
    class Described(TopoalignError):
        """
        Raised when a disk is full. More of this.

        Remedy: Free
        space.
        """

    found = error_documents.describe("Described", [Described])

    assert ("A disk is full.", "Free space.") == (found.cause, found.remedy)
