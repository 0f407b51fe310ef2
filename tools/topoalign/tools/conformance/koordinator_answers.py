"""
Compares answers with the expected ones of the suites `koordinator/…`: only fields that a case contains.

A struct is a record: a key that the case leaves out is not compared. A map is data (device types, names of resources):
it must have the same keys. Null is Go's nil: an empty list, an empty map, no error.
"""

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from topoalign.core.deviceshare.joint_refusals import DevicesDoNotFit, InvalidShareRequest
from topoalign.core.model.errors import TopoalignError, Undecodable
from topoalign.tools.conformance.suite import Outcome


class Error(msgspec.Struct, frozen=True):
    """An expected error: its code and Koordinator's reasons."""

    code: str | UnsetType = UNSET
    reasons: list[str] | UnsetType | None = UNSET

    @property
    def compared(self) -> "Error":
        """Without the parser's own wording, and in order."""
        return Error(self.code, sorted(map(own_wording, self.reasons)) if self.reasons else self.reasons)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a rule answers: an error, or what the fields of its subclass say."""

    error: Error | str | UnsetType | None = UNSET


def own_wording(text: str) -> str:
    """Koordinator's words, without those of the parser that it quotes."""
    return text.partition(", err:")[0]


def refused(error: TopoalignError) -> Error | str:
    """
    The answer that an error is; the error itself, in words, where Koordinator has no such answer.

    Raises Undecodable again: that is no answer, but a file that is damaged.
    """
    if isinstance(error, Undecodable):
        raise error
    if isinstance(error, DevicesDoNotFit | InvalidShareRequest):
        return Error(error.status.value, list(error.reasons))
    return f"{error.code}: {error}"


def outcome(expected: Answer, got: Answer) -> Outcome:
    """Both as they are shown. Raises Undecodable if nothing is expected."""
    if expected == type(expected)():
        raise Undecodable("expect", "it has no key that this suite compares")
    passed = as_expected(expected, got) == as_expected(expected, expected)
    shown = msgspec.to_builtins(expected)
    return shown, shown if passed else msgspec.to_builtins(got)


def as_expected(expected: object, got: object) -> object:
    """What came out, reduced to what is compared with what is expected."""
    if expected is None:
        return got or None if got is not UNSET else UNSET
    if isinstance(expected, Error) and isinstance(got, Error):
        expected = expected.compared
        got = got.compared
    if isinstance(expected, msgspec.Struct) and type(expected) is type(got):
        said = {name: getattr(expected, name) for name in expected.__struct_fields__}
        return {name: as_expected(each, getattr(got, name)) for name, each in said.items() if each is not UNSET}
    if isinstance(expected, Mapping) and isinstance(got, Mapping):
        keys = got.keys() | {key for key, each in expected.items() if each is None}
        return {key: as_expected(expected.get(key, UNSET), got.get(key)) for key in keys}
    if isinstance(expected, Sequence) and isinstance(got, list) and len(expected) == len(got):
        return [as_expected(*pair) for pair in zip(expected, got, strict=True)]
    return own_wording(got) if isinstance(got, str) else got
