"""
Drives a decision: asks elsewhere what it asks, and sends it the answers.

A decision is a generator that yields its questions and returns its result, so the same steps run whether an answer comes
from this process, from NATS or from gRPC. Who has the answers passes them as a function; the loop around them is here, once
for answers that are there at once and once for those that are waited for.

What `answer` raises as a TopoalignError is raised at the question that it could not answer: the steps say what that means.
Anything else ends the drive.
"""

from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import TypeVar

from topoalign.core.model.errors import TopoalignError

Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")


def drive(steps: Generator[Q, R, T], answer: Callable[[Q], R]) -> T:
    """What the steps return in the end. Raises what they raise, and from `answer` what is no TopoalignError."""
    proceed: Callable[[], Q] = partial(next, steps)
    while True:
        try:
            asked = proceed()
        except StopIteration as end:
            result: T = end.value
            return result
        try:
            proceed = partial(steps.send, answer(asked))
        except TopoalignError as error:
            proceed = partial(steps.throw, error)


async def drive_async(steps: Generator[Q, R, T], answer: Callable[[Q], Awaitable[R]]) -> T:
    """`drive`, where answers are waited for."""
    proceed: Callable[[], Q] = partial(next, steps)
    while True:
        try:
            asked = proceed()
        except StopIteration as end:
            result: T = end.value
            return result
        try:
            proceed = partial(steps.send, await answer(asked))
        except TopoalignError as error:
            proceed = partial(steps.throw, error)
