"""Driving a decision: both drives send answers, raise faults at the question, and end with what the steps return."""

from collections.abc import Callable, Generator

import anyio
import anyio.lowlevel
import pytest

from topoalign.core.admission.admit import drive, drive_async
from topoalign.core.model.errors import DriverFault, NoFit

Answer = Callable[[str], int]
Drive = Callable[[Generator[str, int, list[int | str]], Answer], list[int | str]]


def driven_async(steps: Generator[str, int, list[int | str]], answer: Answer) -> list[int | str]:
    async def answered(asked: str) -> int:
        await anyio.lowlevel.checkpoint()
        return answer(asked)

    return anyio.run(drive_async, steps, answered)


def asking(*questions: str) -> Generator[str, int, list[int | str]]:
    """Asks them all, and returns the answers; instead of one that failed, why."""
    got: list[int | str] = []
    for question in questions:
        try:
            got.append((yield question))
        except NoFit as misfit:
            got.append(misfit.finding)
    return got


def length(asked: str) -> int:
    """The answer of these tests. Raises NoFit for what is empty, and DriverFault for `broken`."""
    if not asked:
        raise NoFit("nothing asked", "ask")
    if asked == "broken":
        raise DriverFault("broken", "mend it")
    return len(asked)


@pytest.fixture(params=[drive, driven_async])
def drives(request: pytest.FixtureRequest) -> Drive:
    one: Drive = request.param
    return one


def test_each_question_gets_its_answer(drives: Drive) -> None:
    """Answers are sent in the order of the questions."""

    assert [1, 2, 3] == drives(asking("a", "bb", "ccc"), length)


def test_steps_that_ask_nothing_end_at_once(drives: Drive) -> None:
    """The result is returned without a call of `answer`."""

    assert [] == drives(asking(), length)


def test_a_fault_is_raised_at_its_question(drives: Drive) -> None:
    """The steps handle a TopoalignError of `answer`, and go on."""

    assert [1, "nothing asked", 2] == drives(asking("a", "", "bb"), length)


def test_a_fault_that_the_steps_do_not_handle_is_raised(drives: Drive) -> None:
    """It passes through the steps to who drives them."""
    with pytest.raises(DriverFault, match="broken"):
        drives(asking("a", "broken"), length)


def test_other_exceptions_of_answers_end_the_drive(drives: Drive) -> None:
    """What is no TopoalignError is not offered to the steps."""

    def answer(asked: str) -> int:
        raise KeyError(asked)

    with pytest.raises(KeyError):
        drives(asking("a"), answer)
