"""Errors: stable codes, whose fault each is, the data they take, and foreign text made fit to be shown."""

import importlib
import pkgutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoalign import core
from topoalign.core.model import errors
from topoalign.core.model.errors import (
    BadRequest,
    Failure,
    NoFit,
    RemoteBadRequest,
    RemoteNoFit,
    RemoteUnavailable,
    TopoalignError,
    Unavailable,
    clean,
    quoted,
    remote,
)

CODES = {
    BadRequest: {
        "BadRequest",
        "InvalidField",
        "UnknownDevice",
        "DeviceUnusable",
        "PodAlreadyAllocated",
        "NotFound",
        "InvalidMachine",
        "Undecodable",
        "KubeletOwnsDevices",
    },
    NoFit: {"NoFit", "TooMuchWork", "DeviceInUse"},
    Unavailable: {
        "Unavailable",
        "BusUnavailable",
        "BusConflict",
        "DeadlinePassed",
        "BusRefused",
        "IdTaken",
        "DriverFault",
        "HardwareUnknown",
        "StateFault",
    },
}
"""Whose fault -> the codes of the errors that any part may raise: scripts look for them in answers and logs."""


def kinds() -> list[type[TopoalignError]]:
    return [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, TopoalignError)]


@pytest.mark.parametrize("fault", CODES, ids=lambda fault: fault.__name__)
def test_codes_never_change(fault: type[TopoalignError]) -> None:
    assert CODES[fault] == {each.code for each in kinds() if issubclass(each, fault)}


def test_the_code_of_an_error_is_the_name_of_its_class() -> None:
    """Of all errors of the core; those that give another one have that of their base."""
    for module in pkgutil.walk_packages(core.__path__, "topoalign.core."):
        importlib.import_module(module.name)
    waiting: list[type[TopoalignError]] = [TopoalignError]
    named = {}
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind.__module__.startswith("topoalign.core."):
            named[kind] = kind.code

    others = {kind: code for kind, code in named.items() if code != kind.__name__}
    assert "Internal" == others.pop(TopoalignError)
    assert all(
        code in {base.code for base in kind.__mro__[1:] if issubclass(base, TopoalignError)}
        for kind, code in others.items()
    )
    assert {"NobodyAnswers", "RemoteFailure", "RemoteNoFit"} < {kind.__name__ for kind in others}
    assert 40 < len(named) - len(others)


def test_errors_of_nobody_in_particular_have_codes_too() -> None:
    """They say that a program is wrong, and reach nobody as an answer."""
    rest = {each.code for each in kinds() if not issubclass(each, BadRequest | NoFit | Unavailable)}

    assert {"Internal", "SequenceGap", "Contradiction"} == rest


@pytest.mark.parametrize(
    ("error", "data", "said"),
    [
        (errors.InvalidField("pod.name", "is empty", "give one"), {"field": "pod.name"}, "pod.name: is empty"),
        (
            errors.SequenceGap("n", 3, 4, 9),
            {"node": "n", "epoch": 3, "have": 4, "got": 9},
            "node n, epoch 3: fact 9 arrived after fact 4",
        ),
        (errors.Contradiction("n", "two owners"), {"node": "n"}, "node n: two owners"),
        (errors.UnknownDevice(["a", "b"]), {"devices": ("a", "b")}, "'a', 'b'"),
        (
            errors.DeviceUnusable("GPU-0", "unhealthy", "XID\n79"),
            {"device": "GPU-0", "state": "unhealthy"},
            "device 'GPU-0' is unhealthy: XID?79",
        ),
        (errors.PodAlreadyAllocated("p"), {}, "pod 'p' already holds"),
        (errors.NotFound("node", "n", "look"), {"kind": "node", "name": "n"}, "no node named 'n'"),
        (errors.InvalidMachine("odd", "mend it"), {"line": None, "column": None}, "odd"),
        (errors.InvalidMachine("odd", "mend it", 3), {"line": 3, "column": None}, "line 3: odd"),
        (errors.InvalidMachine("odd", "mend it", 3, 7), {"line": 3, "column": 7}, "line 3, column 7: odd"),
        (errors.KubeletOwnsDevices("n"), {}, "the kubelet of node n allocates its devices"),
        (errors.DeviceInUse(["a"], "x"), {"devices": ("a",), "allocation": "x"}, "'a' belong to the live allocation x"),
        (errors.DeadlinePassed("it\x1b", "late"), {}, "it? was refused: late"),
        (errors.IdTaken("m", "by another"), {}, "the id 'm' is taken: by another"),
        (errors.HardwareUnknown("n", "no answer"), {}, "the hardware of node n is not known yet: no answer"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, TopoalignError) else "",
)
def test_an_error_says_what_it_was_given_and_what_to_do(
    error: TopoalignError, data: dict[str, object], said: str
) -> None:
    assert data == {name: getattr(error, name) for name in data}
    assert said in str(error)
    assert (str(error), True) == (error.finding, bool(error.remedy))


@given(st.text(max_size=12), st.integers(1, 10))
def test_clean_text_is_one_printable_line_of_bounded_length(text: str, width: int) -> None:
    """What is printable and short enough is left alone; what is cut ends with an ellipsis."""
    got = clean(text, width)

    assert got.isprintable() and len(got) <= width
    shown = "".join(character if character.isprintable() else "?" for character in text)
    assert (shown if len(text) <= width else f"{shown[: width - 1]}…") == got


@given(st.lists(st.text(max_size=6), max_size=6), st.integers(1, 4), st.integers(2, 5))
def test_quoted_texts_are_counted_beyond_the_first(texts: list[str], most: int, width: int) -> None:
    expected = ", ".join([repr(clean(text, width)) for text in texts[:most]])

    got = quoted(texts, most, width)

    assert (expected if len(texts) <= most else f"{expected} and {len(texts) - most} more") == got


def test_eight_texts_of_eighty_characters_are_quoted_and_no_more() -> None:
    texts = ["x" * 81, *"abcdefg"]

    assert f"{'x' * 79}…" == clean(texts[0])
    assert f"'{'x' * 79}…', 'a', 'b', 'c', 'd', 'e', 'f', 'g'" == quoted(texts)
    assert quoted(texts) + " and 1 more" == quoted([*texts, "h"])
    assert "x" * 80 == clean("x" * 80)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("request", RemoteBadRequest), ("fit", RemoteNoFit), ("service", RemoteUnavailable), ("", RemoteUnavailable)],
)
def test_a_failure_elsewhere_is_the_fault_of_the_same_here(fault: str, kind: type[TopoalignError]) -> None:
    """A fault that is not known counts as the service's."""
    error = remote(Failure(fault=fault, code="Odd", finding="found", remedy="do"))

    assert kind is type(error)
    assert ("found", "do", "Odd") == (error.finding, error.remedy, error.failure.code)
